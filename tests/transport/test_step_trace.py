"""Moments of steps at workers whose clocks are of their own."""

from __future__ import annotations

import itertools
import json
import socket
import time
from typing import Any

import numpy as np
import pytest

from duckllm import _native
from duckllm._native import FrameType
from duckllm.transport.transport import Transport
from support.fake_workers import HIDDEN_SIZE, FakeConnection, fake_workers, read_request, rows, submit

Event = dict[str, Any]


def reply(sequence: int, times: tuple[int, int, int], *, layer: int = 5, lane: int = 0) -> bytes:
    """A whole STEP_REPLY of one token with these readings of the worker's clock."""
    clock = [each % 2**64 for each in times]
    payload = _native.encode_step_reply_header(layer, 1, 7, lane, False, *clock) + rows(1).tobytes()
    return _native.encode_frame_header(FrameType.STEP_REPLY, len(payload), sequence) + payload


def events(trace: _native.StepTrace, origin_ns: int = 0) -> list[Event]:
    text = trace.drain(origin_ns).decode()
    found: list[Event] = json.loads("[" + text.removeprefix(",") + "]")
    return found


def traced(transport: Transport) -> _native.StepTrace:
    trace = _native.StepTrace(1 << 16)
    transport.set_trace(trace)
    return trace


def answer(
    transport: Transport, worker: socket.socket, ahead: int, *, idle_later_ns: int = 0
) -> tuple[int, int, int, int]:
    """One step at a worker whose clock is ahead; the host's moments around it: idle, started, finished."""
    before = time.monotonic_ns()
    ticket = submit(transport)
    _, sequence = read_request(worker)
    started = time.monotonic_ns() + idle_later_ns
    idle = started - 1000 if idle_later_ns else before - 50_000
    while (finished := time.monotonic_ns()) < started + 200_000:
        pass
    worker.sendall(reply(sequence, (idle + ahead, started + ahead, finished + ahead)))
    transport.wait(ticket)
    return before, idle, started, finished


@pytest.mark.parametrize("ahead", [0, 10**15, -(10**14), 2**63])
def test_moments_are_right_within_their_error_whatever_the_clock(ahead: int) -> None:
    with fake_workers(1) as (transport, (worker,)):
        trace = traced(transport)
        for _ in range(5):
            before, _, started, finished = answer(transport, worker, ahead)
            after = time.monotonic_ns()
            by_name = {event["name"]: event for event in events(trace)}
            assert set(by_name) == {"dispatch", "queue", "wire", "compute", "reply", "wait", "combine"}
            dispatch, compute = by_name["dispatch"], by_name["compute"]
            assert (dispatch["pid"], compute["pid"], compute["tid"]) == (1, 2, 1)
            assert before <= dispatch["ts"] * 1000 + 1
            end = by_name["combine"]["ts"] + by_name["combine"]["dur"]
            assert end * 1000 <= after + 2
            error = compute["args"]["error_ns"] + 100
            assert abs(compute["ts"] * 1000 - started) <= error
            assert abs((compute["ts"] + compute["dur"]) * 1000 - finished) <= error
            names = ("queue", "wire", "compute", "reply")
            for one, two in itertools.pairwise(names):
                assert by_name[one]["ts"] + by_name[one]["dur"] == pytest.approx(by_name[two]["ts"], abs=0.01)
            assert by_name["queue"]["ts"] == dispatch["ts"]


def test_a_worker_that_is_busy_with_earlier_steps_queues() -> None:
    with fake_workers(1) as (transport, (worker,)):
        trace = traced(transport)
        answer(transport, worker, 10**12)
        events(trace)
        _, idle, _, _ = answer(transport, worker, 10**12, idle_later_ns=3_000_000)
        by_name = {event["name"]: event for event in events(trace)}
        queue, error = by_name["queue"], by_name["compute"]["args"]["error_ns"] + 100
        assert queue["dur"] > 2000
        assert abs((queue["ts"] + queue["dur"]) * 1000 - idle) <= error


def test_experts_are_counted() -> None:
    with fake_workers(1) as (transport, (worker,)):
        trace = traced(transport)
        ids = np.array([[4, 1], [1, 31], [1, 4]], np.int32)
        ticket = transport.submit(
            8, np.ones((3, HIDDEN_SIZE), np.float32), ids, np.ones((3, 2), np.float32), lane=1
        )
        read_request(worker)
        payload = (
            _native.encode_step_reply_header(8, 3, 0, 1) + np.ones((3, HIDDEN_SIZE), np.float32).tobytes()
        )
        worker.sendall(_native.encode_frame_header(FrameType.STEP_REPLY, len(payload), ticket) + payload)
        transport.wait(ticket)
        (dispatch,) = [event for event in events(trace) if event["name"] == "dispatch"]
        assert dispatch["tid"] == 2
        args = {"step": ticket, "layer": 8, "tokens": 3, "experts": [1, 4, 31], "rows": [3, 2, 1]}
        assert dispatch["args"] == args


@pytest.mark.parametrize(
    "times", [(0, 0, 0), (2**64 - 1, 2**64 - 1, 0), (0, 2**64 - 1, 2**63), (2**63, 5, 2**63 + 5)]
)
def test_a_clock_that_says_anything_breaks_nothing(times: tuple[int, int, int]) -> None:
    with fake_workers(2) as (transport, (good, bad)):
        trace = traced(transport)
        for _ in range(2):
            ticket = submit(transport)
            _, sequence = read_request(good)
            good.sendall(reply(sequence, (0, 1, 2)))
            bad.sendall(reply(sequence, times))
            transport.wait(ticket)
            found = events(trace)
            assert {event["pid"] for event in found} >= {1, 2}
            assert all(event["dur"] >= 0 and event["ts"] > 0 for event in found)
            ends = [e["ts"] + e["dur"] for e in found if e["name"] in ("reply", "wait")]
            assert max(ends) <= time.monotonic_ns() / 1000


def test_another_worker_has_another_clock() -> None:
    with fake_workers(1) as (transport, (worker,)):
        trace = traced(transport)
        answer(transport, worker, 10**9)
        events(trace)
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.settimeout(20)
            ticket = submit(transport)
            transport.replace(0, FakeConnection(9, ours))  # type: ignore[arg-type]
            _, sequence = read_request(theirs)
            now = time.monotonic_ns()
            theirs.sendall(reply(sequence, (now, now, now)))
            transport.wait(ticket)
            # What was sent twice says nothing of either.
            (replaced,) = events(trace)
            assert (replaced["name"], replaced["pid"]) == ("replaced", 2)
            _, _, started, _ = answer(transport, theirs, 5 * 10**9)
            (compute,) = [event for event in events(trace) if event["name"] == "compute"]
            assert abs(compute["ts"] * 1000 - started) <= compute["args"]["error_ns"] + 100


def test_a_trace_ends_when_it_is_taken_away() -> None:
    with fake_workers(1) as (transport, (worker,)):
        trace = traced(transport)
        transport.set_trace(None)
        answer(transport, worker, 0)
        assert events(trace) == []
