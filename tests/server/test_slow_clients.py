"""Clients that are slow on purpose: headers that never end, replies that nobody reads."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from duckllm.server import limits

WAIT_S = 20.0


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[int]:
    """A server of an application, on a port."""
    config = uvicorn.Config(
        app, http=limits.LimitedProtocol, port=0, lifespan="off", ws="none", log_level="critical"
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    yield server.servers[0].sockets[0].getsockname()[1]
    server.force_exit = True
    await server.shutdown()


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


PARTIAL = b"GET / HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize("first", [b"", PARTIAL, PARTIAL + b"\r\n"])
def test_headers_that_do_not_end_close_the_connection(monkeypatch: pytest.MonkeyPatch, first: bytes) -> None:
    """The first ones, or those behind a request that was answered."""
    monkeypatch.setattr(limits, "HEADERS_TIMEOUT_S", 0.1)

    async def run() -> bytes:
        async with listening(answer) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(first)
            if first.endswith(b"\r\n\r\n"):
                await reader.readuntil(b"ok")
                writer.write(PARTIAL)
            try:
                return await asyncio.wait_for(reader.read(), WAIT_S)
            except ConnectionResetError:
                return b""
            finally:
                writer.close()

    assert asyncio.run(run()) == b""


def head(num_bytes: int, *, last: bool = True) -> bytes:
    """A request's first line and headers, of so many bytes."""
    begin = b"GET / HTTP/1.1\r\nhost: x\r\n" + (b"connection: close\r\n" if last else b"") + b"a: "
    return begin + b"x" * (num_bytes - len(begin) - 4) + b"\r\n\r\n"


TRAILERS = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\na: "


@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        ([head(1000)], ["200"]),
        ([head(1001)], ["400"]),  # whole, or in parts, or behind another one
        ([head(1001)[:990], head(1001)[990:]], ["400"]),
        ([head(3000)[:2000], head(3000)[2000:]], ["400"]),
        ([head(1000, last=False) + head(1000)], ["200", "200"]),
        ([head(1000, last=False) + head(1001)], ["200", "400"]),
        ([TRAILERS + b"x" * 1000 + b"\r\n\r\n"], ["400"]),
    ],
)
def test_headers_have_a_limit_however_they_come(
    monkeypatch: pytest.MonkeyPatch, sent: list[bytes], answers: list[str]
) -> None:
    monkeypatch.setattr(limits, "MAX_HEADER_BYTES", 1000)

    async def run() -> bytes:
        async with listening(answer) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for piece in sent:
                writer.write(piece)
                await asyncio.sleep(0.02)
            found = await asyncio.wait_for(reader.read(), WAIT_S)
            writer.close()
            return found

    found = asyncio.run(run())
    assert re.findall(r"HTTP/1.1 (\d+)", found.decode()) == answers
    told = b"headers: got more than 1000 bytes, expected at most that"
    assert (told in found) == ("400" in answers)


def test_what_is_written_to_a_lost_connection_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """In one turn of the event loop, before the protocol is told, and without asyncio's warning."""

    async def run() -> None:
        over = asyncio.Event()

        async def hasty(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            (protocol,) = protocols
            protocol.transport.abort()
            for _ in range(20):
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
            over.set()

        async with listening(hasty) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await asyncio.wait_for(over.wait(), WAIT_S)
            writer.close()

    protocols: list[limits.LimitedProtocol] = []
    with pytest.MonkeyPatch.context() as patch:
        made = limits.LimitedProtocol.connection_made

        def noted(self: limits.LimitedProtocol, transport: asyncio.Transport) -> None:
            made(self, transport)
            protocols.append(self)

        patch.setattr(limits.LimitedProtocol, "connection_made", noted)
        asyncio.run(run())
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_a_request_that_is_whole_has_all_the_time_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADERS_TIMEOUT_S", 0.05)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.2)
        await answer(scope, receive, send)

    async def run() -> bytes:
        async with listening(slow) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            found = await asyncio.wait_for(reader.read(), WAIT_S)
            writer.close()
            return found

    assert asyncio.run(run()).endswith(b"ok")


def test_a_reply_that_nobody_reads_is_cut_and_its_request_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept for it stays small, and whoever computes it learns that the client is gone."""
    monkeypatch.setattr(limits, "UNREAD_TIMEOUT_S", 0.1)
    num_sent = 0

    async def run() -> None:
        over = asyncio.Event()

        async def endless(scope: Any, receive: Any, send: Any) -> None:
            nonlocal num_sent
            await receive()
            gone = asyncio.ensure_future(receive())
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not gone.done():
                await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
                num_sent += 10_000
                await asyncio.sleep(0)
            assert gone.result() == {"type": "http.disconnect"}
            over.set()

        async with listening(endless) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.wait_for(over.wait(), WAIT_S)
            writer.transport.abort()

    asyncio.run(run())
    assert num_sent < 50_000_000  # what the kernel takes in between
