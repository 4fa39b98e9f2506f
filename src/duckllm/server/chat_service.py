"""Conversations for every API: a request in, its replies taken apart as they come.

Called by the API modules, which know HTTP and their clients' JSON; calls the chat format, which knows how the
model writes, and the engine's thread. Whole and streamed replies come from the same place, and so agree.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from duckllm.errors import ConfigError, InWords, OverloadedError, PromptTooLongError, UnavailableError
from duckllm.outputs import Logprob, RequestMetrics, StreamOutput
from duckllm.sampling_params import SamplingParams
from duckllm.server.engine_thread import EngineThread, ReplyStream
from duckllm.server.errors import prompt_named
from duckllm.server.limits import MAX_PROMPT_LOGPROBS
from duckllm.text.chat import (
    ChatMessage,
    ChatOptions,
    ChatPrompt,
    ContentDelta,
    ReasoningDelta,
    ReplyDelta,
    ReplyParser,
    ToolCallDelta,
)
from duckllm.text.chat_format import ChatFormat, chat_format

if TYPE_CHECKING:
    from duckllm.engine.request import Request
    from duckllm.llm import LLM
    from duckllm.text import Tokenizer

T = TypeVar("T")
DEFAULT_MAX_WAITING = 128
# Texts are counted to the end up to so many contexts, and so many tokens; beyond they are too long anyway.
_COUNTED_CONTEXTS = 4
LEAST_COUNTED_TOKENS = 100_000


@dataclass(frozen=True)
class ChatRequest:
    """What a client asks for.

    Args:
        messages: The conversation, oldest first.
        options: How it goes on.
        params: How tokens are chosen and how many replies there are.
    """

    messages: Sequence[ChatMessage]
    options: ChatOptions = field(default_factory=ChatOptions)
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class ChatOutput:
    """What was added to one reply.

    Args:
        index: The reply's number among the n of the request.
        deltas: New parts; may be none, as of a token whose character is not whole, or of markup.
        token_ids: New tokens.
        logprobs: For each new token, as in :class:`duckllm.outputs.CompletionOutput`; None where not asked.
        finish_reason: None until the reply's last output; then ``"stop"``, ``"length"``, ``"tool_calls"`` or
            ``"error"``.
        stop_reason: The stop string or stop token that ended the reply, or what the error is.
        metrics: Counts and times of this reply so far.
        num_reasoning_tokens: Tokens of this reply so far, up to the last one that added to its reasoning.
    """

    index: int
    deltas: tuple[ReplyDelta, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None
    finish_reason: str | None
    stop_reason: str | int | None
    metrics: RequestMetrics
    num_reasoning_tokens: int = 0


class ChatStream:
    """The replies to one request as they come.

    What has come since the last output was read is one output, so that a reader who is late has no more work.

    Args:
        replies: The tokens and texts.
        parsers: Take each reply apart.

    Attributes:
        prompt_token_ids: The conversation as the model read it.
    """

    def __init__(self, replies: ReplyStream, parsers: Sequence[ReplyParser]) -> None:
        self._replies = replies
        self._parsers = list(parsers)
        self._num_reasoning_tokens = [0] * len(parsers)
        self.prompt_token_ids = replies.prompt_token_ids

    def cancel(self) -> None:
        """Stops its replies within two steps; harmless when repeated or when they have ended."""
        self._replies.cancel()

    async def __aiter__(self) -> AsyncIterator[ChatOutput]:
        """The outputs until every reply has ended.

        Raises:
            WorkerLostError: A worker went away, and neither it nor another came back in time.
            ServerError: The replies were ended, by the server's stop for instance.
        """
        while arrived := await self._replies.arrived():
            for outputs in _by_index(arrived):
                yield self._merge(outputs)

    def _merge(self, outputs: Sequence[StreamOutput]) -> ChatOutput:
        last = outputs[-1]
        parser, index = self._parsers[last.index], last.index
        deltas: list[ReplyDelta] = []
        first_number = last.metrics.num_generated_tokens - len(outputs) + 1
        for number, output in enumerate(outputs, start=first_number):
            new = parser.push(output.text)
            if output.finish_reason is not None:
                new = [*new, *parser.finish()]
            if any(isinstance(delta, ReasoningDelta) for delta in new):
                self._num_reasoning_tokens[index] = number
            deltas += new
        finish_reason = last.finish_reason
        if finish_reason == "stop" and parser.num_tool_calls:
            finish_reason = "tool_calls"
        logprobs = None
        if last.logprobs is not None:
            logprobs = tuple(at for output in outputs for at in output.logprobs or ())
        return ChatOutput(
            index,
            tuple(merged(deltas)),
            tuple(token_id for output in outputs for token_id in output.token_ids),
            logprobs,
            finish_reason,
            last.stop_reason,
            last.metrics,
            self._num_reasoning_tokens[index],
        )


class ChatService:
    """Takes requests of all APIs.

    Args:
        engine: The model's thread.
        max_waiting: Most replies that wait beside those that are computed; more are refused.
    """

    def __init__(self, engine: EngineThread, max_waiting: int = DEFAULT_MAX_WAITING) -> None:
        self.engine, self.max_waiting = engine, max_waiting
        self._format: ChatFormat | None = None
        self._num_beginning = 0  # replies of requests whose prompts are being made
        # One thread: a tokenizer is not made for several, and long prompts are not to take all cores.
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    @property
    def llm(self) -> LLM:
        """The model.

        Raises:
            UnavailableError: It is loading.
        """
        if self.engine.llm is None:
            raise UnavailableError(f"the model is loading: {self.engine.progress.stage}")
        return self.engine.llm

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Errors as of :attr:`llm`."""
        return self.llm.tokenizer

    @property
    def format(self) -> ChatFormat:
        """How the model writes conversations. Errors as of :attr:`llm`."""
        if self._format is None:
            self._format = chat_format(self.tokenizer)
        return self._format

    async def begin(self, request: ChatRequest) -> ChatStream:
        """The replies to a conversation, under way.

        Raises:
            RequestError: The conversation cannot be honoured.
            PromptTooLongError: It leaves no room for a reply.
            ConfigError: Nor can its sampling.
            ServerError: The server is loading or stopping, or too many requests wait.
        """
        options = request.options

        def read() -> ChatPrompt:
            self.check_length(texts_of(request.messages, options))
            return self.format.prompt(request.messages, options)

        def make(prompt: ChatPrompt) -> tuple[list[Request], list[ReplyParser]]:
            begins_in_reasoning = prompt.begins_in_reasoning
            params = self.format.sampling(request.params, options, begins_in_reasoning)
            requests = self.llm.new_requests(prompt.token_ids, params)
            return requests, [self.format.parser(options, begins_in_reasoning) for _ in requests]

        with self._room_for(request.params.n), prompt_named("messages"):
            if options.tools or options.response_format or request.params.structured_outputs:
                prompt = await self.prepare(read)
                requests, parsers = await self._compile(lambda: make(prompt))
            else:
                requests, parsers = await self.prepare(lambda: make(read()))
            return ChatStream(self.engine.submit(requests), parsers)

    async def complete(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams
    ) -> list[ReplyStream]:
        """What follows each text, or its tokens, under way. Errors as of :meth:`begin`."""

        def read() -> list[Sequence[int]]:
            for each in prompts:
                self.check_length([each] if isinstance(each, str) else [])
            encode = self.tokenizer.encode
            return [encode(each) if isinstance(each, str) else each for each in prompts]

        def make(token_ids: Sequence[Sequence[int]]) -> list[list[Request]]:
            _check_prompt_logprobs(token_ids, params)
            return [self.llm.new_requests(each, params) for each in token_ids]

        with self._room_for(len(prompts) * params.n):
            if params.structured_outputs:
                token_ids = await self.prepare(read)
                requests = await self._compile(lambda: make(token_ids))
            else:
                requests = await self.prepare(lambda: make(read()))
            return [self.engine.submit(each) for each in requests]

    async def count_tokens(self, messages: Sequence[ChatMessage], options: ChatOptions) -> int:
        """Tokens of a conversation as the model would read it. Errors as of :meth:`begin`."""

        def count() -> int:
            self.check_length(texts_of(messages, options))
            return len(self.format.prompt(messages, options).token_ids)

        with prompt_named("messages"):
            return await self.prepare(count)

    def check_length(self, texts: Sequence[str]) -> None:
        """Refuses what is so long that counting it would take everybody's time.

        Raises:
            PromptTooLongError: It has several times the tokens of a context.
        """
        length = self.llm.max_model_len
        most = max(LEAST_COUNTED_TOKENS, _COUNTED_CONTEXTS * length)
        if (num_tokens := self.tokenizer.count_beyond(texts, most)) is not None:
            raise PromptTooLongError(num_tokens, length - 1, is_least=True)

    async def prepare(self, work: Callable[[], T]) -> T:
        """The result of work with the tokenizer, done outside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, work)

    async def _compile(self, work: Callable[[], T]) -> T:
        """The result of work that may compile a grammar: for seconds, in which prompts go on being made."""
        return await asyncio.get_running_loop().run_in_executor(self._compiling, work)

    @contextmanager
    def _room_for(self, num_replies: int) -> Iterator[None]:
        """Counts replies whose prompt is being made.

        Raises:
            OverloadedError: So many wait that these may not.
            ConfigError: These alone are too many.
        """
        most = self.llm.max_num_seqs + self.max_waiting
        if num_replies > most:
            raise ConfigError("n", num_replies, f"at most {most} replies to all prompts together")
        num_open = self.engine.num_open + self._num_beginning
        if num_open + num_replies > most:
            raise OverloadedError(num_open, most)
        self._num_beginning += num_replies
        try:
            yield
        finally:
            self._num_beginning -= num_replies


def _check_prompt_logprobs(token_ids: Sequence[Sequence[int]], params: SamplingParams) -> None:
    """Refuses log probabilities of prompts that would be too many to hold."""
    if params.prompt_logprobs is None:
        return
    a_token = params.prompt_logprobs + 1
    number = a_token * sum(map(len, token_ids))
    if number > MAX_PROMPT_LOGPROBS:
        got = InWords(f"{a_token} for each token of the prompts, {number} in all")
        raise ConfigError("logprobs", got, f"at most {MAX_PROMPT_LOGPROBS} with echo")


def texts_of(messages: Sequence[ChatMessage], options: ChatOptions) -> list[str]:
    """What a client has written of a conversation."""
    texts = [text for message in messages for text in (message.content, message.reasoning_content or "")]
    texts += [call.arguments for message in messages for call in message.tool_calls]
    texts += [text for tool in options.tools for text in (tool.description, json.dumps(tool.parameters))]
    return texts


def _by_index(outputs: Sequence[StreamOutput]) -> list[list[StreamOutput]]:
    """The outputs of each reply."""
    found: dict[int, list[StreamOutput]] = {}
    for output in outputs:
        found.setdefault(output.index, []).append(output)
    return list(found.values())


def merged(deltas: Sequence[ReplyDelta]) -> list[ReplyDelta]:
    """The same parts, neighbours of a kind in one."""
    result: list[ReplyDelta] = []
    for delta in deltas:
        last = result[-1] if result else None
        if isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
            result[-1] = ContentDelta(last.text + delta.text)
        elif isinstance(delta, ReasoningDelta) and isinstance(last, ReasoningDelta):
            result[-1] = ReasoningDelta(last.text + delta.text)
        elif (
            isinstance(delta, ToolCallDelta) and isinstance(last, ToolCallDelta) and last.index == delta.index
        ):
            result[-1] = replace(last, arguments=last.arguments + delta.arguments)
        else:
            result.append(delta)
    return result
