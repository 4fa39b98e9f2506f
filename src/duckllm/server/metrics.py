"""``/metrics``: what the server does, for Prometheus; docs/server.md lists it.

What happens is counted as it happens, by the engine thread's side of the event loop and by
:class:`CountedRequests`; all else is asked of the model when somebody looks. Names and meanings are vLLM's
where it has them, with our prefix. Nothing here is shared between two servers in one process.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from duckllm.errors import ModelError, UnavailableError, WorkerLostError
from duckllm.outputs import CachePages, StreamOutput, WorkerTimes
from duckllm.server.errors import CLIENT_CLOSED_REQUEST, FINAL_STATUS
from duckllm.server.routing import new_router

if TYPE_CHECKING:
    from duckllm.server.chat_service import ChatService
    from duckllm.server.openai_models import ServedModel

PREFIX = "duckllm_"
# Tokens a second from 200 down to 1, with a guess that was right before and a stall behind them.
_GAP_BUCKETS_S = (
    *(0.001, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5),
    *(0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0),
)
# A prompt that is cached up to one of 100,000 tokens at 200 a second.
_FIRST_TOKEN_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
_REQUEST_BUCKETS_S = (
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0),
)
_SOURCES = ("computed", "device", "memory", "disk")
_NO_ENDPOINT = "other"
_FAULTS = ((WorkerLostError, "worker_lost"), (ModelError, "model"), (Exception, "internal"))


class ServerMetrics:
    """Counters and histograms of a server, in a registry of its own. In the event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = self._counter("requests", "HTTP requests that are over.", ["endpoint", "outcome"])
        self._duration = self._histogram(
            "e2e_request_latency_seconds",
            "From a request's headers to the end of its answer; of outcome ok alone.",
            _REQUEST_BUCKETS_S,
            ["endpoint"],
        )
        self._ends = self._counter(
            "request_success", "Replies that have ended, by why; each of n is one.", ["finished_reason"]
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts, of each reply's.")
        self._by_source = self._counter(
            "prompt_tokens_by_source", "The same: computed, or found in a tier of the KV cache.", ["source"]
        )
        for source in _SOURCES:
            self._by_source.labels(source)
        self._first_token = self._histogram(
            "time_to_first_token_seconds",
            "From the start of a reply to its first token.",
            _FIRST_TOKEN_BUCKETS_S,
        )
        self._gap = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a reply.", _GAP_BUCKETS_S
        )
        self._faults = self._counter("faults", "Steps that failed, by what failed.", ["kind"])
        for _, name in _FAULTS:
            self._faults.labels(name)

    def collect(self) -> Iterable[Metric]:
        """All of them, with their values."""
        return self.registry.collect()

    def _counter(self, name: str, about: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(PREFIX + name, about, labels, registry=self.registry)

    def _histogram(
        self, name: str, about: str, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        return Histogram(PREFIX + name, about, labels, registry=self.registry, buckets=buckets)

    def count_request(self, endpoint: str, outcome: str, seconds: float) -> None:
        """A request is over."""
        self._requests.labels(endpoint, outcome).inc()
        if outcome == "ok":
            self._duration.labels(endpoint).observe(seconds)

    def count_output(self, output: StreamOutput) -> None:
        """A reply has a token more."""
        metrics = output.metrics
        if output.inter_token_s is not None:
            self._gap.observe(output.inter_token_s)
        elif metrics.time_to_first_token_s is not None:
            self._first_token.observe(metrics.time_to_first_token_s)
            cached = metrics.cached_tokens
            self._prompt_tokens.inc(metrics.num_prompt_tokens)
            found = (metrics.num_prompt_tokens - cached.total, cached.device, cached.memory, cached.disk)
            for source, number in zip(_SOURCES, found, strict=True):
                self._by_source.labels(source).inc(number)
        if output.finish_reason is not None:
            self._ends.labels(output.finish_reason).inc()

    def count_failed(self, error: Exception, num_replies: int) -> None:
        """Replies were ended by an error, one for all of them."""
        if isinstance(error, UnavailableError):  # the client went away, or the server stops
            self._ends.labels("abort").inc(num_replies)
            return
        self._ends.labels("fault").inc(num_replies)
        for kind, name in _FAULTS:
            if isinstance(error, kind):
                self._faults.labels(name).inc()
                return


class CountedRequests:
    """Counts requests by endpoint and outcome.

    Args:
        app: Answers them.
        metrics: Counts.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, is_whole, start_s = 500, False, time.perf_counter()

        async def watched_send(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                is_whole = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            route = scope.get("route")
            endpoint = _NO_ENDPOINT if route is None else route.path
            outcome = _outcome(endpoint, scope.get(FINAL_STATUS, status), is_whole)
            self._metrics.count_request(endpoint, outcome, time.perf_counter() - start_s)


def _outcome(endpoint: str, status: int, is_whole: bool) -> str:
    if status == CLIENT_CLOSED_REQUEST or (status < 400 and not is_whole):
        return "abort"
    if status < 400:
        return "ok"
    # That the model is loading is what /health is asked for, and no failure.
    return "refused" if status < 500 or endpoint == "/health" else "failed"


def router(service: ChatService, model: ServedModel) -> APIRouter:
    """The path of the metrics."""
    routes = new_router("server")
    registry = CollectorRegistry()
    registry.register(service.engine.metrics)
    registry.register(_ModelCollector(service, model))

    @routes.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics(request: Request) -> Response:
        """What the server does, in Prometheus's text format."""
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": kind})

    return routes


class _ModelCollector:
    """What is asked of the model when somebody looks; nothing while it is loaded."""

    def __init__(self, service: ChatService, model: ServedModel) -> None:
        self._service, self._model = service, model

    def collect(self) -> Iterable[Metric]:
        llm = self._service.engine.llm
        if llm is None:
            return
        stats, state = llm.stats(), llm.state()
        info = {"model": self._model.names[0], "weight_format": llm.cluster_info().weight_format}
        yield InfoMetricFamily(PREFIX + "model", "What is served.", info)
        yield _gauge("num_requests_running", "Replies that are computed.", state.num_running)
        waiting = max(0, self._service.engine.num_open - state.num_running)
        yield _gauge("num_requests_waiting", "Replies that wait to be computed.", waiting)
        yield _counter("generation_tokens", "Tokens of replies.", stats.num_generated_tokens)
        yield _counter("spec_decode_num_draft_tokens", "Guesses that were checked.", stats.num_draft_tokens)
        yield _counter(
            "spec_decode_num_accepted_tokens", "Guesses that were right.", stats.num_accepted_tokens
        )
        yield _counter("steps", "Steps computed.", stats.num_steps)
        yield _counter("step_seconds", "Time of steps.", stats.total_step_s)
        parts = CounterMetricFamily(PREFIX + "step_part_seconds", "Time of steps by part.", labels=["part"])
        for name, seconds in stats.total_step_parts_s.items():
            parts.add_metric([name.removesuffix("_s")], seconds)
        yield parts
        yield from _cache(state.cache)
        yield from _workers(llm.worker_times())


def _gauge(name: str, about: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, about, value)


def _counter(name: str, about: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, about, value)


def _cache(cache: CachePages) -> Iterable[Metric]:
    total = cache.used + cache.reusable + cache.free
    yield _gauge(
        "kv_cache_usage_perc", "Part of the KV cache's pool that replies have, 0 to 1.", cache.used / total
    )
    pages = GaugeMetricFamily(
        PREFIX + "kv_cache_pages",
        "Pages of the KV cache by tier: used by replies, reusable by the next ones, or free.",
        labels=["tier", "state"],
    )
    pages.add_metric(["device", "used"], cache.used)
    pages.add_metric(["device", "reusable"], cache.reusable)
    pages.add_metric(["device", "free"], cache.free)
    for tier, number, most in (
        ("memory", cache.memory, cache.max_memory),
        ("disk", cache.disk, cache.max_disk),
    ):
        if most:
            pages.add_metric([tier, "reusable"], number)
            pages.add_metric([tier, "free"], max(0, most - number))
    yield pages
    yield _gauge("kv_cache_page_bytes", "Size of a page.", cache.page_bytes)


def _workers(times: WorkerTimes) -> Iterable[Metric]:
    """Of each worker, by its number: it keeps it when another takes its place."""
    means = {
        "compute": ("A worker's own time for a layer's step, mean of the last steps.", times.compute_us),
        "round_trip": ("From a step's sending to its answer, likewise.", times.round_trip_us),
        "wait": ("How long the host had nothing to do but wait for it, likewise.", times.wait_us),
    }
    for name, (about, by_layer) in means.items():
        gauge = GaugeMetricFamily(f"{PREFIX}worker_{name}_seconds", about, labels=["worker"])
        for worker in range(len(times.addresses) if by_layer else 0):
            mean_us = sum(each[worker] for each in by_layer) / len(by_layer)
            gauge.add_metric([str(worker)], mean_us / 1e6)
        yield gauge
    lost = GaugeMetricFamily(PREFIX + "worker_lost", "Whether a worker is lost now.", labels=["worker"])
    losses = CounterMetricFamily(PREFIX + "worker_losses", "How often it was lost.", labels=["worker"])
    replacements = CounterMetricFamily(
        PREFIX + "worker_replacements", "How often it or another took its place again.", labels=["worker"]
    )
    for family, values in (
        (lost, times.is_lost),
        (losses, times.num_losses),
        (replacements, times.num_replacements),
    ):
        for worker, value in enumerate(values):
            family.add_metric([str(worker)], float(value))
        yield family
