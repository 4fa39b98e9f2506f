"""Workers that die, stop or fall silent in the middle of a session."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from duckllm.errors import CheckpointError, WorkerLostError
from duckllm.transport.transport import Transport
from duckllm.weights.manifest import Manifest
from worker_harness import (
    WorkerProcess,
    connect,
    expected_sum,
    make_model,
    make_step,
    open_transport,
    plan_for,
    running_worker,
    stop_process,
)


@contextmanager
def two_workers(
    folder: Path, model: Manifest, step_timeout_s: float
) -> Iterator[tuple[Transport, list[WorkerProcess]]]:
    with running_worker(folder) as first, running_worker(folder) as second:
        workers = [first, second]
        plans = plan_for(model, 2)
        connections = [connect(w.address, plan) for w, plan in zip(workers, plans, strict=True)]
        with open_transport(connections, step_timeout_s=step_timeout_s) as transport:
            yield transport, workers


def test_kill_9_is_noticed_at_once(tmp_path: Path, model: Manifest) -> None:
    step = make_step(model, 2)
    inputs = (step.layer, step.x, step.topk_ids, step.topk_weights)
    with two_workers(tmp_path, model, step_timeout_s=120.0) as (transport, workers):
        got = transport.wait(transport.submit(*inputs))
        np.testing.assert_array_equal(got, expected_sum(model, plan_for(model, 2), step))
        os.kill(workers[1].pid, signal.SIGKILL)
        workers[1].process.wait(20)
        started = time.monotonic()
        with pytest.raises(WorkerLostError) as caught:
            transport.wait(transport.submit(*inputs))
        assert time.monotonic() - started < 60  # by the closed connection, not by the time-out of 120 s
        assert (caught.value.address, caught.value.layer) == (str(workers[1].address), step.layer)
        # The worker that is left takes the next host.
        transport.close()
        (alone,) = plan_for(model)
        with open_transport([connect(workers[0].address, alone)]) as again:
            np.testing.assert_array_equal(
                again.wait(again.submit(*inputs)), expected_sum(model, [alone], step)
            )


def test_kill_9_while_the_host_waits(tmp_path: Path, model: Manifest) -> None:
    step = make_step(model, 2)
    with two_workers(tmp_path, model, step_timeout_s=120.0) as (transport, workers):
        stop_process(workers[0].pid)  # so that the step cannot be answered before the end
        ticket = transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights)
        os.kill(workers[0].pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="connection") as caught:
            transport.wait(ticket)
        assert caught.value.address == str(workers[0].address)


def test_a_stopped_worker_is_a_time_out(tmp_path: Path, model: Manifest) -> None:
    step = make_step(model, 2)
    inputs = (step.layer, step.x, step.topk_ids, step.topk_weights)
    with two_workers(tmp_path, model, step_timeout_s=0.5) as (transport, workers):
        stop_process(workers[0].pid)
        try:
            ticket = transport.submit(*inputs)
            with pytest.raises(WorkerLostError, match="no answer within 500 ms") as caught:
                transport.wait(ticket)
            assert (caught.value.address, caught.value.layer) == (str(workers[0].address), step.layer)
        finally:
            os.kill(workers[0].pid, signal.SIGCONT)
        transport.close()
        # Once it runs again it finds the session over, and serves the next.
        plans = plan_for(model, 2)
        connections = [connect(w.address, plan) for w, plan in zip(workers, plans, strict=True)]
        with open_transport(connections) as again:
            np.testing.assert_array_equal(again.wait(again.submit(*inputs)), expected_sum(model, plans, step))


def test_a_file_that_is_truncated_in_use_costs_its_worker_and_nothing_else(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    step = make_step(model, 2)
    inputs = (step.layer, step.x, step.topk_ids, step.topk_weights)
    (plan,) = plan_for(model)
    path = model.expert_path(step.layer)
    with running_worker(tmp_path) as worker:
        with open_transport([connect(worker.address, plan)]) as transport:
            np.testing.assert_array_equal(
                transport.wait(transport.submit(*inputs)), expected_sum(model, [plan], step)
            )
            os.truncate(path, 4096)
            with pytest.raises(WorkerLostError) as caught:
                transport.wait(transport.submit(*inputs))
            assert (caught.value.address, caught.value.layer) == (str(worker.address), step.layer)
        assert worker.process.wait(20) == -signal.SIGBUS
    # The next one finds the file truncated before it maps it.
    with (
        running_worker(tmp_path) as worker,
        pytest.raises(CheckpointError, match="truncated, got 4096 bytes"),
    ):
        connect(worker.address, plan)
