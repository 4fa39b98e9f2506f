"""Clients that are slow on purpose: headers that never end, replies that nobody reads."""

from __future__ import annotations

import asyncio
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
