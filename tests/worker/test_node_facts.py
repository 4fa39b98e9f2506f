"""What a worker says of its node: its memory, its speed, its clock; and messages that it sends back."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from duckllm import _native
from duckllm._native import ErrorCode, FrameType
from duckllm.cluster.connect import Connection
from duckllm.errors import ConfigError, ProtocolError, WorkerUnavailableError
from duckllm.weights.manifest import Manifest
from duckllm.worker import read_speed as module
from duckllm.worker import server as server_module
from duckllm.worker.config import WorkerConfig
from duckllm.worker.node import memory_for_experts
from duckllm.worker.other_load import LoadMeter, OtherLoad
from duckllm.worker.read_speed import cpu_name, kept_read_speed, measure_read_speed, read_speed
from duckllm.worker.server import WorkerServer
from worker_harness import (
    WorkerProcess,
    check_serves,
    connect,
    expected_sum,
    fake_worker,
    frame,
    make_step,
    open_transport,
    plan_for,
    raw_socket,
    read_error,
    read_frame,
    running_worker,
)

AUTH_OPEN = frame(FrameType.AUTH_OPEN, _native.encode_auth_payload(False, bytes(32)))
CHALLENGE = frame(FrameType.AUTH_CHALLENGE, _native.encode_auth_payload(False, bytes(32)))
HELLO = frame(FrameType.HELLO, b"{}")


def test_a_worker_says_its_speed_its_memory_and_the_time(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    with running_worker(tmp_path, "--speed", "3.5", DUCKLLM_CACHE_DIR=cache) as worker:
        connection = Connection(worker.address, None, 10.0)
        connection.close()
    info = connection.info
    assert info.read_gb_per_s == 3.5
    assert info.keeps_weights
    assert 0 < (info.available_bytes or 0) <= psutil.virtual_memory().total
    assert abs(info.clock_offset_s or 1.0) <= info.clock_error_s + 0.01
    assert not (tmp_path / "cache").exists()  # told, not measured


def test_a_worker_says_whether_it_serves_another_host(model: Manifest, tmp_path: Path) -> None:
    def said(session: str) -> bool:
        asked = Connection(worker.address, None, 10.0, session)
        asked.close()
        return asked.info.is_busy

    with running_worker(tmp_path) as worker:
        assert not said("")
        first = Connection(worker.address, None, 10.0, "a session")
        first.send_plan(plan_for(model)[0])
        first.wait_ready(20.0)
        assert [said(""), said("another"), said("a session")] == [True, True, False]
        first.close()
        until = time.monotonic() + 20
        while said(""):
            assert time.monotonic() < until


def test_a_worker_is_held_from_hello_on_by_a_host_that_names_its_session(
    model: Manifest, tmp_path: Path
) -> None:
    with running_worker(tmp_path) as worker:
        first = Connection(worker.address, None, 10.0, "a session")
        second = Connection(worker.address, None, 10.0, "another")
        asked = Connection(worker.address, None, 10.0)
        assert [each.info.is_busy for each in (first, second, asked)] == [False, True, True]
        # The second one cannot take it by being faster.
        second.send_plan(plan_for(model)[0])
        with pytest.raises(WorkerUnavailableError, match="busy: this worker serves another host"):
            second.wait_ready(20.0)
        first.send_plan(plan_for(model)[0])
        first.wait_ready(20.0)
        for each in (first, second, asked):
            each.close()
        # One that leaves without a plan gives it back; one that only asks never had it.
        until = time.monotonic() + 20
        while True:
            asked, third = (Connection(worker.address, None, 10.0, name) for name in ("", "a third"))
            asked.close()
            third.close()
            if not third.info.is_busy:
                break
            assert time.monotonic() < until


def test_a_worker_that_is_told_nothing_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "read_speed", lambda threads: 10.0 * threads)
    for speed, said in ((None, 20.0), (5, 5), (0, None)):
        server = WorkerServer(WorkerConfig(listen="127.0.0.1:0", threads=2, speed=speed), print)
        server.measure()
        assert server._sessions.read_gb_per_s == said
        server._close()


def test_a_figure_is_kept_for_this_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUCKLLM_CACHE_DIR", str(tmp_path))
    figures, others = iter([3.9, 12.34, 56.78]), iter([OtherLoad(0.2, 0.1), OtherLoad(0.2, 0.0)])
    monkeypatch.setattr(module, "measure_read_speed", lambda threads: next(figures))
    monkeypatch.setattr(LoadMeter, "read", lambda meter: next(others, OtherLoad(0.0, 0.0)))
    assert (read_speed(2), kept_read_speed(2)[1]) == (3.9, None)  # something else ran
    assert (read_speed(2), read_speed(2)) == (12.3, 12.3)
    path, kept = kept_read_speed(2)
    assert kept == 12.3
    content = json.loads(path.read_text())
    assert content["machine"]["cpu"] == cpu_name()
    assert kept_read_speed(1)[1] is None
    for bad in (
        "{",
        "[]",
        "{}",
        json.dumps(content | {"read_gb_per_s": -1.0}),
        json.dumps(content | {"machine": {}}),
    ):
        path.write_text(bad)
        assert kept_read_speed(2)[1] is None
    assert read_speed(2) == 56.8


def test_a_cache_that_cannot_be_written_costs_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DUCKLLM_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(module, "measure_read_speed", lambda threads: 7.0)
    assert read_speed(1) == 7.0


def test_the_loops_measure_something() -> None:
    assert 0.1 < measure_read_speed(1, 1 << 22) < 10_000


@pytest.mark.parametrize("speed", [-1, float("nan"), float("inf"), 1e7, True, "fast"])
def test_a_speed_that_is_none(speed: object) -> None:
    with pytest.raises(ConfigError, match="speed: got"):
        WorkerConfig(speed=speed)  # type: ignore[arg-type]


def test_memory_is_what_is_free_and_what_the_worker_holds(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 1000 kB\n")
    assert memory_for_experts(tmp_path) == 1000 * 1024
    (tmp_path / "proc/self/status").write_text("VmRSS: 80 kB\nRssAnon:\t  24 kB\n")
    assert memory_for_experts(tmp_path) == 1024 * 1024


def test_messages_come_back_until_the_plan(worker: WorkerProcess, model: Manifest) -> None:
    log_before = worker.log()
    connection = Connection(worker.address, None, 10.0)
    for num_bytes in (0, 1, 4096, _native.MAX_PING_BYTES):
        assert connection.ping(num_bytes) > 0
    connection.close()
    with raw_socket(worker.address) as host:
        host.sendall(AUTH_OPEN + HELLO + frame(FrameType.PING, b"duck"))
        kinds = [read_frame(host) for _ in range(3)]
        assert kinds[2] == (FrameType.PING, b"duck", 0)
        # READY is a worker's, and a step comes after a plan.
        host.sendall(frame(FrameType.CLOSE))
        error = read_error(host)
    assert error is not None
    assert error[0] == ErrorCode.PROTOCOL.value
    assert "frame type from the host: got CLOSE, expected PREPARE or PING" in error[1]
    check_serves(worker, model)
    # Who asked and left without a plan is no matter for the log.
    assert "closed the connection" not in worker.log().removeprefix(log_before)


def test_a_worker_that_is_busy_sends_messages_back_too(worker: WorkerProcess, model: Manifest) -> None:
    [plan] = plan_for(model)
    busy = connect(worker.address, plan)
    connection = Connection(worker.address, None, 10.0)
    assert connection.ping(64) > 0
    connection.close()
    with open_transport([busy]) as transport:
        step = make_step(model, 1)
        got = transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
    np.testing.assert_array_equal(got, expected_sum(model, [plan], step))


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        (frame(FrameType.PING, b"duck"), "got PING, expected AUTH_OPEN"),
        (AUTH_OPEN + frame(FrameType.PING, b"duck"), "got PING, expected HELLO"),
        (
            AUTH_OPEN
            + HELLO
            + _native.encode_frame_header(FrameType.PING, 1)[:8]
            + b"\1\0\x10\0"
            + bytes(12),
            "PING payload bytes: got 1048577, expected 0 to 1048576",
        ),
    ],
)
def test_no_message_comes_back_before_hello_or_beyond_its_limit(
    worker: WorkerProcess, sent: bytes, sentence: str
) -> None:
    with raw_socket(worker.address) as host:
        host.sendall(sent)
        while (got := read_frame(host)) is not None and got[0] != FrameType.ERROR:
            assert got[0] != FrameType.PING
    assert got is not None
    assert sentence in got[1][4:].decode()


def test_without_the_token_nothing_comes_back(tmp_path: Path) -> None:
    with running_worker(tmp_path, token="t") as worker, raw_socket(worker.address) as host:
        host.sendall(frame(FrameType.AUTH_OPEN, _native.encode_auth_payload(True, bytes(32))))
        assert read_frame(host) is not None
        host.sendall(frame(FrameType.PING, b"duck"))
        error = read_error(host)
    assert error is not None
    assert "got PING, expected AUTH_PROOF" in error[1]


def test_a_worker_that_sends_something_else_back() -> None:
    facts = {"isa": "avx2", "build": "0.1.0", "threads": 2, "pid": 7, "memory_bytes": 1 << 33}
    hello = frame(FrameType.HELLO, json.dumps(facts).encode())
    with fake_worker(CHALLENGE, hello, frame(FrameType.PING, b"drake")) as address:
        connection = Connection(address, None, 5.0)
        with pytest.raises(
            ProtocolError, match=r"PING from worker .*: got 5 other bytes, expected the 4 sent"
        ):
            connection.ping(4)
        connection.close()
