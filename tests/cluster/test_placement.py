"""Slices and plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duckllm.cluster.plan import WorkerPlan
from duckllm.errors import ConfigError, ProtocolError
from duckllm.moe.placement import Slice, plan_slices, plan_workers
from worker_harness import make_model


@pytest.mark.parametrize("num_stripes", [1, 2, 7, 13, 128])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 8])
def test_slices_cover_every_stripe_once_and_evenly(num_stripes: int, num_workers: int) -> None:
    if num_workers > num_stripes:
        with pytest.raises(ConfigError, match=f"workers: got {num_workers}, expected 1 to {num_stripes}"):
            plan_slices(num_stripes, num_workers)
        return
    slices = plan_slices(num_stripes, num_workers)
    covered = [
        stripe for part in slices for stripe in range(part.first_stripe, part.first_stripe + part.num_stripes)
    ]
    assert covered == list(range(num_stripes))
    sizes = [part.num_stripes for part in slices]
    assert len(sizes) == num_workers
    assert max(sizes) - min(sizes) <= 1


def test_shares() -> None:
    assert plan_slices(12, 3, [1, 2, 3]) == (Slice(0, 2), Slice(2, 4), Slice(6, 6))
    assert plan_slices(3, 3, [1, 1000, 1]) == (Slice(0, 1), Slice(1, 1), Slice(2, 1))
    for shares in ([1.0, 2.0], [1, 0, 1], [1, -1, 1], [1, float("nan"), 1], [1, float("inf"), 1]):
        with pytest.raises(ConfigError, match="shares: got"):
            plan_slices(12, 3, shares)
    with pytest.raises(ConfigError, match="workers: got 0"):
        plan_slices(12, 0)


def test_plans_survive_the_wire(tmp_path: Path) -> None:
    manifest = make_model(tmp_path / "model")
    plans = plan_workers(manifest, 3, max_step_tokens=16, wire_dtype="bf16")
    assert [(plan.first_stripe, plan.num_stripes) for plan in plans] == [(0, 3), (3, 2), (5, 2)]
    assert plans[1].layers[0].stripe_sha256 == manifest.expert_layers[1].stripe_sha256[3:5]
    assert [layer.layer for layer in plans[0].layers] == [1, 3]
    for plan in plans:
        assert WorkerPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_layers_that_the_host_does_not_run_are_no_workers(tmp_path: Path) -> None:
    manifest = make_model(tmp_path / "model")
    for num_layers, planned in ((None, [1, 3]), (4, [1, 3]), (3, [1]), (2, [1])):
        plans = plan_workers(manifest, 2, max_step_tokens=4, num_layers=num_layers)
        assert [[layer.layer for layer in plan.layers] for plan in plans] == [planned] * 2


def _set(name: str, value: Any) -> Any:
    return lambda plan: plan | {name: value}


def _set_layer(**fields: Any) -> Any:
    return lambda plan: plan | {"layers": [plan["layers"][0] | fields]}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda plan: {key: value for key, value in plan.items() if key != "top_k"},
            "unknown fields \\['top_k'\\]",
        ),
        (_set("extra", 1), "unknown fields \\['extra'\\]"),
        (_set("hidden_size", 0), "plan hidden_size: got 0"),
        (_set("hidden_size", 1 << 31), "plan hidden_size"),
        (_set("hidden_size", True), "plan hidden_size: got True"),
        (_set("num_experts", "6"), "plan num_experts: got '6'"),
        (_set("max_step_tokens", 1.5), "plan max_step_tokens: got 1.5"),
        (_set("first_stripe", -1), "plan first_stripe: got -1"),
        (_set("first_stripe", 5), "plan first_stripe: got 5, expected a slice inside 7 stripes"),
        (_set("num_stripes", 8), "plan first_stripe"),
        (_set("top_k", 7), "plan top_k: got 7"),
        (_set("format", "fp7"), "plan format: got 'fp7', expected one of fp9, fp8"),
        (_set("wire_dtype", ["f32"]), "plan wire_dtype"),
        (_set("folder", None), "plan folder: got None"),
        (_set("layers", []), "plan layers"),
        (_set("layers", {}), "plan layers"),
        (_set("layers", [3]), "plan layers: got 3"),
        (lambda plan: plan | {"layers": plan["layers"] * 2}, "expected every layer once"),
        (_set_layer(layer=-1), "plan layer: got -1"),
        (_set_layer(file="../experts"), "plan file: got '../experts', expected a plain file name"),
        (_set_layer(file="/etc/passwd"), "plan file"),
        (_set_layer(file=".."), "plan file"),
        (_set_layer(file="a\0b"), "plan file"),
        (_set_layer(file=""), "plan file"),
        (_set_layer(stripe_sha256=["0" * 64]), "plan stripe_sha256: got .* expected 7 SHA-256"),
        (_set_layer(stripe_sha256=["0" * 63 + "G"] * 7), "plan stripe_sha256"),
        (_set_layer(stripe_sha256=["0" * 65] * 7), "plan stripe_sha256"),
        (_set_layer(stripe_sha256=[0] * 7), "plan stripe_sha256"),
    ],
)
def test_a_wrong_plan_is_refused(tmp_path: Path, change: Any, sentence: str) -> None:
    (plan,) = plan_workers(make_model(tmp_path / "model"), 1, max_step_tokens=4)
    value = json.loads(json.dumps(plan.to_json()))
    assert WorkerPlan.from_json(value) == plan
    with pytest.raises(ProtocolError, match=sentence) as caught:
        WorkerPlan.from_json(change(value))
    assert len(str(caught.value)) < 500


def test_plans_differ_by_slice_only(tmp_path: Path) -> None:
    first, second = plan_workers(make_model(tmp_path / "model"), 2, max_step_tokens=4)
    assert replace(second, first_stripe=0, num_stripes=4, layers=first.layers) == first


@pytest.mark.parametrize("num_stripes", [7, 8, 13, 128])
@pytest.mark.parametrize("speeds", [(1, 2, 4), (1, 2, 4, 1, 2, 4, 4), (17.5, 35), (9, 9.5, 30, 11)])
def test_shares_by_speed_are_within_a_stripe(num_stripes: int, speeds: tuple[float, ...]) -> None:
    slices = plan_slices(num_stripes, len(speeds), speeds)
    assert sum(part.num_stripes for part in slices) == num_stripes
    for part, speed in zip(slices, speeds, strict=True):
        quota = num_stripes * speed / sum(speeds)
        assert abs(part.num_stripes - quota) < 1 or part.num_stripes == 1


def test_no_other_division_has_a_faster_slowest_worker() -> None:
    generator = np.random.default_rng(7)
    for _ in range(60):
        stripes, speeds = int(generator.integers(3, 14)), generator.uniform(1, 9, 3)
        most = generator.integers(stripes // 3 + 1, stripes + 1, 3)
        got = [part.num_stripes for part in plan_slices(stripes, 3, list(speeds), list(most))]
        assert all(1 <= size <= limit for size, limit in zip(got, most, strict=True))
        best = min(
            max(size / speed for size, speed in zip((a, b, stripes - a - b), speeds, strict=True))
            for a in range(1, min(most[0], stripes - 2) + 1)
            for b in range(1, min(most[1], stripes - a - 1) + 1)
            if stripes - a - b <= most[2]
        )
        assert max(size / speed for size, speed in zip(got, speeds, strict=True)) == best
