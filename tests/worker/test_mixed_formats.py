"""A model whose layers are stored in several formats, through workers: mapped, fetched, copied, refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from duckllm import LLM, _native
from duckllm.assembly_experts import ClusterInfo, with_layers
from duckllm.cluster.plan import WorkerPlan
from duckllm.errors import ProtocolError, WeightFormatError
from duckllm.moe.local import LocalExperts
from duckllm.moe.placement import plan_workers
from duckllm.weights import choice
from duckllm.weights.choice import ExpertSlice, load_layers
from duckllm.weights.convert import convert
from duckllm.weights.formats import LayerFormat
from duckllm.weights.manifest import Manifest
from duckllm.weights.reader import ExpertFile
from worker_harness import connect, expected_sum, make_step, open_transport, running_worker

FORMATS = {1: "fp8", 2: "int8", 3: "int4", 4: "int4", 5: "int4", 6: "fp8"}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path) -> Manifest:
    folder = tmp_path_factory.mktemp("mixed") / "demo"
    keep = ["fp8:first,mtp", "int8:2"]
    manifest = convert(demo_checkpoint, folder, weight_format="int4", keep=keep)
    assert manifest.layer_formats() == FORMATS
    return manifest


@pytest.mark.parametrize("flags", [(), ("--no-cache",), ("--copy",)])
def test_workers_compute_each_layer_in_its_format(
    mixed: Manifest, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    plans = plan_workers(mixed, 2, max_step_tokens=12, num_layers=6)
    with running_worker(tmp_path, *flags) as worker:
        connection = connect(worker.address, plans[1], share_folder="--copy" in flags)
        with open_transport([connection]) as transport:
            for layer in (1, 2, 3, 5):
                for tokens in (1, 12):
                    step = make_step(mixed, tokens, layer=layer)
                    got = transport.wait(
                        transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights)
                    )
                    np.testing.assert_array_equal(got, expected_sum(mixed, [plans[1]], step))
        info = connection.info
    assert info.weight_format == "fp8+int4+int8"
    units = sum(mixed.units_shape(layer)[2] for layer in range(1, 6))
    assert info.weight_bytes == units * mixed.num_experts * plans[1].num_stripes
    if "--copy" not in flags:
        assert connection.fetched_bytes == info.weight_bytes


def test_lossless_layers_are_copied_in_the_format_asked_for(mixed: Manifest, tmp_path: Path) -> None:
    (plan,) = plan_workers(mixed, 1, max_step_tokens=3, num_layers=6, weight_format="fp9")
    with running_worker(tmp_path) as worker:
        connection = connect(worker.address, plan)
        with open_transport([connection]) as transport:
            for layer in (1, 4):
                step = make_step(mixed, 3, layer=layer)
                got = transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
                np.testing.assert_array_equal(got, expected_sum(mixed, [plan], step))
    assert connection.info.weight_format == "fp9+int4+int8"
    fp9, fp8 = (LayerFormat(name, "block").unit_bytes(mixed.hidden_size) for name in ("fp9", "fp8"))
    stored = sum(mixed.units_shape(layer)[2] for layer in range(1, 6))
    assert connection.info.weight_bytes == (stored + fp9 - fp8) * mixed.num_experts * mixed.num_stripes


def test_nothing_is_rounded_when_a_worker_starts(mixed: Manifest, tmp_path: Path) -> None:
    (plan,) = plan_workers(mixed, 1, max_step_tokens=3, weight_format="mxfp4")
    with (
        running_worker(tmp_path) as worker,
        pytest.raises(
            WeightFormatError,
            match=r"got fp8 and int4 and int8, expected mxfp4, to which nothing is rounded .*; only check",
        ),
    ):
        connect(worker.address, plan)


def test_experts_in_this_process_do_the_same(mixed: Manifest) -> None:
    import torch

    experts = LocalExperts(mixed, num_threads=1)
    assert experts.weight_format == "fp8+int4+int8"
    (plan,) = plan_workers(mixed, 1, max_step_tokens=3)
    for layer in (1, 2, 3, 6):
        step = make_step(mixed, 3, layer=layer)
        arrays = (torch.from_numpy(each) for each in (step.x, step.topk_ids, step.topk_weights))
        got = experts.submit(layer, *arrays).wait().numpy()
        np.testing.assert_array_equal(got, expected_sum(mixed, [plan], step))


@pytest.mark.parametrize(
    ("used", "num_layers", "words"),
    [
        ("fp8+int4+int8", 7, "int4, fp8 in layers 1 and 6, int8 in layer 2"),
        ("fp8+int4+int8", 6, "int4, fp8 in layer 1, int8 in layer 2"),
        ("fp9+int4+int8", 6, "int4, fp9 in layer 1, int8 in layer 2"),
        ("fp8+fp9+int4+int8", 6, "int4, fp8+fp9 in layer 1, int8 in layer 2"),  # by workers that differ
        ("fp8", 2, ""),
    ],
)
def test_which_layers_are_computed_in_which_format_is_said(
    mixed: Manifest, used: str, num_layers: int, words: str
) -> None:
    info = ClusterInfo(2, used, ("avx2", "avx2"))
    assert with_layers(lambda: info, mixed, num_layers) == replace(info, layer_formats=words)


@pytest.mark.parametrize(("draft", "layers"), [("on", "layers 1 and 6"), ("off", "layer 1")])
def test_a_loaded_model_says_what_it_is_computed_in(mixed: Manifest, draft: str, layers: str) -> None:
    with LLM(mixed.folder, workers=0, max_model_len=64, draft=draft) as llm:
        assert llm.cluster_info().layer_formats == f"int4, fp8 in {layers}, int8 in layer 2"


def test_auto_never_leaves_what_is_stored_for_fewer_bits(
    mixed: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever would be fastest: only fp9 and fp8, which hold the same weights, take each other's place."""
    asked: list[tuple[str, str]] = []

    def measure(part: ExpertSlice, units: object, stored: str, other: str) -> dict[str, float]:
        asked.append((stored, other))
        return {stored: 1.0, other: 100.0}

    monkeypatch.setattr(choice, "MIN_MEASURED_BYTES", 0)
    monkeypatch.setattr(choice, "copy_fits", lambda num_bytes: True)
    monkeypatch.setattr(choice, "measure_formats", measure)
    part = ExpertSlice(mixed.hidden_size, mixed.moe_intermediate_size, mixed.num_experts, 4, 0, 2, 0, 1)
    files = {layer: ExpertFile.open(mixed, layer) for layer in FORMATS}
    units = {layer: file.slice(0, 2) for layer, file in files.items()}
    loaded = load_layers(part, units, {layer: file.format for layer, file in files.items()}, "auto")
    assert asked == [("fp8", "fp9")]
    assert {layer: form.format for layer, form in loaded.formats.items()} == FORMATS | {1: "fp9", 6: "fp9"}
    assert loaded.choice.format == "fp9+int4+int8"
    assert loaded.units[3] is units[3]
    assert list(loaded.units) == list(units)


