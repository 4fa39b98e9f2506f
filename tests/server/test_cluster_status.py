"""``/cluster`` of a running server: what is known before a step, after one, and of a worker that is gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from server_harness import ServerProcess, running_server

from duckllm.cluster.discovery_announcement import node_name
from duckllm.config import available_cores, total_memory_bytes
from duckllm.prefill import select_isa
from duckllm.weights.manifest import Manifest

BODY = {"messages": [{"role": "user", "content": "What is a duck?"}], "max_tokens": 12, "temperature": 0}
TIMEOUT_S = 30.0


def cluster(server: ServerProcess) -> Any:
    reply = server.http.get("/cluster")
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_what_computes_and_where_the_time_goes(server: ServerProcess, demo_folder: Path) -> None:
    assert server.http.post("/v1/chat/completions", json=BODY).status_code == 200
    manifest = Manifest.load(demo_folder)
    before = cluster(server)
    assert server.http.post("/v1/chat/completions", json=BODY).status_code == 200
    now = cluster(server)
    assert now["model"] == {"id": "demo", "context_length": 4096, "weight_format": "fp9"}
    assert (now["host"]["device"], now["host"]["isa"]) == ("CPU", select_isa())
    assert 60 << 20 < now["host"]["memory_bytes"]["cache_bytes"] <= 64 << 20
    assert set(now["host"]["memory_bytes"]) == {
        *("weight_bytes", "expert_bytes", "process_bytes", "cache_bytes", "tier_bytes")
    }
    assert [worker["index"] for worker in now["workers"]] == [0, 1]
    assert sum(worker["share"] for worker in now["workers"]) == 1
    assert sum(worker["stripes"] for worker in now["workers"]) == manifest.num_stripes
    for worker in now["workers"]:
        assert worker["address"].startswith("127.0.0.1:")
        assert worker["threads"] == max(1, available_cores() // 2)
        assert (worker["weight_format"], worker["connection"]) == ("fp9", "shared memory")
        assert (worker["is_lost"], worker["num_losses"]) == (False, 0)
        assert worker["round_trip_us"] > worker["compute_us"] > 0
        assert worker["weights_bytes"] > 0
        assert worker["name"] == node_name()
        assert worker["memory_bytes"] == total_memory_bytes()
        assert worker["read_gb_per_s"] is None  # workers started here are all alike
    assert now["other_nodes"] == []
    assert now["layers"] == list(manifest.expert_layers)
    assert [len(each) for each in now["compute_us"]] == [2] * len(now["layers"])
    for index, worker in enumerate(now["workers"]):
        column = [each[index] for each in now["compute_us"]]
        assert worker["compute_us"] == pytest.approx(sum(column) / len(column))
    assert now["engine"]["num_generated_tokens"] - before["engine"]["num_generated_tokens"] == 12
    assert now["engine"]["num_steps"] > before["engine"]["num_steps"] > 0
    assert sum(now["engine"]["step_parts_s"].values()) <= now["engine"]["step_s"]
    assert now["requests"] == {"running": 0, "waiting": 0}
    assert now["uptime_s"] > before["uptime_s"] > 0


def test_in_this_process_there_are_no_workers(tmp_path: Path, demo_folder: Path) -> None:
    with running_server(tmp_path / "stderr", "--workers", "0") as server:
        before = cluster(server)
        assert (before["workers"], before["layers"], before["compute_us"]) == ([], [], [])
        assert before["engine"]["acceptance"] is None
        assert server.http.post("/v1/chat/completions", json=BODY).status_code == 200
        assert cluster(server)["engine"]["num_generated_tokens"] == 12
        assert server.stop() == 0


def wait_for(server: ServerProcess, condition: Any) -> Any:
    """What it says once a condition holds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition(now := cluster(server)):
        assert time.monotonic() < deadline, now
        time.sleep(0.005)
    return now


def test_a_worker_is_lost_and_comes_back(tmp_path: Path, demo_folder: Path) -> None:
    """First while nothing is computed; then the other one, while a reply waits for it."""
    with running_server(tmp_path / "stderr", "--workers", "2") as server:
        [first, second] = psutil.Process(server.process.pid).children()
        os.kill(first.pid, signal.SIGKILL)
        wait_for(server, lambda now: sum(worker["num_losses"] for worker in now["workers"]) == 1)
        back = wait_for(server, lambda now: not any(worker["is_lost"] for worker in now["workers"]))
        assert back["engine"]["num_steps"] == 0
        assert len(psutil.Process(server.process.pid).children()) == 2
        assert server.http.post("/v1/chat/completions", json=BODY).status_code == 200
        assert sorted(worker["num_losses"] for worker in cluster(server)["workers"]) == [0, 1]
        loses_while_a_reply_waits(server, second.pid)
        assert server.stop() == 0


def places(now: Any) -> list[str]:
    """Where the workers are."""
    return [worker["address"] for worker in now["workers"]]


def loses_while_a_reply_waits(server: ServerProcess, pid: int) -> None:
    """The worker ``pid``, the one that was not lost yet; the reply goes on with as many tokens."""
    body = {**BODY, "max_tokens": 1000, "ignore_eos": True, "stream": False}
    before = cluster(server)
    begun = before["engine"]["num_generated_tokens"] + 10
    [number] = [worker["index"] for worker in before["workers"] if not worker["num_losses"]]
    replies: list[Any] = []
    asking = threading.Thread(
        target=lambda: replies.append(server.http.post("/v1/chat/completions", json=body))
    )
    asking.start()
    now = wait_for(server, lambda now: now["engine"]["num_generated_tokens"] > begun)
    assert now["requests"] == {"running": 1, "waiting": 0}
    os.kill(pid, signal.SIGKILL)
    lost = wait_for(server, lambda now: now["workers"][number]["num_losses"])
    # Whoever polls slowly sees it after it has come back, elsewhere.
    assert lost["workers"][number]["is_lost"] or places(lost)[number] != places(before)[number]
    assert not lost["workers"][1 - number]["is_lost"]
    back = wait_for(server, lambda now: not any(worker["is_lost"] for worker in now["workers"]))
    assert [worker["num_losses"] for worker in back["workers"]] == [1, 1]
    assert places(back)[number] != places(before)[number]
    assert places(back)[1 - number] == places(before)[1 - number]
    asking.join()
    assert replies[0].json()["usage"]["completion_tokens"] == 1000
