"""One streamed request to a server of OpenAI's API, and when each piece of its reply came.

Called by serving.py. httpx is imported with this module: only the extra ``bench`` installs it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from duckllm.errors import ConfigError, without_credentials

BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_TEXTS = ("content", "reasoning_content", "reasoning")
_QUOTED = 120
_MOST_TOKENS = 1_000_000_000


@dataclass
class Outcome:
    """What became of a request; times are those of ``time.perf_counter``.

    Args:
        intended: When it should have been sent.
        input_len: Tokens that were asked for in its prompt; 0 for a prompt of its own.
        output_len: Tokens that were asked for in its reply.
        sent: When it was sent.
        pieces: When each piece of the reply came.
        end: When the stream ended, or failed.
        prompt_tokens: By the server's own count; None where it does not count.
        completion_tokens: Likewise.
        cached_tokens: Of the prompt, those that the server had; None where it does not say.
        error: What went wrong; empty where nothing did.
    """

    intended: float
    input_len: int
    output_len: int
    sent: float = 0.0
    pieces: list[float] = field(default_factory=list)
    end: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    error: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens of the reply; of a server that does not count, its pieces."""
        return len(self.pieces) if self.completion_tokens is None else self.completion_tokens

    @property
    def first_s(self) -> float:
        """From the moment at which it should have been sent to the first piece."""
        return self.pieces[0] - self.intended

    @property
    def whole_s(self) -> float:
        """From that moment to the end."""
        return self.end - self.intended

    @property
    def gaps_s(self) -> list[float]:
        """Times between pieces."""
        return [after - before for before, after in pairwise(self.pieces)]

    @property
    def per_token_s(self) -> float | None:
        """Time for each token after the first; None of a reply of one."""
        if self.num_tokens < 2 or len(self.pieces) < 2:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.num_tokens - 1)


class StreamFailedError(Exception):
    """A request that did not come to its end; its text says why, alike for all that fail alike."""


class StreamClient:
    """Sends requests to one server.

    Args:
        base_url: Where it is, without ``/v1``.
        backend: One of :data:`BACKENDS`.
        model: What it calls the model; empty until :meth:`find_model`.
        api_key: Key that it asks for; empty for none.
        ignore_eos: Ask for replies that go on to their full length.
        extra_body: More fields of every request.
        timeout_s: The longest that a request may take.
        transport: For tests; a network by default.
    """

    def __init__(
        self,
        base_url: str,
        backend: str,
        model: str = "",
        *,
        api_key: str = "",
        ignore_eos: bool = True,
        extra_body: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.model, self._backend, self._timeout_s = model, backend, timeout_s
        self._fields: dict[str, Any] = {"temperature": 0, **({"ignore_eos": True} if ignore_eos else {})}
        self._fields |= extra_body or {}
        self._client = httpx.AsyncClient(
            base_url=base_url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=min(30.0, timeout_s)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            transport=transport,
            trust_env=False,  # a proxy would be measured with it
        )

    async def __aenter__(self) -> StreamClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    @property
    def _shown_url(self) -> str:
        return without_credentials(str(self._client.base_url))

    async def find_model(self) -> str:
        """The model's name: the one that was given, or the first that the server has.

        Raises:
            ConfigError: No server answers there, or it says no name.
        """
        if self.model:
            return self.model
        try:
            response = await self._client.get("/v1/models")
            response.raise_for_status()
            self.model = str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError, RecursionError) as error:
            expected = "a server of OpenAI's API, or the model's name by --model"
            raise ConfigError("base_url", self._shown_url, expected, _reason(error)) from error
        return self.model

    async def count_tokens(self, prompt: str) -> int | None:
        """Tokens of a prompt, as the server counts them; None where it does not. Computes it, and a token.

        Raises:
            ConfigError: The server does not answer such a request.
        """
        outcome = await self.stream(Outcome(time.perf_counter(), 0, 1), prompt)
        if outcome.error and outcome.prompt_tokens is None:  # a reply of one token may have no text
            expected = "a server that answers a first request"
            raise ConfigError("base_url", self._shown_url, expected, outcome.error)
        return outcome.prompt_tokens

    async def stream(self, outcome: Outcome, prompt: str) -> Outcome:
        """Sends a request, and reads its reply to the end; what goes wrong is in the outcome."""
        outcome.sent = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._read(outcome, self._body(prompt, outcome.output_len))
        except StreamFailedError as error:
            outcome.error = str(error)
        except (TimeoutError, httpx.TimeoutException):
            outcome.error = "time-out"
        except httpx.HTTPError as error:
            outcome.error = _reason(error)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            outcome.error = "a reply of another form"
        outcome.end = time.perf_counter()
        return outcome

    def _body(self, prompt: str, output_len: int) -> dict[str, Any]:
        is_chat = self._backend == "openai-chat"
        asked = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": output_len}
        return {"model": self.model, **asked, **options, **self._fields}

    async def _read(self, outcome: Outcome, body: dict[str, Any]) -> None:
        is_whole = False
        async with self._client.stream("POST", BACKENDS[self._backend], json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise StreamFailedError(f"HTTP {response.status_code}: {_message(text)}")
            async for data in _events(response):
                if data == b"[DONE]":
                    is_whole = True
                    continue
                chunk = json.loads(data)
                if chunk.get("error"):
                    raise StreamFailedError(f"error in the stream: {_message(json.dumps(chunk))}")
                for choice in chunk.get("choices") or ():
                    if _text_of(choice):
                        outcome.pieces.append(time.perf_counter())
                    is_whole = is_whole or choice.get("finish_reason") is not None
                _count(outcome, chunk.get("usage"))
        if not is_whole:
            raise StreamFailedError("a stream that broke off")
        if not outcome.pieces:
            raise StreamFailedError("an empty reply")


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of server-sent events, a line each. Lines end with line feeds alone: JSON may hold others."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


def _text_of(choice: dict[str, Any]) -> str:
    """What a chunk adds to the reply, its thinking and calls included."""
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    return "".join(delta.get(name) or "" for name in _TEXTS) or ("call" if delta.get("tool_calls") else "")


def _count(outcome: Outcome, usage: dict[str, Any] | None) -> None:
    if usage:
        outcome.prompt_tokens = _number(usage["prompt_tokens"])
        outcome.completion_tokens = _number(usage["completion_tokens"])
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        outcome.cached_tokens = None if cached is None else _number(cached)


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MOST_TOKENS:
        raise ValueError("no number of tokens")
    return value


def _message(text: str) -> str:
    """The message in an error's body, or its beginning."""
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    text = " ".join(text.split())
    return text if len(text) <= _QUOTED else text[:_QUOTED] + "..."


def _reason(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP {error.response.status_code}"
    text = without_credentials(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
