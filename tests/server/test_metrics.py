"""``/metrics``: what Prometheus reads after requests whose counts are known."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from app_harness import Call, InProcess, ask
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from server_harness import ServerProcess

from duckllm.errors import ModelError
from duckllm.server.metrics import ServerMetrics

CHAT = "/v1/chat/completions"
DOCS = Path(__file__).parents[2] / "docs" / "server.md"
Values = dict[tuple[str, ...], float]


def body(text: str = "What is a duck?", **options: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {"messages": [message], "temperature": 0, "max_tokens": 12, "ignore_eos": True, **options}


def read(text: str) -> Values:
    """Each sample's value by its name and its labels' values."""
    return {
        (sample.name.removeprefix("duckllm_"), *(sample.labels[name] for name in sorted(sample.labels))): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Watched:
    """How much the metrics of an application have grown since."""

    def __init__(self, here: InProcess) -> None:
        self._here = here
        self._before = self.now()

    def now(self) -> Values:
        return read(ask(self._here, "/metrics").content.decode())

    def grown(self) -> Values:
        now = self.now()
        changed = {name: value - self._before.get(name, 0) for name, value in now.items()}
        self._before = now
        return {name: value for name, value in changed.items() if value and not name[0].endswith("_created")}


@pytest.fixture
def watched(here: InProcess) -> Watched:
    here.settle()
    return Watched(here)


def test_replies_are_counted_with_their_tokens(here: InProcess, watched: Watched) -> None:
    usage = ask(here, CHAT, body("Twelve tokens, in a prompt that nobody has sent so far.")).json()["usage"]
    grown = watched.grown()
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    prompt = usage["prompt_tokens"]
    assert grown["prompt_tokens_total",] == grown["prompt_tokens_by_source_total", "computed"] == prompt
    assert ("prompt_tokens_by_source_total", "device") not in grown
    assert grown["generation_tokens_total",] == usage["completion_tokens"] == 12
    assert grown["request_success_total", "length"] == 1
    assert grown["requests_total", CHAT, "ok"] == 1
    assert grown["time_to_first_token_seconds_count",] == 1
    assert grown["inter_token_latency_seconds_count",] == 11
    assert grown["e2e_request_latency_seconds_count", CHAT] == 1
    within = grown["e2e_request_latency_seconds_sum", CHAT]
    parts = grown["time_to_first_token_seconds_sum",] + grown["inter_token_latency_seconds_sum",]
    assert 0 < parts < within
    assert grown["steps_total",] == 12 + (prompt - 1) // 16
    assert 0 < grown["step_part_seconds_total", "attention"] < grown["step_seconds_total",] < within


def test_what_was_found_is_counted_by_tier(here: InProcess, watched: Watched) -> None:
    asked = body("A prompt of more than a page, which is in the cache when it comes again. " * 2, stream=True)
    ask(here, CHAT, asked)
    first = watched.grown()
    ask(here, CHAT, asked)
    again = watched.grown()
    length = first["prompt_tokens_total",]
    assert again["prompt_tokens_total",] == length > 16
    cached = (length - 1) // 16 * 16
    assert again["prompt_tokens_by_source_total", "device"] == cached
    assert again["prompt_tokens_by_source_total", "computed"] == length - cached


def test_each_of_n_replies_is_one(here: InProcess, watched: Watched) -> None:
    ask(here, CHAT, body(n=3, temperature=1, seed=1, stop=["e"], ignore_eos=False))
    grown = watched.grown()
    ends = sum(value for name, value in grown.items() if name[0] == "request_success_total")
    assert ends == grown["time_to_first_token_seconds_count",] == 3
    assert grown["requests_total", CHAT, "ok"] == 1


def test_outcomes_of_requests(here: InProcess, watched: Watched) -> None:
    assert ask(here, CHAT, body(temperature=-1)).status == 400
    assert ask(here, "/v1/embeddings", {}).status == 501
    for number in range(3):
        assert ask(here, f"/nowhere/{number}").status == 404
    assert ask(here, "/v1/models/other").status == 404
    grown = watched.grown()
    assert {name: value for name, value in grown.items() if name[0] == "requests_total"} == {
        ("requests_total", "/metrics", "ok"): 1,  # the one before
        ("requests_total", CHAT, "refused"): 1,
        ("requests_total", "/v1/embeddings", "failed"): 1,
        ("requests_total", "/v1/models/{name:path}", "refused"): 1,
        ("requests_total", "other", "refused"): 3,
    }
    assert ("e2e_request_latency_seconds_count", CHAT) not in grown


def test_a_client_that_leaves_while_it_sends_is_no_failure(here: InProcess, watched: Watched) -> None:
    async def run() -> None:
        call = Call(here.app, CHAT, body())
        call._was_read = True  # nothing of the body comes
        await (await call.begin()).leave()

    here.run(run())
    grown = watched.grown()
    assert {name: value for name, value in grown.items() if name[0] == "requests_total"} == {
        ("requests_total", "/metrics", "ok"): 1,  # the one before
        ("requests_total", "other", "abort"): 1,
    }


@pytest.fixture
def closed(here: InProcess) -> Iterator[InProcess]:
    """No step is computed until the test is over."""
    here.gate.close()
    yield here
    here.gate.open()
    here.settle()


def test_who_runs_who_waits_and_who_left(closed: InProcess, watched: Watched) -> None:
    """Two run at most; of four two leave."""

    async def begin(**options: Any) -> Call:
        before = closed.service.engine.num_open
        call = await Call(closed.app, CHAT, body(**options)).begin()
        while closed.service.engine.num_open == before:
            await asyncio.sleep(0.001)
        return call

    calls = [closed.run(begin(stream=number == 3)) for number in range(4)]
    for _ in range(2):  # the first step may have begun with the first of them
        closed.gate.allow()
    now = watched.now()
    assert (now["num_requests_running",], now["num_requests_waiting",]) == (2, 2)
    assert now["kv_cache_pages", "used", "device"] == 2
    assert now["kv_cache_usage_perc",] == 2 / sum(
        value for name, value in now.items() if name[0] == "kv_cache_pages"
    )
    closed.run(calls[3].leave())
    closed.run(calls[2].leave())
    closed.gate.open()
    for call in calls[:2]:
        closed.run(call.end())
    closed.settle()
    now, grown = watched.now(), watched.grown()
    assert (now["num_requests_running",], now["num_requests_waiting",]) == (0, 0)
    assert now["kv_cache_pages", "used", "device"] == 0
    assert grown["request_success_total", "abort"] == grown["requests_total", CHAT, "abort"] == 2
    assert grown["request_success_total", "length"] == grown["requests_total", CHAT, "ok"] == 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("error", "kind"), [(ModelError("broken"), "model"), (KeyError(), "internal")])
def test_a_step_that_fails_is_a_fault(
    here: InProcess,
    watched: Watched,
    error: Exception,
    kind: str,
    stream: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(here.gate, "before_step", fail)
    done = ask(here, CHAT, body(n=2, temperature=1, stream=stream))
    assert done.status == (200 if stream else 500)
    assert b"server_error" in done.content
    monkeypatch.undo()
    grown = watched.grown()
    assert grown["faults_total", kind] == grown["requests_total", CHAT, "failed"] == 1
    assert grown["request_success_total", "fault"] == 2


def test_workers_are_those_of_the_cluster(server: ServerProcess) -> None:
    assert server.http.post(CHAT, json=body()).status_code == 200
    now = read(server.http.get("/metrics").text)
    for worker in server.http.get("/cluster").json()["workers"]:
        number = str(worker["index"])
        assert now["worker_compute_seconds", number] == pytest.approx(worker["compute_us"] / 1e6)
        assert now["worker_round_trip_seconds", number] == pytest.approx(worker["round_trip_us"] / 1e6)
        assert now["worker_wait_seconds", number] > 0
        for name in ("worker_lost", "worker_losses_total", "worker_replacements_total"):
            assert now[name, number] == 0
    assert now["model_info", "demo", "fp9"] == 1
    assert now["process_resident_memory_bytes",] > 50e6


def test_every_metric_is_in_the_documentation(server: ServerProcess) -> None:
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    told = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in families
        if family.name.startswith("duckllm_") and not family.name.endswith("_created")
    }
    assert set(re.findall(r"^\| `(duckllm_\w+)", DOCS.read_text(), re.M)) == told


def test_openmetrics_where_it_is_asked_for(here: InProcess) -> None:
    done = ask(here, "/metrics", headers=[("accept", "application/openmetrics-text; version=1.0.0")])
    assert done.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert "duckllm_steps" in {family.name for family in parse_openmetrics(done.content.decode())}


def test_two_servers_share_nothing() -> None:
    first, second = ServerMetrics(), ServerMetrics()
    first.count_request("/health", "ok", 0.1)
    labels = {"endpoint": "/health", "outcome": "ok"}
    assert first.registry.get_sample_value("duckllm_requests_total", labels) == 1
    assert second.registry.get_sample_value("duckllm_requests_total", labels) is None
    assert prometheus_client.REGISTRY.get_sample_value("duckllm_requests_total", labels) is None
