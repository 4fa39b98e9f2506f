"""Whether a worker lives, asked on a connection of its own."""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from duckllm.cluster.liveness import find_silent
from duckllm.weights.manifest import Manifest
from worker_harness import (
    check_serves,
    connect,
    expected_sum,
    make_model,
    make_step,
    open_transport,
    plan_for,
    running_worker,
    stop_process,
)


def end_of(port: int) -> tuple[int, tuple[str, int]]:
    return socket.AF_INET, ("127.0.0.1", port)


@pytest.mark.parametrize("has_token", [False, True])
def test_a_worker_in_a_session_lives_and_a_stopped_one_does_not(
    tmp_path: Path, model: Manifest, has_token: bool
) -> None:
    token = "a secret" if has_token else None
    (plan,) = plan_for(model)
    step = make_step(model, 1)
    with running_worker(tmp_path, token=token) as worker:
        end = end_of(worker.address.port)
        with open_transport([connect(worker.address, plan, token=token)]) as transport:
            for _ in range(12):  # more often than it holds connections
                assert find_silent({7: end}, has_token, 20) == []
            assert find_silent({7: end}, not has_token, 20) == []  # refused, so it lives
            stop_process(worker.pid)
            assert find_silent({7: end}, has_token, 0.2) == [7]
            os.kill(worker.pid, signal.SIGCONT)
            assert find_silent({7: end}, has_token, 20) == []
            got = transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
            np.testing.assert_array_equal(got, expected_sum(model, [plan], step))
        check_serves(worker, model, token=token)
        # A log that says each time that a host left would be nothing but that; only the refusal is said.
        lines = worker.log().splitlines()
        assert len([line for line in lines if "closed the connection" in line]) == 0
        assert len([line for line in lines if "refused" in line]) == 1


def test_a_worker_that_computes_says_that_it_lives(tmp_path: Path) -> None:
    tokens, steps = 512, 3
    model = make_model(
        tmp_path / "model", hidden_size=512, intermediate_size=512, num_experts=8, top_k=8, layers=[1]
    )
    plans = plan_for(model, max_step_tokens=tokens)
    step = make_step(model, tokens)
    with running_worker(tmp_path) as worker, open_transport([connect(worker.address, plans[0])]) as transport:
        tickets = [
            transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights) for _ in range(steps)
        ]
        assert find_silent({0: end_of(worker.address.port)}, False, 20) == []
        assert transport.wait_some(tickets[-1], 0.001) == (0,)  # it was computing all the while
        np.testing.assert_array_equal(transport.wait(tickets[-1]), expected_sum(model, plans, step))


def test_several_are_asked_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.create_server(("127.0.0.1", 0)) as gone:
        nobody = gone.getsockname()[1]
        gone.close()
        ends = {3: end_of(mute.getsockname()[1]), 1: end_of(nobody), 4: end_of(nobody)}
        assert find_silent(ends, False, 0.2) == [1, 3, 4]
        assert find_silent({}, False, 0.2) == []


def test_the_end_of_a_connection_is_no_sign_of_life() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closing, ThreadPoolExecutor() as pool:
        closing.settimeout(20)
        silent = pool.submit(find_silent, {2: end_of(closing.getsockname()[1])}, False, 20)
        closing.accept()[0].close()
        assert silent.result(20) == [2]