def test_plans_say_which_layers_differ(mixed: Manifest) -> None:
    (plan,) = plan_workers(mixed, 1, max_step_tokens=3)
    value = json.loads(json.dumps(plan.to_json()))
    assert WorkerPlan.from_json(value) == plan
    assert (value["format"], value["scale_layout"]) == ("int4", "group")
    assert [layer.get("format") for layer in value["layers"]] == ["fp8", "int8", None, None, None, "fp8"]
    for change, message in (
        ({"format": "fp7"}, "plan layer format: got 'fp7', expected one of fp9, fp8, int8"),
        ({"scale_layout": "group"}, "plan scale_layout: got 'group', expected block or channel with fp8"),
        ({"unit_bytes": 1}, "plan layers: got"),
    ):
        wrong = {**value, "layers": [value["layers"][0] | change, *value["layers"][1:]]}
        with pytest.raises(ProtocolError, match=message):
            WorkerPlan.from_json(wrong)
    first = {name: entry for name, entry in value["layers"][0].items() if name != "scale_layout"}
    with pytest.raises(ProtocolError, match="plan layers: got"):
        WorkerPlan.from_json({**value, "layers": [first]})
    with pytest.raises(ProtocolError, match="plan scale_layout: got 'block', expected group with int4"):
        WorkerPlan.from_json(value | {"scale_layout": "block"})
    assert plan.computed_bytes(["fp8", "int4", "int8"]) == sum(
        int(np.prod(mixed.units_shape(layer))) for layer in FORMATS
    )


def test_layers_of_one_expert_object_are_of_the_formats_that_they_say(mixed: Manifest) -> None:
    """The int4 units, taken for mxfp4's of the same length, give other numbers: the format is used."""
    (plan,) = plan_workers(mixed, 1, max_step_tokens=3)
    step = make_step(mixed, 3, layer=3)
    units = ExpertFile.open(mixed, 3).units
    experts = _native.Experts(
        *(mixed.hidden_size, mixed.moe_intermediate_size, mixed.num_experts, mixed.num_experts_per_tok),
        *(0, mixed.num_stripes, 3, 1, 0),
    )
    rows = (step.x, step.topk_ids, step.topk_weights)
    as_int4 = experts.run(units, *rows, format="int4", scale_layout="group")
    np.testing.assert_array_equal(as_int4, expected_sum(mixed, [plan], step))
    assert (experts.run(units, *rows, format="mxfp4", scale_layout="group") != as_int4).mean() > 0.9
