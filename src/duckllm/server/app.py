"""The application: every API's paths behind the same checks, and the server's life from port to stop.

Called by ``duckllm serve``. The event loop runs in the main thread; the model lives in the engine's thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from duckllm.errors import ConfigError, DuckError, UnavailableError
from duckllm.server import (
    anthropic,
    cluster_status,
    metrics,
    openai_chat,
    openai_completions,
    openai_models,
    openapi,
    page,
    responses,
    tokenize,
)
from duckllm.server.chat_service import DEFAULT_MAX_WAITING, ChatService
from duckllm.server.engine_thread import EngineThread, LoadingProgress
from duckllm.server.errors import ApiError, as_api_error, from_validation, log_fault, no_such_call
from duckllm.server.limits import BodyLimit, LimitedProtocol
from duckllm.server.openai_models import ServedModel
from duckllm.server.security import ApiKeys, KnownNames, check_exposure, check_key

if TYPE_CHECKING:
    from duckllm.llm import LLM

# After the deadline of a stop, for replies that were cut to say so.
_CUT_S = 3.0
# For the step under way, pages that are to be saved, and the workers.
_CLOSE_S = 20.0
_log = logging.getLogger("duckllm")


@dataclass(frozen=True)
class ServerConfig:
    """How the server listens and whom it serves.

    Args:
        host: Address or name to listen on.
        port: 0 takes a free one.
        api_keys: Keys of which a request must have one; empty for none.
        is_insecure: Whether anybody may be served beyond loopback without a key.
        cors_origins: Origins of pages elsewhere that browsers may let in; ``"*"`` for any.
        model_names: What clients may call the model, its own name first.
        max_waiting: Most replies that wait beside those that are computed.
        shutdown_timeout_s: How long a stop waits for replies to come to their end, seconds.

    Raises:
        ConfigError: A value is out of range, or the server would be open to others without a key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    is_insecure: bool = False
    cors_origins: tuple[str, ...] = ()
    model_names: tuple[str, ...] = ("demo",)
    max_waiting: int = DEFAULT_MAX_WAITING
    shutdown_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("port", self.port, "a number from 0 to 65535")
        if not 0 <= self.max_waiting <= 100_000:
            raise ConfigError("max_waiting", self.max_waiting, "a number from 0 to 100000")
        if not 0 <= self.shutdown_timeout_s <= 86_400:
            raise ConfigError("shutdown_timeout_s", self.shutdown_timeout_s, "seconds from 0 to 86400")
        for name in self.model_names:
            if not re.fullmatch(r"[!-~]{1,256}", name):
                raise ConfigError("served_model_name", name, "1 to 256 signs of ASCII without spaces")
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ConfigError("cors_origin", origin, "an origin such as https://example.org, or *")
        for key in self.api_keys:
            check_key("api_key", key)
        check_exposure(self.host, self.api_keys, is_insecure=self.is_insecure)


def make_app(service: ChatService, config: ServerConfig) -> FastAPI:
    """All paths, behind the checks of who asks and how much."""
    app = FastAPI(title="duck-llm", docs_url=None, redoc_url=None, redirect_slashes=False)
    model = ServedModel(config.model_names, service)
    apis = (openai_chat, openai_completions, openai_models, responses, anthropic, tokenize)
    for module in (*apis, cluster_status, metrics):
        app.include_router(module.router(service, model))
    app.include_router(page.router())
    app.add_api_route(
        "/health", _health(service), tags=["server"], responses={503: {"description": "Loading"}}
    )
    app.add_api_route("/health", _health(service), methods=["HEAD"], include_in_schema=False)
    app.add_exception_handler(HTTPException, _answer_error)
    app.add_exception_handler(DuckError, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_error)
    checks_names = not config.api_keys and not config.is_insecure
    openapi.describe(app, has_keys=bool(config.api_keys), checks_names=checks_names)
    # The last one that is added sees a request first.
    app.add_middleware(_WhileLoading, service=service)
    app.add_middleware(BodyLimit)
    app.add_middleware(ApiKeys, keys=config.api_keys)
    if checks_names:
        app.add_middleware(KnownNames, names=[config.host])
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            max_age=600,
        )
    app.add_middleware(metrics.CountedRequests, metrics=service.engine.metrics)
    app.add_middleware(_TidyPaths)
    app.add_middleware(_LastResort)
    return app


def _health(service: ChatService) -> Callable[[], Any]:
    async def health() -> JSONResponse:
        """Whether the model is loaded."""
        engine = service.engine
        if engine.llm is None:
            progress = engine.progress
            loading = {"status": "loading", "stage": progress.stage, "progress": progress.share}
            return JSONResponse(loading, 503, {"retry-after": "1"})
        return JSONResponse({"status": "ok"})

    return health


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        kind = request.headers.get("content-type", "")
        return from_validation(error.errors(), kind).response(request.url.path)
    is_ours = isinstance(error, ApiError)
    if isinstance(error, HTTPException) and not is_ours and error.status_code in {404, 405}:
        known = request.app.openapi()["paths"]
        return no_such_call(request.method, request.url.path, error, known).response(request.url.path)
    return as_api_error(error).response(request.url.path)


