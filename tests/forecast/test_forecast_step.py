"""A step's parts against arithmetic by hand, on a model and hardware with round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from duckllm.forecast.coefficients import Coefficients
from duckllm.forecast.flock import Card, Computer, Flock, Machine
from duckllm.forecast.load import AttentionLoad, ModelLoad
from duckllm.forecast.step import (
    CACHE,
    EXCHANGE,
    EXPERTS,
    GUESSES,
    HIDDEN,
    LAYERS,
    STEP,
    WEIGHTS,
    WIRE,
    WIRE_OVERHEAD,
    Prediction,
    Setting,
    predict,
)

LOAD = ModelLoad(
    hidden_size=1000,
    num_experts=10,
    top_k=2,
    num_moe_layers=4,
    num_layers=5,
    expert_flop=6_000_000,
    num_stripes=10,
    unit_bytes={"fp9": 90_000, "fp8": 80_000},
    layer_bytes=5_000_000,
    shared_bytes=0,
    head_bytes=2_000_000,
    draft_bytes=1_000_000,
    attention=(AttentionLoad(100, 0, None, 0, 0),) * 5,
    on_card=False,
)
NODE = Computer("n", 1, 10.0, 1e5, 16, 1.0)
HOST = Computer("h", 1, 20.0, 1e5, 16, 10.0)
EXACT = Coefficients(
    "exact",
    expert_share={"avx2 fp9": 0.5, "avx2 fp8": 0.8},
    expert_flop_share=1.0,
    node_step_us=7.0,
    dense_share=1.0,
    cache_share=0.5,
    attention_flop_share=0.0,
    layer_us=11.0,
    layer_row_us=2.0,
    step_us=30.0,
    step_request_us=5.0,
    exchange_us=50.0,
    worker_us=0.0,
)
ONE = Setting("fp9", context=1000)


def made(
    setting: Setting = ONE,
    flock: Flock | None = None,
    stripes: tuple[int, ...] = (10,),
    coefficients: Coefficients = EXACT,
    load: ModelLoad = LOAD,
) -> Prediction:
    return predict(load, flock or Flock(HOST, (NODE,)), stripes, coefficients, setting)


def test_every_part_is_bytes_over_bandwidth_and_what_does_not_depend_on_them() -> None:
    parts = made().parts_us
    assert parts[WEIGHTS] == pytest.approx(7e6 / 20e3)
    assert parts[CACHE] == pytest.approx(5 * 1000 * 100 * 4 / (20e3 * 0.5))
    assert parts[LAYERS] == pytest.approx(5 * 11)
    # Two experts of ten stripes at half of 10 GB/s.
    assert parts[EXPERTS] == pytest.approx(4 * (2 * 10 * 90_000 / 5e3 + 7))
    # 4016 bytes out and 4000 back, through the slower port of 1 Gbit/s.
    assert parts[WIRE] == pytest.approx(4 * 8.016 * WIRE_OVERHEAD * 8)
    assert parts[EXCHANGE] == pytest.approx(4 * 50)
    assert parts[STEP] == 30
    assert parts[GUESSES] == parts[HIDDEN] == 0
    assert made().step_us == pytest.approx(sum(parts.values()))
    assert made().tokens_per_s == pytest.approx(1e6 / sum(parts.values()))
    assert made().bottleneck == EXPERTS


def test_rows_share_experts_as_far_as_they_choose_the_same() -> None:
    assert LOAD.distinct_experts(1) == pytest.approx(2)
    assert LOAD.distinct_experts(2) == pytest.approx(10 * (1 - 0.8**2))
    four = made(replace(ONE, batch=4)).parts_us
    assert four[EXPERTS] == pytest.approx(4 * (10 * (1 - 0.8**4) * 10 * 90_000 / 5e3 + 7))
    assert four[CACHE] == pytest.approx(4 * made().parts_us[CACHE])
    assert four[LAYERS] == pytest.approx(5 * (11 + 3 * 2))
    assert four[STEP] == pytest.approx(30 + 3 * 5)
    assert four[WEIGHTS] == made().parts_us[WEIGHTS]
    assert made(replace(ONE, batch=4)).tokens_per_s == pytest.approx(4e6 / sum(four.values()))


def test_arithmetic_is_the_bound_where_rows_are_many() -> None:
    slow = replace(NODE, gflop_per_s=10.0)
    parts = made(replace(ONE, batch=8), Flock(HOST, (slow,))).parts_us
    assert parts[EXPERTS] == pytest.approx(4 * (8 * 2 * 6_000_000 / 10e3 + 7))


def test_a_format_has_its_bytes_and_its_kernels_share() -> None:
    parts = made(replace(ONE, weight_format="fp8")).parts_us
    assert parts[EXPERTS] == pytest.approx(4 * (2 * 10 * 80_000 / 8e3 + 7))
    assert EXACT.share_of("avx2+bf16", "fp8") == 0.8
    assert EXACT.share_of("avx512", "fp8") == 0.5  # unknown: the least that is known


def test_the_slowest_node_counts_and_slices_divide_the_work() -> None:
    slow = replace(NODE, read_gb_per_s=2.0)
    parts = made(flock=Flock(HOST, (NODE, slow)), stripes=(8, 2)).parts_us
    assert parts[EXPERTS] == pytest.approx(4 * (2 * 2 * 90_000 / 1e3 + 7))
    even = made(flock=Flock(HOST, (NODE, NODE)), stripes=(5, 5)).parts_us
    assert even[EXPERTS] == pytest.approx(4 * (2 * 5 * 90_000 / 5e3 + 7))


def wire(setting: Setting, nodes: int, host_gbit_per_s: float, coefficients: Coefficients = EXACT) -> float:
    """Microseconds of a layer, over nodes that compute alike."""
    flock = Flock(replace(HOST, link_gbit_per_s=host_gbit_per_s), (NODE,) * nodes)
    return made(setting, flock, (1,) * nodes, coefficients).parts_us[WIRE] / 4


def test_requests_fan_out_of_the_hosts_port_and_answers_meet_there() -> None:
    out, back = 4016 * WIRE_OVERHEAD * 8 / 1e3, 4000 * WIRE_OVERHEAD * 8 / 1e3  # at 1 Gbit/s
    assert wire(ONE, 1, 1.0) == pytest.approx(out + back)
    # Each request waits for those before it; answers come as staggered, and the last one passes alone.
    assert wire(ONE, 4, 1.0) == pytest.approx(4 * out + back)
    # The first answer is ready when the first request has arrived: four of them then pass one after another.
    fast_out = replace(ONE, x_bytes=2)
    assert wire(fast_out, 4, 1.0) == pytest.approx(2016 * WIRE_OVERHEAD * 8 / 1e3 + 4 * back)
    # By multicast all begin together, and their answers meet.
    assert wire(replace(ONE, multicast=True), 4, 1.0) == pytest.approx(out + 4 * back)
    # A port of four times the speed takes them all at once.
    assert wire(replace(ONE, multicast=True), 4, 4.0) == pytest.approx(out + back)
    assert wire(replace(ONE, x_bytes=2, reply_bytes=2), 1, 1.0) == pytest.approx(4.016 * WIRE_OVERHEAD * 8)


def test_the_host_itself_may_be_slower_than_its_port() -> None:
    busy = replace(EXACT, worker_us=100.0)
    out, back = 4016 * WIRE_OVERHEAD * 8 / 1e3, 4000 * WIRE_OVERHEAD * 8 / 1e3
    assert wire(ONE, 4, 1.0, busy) == pytest.approx(3 * 50 + 50 + max(50, back))
    assert out < 50  # else the port would be what counts
    flock = Flock(HOST, (NODE,) * 4)
    assert made(flock=flock, stripes=(1,) * 4, coefficients=busy).parts_us[EXCHANGE] == 0
    # A round trip that was measured replaces what is usual.
    far = replace(NODE, round_trip_us=300.0)
    assert made(flock=Flock(HOST, (far,))).parts_us[EXCHANGE] == pytest.approx(4 * 300)


def test_workers_of_one_machine_share_its_cores_and_have_no_wire() -> None:
    machines = {"m": Machine(2, 18.0)}
    here = replace(NODE, machine="m")
    host = replace(HOST, machine="m")
    two = made(flock=Flock(host, (here, here), machines=machines), stripes=(5, 5)).parts_us
    assert two[EXPERTS] == pytest.approx(4 * (2 * 5 * 90_000 / 5e3 * 20 / 18 + 7))
    assert two[WIRE] == 0
    three = made(flock=Flock(host, (here,) * 3, machines=machines), stripes=(4, 3, 3)).parts_us
    assert three[EXPERTS] == pytest.approx(4 * (2 * 4 * 90_000 / 5e3 * 30 / 18 + 7))
    wired = replace(here, wired=True)
    assert made(flock=Flock(host, (wired,), machines=machines)).parts_us[WIRE] == made().parts_us[WIRE]


def test_a_bucket_lets_its_burst_pass() -> None:
    quick = replace(NODE, burst_bytes=3000)
    parts = made(flock=Flock(replace(HOST, burst_bytes=3000), (quick,))).parts_us
    assert parts[WIRE] == pytest.approx(4 * (8016 * WIRE_OVERHEAD - 6000) * 8 / 1e3)


def test_guesses_cost_a_layer_and_the_head_and_give_what_is_right() -> None:
    guessing = replace(ONE, drafts=1, acceptance=0.5)
    parts = made(guessing).parts_us
    rows = 1.5  # that the layer follows: what was accepted, on average
    experts = 10 * (1 - 0.8**rows) * 10 * 90_000 / 5e3 + 7
    moved = rows * (4016 + 4000) * WIRE_OVERHEAD * 8 / 1e3
    assert parts[GUESSES] == pytest.approx(3e6 / 20e3 + 11 + experts + moved + 50)
    assert parts[LAYERS] == pytest.approx(5 * (11 + 2))
    assert parts[CACHE] == made().parts_us[CACHE]  # the same context for both rows
    assert made(guessing).tokens_per_s == pytest.approx(1.5e6 / sum(parts.values()))
    assert replace(ONE, drafts=2, acceptance=0.5).tokens_per_step == pytest.approx(1.75)


def test_lanes_hide_the_shorter_of_host_and_workers() -> None:
    two = replace(ONE, batch=2)
    laned = made(replace(two, lanes=True))
    host = 5e6 / 20e3 / 5 + 1000 * 100 * 4 / 10e3 + 11
    experts = 2 * 10 * 90_000 / 5e3 + 7
    away = experts + 8.016 * WIRE_OVERHEAD * 8 + 50
    # Each lane has a row of its own and reads the host's weights again; the nodes are busy longest.
    assert laned.parts_us[EXPERTS] == pytest.approx(4 * 2 * experts)
    assert laned.parts_us[HIDDEN] == pytest.approx(4 * (max(2 * experts, host + away) - 2 * (host + away)))
    assert laned.parts_us[WEIGHTS] == pytest.approx(2 * 5e6 / 20e3 + 2e6 / 20e3)
    assert made(replace(ONE, lanes=True)).parts_us == made().parts_us  # a single row is not cut


def test_a_port_may_be_what_both_lanes_wait_for() -> None:
    slow = replace(NODE, link_gbit_per_s=0.02)
    laned = made(replace(ONE, batch=2, lanes=True), Flock(HOST, (slow,)))
    whole = laned.step_us - laned.parts_us[STEP] - 100  # without the head
    alone = (250 + 5 * (1000 * 100 * 4 / 10e3 + 11)) / 5
    alone += 2 * 10 * 90_000 / 5e3 + 7 + 8.016 * WIRE_OVERHEAD * 8 / 0.02 + 50
    both = 2 * 4.016 * WIRE_OVERHEAD * 8 / 0.02
    dense = 2 * (250 / 5 + 1000 * 100 * 4 / 10e3 + 11)  # the layer without experts
    assert whole == pytest.approx(4 * max(alone, both) + dense)
    # Out of one port to many nodes, requests are what takes longest.
    host = replace(HOST, link_gbit_per_s=0.02)
    laned = made(replace(ONE, batch=2, lanes=True), Flock(host, (NODE,) * 4), (1,) * 4)
    whole = laned.step_us - laned.parts_us[STEP] - 100
    assert whole == pytest.approx(4 * 4 * both + dense)


def test_lanes_gain_nothing_where_host_and_workers_are_the_same_cores() -> None:
    machines = {"m": Machine(1, 10.0)}
    host, here = replace(HOST, machine="m"), replace(NODE, machine="m")
    flock = Flock(host, (here,), machines=machines)
    two = replace(ONE, batch=2, lanes=True)
    laned = made(two, flock).parts_us
    host_us = (laned[WEIGHTS] - 100) / 5 + laned[CACHE] / 5 + laned[LAYERS] / 5
    busy = host_us + laned[EXPERTS] / 4
    assert laned[HIDDEN] == pytest.approx(4 * (busy - host_us - laned[EXPERTS] / 4 - 2 * 50))


def test_a_shared_expert_is_hidden_behind_the_workers() -> None:
    load = replace(LOAD, shared_bytes=4 * 20_000)
    assert made(load=load).parts_us[WEIGHTS] == made().parts_us[WEIGHTS]
    open_ = replace(EXACT, hides_shared=False)
    assert made(load=load, coefficients=open_).parts_us[WEIGHTS] == pytest.approx(7e6 / 20e3 + 4)
    away = sum(made().parts_us[name] for name in (EXPERTS, WIRE, EXCHANGE))
    large = replace(LOAD, shared_bytes=100_000_000)
    assert made(load=large).parts_us[WEIGHTS] == pytest.approx(7e6 / 20e3 + 1e8 / 20e3 - away)


def test_a_card_reads_what_the_host_would() -> None:
    flock = Flock(HOST, (NODE,), Card("c", 32, 1000.0))
    parts = made(flock=flock, load=replace(LOAD, on_card=True)).parts_us
    assert parts[WEIGHTS] == pytest.approx(7e6 / 1e6)
    assert parts[CACHE] == pytest.approx(5 * 1000 * 100 * 2 / 0.5e6)


def test_attention_that_chooses_reads_every_key_once_it_must() -> None:
    sparse = AttentionLoad(100, 10, 500, 1000, 30)
    assert sparse.cache_bytes(400, False) == 4 * 400 * 100
    assert sparse.cache_bytes(2000, False) == 4 * (500 * 100 + 2000 * 10)
    assert sparse.operations(2000) == 500 * 1000 + 2000 * 30
    window = AttentionLoad(100, 0, 500, 1000, 0)
    assert window.cache_bytes(2000, True) == 2 * 500 * 100
    slow = replace(EXACT, attention_flop_share=0.5)
    load = replace(LOAD, attention=(sparse,))
    by_flop = made(replace(ONE, context=2000), coefficients=slow, load=load, flock=Flock(
        replace(HOST, gflop_per_s=0.1), (NODE,)
    ))  # fmt: skip
    assert by_flop.parts_us[CACHE] == pytest.approx(560_000 / 0.05 / 1e3)
