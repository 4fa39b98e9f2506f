"""``/v1/completions``: texts in, what follows them out, whole or as it comes.

Mounted by :mod:`duckllm.server.app`; calls the chat service. Nothing of a chat format: a prompt is read as it
is written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from duckllm.errors import ConfigError, InWords
from duckllm.outputs import Logprob, PromptLogprobs, StreamOutput
from duckllm.sampling_params import SamplingParams
from duckllm.server.chat_service import ChatService
from duckllm.server.engine_thread import ReplyStream
from duckllm.server.errors import ApiError, refuse
from duckllm.server.openai_models import ServedModel
from duckllm.server.openai_replies import (
    ReplyOffsets,
    Tally,
    legacy_logprobs,
    new_id,
    prompt_logprobs,
    without_end,
)
from duckllm.server.openai_requests import check_model, to_sampling, to_structured_outputs
from duckllm.server.openai_types import CompletionBody
from duckllm.server.routing import new_router
from duckllm.server.streaming import DONE, EventStream, data_event, openai_error, unless_gone

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


def router(service: ChatService, model: ServedModel) -> APIRouter:
    """The path of the completions API."""
    routes = new_router("OpenAI")

    @routes.post("/v1/completions")
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        """What follows a text."""
        name = check_model(body.model, model.names)
        _check_together(body)
        params = _sampling(body, service.llm.default_sampling_params)
        reply = _Reply(service, name, model.fingerprint(), body)
        if body.stream:
            streams = await unless_gone(request, service.complete(_prompts(body), params))
            return EventStream(reply.events(streams), lambda: _cancel(streams), openai_error)
        return await unless_gone(request, reply.whole(params))

    return routes


def _check_together(body: CompletionBody) -> None:
    """Refuses fields that do not go together."""
    if body.stream_options is not None and not body.stream:
        raise refuse("stream_options", InWords("some"), "none without stream: true")
    n, best_of = body.n or 1, body.best_of
    if best_of is not None and best_of < n:
        raise refuse("best_of", best_of, f"at least n={n}")
    if best_of is not None and best_of > n and body.stream:
        raise refuse("best_of", best_of, f"n={n} in a stream, as all must be there to choose from")


def _sampling(body: CompletionBody, defaults: SamplingParams) -> SamplingParams:
    n, best_of = body.n or 1, body.best_of or body.n or 1
    logprobs = body.logprobs
    if best_of > n and logprobs is None:
        logprobs = 0  # by which they are chosen
    structure = to_structured_outputs(body.structured_outputs)
    most = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    most = 1 if body.echo and most == 0 else most
    try:
        params = to_sampling(body, defaults, max_tokens=most, n=best_of, logprobs=logprobs)
    except ConfigError as error:
        if error.field != "n" or best_of == n:
            raise
        raise error.named("best_of") from error
    if body.echo:
        params = replace(params, prompt_logprobs=body.logprobs)
    return params if structure is None else replace(params, structured_outputs=structure)


def _prompts(body: CompletionBody) -> list[str | Sequence[int]]:
    prompt: Any = body.prompt
    is_one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
    return [prompt] if is_one else list(prompt)


def _cancel(streams: Sequence[ReplyStream]) -> None:
    for stream in streams:
        stream.cancel()


@dataclass
class _Choice:
    """One reply, put together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str | None = None

    @property
    def mean_logprob(self) -> float:
        """By which the best ones are chosen."""
        own = [at[token_id].logprob for token_id, at in zip(self.token_ids, self.logprobs, strict=True)]
        return sum(own) / max(1, len(own))


@dataclass(frozen=True)
class _Echo:
    """The prompt, before the reply of that index."""

    index: int
    text: str
    logprobs: dict[str, Any] | None