class _WhileLoading:
    """Answers 503 on paths that need the model, until it is loaded."""

    def __init__(self, app: ASGIApp, service: ChatService) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/") and self._service.engine.llm is None:
            error = UnavailableError(f"the model is loading: {self._service.engine.progress.stage}")
            await as_api_error(error).response(scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)


class _TidyPaths:
    """Takes ``/v1//models`` and ``/v1/models/`` for ``/v1/models``, as clients put addresses together."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = re.sub(r"/{2,}", "/", scope["path"])
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await self._app(scope, receive, send)


class _LastResort:
    """Answers what nobody expected, and says in the log where it happened, not what was said."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def watched_send(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            log_fault(f"{scope.get('method')} {scope['path'][:200]}", error)
            if has_begun:
                raise ConnectionError from None  # uvicorn closes the connection
            await as_api_error(error).response(scope["path"])(scope, receive, send)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens, before anything is loaded.

    Raises:
        ConfigError: The name is none, or the port is taken.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError("host", host, "an address of this machine, or a name of one") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        field = "host" if error.errno == 99 else "port"
        reason = (error.strerror or "").lower()
        if field == "host":
            raise ConfigError(field, host, "an address of this machine", reason) from error
        expected = "one that is free here, such as by --port 0"
        raise ConfigError(field, port, expected, reason) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where the server is, for people and programs."""
    name, port = listener.getsockname()[:2]
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def serve(
    config: ServerConfig,
    load: Callable[[LoadingProgress], LLM],
    on_listening: Callable[[str], None],
    on_ready: Callable[[str, LLM], None],
) -> None:
    """Serves until SIGTERM or SIGINT, and then until replies have come to their end or the deadline.

    Args:
        config: How.
        load: Makes the model, in the engine's thread.
        on_listening: Called with the address before that begins.
        on_ready: Called with the address once the model is there.

    Raises:
        ConfigError: The port is taken.
        DuckError: The model cannot be loaded.
    """
    with bind(config.host, config.port) as listener:
        on_listening(url_of(listener))
        asyncio.run(_Life(config, listener, on_ready).run(load))


class _Life:
    """A server from its port to its stop."""

    def __init__(
        self, config: ServerConfig, listener: socket.socket, on_ready: Callable[[str, LLM], None]
    ) -> None:
        self._config, self._listener, self._on_ready = config, listener, on_ready
        self._is_leaving = False

    async def run(self, load: Callable[[LoadingProgress], LLM]) -> None:
        loop = asyncio.get_running_loop()
        self._engine = EngineThread(load, loop)
        app = make_app(ChatService(self._engine, self._config.max_waiting), self._config)
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                http=LimitedProtocol,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="critical",  # what clients do wrong is no matter for the log
                server_header=False,
                timeout_graceful_shutdown=self._config.shutdown_timeout_s + _CUT_S,  # type: ignore[arg-type]
            )
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._leave, 128 + number)
        self._engine.loaded.add_done_callback(self._after_loading)
        self._engine.ended.add_done_callback(lambda _: self._stop_serving())
        self._engine.start()
        await self._server.serve([self._listener])
        await self._close()

    def _after_loading(self, loaded: asyncio.Future[LLM]) -> None:
        if loaded.exception() is not None:
            self._stop_serving()
        else:
            with suppress(OSError):  # nobody reads it any more, or the disk is full: no matter to clients
                self._on_ready(url_of(self._listener), loaded.result())

    def _stop_serving(self) -> None:
        self._server.should_exit = True

    def _leave(self, code: int) -> None:
        """Stops in order; when asked again, at once: workers leave when this process is gone."""
        if self._is_leaving:
            os._exit(code)
        self._is_leaving = True
        self._stop_serving()
        if running := self._engine.num_open:
            limit = f"for {self._config.shutdown_timeout_s:g} s at most, or until Ctrl-C again"
            _log.warning("stopping; waiting %s: replies under way: %d", limit, running)
        error = UnavailableError("the server is stopping")
        asyncio.get_running_loop().call_later(self._config.shutdown_timeout_s, self._engine.fail_all, error)

    async def _close(self) -> None:
        engine = self._engine
        if not engine.loaded.done():
            _leave_at_once()
        engine.loaded.result()  # or its error
        if not engine.ended.done() and not await engine.stop(_CLOSE_S):
            _log.warning("a step takes long; leaving in the midst of it")
            _leave_at_once()
        engine.ended.result()


def _leave_at_once() -> None:
    """Ends the process: nothing ends a thread that loads a model or computes. Its workers leave with it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(0)


class _Uvicorn(uvicorn.Server):
    """Signals are not its business."""

    def capture_signals(self) -> Any:
        """Takes none."""
        return nullcontext()
