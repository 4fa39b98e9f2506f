"""What a step takes on simulated nodes and links, against sums by hand."""

from __future__ import annotations

import numpy as np
import pytest

from duckllm.errors import ConfigError
from duckllm.forecast.step import WIRE_OVERHEAD
from duckllm.simulate.nodes import (
    ExpertLayers,
    HostCost,
    Node,
    bytes_per_us,
    node_of,
    step_us,
)
from duckllm.simulate.pattern import ExpectedSums, partial_sum

MODEL = ExpertLayers(
    hidden_size=100,
    intermediate_size=64,
    num_experts=8,
    top_k=2,
    layers=(1, 2),
    unit_bytes=5000,
    num_stripes=4,
)
NODE = Node(read_gb_per_s=1.0)


def test_a_node_reads_the_distinct_experts_of_its_slice() -> None:
    assert MODEL.compute_us(NODE, 2, 1) == pytest.approx(2 * 2 * 5.0)
    assert MODEL.distinct_experts(2) == pytest.approx(8 * (1 - 0.75**2))
    assert MODEL.compute_us(NODE, 1, 2) == pytest.approx(3.5 * 5.0)
    assert MODEL.compute_us(Node(1.0, fixed_us=7.0), 1, 2) == pytest.approx(7 + 17.5)
    # 40 rows of 2 experts: 2 * 3 * 100 * 16 operations each at 1 GFLOP/s, longer than reading all experts.
    assert MODEL.compute_us(Node(1.0, gflop_per_s=1.0), 1, 40) == pytest.approx(80 * 9.6)
    slow = Node(1.0, gflop_per_s=1.0, fixed_us=7.0).slower(3)
    assert MODEL.compute_us(slow, 2, 1) == pytest.approx(3 * (7 + 2 * 19.2))
    assert MODEL.compute_us(NODE.slower(3), 2, 1) == pytest.approx(60.0)


def test_a_step_without_links_is_the_slowest_node() -> None:
    assert step_us(MODEL, [NODE], 1) == pytest.approx(40.0)
    assert step_us(MODEL, [NODE] * 4, 1) == pytest.approx(10.0)
    assert step_us(MODEL, [NODE, NODE, NODE.slower(4), NODE], 1) == pytest.approx(40.0)


def test_requests_and_replies_pass_the_hosts_port_one_by_one() -> None:
    gbit = 8e-3 * WIRE_OVERHEAD  # a byte a microsecond
    assert bytes_per_us(gbit) == pytest.approx(1.0)
    request, reply = 4 * 100 + 16, 400
    # One worker: request, computing, reply. Four: the last request leaves after four, and replies come no
    # faster than requests did, as they are smaller.
    assert step_us(MODEL, [NODE], 1, gbit) == pytest.approx(request + 40 + reply)
    assert step_us(MODEL, [NODE] * 4, 1, gbit) == pytest.approx(4 * request + 10 + reply)
    # Slow nodes answer at once: the port is busy with four replies.
    slow_first = [NODE.slower(1 + 41.6 * (3 - index) * 1.0) for index in range(4)]
    assert step_us(MODEL, slow_first, 1, gbit) == pytest.approx(4 * request + 10 + 4 * reply)


def test_a_late_reply_holds_no_other_up() -> None:
    gbit = 8e-3 * WIRE_OVERHEAD
    # Three requests and replies pass while the first node computes; its own reply comes behind them.
    nodes = [NODE.slower(1000), NODE, NODE, NODE]
    assert step_us(MODEL, nodes, 1, gbit) == pytest.approx(416 + 10_000 + 400)


def test_a_slow_link_of_a_node_and_delays_count_once_each_way() -> None:
    node = Node(1.0, link_gbit_per_s=8e-3 * WIRE_OVERHEAD, delay_us=30)
    assert step_us(MODEL, [node], 1) == pytest.approx(416 + 30 + 40 + 400 + 30)
    # Ten times as fast a port of the host passes within the node's time.
    assert step_us(MODEL, [node], 1, 8e-2 * WIRE_OVERHEAD) == pytest.approx(416 + 30 + 40 + 400 + 30)
    assert step_us(MODEL, [node] * 4, 1) == pytest.approx(416 + 30 + 10 + 400 + 30)


def test_the_hosts_thread_sends_then_takes_one_reply_at_a_time() -> None:
    # The last of four requests leaves at 8, is answered at 18; three replies were taken meanwhile.
    assert step_us(MODEL, [NODE] * 4, 1, cost=HostCost(2, 1)) == pytest.approx(8 + 10 + 1)
    # Taking is slower than sending: from the first reply at 12 on, four times 5.
    assert step_us(MODEL, [NODE] * 4, 1, cost=HostCost(2, 5)) == pytest.approx(12 + 4 * 5)
    # Nothing is taken while requests are still sent, for 80.
    assert step_us(MODEL, [NODE] * 4, 1, cost=HostCost(20, 5)) == pytest.approx(80 + 4 * 5)


def test_bytes_on_the_wire_follow_their_types() -> None:
    assert (MODEL.request_row_bytes, MODEL.reply_row_bytes) == (416, 400)
    small = ExpertLayers(100, 64, 8, 2, (1,), 5000, 4, "bf16", "bf16")
    assert (small.request_row_bytes, small.reply_row_bytes) == (216, 200)


def test_more_workers_than_stripes_and_unknown_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="workers"):
        MODEL.slices(5)
    with pytest.raises(ConfigError, match="node: got 'pi', expected one of n100"):
        node_of("pi", "fp9")
    node = node_of("n100", "fp9")
    assert node.read_gb_per_s == pytest.approx(35 * 0.8)
    assert (node.fixed_us, node.link_gbit_per_s) == (8.0, 2.5)


def test_expected_sums_are_the_sums_of_the_patterns() -> None:
    firsts = [0, 3, 4, 9]
    expected = ExpectedSums(firsts, 50)
    for step in (1, 7, 64, 123456):
        total = sum(partial_sum(step, 3, first, 50) for first in firsts)
        np.testing.assert_array_equal(expected.of(step, 3), total)
    one = partial_sum(5, 2, 1, 50)
    assert not np.array_equal(one, partial_sum(6, 2, 1, 50))
    assert not np.array_equal(one, partial_sum(5, 2, 2, 50))
    assert not np.array_equal(one[0], one[1])
    assert set(np.unique(one)) <= set(range(-15, 16))
