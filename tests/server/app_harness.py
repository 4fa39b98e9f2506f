"""The application with the demo model in this process, called without a network, its steps counted."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi import FastAPI

from duckllm import LLM
from duckllm.engine.pool import RequestPool
from duckllm.server.app import ServerConfig, make_app
from duckllm.server.chat_service import ChatService
from duckllm.server.engine_thread import EngineThread

T = TypeVar("T")
TIMEOUT_S = 60.0


class Gate:
    """A pool of requests whose steps are computed as the test allows them.

    Attributes:
        num_steps: How many were.
        before_step: Called in the engine's thread before each; what it raises ends the step.
    """

    def __init__(self, pool: RequestPool) -> None:
        self._pool = pool
        self._change = threading.Condition()
        self._allowed: float = math.inf
        self._waits = False
        self.num_steps = 0
        self.before_step: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._pool)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def close(self) -> None:
        """From now on a step needs :meth:`allow`."""
        self._allow(0)

    def open(self) -> None:
        """Steps are free again."""
        self._allow(math.inf)

    def allow(self) -> None:
        """Lets one step be computed, and returns when the thread waits for the next or has nothing to do."""
        with self._change:
            assert self._change.wait_for(lambda: self._waits, TIMEOUT_S)
            before, self._allowed, self._waits = self.num_steps, 1, False
            self._change.notify_all()
            # A pool that an abortion empties says nothing.
            deadline = time.monotonic() + TIMEOUT_S
            while not (self.num_steps > before and (self._waits or not self._pool)):
                assert time.monotonic() < deadline
                self._change.wait(0.002)

    def _allow(self, number: float) -> None:
        with self._change:
            self._allowed = number
            self._change.notify_all()

    def step(self) -> Any:
        with self._change:
            self._waits = True
            self._change.notify_all()
            self._change.wait_for(lambda: self._allowed > 0)
            self._allowed -= 1
            self._waits = False
        self.before_step()
        try:
            return self._pool.step()
        finally:
            with self._change:
                self.num_steps += 1
                self._change.notify_all()


class InProcess:
    """An event loop in a thread, with the application on it."""

    def __init__(self, **options: Any) -> None:
        self.options = {"workers": 0, "kv_cache_bytes": "16MiB", "max_num_seqs": 2, "draft": "off", **options}
        self.loop = asyncio.new_event_loop()
        self.gate: Gate
        self.llm: LLM
        self.service: ChatService
        self.app: FastAPI

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(TIMEOUT_S)

    def settle(self) -> None:
        """Waits until no reply is under way."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.service.engine.num_open or len(self.gate):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    async def start(self, config: ServerConfig) -> None:
        def load(_: object) -> LLM:
            llm = LLM(**self.options)
            self.gate = Gate(llm.new_pool())
            llm.new_pool = lambda: self.gate  # type: ignore[method-assign, assignment, return-value]
            return llm

        engine = EngineThread(load)
        self.service = ChatService(engine, config.max_waiting)
        self.app = make_app(self.service, config)
        engine.start()
        self.llm = await engine.loaded


@contextmanager
def in_process(config: ServerConfig | None = None, **options: Any) -> Iterator[InProcess]:
    """An application for tests, its model loaded."""
    here = InProcess(**options)
    thread = threading.Thread(target=here.loop.run_forever)
    thread.start()
    try:
        here.run(here.start(config or ServerConfig()))
        yield here
        here.gate.open()
        here.run(here.service.engine.stop())
    finally:
        here.loop.call_soon_threadsafe(here.loop.stop)
        thread.join()
        here.loop.close()


class Call:
    """A request to the application, and what it answered so far.

    Args:
        app: The application.
        path: Of the request.
        body: Its JSON, or bytes as they are.
        method: Its method.
        headers: Beside the content's type and the host.
    """

    def __init__(
        self,
        app: FastAPI,
        path: str,
        body: object = None,
        *,
        method: str | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._app, self._path = app, path
        self._body = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        self._method = method or ("GET" if body is None else "POST")
        given = dict([("content-type", "application/json"), ("host", "127.0.0.1"), *headers])
        self._headers = [(name.encode(), value.encode()) for name, value in given.items()]
        self._gone, self._has_sent = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._was_read = False
        self.status = 0
        self.headers: dict[str, str] = {}
        self.content = b""

    async def begin(self) -> Call:
        """Sends the request."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self._method,
            "scheme": "http",
            "path": self._path,
            "raw_path": self._path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": self._headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self._task = asyncio.ensure_future(self._app(scope, self._receive, self._send))
        return self

    async def leave(self) -> None:
        """Closes the connection, and waits until the application has noticed."""
        self._gone.set()
        await self.end()

    async def end(self) -> Call:
        """Waits for the end of the reply."""
        assert self._task is not None
        await asyncio.wait_for(self._task, TIMEOUT_S)
        return self

    def json(self) -> Any:
        return json.loads(self.content)

    async def _receive(self) -> dict[str, Any]:
        if not self._was_read:
            self._was_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.content += message.get("body", b"")


def ask(here: InProcess, path: str, body: object = None, **options: Any) -> Call:
    """A whole request."""

    async def run() -> Call:
        return await (await Call(here.app, path, body, **options).begin()).end()

    return here.run(run())
