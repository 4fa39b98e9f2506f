"""Steps through real workers give the bits of the native experts in this process."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from duckllm import _native
from duckllm._native import FrameType
from duckllm.moe.placement import plan_slices
from duckllm.weights.manifest import Manifest
from worker_harness import (
    WorkerProcess,
    connect,
    expected_sum,
    make_model,
    make_step,
    open_transport,
    partial_sum,
    plan_for,
    read_exactly,
    read_frame,
    running_worker,
    step_frame,
)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """bf16 bits, to nearest-even; finite values only."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_a_worker_takes_the_instruction_set_of_its_surroundings(
    worker: WorkerProcess, model: Manifest
) -> None:
    connection = connect(worker.address, plan_for(model)[0])
    connection.close()
    assert connection.info.isa == _native.select_isa()


@pytest.mark.parametrize("num_tokens", [1, 2, 8])
@pytest.mark.parametrize("layer", [1, 3])
def test_one_worker(worker: WorkerProcess, model: Manifest, num_tokens: int, layer: int) -> None:
    plans = plan_for(model)
    step = make_step(model, num_tokens, layer=layer, seed=num_tokens)
    with open_transport([connect(worker.address, plans[0])]) as transport:
        got = transport.wait(transport.submit(layer, step.x, step.topk_ids, step.topk_weights))
    np.testing.assert_array_equal(got, expected_sum(model, plans, step))


@pytest.mark.parametrize("shares", [None, (1, 5, 1)])
def test_three_workers_and_several_steps_in_flight(
    tmp_path: Path, model: Manifest, shares: tuple[int, ...] | None
) -> None:
    plans = plan_for(model, 3, slices=plan_slices(model.num_stripes, 3, shares))
    steps = [make_step(model, 1 + seed % 8, layer=(1, 3)[seed % 2], seed=seed) for seed in range(12)]
    with ExitStack() as stack:
        workers = [stack.enter_context(running_worker(tmp_path)) for _ in plans]
        connections = [connect(w.address, plan) for w, plan in zip(workers, plans, strict=True)]
        transport = stack.enter_context(open_transport(connections))
        tickets = [
            transport.submit(s.layer, s.x, s.topk_ids, s.topk_weights, lane=lane)
            for lane, s in enumerate(steps)
        ]
        for ticket, step in reversed(list(zip(tickets, steps, strict=True))):
            np.testing.assert_array_equal(transport.wait(ticket), expected_sum(model, plans, step))


def test_sizes_that_16_and_128_do_not_divide(worker: WorkerProcess, tmp_path: Path) -> None:
    odd = make_model(
        tmp_path / "odd", hidden_size=200, intermediate_size=51, num_experts=3, top_k=2, layers=[0]
    )
    plans = plan_for(odd)
    step = make_step(odd, 5)
    with open_transport([connect(worker.address, plans[0])]) as transport:
        got = transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
    np.testing.assert_array_equal(got, expected_sum(odd, plans, step))


def test_bf16_both_ways(worker: WorkerProcess, model: Manifest) -> None:
    plans = plan_for(model, wire_dtype="bf16", reply_dtype="bf16")
    step = make_step(model, 4)
    with open_transport([connect(worker.address, plans[0])]) as transport:
        got = transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
    exact = partial_sum(model, 0, model.num_stripes, step, to_bf16(step.x))
    np.testing.assert_array_equal(got, from_bf16(to_bf16(exact)))
    assert not np.array_equal(got, exact)
    assert not np.array_equal(exact, partial_sum(model, 0, model.num_stripes, step))


def test_nan_in_a_row_comes_out_and_harms_no_other(worker: WorkerProcess, model: Manifest) -> None:
    plans = plan_for(model)
    step = make_step(model, 3)
    clean = expected_sum(model, plans, step)
    step.x[1, 5] = np.nan
    with open_transport([connect(worker.address, plans[0])]) as transport:
        got = transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
    assert np.isnan(got[1]).all()
    np.testing.assert_array_equal(got[[0, 2]], clean[[0, 2]])


def test_queued_requests_are_answered_in_order(worker: WorkerProcess, model: Manifest) -> None:
    (plan,) = plan_for(model)
    steps = [make_step(model, tokens, seed=tokens) for tokens in (3, 1, 8, 2)]
    connection = connect(worker.address, plan)
    with connection._socket as raw:
        raw.settimeout(20)
        requests = [
            step_frame(step, sequence=70 + lane, lane=lane, reply_bf16=lane == 1)
            for lane, step in enumerate(steps)
        ]
        raw.sendall(b"".join(requests) + _native.encode_frame_header(FrameType.CLOSE, 0))
        for lane, step in enumerate(steps):
            got = read_frame(raw)
            assert got is not None
            kind, payload, sequence = got
            assert (kind, sequence) == (FrameType.STEP_REPLY, 70 + lane)
            layer, tokens, _, reply_lane, is_bf16 = _native.decode_step_reply_header(payload[:40])
            assert (layer, tokens, reply_lane, is_bf16) == (step.layer, len(step.x), lane, lane == 1)
            expected = partial_sum(model, 0, model.num_stripes, step)
            body = to_bf16(expected) if is_bf16 else expected
            assert payload[40:] == body.tobytes()
        assert read_exactly(raw, 1) == b""


@pytest.mark.parametrize("piece", [1, 23, 40, 1000])
def test_a_request_in_small_pieces(worker: WorkerProcess, model: Manifest, piece: int) -> None:
    (plan,) = plan_for(model)
    step = make_step(model, 2)
    connection = connect(worker.address, plan)
    with connection._socket as raw:
        raw.settimeout(20)
        data = step_frame(step) * 2
        for start in range(0, len(data), piece):
            raw.sendall(data[start : start + piece])
        for _ in range(2):
            got = read_frame(raw)
            assert got is not None
            assert got[1][40:] == partial_sum(model, 0, model.num_stripes, step).tobytes()
