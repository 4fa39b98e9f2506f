"""The real dispatch at scale: 16 and more simulated workers, slow ones, lost ones, steps in lanes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from duckllm.errors import ConfigError
from duckllm.simulate.flock import SimulatedFlock, Submitted, simulated_flock
from duckllm.simulate.measure import (
    WARM_UP_STEPS,
    WrongSumError,
    find_bends,
    measure,
    measure_layers,
    measure_point,
)
from duckllm.simulate.nodes import ExpertLayers, Node
from duckllm.simulate.pattern import partial_sum
from duckllm.simulate.report import describe_bend

MODEL = ExpertLayers(
    hidden_size=200,
    intermediate_size=400,
    num_experts=12,
    top_k=3,
    layers=(1, 2, 5),
    unit_bytes=5000,
    num_stripes=25,
)
NODE = Node(read_gb_per_s=1.0, fixed_us=20.0, link_gbit_per_s=1.0, delay_us=20.0)
SLEEPY = Node(read_gb_per_s=1.0, fixed_us=200_000.0)


@contextmanager
def flock_of(num_workers: int, node: Node = NODE, **options: int) -> Iterator[SimulatedFlock]:
    with simulated_flock(MODEL, [node] * num_workers, max_step_tokens=8, **options) as flock:
        yield flock


def check(flock: SimulatedFlock, step: Submitted) -> None:
    """The sum by hand, row by row, and by the flock's own table."""
    total = flock.wait(step)
    slices = MODEL.slices(len(flock.transport.addresses))
    expected = sum(partial_sum(step.number, step.num_tokens, first, MODEL.hidden_size) for first, _ in slices)
    np.testing.assert_array_equal(total, expected)
    assert flock.is_right(step, total)
    assert not flock.is_right(step, total + 1)


@pytest.mark.parametrize("num_workers", [1, 16, 25])
def test_sums_are_those_of_all_workers_in_every_size_and_order(num_workers: int) -> None:
    with flock_of(num_workers, host_gbit_per_s=1) as flock:
        for num_tokens in (1, 2, 7):
            check(flock, flock.submit(flock.choose(num_tokens)))
        steps = [flock.submit(flock.choose(1 + lane % 3), MODEL.layers[lane % 3], lane) for lane in range(9)]
        for index in (4, 0, 8, 2, 1, 7, 5, 3, 6):
            check(flock, steps[index])


@pytest.mark.parametrize("dtypes", [("bf16", "f32"), ("bf16", "bf16")])
def test_replies_are_exact_in_bf16(dtypes: tuple[str, str]) -> None:
    model = replace(MODEL, wire_dtype=dtypes[0], reply_dtype=dtypes[1])
    with simulated_flock(model, [NODE] * 16, max_step_tokens=8) as flock:
        check(flock, flock.submit(flock.choose(8)))


def test_a_slow_worker_is_waited_for_and_named() -> None:
    factors = [1.0] * 16
    factors[11] = 400.0
    nodes = [NODE.slower(factor) for factor in factors]
    with simulated_flock(MODEL, nodes, max_step_tokens=8) as flock:
        for _ in range(3):
            step = flock.submit(flock.choose(1))
            check(flock, step)
            # What the stand-in slept is a lower bound, whatever else this machine does.
            slowest = MODEL.compute_us(nodes[11], MODEL.slices(16)[11][1], 1)
            assert flock.transport.last_compute_us()[11] >= slowest
        compute_us = flock.flock.times().compute_us[0]
        assert max(range(16), key=lambda worker: compute_us[worker]) == 11


def test_stand_ins_take_the_distinct_experts_of_a_step() -> None:
    node = Node(read_gb_per_s=0.001)  # a stripe of an expert: 5 ms
    with simulated_flock(MODEL, [node] * 16, max_step_tokens=8) as flock:
        one = torch.tensor([[0, 1, 2]], dtype=torch.int32)
        check(flock, flock.submit(one))
        stripes = [count for _, count in MODEL.slices(16)]
        first = flock.transport.last_compute_us()
        assert all(us >= 3 * 5000 * count for us, count in zip(first, stripes, strict=True))
        check(flock, flock.submit(torch.cat([one, one + 3])))
        second = flock.transport.last_compute_us()
        assert all(us >= 6 * 5000 * count for us, count in zip(second, stripes, strict=True))


def test_a_worker_lost_in_a_step_is_replaced_and_the_sum_is_the_same() -> None:
    with flock_of(16, SLEEPY, num_spares=1) as flock:
        step = flock.submit(flock.choose(2))
        flock.workers[7].stop()
        check(flock, step)
        times = flock.flock.times()
        assert (times.num_losses[7], times.num_replacements[7]) == (1, 1)
        assert sum(times.num_losses) == 1
        assert flock.transport.address(7) == str(flock.workers[16].address)
        check(flock, flock.submit(flock.choose(1)))


def test_lanes_survive_the_loss_of_two_workers() -> None:
    with flock_of(16, SLEEPY, num_spares=2) as flock:
        steps = [flock.submit(flock.choose(2), MODEL.layers[0], lane) for lane in (0, 1)]
        flock.workers[0].stop()
        flock.workers[15].stop()
        for step in steps:
            check(flock, step)
        assert flock.flock.times().num_replacements == (1, *[0] * 14, 1)


