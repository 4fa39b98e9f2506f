"""Coefficients of samples: what was put into made-up times comes out of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from duckllm import _native
from duckllm.config import available_cores, total_memory_bytes
from duckllm.forecast.load import AttentionLoad, ModelLoad
from duckllm.forecast.measure import MANY, SHORT_CONTEXT, Decode, KernelProbe, Probes, decode, quantile
from duckllm.forecast.report import nodes_for

LOAD = ModelLoad(
    hidden_size=1000,
    num_experts=16,
    top_k=4,
    num_moe_layers=4,
    num_layers=5,
    expert_flop=6_000_000,
    num_stripes=10,
    unit_bytes={"fp9": 90_000, "fp8": 80_000},
    layer_bytes=5_000_000,
    shared_bytes=1_000_000,
    head_bytes=2_000_000,
    draft_bytes=0,
    attention=(AttentionLoad(100, 0, None, 0, 0),) * 5,
    on_card=False,
)
LONG = 1032
PARTS = ("attention_s", "dense_s", "dispatch_s", "wait_s", "combine_s", "head_s", "sampling_s", "draft_s")


def samples(outside_us: float, **parts_us: float) -> Decode:
    """Three steps, of which the median is this one."""
    made = Decode()
    for times in (0.5, 1.0, 3.0):
        for name in PARTS:
            made.parts.setdefault(name, []).append(times * parts_us.get(name, 0.0) / 1e6)
        made.seconds.append(times * (outside_us + sum(parts_us.values())) / 1e6)
    return made


def test_quantiles() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0, 2.0], 0.5) == 1.5
    assert (quantile([4.0, 1.0], 0.0), quantile([4.0, 1.0], 1.0), quantile([7.0], 0.1)) == (1.0, 4.0, 7.0)


def test_what_was_put_into_times_comes_out_of_them() -> None:
    # 10 GB/s of a plain read; the head at half of it, so the other weights are taken to take 1200 us.
    probes = Probes.__new__(Probes)
    own: dict[str, Any] = vars(probes)
    own["_load"], own["_long"], own["_format"] = LOAD, LONG, "fp9"
    own["_reads"] = {1: [5.0, 10.0, 11.0], available_cores(): [18.0]}
    # The kernel at 80 % of it and 20 us beside.
    own["_kernels"] = {
        "fp9": SimpleNamespace(line=lambda _: (8.0, 20.0)),
        "fp8": SimpleNamespace(line=lambda _: (7.0, 9.0)),
    }
    experts_us = 4 * 10 * 90_000 / 8e3 + 20
    one = {"attention_s": 1000.0, "dense_s": 150.0, "dispatch_s": 90.0, "combine_s": 10.0, "head_s": 400.0}
    one |= {"wait_s": 4 * (experts_us + 60), "sampling_s": 30.0}
    many = {**one, "attention_s": 1000.0 + 7 * 5 * 3, "head_s": 400.0 + 7 * 2, "sampling_s": 30.0 + 7 * 4}
    long = {**one, "attention_s": 1000.0 + 500.0}
    own["_decodes"] = {
        "one": samples(70.0, **one),
        "many": samples(70.0, **many),
        "long": samples(70.0, **long),
    }
    llm = SimpleNamespace(worker_times=lambda: SimpleNamespace(layers=(1, 2)))
    own["_small"] = {1: llm, 3: llm}
    own["_small_decodes"] = {
        1: samples(0.0, dispatch_s=100.0, wait_s=200.0),
        3: samples(0.0, dispatch_s=120.0, wait_s=220.0),
    }
    found = probes.coefficients()
    isa = _native.select_isa().partition("+")[0]
    assert found.expert_share == pytest.approx({f"{isa} fp9": 0.8, f"{isa} fp8": 0.7})
    assert found.node_step_us == 20
    assert found.dense_share == pytest.approx(0.5)
    assert found.layer_us == pytest.approx((1250 - 1200) / 5)
    assert found.layer_row_us == pytest.approx(3)
    tokens = LONG - SHORT_CONTEXT
    assert found.cache_share == pytest.approx(5 * tokens * 100 * 4 / 500e3 / 10)
    assert found.exchange_us == pytest.approx(60)
    assert found.step_us == pytest.approx(100)
    assert found.step_request_us == pytest.approx(6)
    assert found.worker_us == pytest.approx(2 * 40 / 2 / 2)
    flock = probes.flock(3)
    assert [node.read_gb_per_s for node in flock.nodes] == [10.0] * 3
    # One machine's speed and memory are there once, the memory for the host, too.
    assert [node.gb_per_s for node in nodes_for(flock)] == pytest.approx([6.0] * 3)
    assert 4 * flock.nodes[0].memory_gib == pytest.approx(total_memory_bytes() / (1 << 30))
    assert flock.machines["here"].read_gb_per_s == 18.0
    assert MANY == 8
    assert probes.flock(1, 0.0).host.read_gb_per_s == 11.0  # the fastest
    assert probes.coefficients(0.0).expert_share[f"{isa} fp9"] == pytest.approx(8 / 11)


def test_the_kernels_line_has_a_slope_and_what_is_left() -> None:
    probe = KernelProbe.__new__(KernelProbe)
    own: dict[str, Any] = vars(probe)
    own["_expert_bytes"] = 1_000_000
    own["_steps"] = {
        2: SimpleNamespace(seconds=[210e-6 + 1.0, 210e-6, 1e-6]),
        8: SimpleNamespace(seconds=[810e-6, 2.0, 1e-6]),
    }
    assert probe.line() == pytest.approx((10.0, 10.0))
    own["_steps"][8].seconds = [100e-6]  # noise: faster with more
    assert probe.line() == pytest.approx((80.0, 0.0))


def test_decode_times_steps_of_replies_alone(demo_folder: Any) -> None:
    from duckllm import LLM

    with LLM(demo_folder, workers=0, draft="off", device="cpu") as llm:
        before = llm.stats().num_prompt_tokens
        made = decode(llm, 2, 20, 3)
        decode(llm, 2, 20, 2, made)
        assert llm.stats().num_prompt_tokens - before >= 40
        assert llm.state().num_running == llm.state().num_waiting == 0
    assert len(made.seconds) == len(made.parts["attention_s"]) == 5
    assert all(0 < sum(parts) <= own for own, *parts in zip(made.seconds, *made.parts.values(), strict=True))