class _Reply:
    """A reply in OpenAI's form.

    Args:
        service: Computes it.
        model: The name that it has.
        fingerprint: Of what computes it.
        body: What was asked.
    """

    def __init__(self, service: ChatService, model: str, fingerprint: str, body: CompletionBody) -> None:
        self._service, self._body, self._n = service, body, body.n or 1
        # Nothing but the prompt is asked for; the token that is computed behind it is not shown.
        self._is_prompt_alone = bool(body.echo) and body.max_tokens == 0
        self._common = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._offsets: dict[int, ReplyOffsets] = {}

    async def whole(self, params: SamplingParams) -> Response:
        """All of it at its end."""
        streams = await self._service.complete(_prompts(self._body), params)
        tallies = [Tally(len(stream.prompt_token_ids)) for stream in streams]
        try:
            found = await asyncio.gather(*map(self._collect, streams, tallies))
        finally:
            _cancel(streams)
        choices: list[dict[str, Any]] = []
        for number, replies in enumerate(found):
            replies_prompt = replies[0].prompt_logprobs
            if params.n > self._n:
                replies = sorted(replies, key=lambda reply: reply.mean_logprob, reverse=True)[: self._n]
            for reply in replies:
                index = len(choices)
                echo, of_prompt = self._echo(index, number, streams[number], replies_prompt)
                logprobs = _joined(of_prompt, self._logprobs(index, reply.token_ids, reply.logprobs))
                choices.append(_choice(index, echo + reply.text, logprobs, reply.finish_reason))
        tally = Tally.of_all(tallies)
        return JSONResponse(
            {**self._common, "choices": choices, "usage": tally.usage(), "timings": tally.timings()}
        )

    async def events(self, streams: Sequence[ReplyStream]) -> AsyncIterator[bytes]:
        """Its chunks: text as it comes, the last of each with its reason; then the usage, where asked for."""
        options = self._body.stream_options
        more: dict[str, Any] = {"usage": None} if options is not None and options.include_usage else {}
        tallies = [Tally(len(stream.prompt_token_ids)) for stream in streams]
        num_open = len(streams) * self._n
        async for number, output in self._behind_echoes(streams):
            if isinstance(output, _Echo):
                choice = _choice(output.index, output.text, output.logprobs, None)
                yield data_event({**self._common, "choices": [choice], **more})
                continue
            _check(output)
            tallies[number].add(output.index, output.metrics)
            num_open -= output.finish_reason is not None
            logprobs = output.logprobs or ()
            if not (output.text or logprobs or output.finish_reason):
                continue
            index = number * self._n + output.index
            legacy = self._logprobs(index, output.token_ids, logprobs)
            choice = _choice(index, output.text, legacy, output.finish_reason)
            last = {} if num_open else {"timings": Tally.of_all(tallies).timings()}
            yield data_event({**self._common, "choices": [choice], **last, **more})
        if more:
            usage = Tally.of_all(tallies).usage()
            yield data_event({**self._common, "choices": [], "usage": usage})
        yield DONE

    async def _behind_echoes(
        self, streams: Sequence[ReplyStream]
    ) -> AsyncIterator[tuple[int, StreamOutput | _Echo]]:
        """The outputs of several streams, behind the prompts where these are asked for.

        Prompts come at once, or when their log probabilities are there, with the first token of the first
        reply. Another reply may be faster, where the cache has the prompt, and is kept until then.
        """
        num_streams, with_logprobs = len(streams), self._body.logprobs is not None
        kept: dict[int, list[StreamOutput]] = {}

        def echoes(number: int, logprobs: PromptLogprobs | None) -> Iterator[_Echo]:
            for index in range(number * self._n, (number + 1) * self._n):
                yield _Echo(index, *self._echo(index, number, streams[number], logprobs))

        if self._body.echo:
            if with_logprobs:
                kept = {number: [] for number in range(num_streams)}
            else:
                for number in range(num_streams):
                    for echo in echoes(number, None):
                        yield number, echo
        async for number, output in _as_they_come(streams):
            shown = self._shown(output)
            if number not in kept:
                yield number, shown
                continue
            kept[number].append(shown)
            if output.prompt_logprobs is not None:
                for echo in echoes(number, output.prompt_logprobs):
                    yield number, echo
                for earlier in kept.pop(number):
                    yield number, earlier

    async def _collect(self, stream: ReplyStream, tally: Tally) -> list[_Choice]:
        """The replies to one prompt, whole."""
        choices = [_Choice() for _ in stream.requests]
        async for output in stream:
            shown = self._shown(output)
            _check(shown)
            tally.add(shown.index, shown.metrics)
            choice = choices[shown.index]
            choice.text += shown.text
            choice.token_ids += shown.token_ids
            choice.logprobs += shown.logprobs or ()
            choice.prompt_logprobs = choice.prompt_logprobs or shown.prompt_logprobs
            choice.finish_reason = shown.finish_reason
        return choices

    def _shown(self, output: StreamOutput) -> StreamOutput:
        """An output as the client sees it: without a token that nobody asked for."""
        if not self._is_prompt_alone:
            return output
        metrics = replace(output.metrics, num_generated_tokens=0)
        logprobs = None if output.logprobs is None else ()
        return replace(
            output, text="", token_ids=(), logprobs=logprobs, metrics=metrics, finish_reason="length"
        )

    def _echo(
        self, index: int, number: int, stream: ReplyStream, logprobs: PromptLogprobs | None
    ) -> tuple[str, dict[str, Any] | None]:
        """The prompt as text, where it is asked for, and its log probabilities, where these are."""
        if not self._body.echo:
            return "", None
        prompt, tokenizer = _prompts(self._body)[number], self._service.tokenizer
        token_ids = stream.prompt_token_ids
        text = prompt if isinstance(prompt, str) else tokenizer.decode(token_ids)
        if logprobs is None or self._body.logprobs is None:
            return text, None
        found = prompt_logprobs(token_ids, logprobs, self._body.logprobs, text, tokenizer)
        self._offsets[index] = ReplyOffsets(tokenizer, len(text))
        return text, found

    def _logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]]
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        tokenizer = self._service.tokenizer
        if index not in self._offsets:
            self._offsets[index] = ReplyOffsets(tokenizer, 0)
        if not self._body.echo:
            token_ids, logprobs = without_end(token_ids, logprobs, tokenizer)
        return legacy_logprobs(token_ids, logprobs, self._body.logprobs, self._offsets[index].take(token_ids))


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _joined(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """Log probabilities of a prompt and of the reply behind it."""
    if first is None or second is None:
        return second
    return {name: values + second[name] for name, values in first.items()}


def _check(output: StreamOutput) -> None:
    """Refuses a reply that its grammar could not go on with."""
    if output.finish_reason == "error":
        raise ApiError(400, f"structured_outputs: {output.stop_reason}", param="structured_outputs")


async def _as_they_come(streams: Sequence[ReplyStream]) -> AsyncIterator[tuple[int, StreamOutput]]:
    """The outputs of several streams, each with its stream's number."""
    waiting = {asyncio.ensure_future(stream.arrived()): number for number, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                number = waiting.pop(future)
                outputs = future.result()
                for output in outputs:
                    yield number, output
                if outputs:
                    waiting[asyncio.ensure_future(streams[number].arrived())] = number
    finally:
        for future in waiting:
            future.cancel()
