"""Limits on what clients send: sizes of bodies and of what is in them, and times for sending and reading.

Checked before anything is computed. The figures are far above what clients that work send.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from duckllm.server.errors import CLIENT_CLOSED_REQUEST, FINAL_STATUS, ApiError, refuse

MAX_BODY_BYTES = 16 << 20
# Bodies that are being read, all together: as many clients as like may send one.
MAX_BODIES_BYTES = 16 * MAX_BODY_BYTES
# Of a body that is too large, what is read and thrown away so that its sender reads the refusal.
_DRAINED_BYTES = 2 * MAX_BODY_BYTES
MAX_HEADER_BYTES = 64 << 10
MAX_MESSAGES = 10_000
MAX_TOOLS = 512
MAX_N = 128  # OpenAI's
MAX_PROMPTS = 1024
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 4096
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_BYTES = 256 << 10
MAX_GRAMMAR_BYTES = 64 << 10
MAX_NODES = 100_000  # of a body's JSON, names and values together
MAX_FIELDS = 100  # of one object whose fields are known
MAX_PROMPT_TOKENS = 1 << 20  # of a prompt that is given as tokens
# Of all prompts of a request together, a place's likeliest tokens counted: some 150 MB while they are held.
MAX_PROMPT_LOGPROBS = 1 << 19
# What is sent in chunks of few bytes costs as much for each as for a large one.
MAX_SMALL_CHUNKS = 16_384
_SMALL_CHUNK_BYTES = 64
_HEADERS_TOO_LARGE = 431  # as h11 names the kind of error
_TOKENS = ("prompt", "tokens")
HEADERS_TIMEOUT_S = 20.0
BODY_TIMEOUT_S = 60.0
UNREAD_TIMEOUT_S = 30.0


def check_sizes(field: str, value: object) -> None:
    """Refuses JSON that is nested too deeply or too large for a schema.

    Raises:
        ApiError: Names the field.
    """
    waiting: list[tuple[object, int]] = [(value, 1)]
    num_bytes = 0
    while waiting:
        item, depth = waiting.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise refuse(field, f"more than {MAX_SCHEMA_DEPTH} levels", f"at most {MAX_SCHEMA_DEPTH} levels")
        if isinstance(item, Mapping):
            num_bytes += sum(len(str(key)) + 4 for key in item)
            waiting += [(each, depth + 1) for each in item.values()]
        elif isinstance(item, list):
            num_bytes += 2 * len(item)
            waiting += [(each, depth + 1) for each in item]
        else:
            num_bytes += len(item) if isinstance(item, str) else 8
        if num_bytes > MAX_SCHEMA_BYTES:
            raise refuse(field, f"more than {MAX_SCHEMA_BYTES} bytes", f"at most {MAX_SCHEMA_BYTES} bytes")


def check_nodes(body: object) -> None:
    """Refuses JSON of more names and values than any client sends that works.

    Raises:
        ApiError: It is that large.
    """
    waiting, num_nodes = [body], 0
    if isinstance(body, dict):
        waiting = [value for name, value in body.items() if not (name in _TOKENS and _are_tokens(value))]
        num_nodes = 2 * len(body)
    while waiting:
        item = waiting.pop()
        values = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        num_nodes += 2 * len(values) if isinstance(item, dict) else len(values)
        if num_nodes > MAX_NODES:
            message = f"body: got more than {MAX_NODES} names and values, expected at most that"
            raise ApiError(400, message, code="body_too_complex")
        waiting += [each for each in values if isinstance(each, dict | list)]


def _are_tokens(value: object) -> bool:
    """Whether it is a prompt as tokens, or several; these may be many, and cost little."""
    lists = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    return len(lists) <= MAX_PROMPTS and all(
        isinstance(each, list)
        and len(each) <= MAX_PROMPT_TOKENS
        and all(type(token) is int for token in each)
        for each in lists
    )


def check_grammar(field: str, values: Mapping[str, Any]) -> None:
    """Refuses an expression, choice or grammar that is too long, or a schema that :func:`check_sizes` does.

    Raises:
        ApiError: Names the field.
    """
    for name in ("regex", "grammar", "choice"):
        texts = values.get(name) or ""
        length = len(texts if isinstance(texts, str) else "".join(map(str, texts)))
        if length > MAX_GRAMMAR_BYTES:
            got = f"{length} characters"
            raise refuse(f"{field}.{name}", got, f"at most {MAX_GRAMMAR_BYTES} characters")
    check_sizes(f"{field}.choice", values.get("choice"))
    check_sizes(f"{field}.json", values.get("json"))


class BodyLimit:
    """Reads a request's body before anybody else, up to a size and within a time.

    Args:
        app: Gets the body in one piece.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._num_bytes = 0  # of all bodies that are being read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or refuses it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                if not await self._read(scope, receive, body):
                    scope[FINAL_STATUS] = CLIENT_CLOSED_REQUEST
                    return
        except TimeoutError:
            error = ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:.0f} s", headers=_CLOSE)
            await error.response(scope["path"])(scope, receive, send)
            return
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        finally:
            self._num_bytes -= len(body)
        whole: Message | None = {"type": "http.request", "body": bytes(body), "more_body": False}
        del body

        async def receive_whole() -> Message:
            nonlocal whole
            if whole is None:
                return await receive()
            message, whole = whole, None
            return message

        await self._app(scope, receive_whole, send)

    async def _read(self, scope: Scope, receive: Receive, body: bytearray) -> bool:
        """Fills ``body``; whether the client is still there."""
        num_bytes, error = 0, None
        headers = dict(scope["headers"])
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # Something before us may go by the other one, and take for a request what is a body here.
            told = "got content-length and transfer-encoding, expected one of them"
            raise ApiError(400, told, headers=_CLOSE)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            error = self._too_large()
            if b"expect" in headers or int(length) > _DRAINED_BYTES:
                raise error
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            piece = message.get("body", b"")
            num_bytes += len(piece)
            if error is None and num_bytes > MAX_BODY_BYTES:
                error = self._too_large()
            elif error is None and self._num_bytes + len(piece) > MAX_BODIES_BYTES:
                error = ApiError(503, "too many large requests at a time", "server_error", headers=_CLOSE)
            if error is None:
                body += piece
                self._num_bytes += len(piece)
            elif num_bytes > _DRAINED_BYTES:
                raise error
            if not message.get("more_body", False):
                break
        if error is not None:
            raise error
        return True

    def _too_large(self) -> ApiError:
        message = f"body: got more than {MAX_BODY_BYTES} bytes, expected at most that"
        return ApiError(413, message, code="request_too_large", headers=_CLOSE)


