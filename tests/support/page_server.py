"""A server of canned answers for the web page: what it says, and when, is the test's choice."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from duckllm.server import page


class Gate:
    """A place in a reply where the server waits until the test opens it."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def open(self) -> None:
        """Lets the reply go on."""
        self._open.set()

    async def passed(self) -> None:
        """Returns once the gate is open."""
        while not self._open.is_set():
            await asyncio.sleep(0.005)


@dataclass(frozen=True)
class Thought:
    """A piece of a reply's thinking."""

    text: str


@dataclass(frozen=True)
class Failure:
    """Ends a stream with an error in the API's form, or without a word (empty message)."""

    message: str
    code: int = 503


Piece = str | Thought | Gate | Failure


@dataclass
class PageServer:
    """What the server says.

    Args:
        replies: The pieces of each reply, one after the other; the last one goes on being said.
        health: Status and body of ``/health``.
        key: The key it wants; None for none.
        refusal: Status and error of chat completions; None to answer.
        cluster: What ``/cluster`` says.
        card: What the model's card has beside its name.
        requests: The bodies of chat completions, as they came.
        num_left: Clients that went away in the middle of a reply.
    """

    replies: list[Sequence[Piece]] = field(default_factory=lambda: [["Hello."]])
    health: tuple[int, dict[str, Any]] = (200, {"status": "ok"})
    key: str | None = None
    refusal: tuple[int, dict[str, Any]] | None = None
    cluster: dict[str, Any] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=lambda: {"context_length": 2048})
    requests: list[dict[str, Any]] = field(default_factory=list)
    num_left: int = 0
    url: str = ""

    def app(self) -> FastAPI:
        """The routes that the page asks for."""
        app = FastAPI()
        app.include_router(page.router())

        @app.get("/health")
        async def health() -> Response:
            status, body = self.health
            return JSONResponse(body, status)

        @app.get("/v1/models")
        async def models(request: Request) -> Response:
            return self._refused(request) or JSONResponse(
                {"object": "list", "data": [{"id": "demo", "object": "model", **self.card}]}
            )

        @app.get("/cluster")
        async def cluster(request: Request) -> Response:
            return self._refused(request) or JSONResponse(self.cluster)

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            refused = self._refused(request)
            if refused:
                return refused
            if self.refusal is not None:
                status, error = self.refusal
                return JSONResponse({"error": error}, status)
            self.requests.append(await request.json())
            pieces = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
            return StreamingResponse(self._stream(pieces), media_type="text/event-stream")

        return app

    def _refused(self, request: Request) -> Response | None:
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        error = {"message": "A key is needed.", "type": "authentication_error", "param": None, "code": None}
        return JSONResponse({"error": error}, 401)

    async def _stream(self, pieces: Sequence[Piece]) -> AsyncIterator[str]:
        done = False
        try:
            for piece in pieces:
                if isinstance(piece, Gate):
                    yield ": ping\n\n"
                    await piece.passed()
                    continue
                if isinstance(piece, Failure):
                    done = True
                    if piece.message:
                        error = {"message": piece.message, "type": "server_error", "code": piece.code}
                        yield _event({"error": error})
                    return
                text = piece.text if isinstance(piece, Thought) else piece
                name = "reasoning_content" if isinstance(piece, Thought) else "content"
                yield _event({"choices": [{"index": 0, "delta": {name: text}, "finish_reason": None}]})
            yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            usage = {
                "prompt_tokens": 12,
                "completion_tokens": 34,
                "total_tokens": 46,
                "prompt_tokens_details": {"cached_tokens": 8},
                "completion_tokens_details": {"reasoning_tokens": 0},
            }
            timings = {"predicted_per_second": 56.7, "draft_n": 10, "draft_n_accepted": 7}
            yield _event({"choices": [], "usage": usage, "timings": timings})
            yield "data: [DONE]\n\n"
            done = True
        finally:
            self.num_left += not done


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


@contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """Serves an app on a port of this machine; gives its address."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the server did not start")
        thread.join(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