@pytest.mark.parametrize("lanes", [False, True])
def test_layers_with_and_without_lanes_have_right_sums(lanes: bool) -> None:
    nodes = [NODE] * 15 + [NODE.slower(20)]
    with simulated_flock(MODEL, nodes, max_step_tokens=8, host_gbit_per_s=10) as flock:
        before = flock.submit(flock.choose(1))
        flock.wait(before)
        assert measure_layers(flock, 5, 10, 100.0, lanes=lanes) > 0
        # Each step had its own number: one a layer, or one a layer and lane.
        after = flock.submit(flock.choose(1))
        check(flock, after)
        assert after.number - before.number - 1 == (20 if lanes else 10)


def test_host_time_is_counted_by_part_while_it_is_measured_only() -> None:
    with flock_of(16) as flock:
        check(flock, flock.submit(flock.choose(1)))
        assert flock.transport.host_time() == ((0, 0, 0),) * 5
        flock.transport.measure_host_time(True)
        for _ in range(4):
            check(flock, flock.submit(flock.choose(1)))
        pack, send, sleep, receive, combine = flock.transport.host_time()
        assert pack[2] == 4
        assert send[2] >= 4
        # Flock.wait waits for all, then asks for the sum: two looks at least, and the copy of the sum.
        assert receive[2] == sleep[2] + 8
        assert combine[2] == receive[2] + 4
        for cpu_ns, wall_ns, _ in (send, receive):
            assert cpu_ns > 0
            assert wall_ns > 0
        flock.transport.measure_host_time(True)
        assert flock.transport.host_time() == ((0, 0, 0),) * 5
        flock.transport.measure_host_time(False)
        check(flock, flock.submit(flock.choose(1)))
        assert flock.transport.host_time() == ((0, 0, 0),) * 5


def test_a_wrong_sum_ends_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    with flock_of(16) as flock:
        flock.expected._rows += 1  # as if another worker had answered
        with pytest.raises(WrongSumError, match="16 workers answered for 2 rows"):
            measure_point(flock, [NODE] * 16, 2, 10, 0.0)
        counted = iter(range(1000))  # steps of the warm-up are right, the first that counts is not
        monkeypatch.setattr(flock, "is_right", lambda step, total: next(counted) < WARM_UP_STEPS)
        with pytest.raises(WrongSumError, match="16 workers"):
            measure_point(flock, [NODE] * 16, 2, 10, 0.0)
        assert next(counted) == WARM_UP_STEPS + 1


def test_a_measurement_has_a_point_for_each_size_and_number() -> None:
    points, layers = measure(
        MODEL, NODE, (2, 16), (1, 2), host_gbit_per_s=1.0, num_steps=10, layer_us=50.0, slow={3: 2.0, 17: 9.0}
    )
    assert [(point.num_workers, point.num_tokens) for point in points] == [(2, 1), (2, 2), (16, 1), (16, 2)]
    assert [(each.num_workers, each.num_tokens) for each in layers] == [(2, 2), (16, 2)]
    for point in points:
        assert point.host_us > 0
        assert point.flock_us <= point.with_host_us
        assert point.cost.send_us * point.num_workers == pytest.approx(
            point.cpu_us["pack"] + point.cpu_us["send"]
        )
    # Worker 3 is slow where there is one.
    even = measure(MODEL, NODE, (16,), (1,), host_gbit_per_s=1.0, num_steps=10)[0][0]
    assert points[2].flock_us > even.flock_us


def test_bends_are_where_steps_are_shortest() -> None:
    points, _ = measure(MODEL, NODE, (2, 16), (1,), host_gbit_per_s=0.0, num_steps=10)
    free = [replace(point, cpu_us=dict.fromkeys(point.cpu_us, 0.0), host_us=0.0) for point in points]
    (bend,) = find_bends(MODEL, NODE, free, 0.0)
    assert bend.flock_workers == bend.host_workers == 25
    # A host that needs 100 us for each worker: so few that reading takes about as long.
    costly = [
        replace(
            point,
            cpu_us={**dict.fromkeys(point.cpu_us, 0.0), "send": 50.0 * point.num_workers},
            host_us=100.0 * point.num_workers,
        )
        for point in points
    ]
    (bend,) = find_bends(MODEL, NODE, costly, 0.0)
    assert bend.flock_workers == 25
    assert bend.host_workers < 8
    assert bend.host_us > bend.flock_us
    assert (bend.is_between, bend.nearest_measured) == (True, 2)
    assert "not measured" not in describe_bend(bend)
    # Of one point alone nothing is known of fewer workers but its cost, which is said.
    (bend,) = find_bends(MODEL, NODE, costly[-1:], 0.0)
    assert (bend.is_between, bend.nearest_measured) == (False, 16)
    assert "us, not measured, by the host's cost of a worker at 16; nodes" in describe_bend(bend)


def test_more_workers_than_stripes_are_refused() -> None:
    with pytest.raises(ConfigError, match="workers: got 26"), flock_of(26):
        pass
