"""A conversation that keeps its tokens as they really were, so that every turn begins with all before it.

Made by :meth:`duckllm.LLM.conversation`; used by the command line. A list of messages alone loses them: a
reply's text need not be cut into the tokens that it was generated as, and special tokens, as of a call of a
tool, are no part of it. Knows text and token ids, and of the model what :class:`Speaker` says.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from duckllm.errors import CacheFormatError, ConfigError, RequestError
from duckllm.outputs import RequestOutput, StreamOutput
from duckllm.paths import as_path, check_replaceable
from duckllm.sampling_params import SamplingParams
from duckllm.text.messages import check_messages
from duckllm.text.tokenizer import Tokenizer
from duckllm.weights.files import write_atomically

FORMAT_VERSION = 1
Message = dict[str, str]


class Speaker(Protocol):
    """What a conversation needs of :class:`duckllm.LLM`."""

    tokenizer: Tokenizer
    model_hash: str

    def stream(
        self, prompt: Sequence[int], sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamOutput]:
        """The reply to a prompt, as it comes."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """The replies to prompts."""


class Conversation:
    """Messages, and the tokens that they were to the model.

    The next turn's prompt is the tokens so far, the reply's own among them (its thinking, calls of tools and
    end token), and behind them what the chat template adds for the new message. Where the template, now that
    there is more, writes earlier messages otherwise, the prompt is what the template says of all messages;
    what it has in common with the tokens so far is found in the KV cache all the same.

    Args:
        model: Answers.
        system: A system message before the conversation.
        keep_thinking: Whether replies stay as they were where the template writes earlier ones otherwise:
            many leave out the thinking of earlier turns. False follows the template.

    Attributes:
        messages: What was said, oldest first.
        token_ids: The last turn's prompt and reply, as they really were; empty before the first.

    Example:
        >>> conversation = llm.conversation(system="Be brief.")
        >>> for output in conversation.stream("What is a duck?"):
        ...     print(output.text, end="", flush=True)
        >>> conversation.save("ducks.conversation.json")
        >>> conversation = Conversation.load("ducks.conversation.json", llm)
    """

    def __init__(self, model: Speaker, system: str | None = None, *, keep_thinking: bool = True) -> None:
        self._model, self._system, self._keep_thinking = model, system, keep_thinking
        self.reset()

    def reset(self) -> None:
        """Begins anew, with the system message alone."""
        self.messages: list[Message] = []
        self.token_ids: list[int] = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})

    @property
    def system(self) -> str | None:
        """The system message."""
        return self._system

    def send(self, text: str, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """The whole reply to a message. What fails leaves the conversation as it was.

        Raises:
            RequestError: The message cannot be honoured, or the conversation has become too long.
            ConfigError: The sampling asks for several replies, or for what the model does not have.
            WorkerLostError: A worker went away, or did not answer in time.
        """
        _check_one_reply(sampling_params)
        prompt = self._prompt(text)
        [output] = self._model.generate([prompt], sampling_params)
        self._add(text, output.outputs[0].text, prompt, output.outputs[0].token_ids)
        return output

    def stream(
        self, text: str, sampling_params: SamplingParams | None = None
    ) -> Generator[StreamOutput, None, None]:
        """The reply to a message as it grows. One that is not read to its end is kept as far as it was read.

        Errors as of :meth:`send`; the message is checked here and now.
        """
        _check_one_reply(sampling_params)
        prompt = self._prompt(text)
        return self._stream(text, prompt, self._model.stream(prompt, sampling_params))

    def _stream(
        self, text: str, prompt: list[int], outputs: Iterator[StreamOutput]
    ) -> Generator[StreamOutput, None, None]:
        said = ""
        token_ids: list[int] = []
        try:
            for output in outputs:
                said += output.text
                token_ids += output.token_ids
                yield output
        finally:
            if token_ids:
                self._add(text, said, prompt, token_ids)

    def _add(self, text: str, said: str, prompt: list[int], token_ids: Sequence[int]) -> None:
        self.token_ids = [*prompt, *token_ids]
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": said}]

    def _prompt(self, text: str) -> list[int]:
        messages = [*self.messages, {"role": "user", "content": text}]
        tokenizer = self._model.tokenizer
        if self.token_ids:
            more = tokenizer.continue_chat_template(messages, keep_replies=self._keep_thinking)
            if more is not None:
                # A reply that came to its end has the token that ends its turn, as the template writes it.
                ends = tokenizer.eos_token_ids
                has_end = self.token_ids[-1] in ends and more[0] in ends
                return [*self.token_ids[: -1 if has_end else None], *more]
        return tokenizer.apply_chat_template(messages)

    def save(self, path: str | Path) -> None:
        """Writes the conversation to a file, which appears whole or stays as it was.

        A new file is its owner's alone, as it holds what was said; one that is replaced keeps its mode.

        Raises:
            ConfigError: It cannot be written, or something else than a regular file lies there; names the
                path that was given.
        """
        target = as_path("path", path, "a file to write")
        check_replaceable("path", target)
        facts = {
            "format_version": FORMAT_VERSION,
            "model_hash": self._model.model_hash,
            "keep_thinking": self._keep_thinking,
            "messages": self.messages,
            "token_ids": self.token_ids,
        }
        try:
            write_atomically(target, json.dumps(facts, ensure_ascii=False).encode() + b"\n", private=True)
        except OSError as error:
            reason = error.strerror or ""
            raise ConfigError("path", str(path), "a file that can be written", reason) from error

    @classmethod
    def load(cls, path: str | Path, model: Speaker) -> Conversation:
        """The conversation that a file holds, to go on with.

        Raises:
            CacheFormatError: The file cannot be read, is malformed, or is another model's.
            ConfigError: ``path`` is none.
        """
        facts = read_conversation(path)
        _check_model(path, facts, model)
        messages = facts["messages"]
        conversation = cls(model, system_of(messages), keep_thinking=facts["keep_thinking"])
        conversation.messages, conversation.token_ids = messages, facts["token_ids"]
        return conversation


def _check_one_reply(params: SamplingParams | None) -> None:
    if params is not None and params.n != 1:
        raise ConfigError("n", params.n, "1 in a conversation")


def read_conversation(path: str | Path) -> dict[str, Any]:
    """What a conversation's file holds, checked as far as no model is needed for it.

    Raises:
        CacheFormatError: The file cannot be read, or is malformed.
        ConfigError: ``path`` is none.
    """
    file = as_path("path", path, "a conversation's file")
    try:
        facts = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CacheFormatError(f"{path}: cannot be read ({error})") from error
    _check_facts(path, facts)
    return dict(facts)


def system_of(messages: Sequence[Message]) -> str | None:
    """The system message that a conversation begins with, if it does."""
    return messages[0]["content"] if messages and messages[0]["role"] == "system" else None


def _check_facts(path: str | Path, facts: Any) -> None:
    if not isinstance(facts, dict):
        raise CacheFormatError(f"{path}: got {type(facts).__name__}, expected an object")
    if (version := facts.get("format_version")) != FORMAT_VERSION:
        raise CacheFormatError(f"{path}: format_version: got {version!r}, expected {FORMAT_VERSION}")
    if not isinstance(facts.get("keep_thinking"), bool):
        raise CacheFormatError(f"{path}: keep_thinking: got no true or false, expected one")
    messages: Any = facts.get("messages")
    token_ids: Any = facts.get("token_ids")
    try:
        if messages != []:
            check_messages(messages)
    except RequestError as error:
        raise CacheFormatError(f"{path}: {error}") from error
    if not isinstance(token_ids, list) or not all(type(each) is int and each >= 0 for each in token_ids):
        raise CacheFormatError(f"{path}: token_ids: got something else, expected a list of token ids")
    has_reply = any(message["role"] == "assistant" for message in messages)
    if has_reply != bool(token_ids):
        raise CacheFormatError(f"{path}: token_ids: got {len(token_ids)}, expected some where a reply is")


def _check_model(path: str | Path, facts: dict[str, Any], model: Speaker) -> None:
    got, most = facts.get("model_hash"), model.tokenizer.max_token_id
    if got != model.model_hash:
        raise CacheFormatError(f"{path}: model_hash: got {got!r}, expected {model.model_hash!r}")
    if (largest := max(facts["token_ids"], default=0)) > most:
        raise CacheFormatError(f"{path}: token_ids: got {largest}, expected numbers from 0 to {most}")
