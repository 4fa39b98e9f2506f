"""Replies that end when their client goes away: server-sent events, and work that is waited for.

Used by every API. A client that closes its connection, or does not read, has its request cancelled; how that
is found out is the protocol's part (:mod:`duckllm.server.limits`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from duckllm.errors import DuckError
from duckllm.server.errors import (
    CLIENT_CLOSED_REQUEST,
    FINAL_STATUS,
    ApiError,
    as_api_error,
    log_fault,
)

T = TypeVar("T")
# Silence after which a comment is sent, as something on the way may close a connection without traffic.
PING_S = 10.0
DONE = b"data: [DONE]\n\n"


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client goes away.

    Raises:
        ApiError: The client went away, so that nobody sees this.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(CLIENT_CLOSED_REQUEST, "the client went away")
    finally:
        await _end(task, gone)


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed its connection; the body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


class EventStream(Response):
    """Server-sent events, with a comment where nothing came for a while.

    Args:
        events: Whole events, as they are sent.
        close: Called when it is over, however it ended: all sent, the client gone, the server stopping.
        fail: The events that tell of an error and end the stream.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], object],
        fail: Callable[[ApiError], Iterable[bytes]],
    ) -> None:
        # nginx would else collect events before it passes them on.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close, self._fail = events, close, fail
        self._has_sent = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            tasks: list[Awaitable[None]] = [self._send(scope, send), _gone(receive), self._ping(send)]
            futures = [asyncio.ensure_future(task) for task in tasks]
            try:
                await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
                if futures[0].done():
                    futures[0].result()
            finally:
                await _end(*futures)
        finally:
            self._close()

    async def _send(self, scope: Scope, send: Send) -> None:
        async for event in self._with_error(scope):
            self._has_sent = True
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _with_error(self, scope: Scope) -> AsyncIterator[bytes]:
        """The events, and what ended them before their time."""
        try:
            async for event in self._events:
                yield event
        except Exception as error:
            if not isinstance(error, DuckError | ApiError):
                log_fault(scope["path"][:200], error)
            told = as_api_error(error)
            # The reply has begun with 200; this is what became of it.
            scope[FINAL_STATUS] = told.status
            for event in self._fail(told):
                yield event

    async def _ping(self, send: Send) -> None:
        while True:
            self._has_sent = False
            await asyncio.sleep(PING_S)
            if not self._has_sent:
                await send({"type": "http.response.body", "body": b": ping\n\n", "more_body": True})


def data_event(value: object) -> bytes:
    """An event without a name, as OpenAI's streams have them."""
    return b"data: " + json_bytes(value) + b"\n\n"


def openai_error(error: ApiError) -> list[bytes]:
    """How OpenAI's chat and completions streams end with an error."""
    return [data_event(error.openai()), DONE]


def json_bytes(value: object) -> bytes:
    """JSON in UTF-8 on one line."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def named_event(value: Mapping[str, Any]) -> bytes:
    """An event that is named by its ``type``, as Anthropic's and the Responses API's streams have them."""
    return f"event: {value['type']}\n".encode() + data_event(value)