_CLOSE = {"connection": "close"}


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 whose clients have limited time for headers and for reading what was sent to them.

    Nor may they send a body in very many chunks.
    """

    conn: _CountedConnection

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _CountedConnection(MAX_HEADER_BYTES)
        self._headers, self._unread = _Timer(HEADERS_TIMEOUT_S), _Timer(UNREAD_TIMEOUT_S)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: its headers are awaited."""
        super().connection_made(_OpenTransport(transport))  # type: ignore[arg-type]
        self._watch_headers()

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no request, or has too large headers; who was answered before is cut off."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        if self.conn.has_large_headers:
            msg = f"headers: got more than {self.conn.max_header_bytes} bytes, expected at most that"
        super().send_400_response(msg)

    def data_received(self, data: bytes) -> None:
        """Takes what came; a request whose headers are not whole has until the time for them is over."""
        super().data_received(data)
        if self.conn.has_too_many_chunks and not self.transport.is_closing():
            if self.conn.our_state is h11.SEND_RESPONSE:
                self.send_400_response("The body has too many small chunks.")
            else:
                self.transport.abort()
        self._watch_headers()

    def _watch_headers(self) -> None:
        state = self.conn.their_state
        is_next = state is h11.IDLE and self.conn.trailing_data[0]
        # Of a request that was refused early nobody reads the rest; who goes on sending it is not waited for.
        is_rest = state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete
        if self.cycle is None or is_next or is_rest:
            self._headers.start(self.transport)
        else:
            self._headers.stop()

    def pause_writing(self) -> None:
        """Nobody reads as fast as is sent; for long, and the connection is cut."""
        super().pause_writing()
        self._unread.start(self.transport)

    def resume_writing(self) -> None:
        """What was sent has been read."""
        super().resume_writing()
        self._unread.stop()

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection, whether or not its client reads what is left."""
        super().timeout_keep_alive_handler()
        self._unread.start(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        super().connection_lost(exc)
        self._headers.stop()
        self._unread.stop()


class _OpenTransport:
    """A connection's transport, which drops what is written once it is lost.

    The protocol is told in a later turn of the event loop, and asyncio warns of what is written until then.
    """

    def __init__(self, inner: asyncio.Transport) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, data: bytes) -> None:
        """Sends, where there is somebody to send to."""
        if not self._inner.is_closing():
            self._inner.write(data)


class _CountedConnection(h11.Connection):
    """Knows whether headers are too large, and whether a body comes in pieces that are too small.

    Args:
        max_header_bytes: Most of a request before its body, and of what stands behind the last chunk of one.
    """

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self.max_header_bytes, self.has_large_headers = max_header_bytes, False
        self._num_chunks = self._num_bytes = 0

    @property
    def has_too_many_chunks(self) -> bool:
        """Whether it is so of the request that is read."""
        is_small = self._num_bytes < self._num_chunks * _SMALL_CHUNK_BYTES
        return is_small and self._num_chunks > MAX_SMALL_CHUNKS

    def next_event(self) -> Any:
        """What has come."""
        # Of headers that have come whole h11 takes as many as there are.
        num_before = len(self.trailing_data[0]) if self.their_state is h11.IDLE else 0
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._check_headers(num_before - len(self.trailing_data[0]))
            elif isinstance(event, h11.EndOfMessage):
                self._check_headers(sum(len(name) + len(value) + 4 for name, value in event.headers))
        except h11.RemoteProtocolError as error:
            self.has_large_headers = error.error_status_hint == _HEADERS_TOO_LARGE
            raise
        if isinstance(event, h11.Data):
            self._num_chunks += 1
            self._num_bytes += len(event.data)
        elif isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        return event

    def _check_headers(self, num_bytes: int) -> None:
        if num_bytes > self.max_header_bytes:
            raise h11.RemoteProtocolError("too many bytes of headers", error_status_hint=_HEADERS_TOO_LARGE)


class _Timer:
    """Cuts a connection after a while, unless it is stopped."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._handle: asyncio.TimerHandle | None = None

    def start(self, transport: asyncio.Transport) -> None:
        """Time counts from now, or from the first start without a stop."""
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(self._seconds, transport.abort)

    def stop(self) -> None:
        """It does not go off."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
