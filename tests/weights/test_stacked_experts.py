"""Experts of a layer in one tensor: the same conversion, to the last byte, as expert by expert."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from random_checkpoint import FP8_CONFIG, make_checkpoint
from stacking import stack, taken

from duckllm.errors import CheckpointError, WeightFormatError
from duckllm.weights.convert import convert
from duckllm.weights.manifest import Manifest
from duckllm.weights.safetensors_file import TensorInfo, TensorReader

EXPERTS, HIDDEN, INNER = 3, 272, 144
SIZES = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "n_routed_experts": EXPERTS,
}
PREFIXES = ("model.layers.1.mlp.experts.", "model.layers.2.mlp.experts.")
PER_TENSOR = {"quant_method": "fp8", "weight_block_size": None}
PER_CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}


def conversions(tmp_path: Path, form: dict, **options: object) -> tuple[Manifest, Manifest]:
    """Of experts one by one, and of the same ones stacked."""
    make_checkpoint(tmp_path / "each", **SIZES, **options)  # type: ignore[arg-type]
    make_checkpoint(tmp_path / "stacked", edit=lambda t: stack(t, **form), **SIZES, **options)  # type: ignore[arg-type]
    each = convert(tmp_path / "each", tmp_path / "dst-each")
    return each, convert(tmp_path / "stacked", tmp_path / "dst-stacked", verify=True)


FORMS = {
    "joined": {},
    "joined-weight": {"suffix": ".weight"},
    "transposed": {"transposed": True},
    "transposed-weight": {"transposed": True, "suffix": ".weight"},
    "separate": {"joined": False},
    "separate-weight": {"joined": False, "suffix": ".weight"},
    "separate-transposed": {"joined": False, "transposed": True},
}


@pytest.mark.parametrize(
    ("form", "dtype"),
    [*((form, "BF16") for form in FORMS), ("joined", "F16"), ("joined", "F32"), ("transposed", "F32")],
)
def test_wide_experts(tmp_path: Path, form: str, dtype: str) -> None:
    each, stacked = conversions(tmp_path, FORMS[form], dtype=dtype)
    assert stacked.model_hash == each.model_hash
    assert stacked.expert_layers == each.expert_layers
    assert stacked.source["dtype"] == dtype
    assert stacked.source["quantisation_error"] == each.source["quantisation_error"]


BLOCK_64 = FP8_CONFIG | {"weight_block_size": [64, 64]}
SCALED = {
    # Gate's blocks, then up's: with 144 rows each they do not meet at a block's edge.
    "blocks": {"quantization_config": FP8_CONFIG},
    "e8m0": {"quantization_config": FP8_CONFIG, "scale_dtype": "F8_E8M0"},
    "rows": {"quantization_config": PER_CHANNEL, "scale_block": (1, None)},
    "tensor": {"quantization_config": PER_TENSOR, "scale_block": (None, None)},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", SCALED)
def test_fp8_experts(tmp_path: Path, form: str, kind: str) -> None:
    scale = {"rows": "scale"}.get(kind, "scale_inv")
    options = SCALED[kind] | {"scale_suffix": f"weight_{scale}"}
    each, stacked = conversions(tmp_path, FORMS[form] | {"scale": scale}, **options)
    assert stacked.scale_layout == each.scale_layout == ("channel" if kind == "rows" else "block")
    assert stacked.model_hash == each.model_hash
    assert stacked.source["quantisation_error"] is None


def test_one_scale_an_expert_in_one_dimension(tmp_path: Path) -> None:
    options = SCALED["tensor"] | {"scale_suffix": "weight_scale_inv"}
    each, stacked = conversions(tmp_path, {"scale": "scale_inv", "flat": True}, **options)
    assert stacked.model_hash == each.model_hash


def test_one_scale_for_all_experts(tmp_path: Path) -> None:
    def one(tensors: dict) -> None:
        for name in [name for name in tensors if ".experts." in name and "scale" in name]:
            tensors[name] = ("F32", tensors[name][1], np.float32([0.125]).tobytes())

    def stacked_one(tensors: dict) -> None:
        one(tensors)
        stack(tensors, scale="scale_inv")
        for prefix in PREFIXES:
            for part in ("gate_up_proj", "down_proj"):
                tensors[f"{prefix}{part}_scale_inv"] = ("F32", (1,), np.float32([0.125]).tobytes())

    options = {"quantization_config": PER_TENSOR, "scale_block": (None, None), **SIZES}
    make_checkpoint(tmp_path / "each", edit=one, **options)
    make_checkpoint(tmp_path / "stacked", edit=stacked_one, **options)
    each = convert(tmp_path / "each", tmp_path / "dst-each")
    assert convert(tmp_path / "stacked", tmp_path / "dst-stacked").model_hash == each.model_hash


def test_blocks_that_reach_from_gate_into_up(tmp_path: Path) -> None:
    """288 rows in blocks of 128: the second is half gate's and half up's, and up's own blocks have two."""
    rng = np.random.default_rng(3)

    def edit(tensors: dict) -> None:
        stack(tensors, scale="scale_inv")
        for prefix in PREFIXES:
            scales = rng.uniform(0.001, 0.01, (EXPERTS, 3, 3)).astype(np.float32)
            tensors[f"{prefix}gate_up_proj_scale_inv"] = ("F32", (EXPERTS, 3, 3), scales.tobytes())

    made = make_checkpoint(tmp_path / "src", edit=edit, **SIZES)
    manifest = convert(tmp_path / "src", tmp_path / "dst", verify=True)
    assert manifest.source["requantised"] == "a scale for 128 x 128 weights"
    report = manifest.source["quantisation_error"]
    assert (
        report["weights"] == 2 * EXPERTS * INNER * HIDDEN
    )  # up alone: gate's and down's blocks are as they should be
    assert 0.005 < report["rms_relative"] < 0.04
    assert made.tensors[PREFIXES[0] + "gate_up_proj"][1] == (EXPERTS, 2 * INNER, HIDDEN)


def test_blocks_whose_halves_are_in_doubt(tmp_path: Path) -> None:
    """In blocks of 80, 144 rows are two blocks and 288 are four, of all rows or of each half."""
    config = FP8_CONFIG | {"weight_block_size": [80, 128]}
    form = {"scale": "scale_inv"}
    with pytest.raises(CheckpointError, match=r"gate_up_proj_scale_inv: got shape .* fits in several ways"):
        conversions(tmp_path, form, quantization_config=config, scale_block=(80, 128))


def swapped(tensors: dict) -> None:
    stack(tensors, order=("up_proj", "gate_proj"))


def one_expert_later(tensors: dict) -> None:
    stack(tensors)
    for prefix in PREFIXES:
        dtype, matrices = taken(tensors, prefix + "down_proj")
        tensors[prefix + "down_proj"] = (dtype, matrices.shape, np.roll(matrices, 1, axis=0).tobytes())


@pytest.mark.parametrize("edit", [swapped, one_expert_later])
def test_what_is_in_another_order_is_another_model(tmp_path: Path, edit: Callable[[dict], None]) -> None:
    make_checkpoint(tmp_path / "right", dtype="BF16", edit=stack, **SIZES)
    make_checkpoint(tmp_path / "wrong", dtype="BF16", edit=edit, **SIZES)
    right, wrong = (convert(tmp_path / name, tmp_path / f"dst-{name}") for name in ("right", "wrong"))
    assert right.host_files == wrong.host_files
    for layer in right.expert_layers:
        assert right.expert_layers[layer] != wrong.expert_layers[layer]


def reshape(name: str, shape: tuple[int, ...]) -> Callable[[dict], None]:
    def edit(tensors: dict) -> None:
        stack(tensors)
        dtype, _, data = tensors[PREFIXES[0] + name]
        tensors[PREFIXES[0] + name] = (dtype, shape, data)

    return edit


def without(name: str) -> Callable[[dict], None]:
    def edit(tensors: dict) -> None:
        stack(tensors)
        del tensors[PREFIXES[0] + name]

    return edit


def both(tensors: dict) -> None:
    name = PREFIXES[0] + "1.up_proj.weight"
    kept = tensors[name]
    stack(tensors)
    tensors[name] = kept


def with_bias(tensors: dict) -> None:
    stack(tensors)
    tensors[PREFIXES[0] + "gate_up_proj_bias"] = ("BF16", (EXPERTS, 2 * INNER), bytes(4 * EXPERTS * INNER))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            reshape("down_proj", (EXPERTS, INNER, HIDDEN)),
            "got shapes of which some are transposed, expected one orientation that is certain",
        ),
        (
            reshape("gate_up_proj", (EXPERTS, 2 * HIDDEN, INNER)),
            "gate_up_proj: got shape [3, 544, 144], expected [3, 288, 272] or [3, 272, 288]",
        ),
        (
            reshape("gate_up_proj", (2 * INNER, EXPERTS, HIDDEN)),
            "gate_up_proj: got shape [288, 3, 272], expected",
        ),
        (without("down_proj"), f"1 missing tensor(s): {PREFIXES[0]}down_proj"),
        (without("gate_up_proj"), f"2 missing tensor(s): {PREFIXES[0]}gate_proj, {PREFIXES[0]}up_proj"),
        (both, f"1 unknown tensor(s): {PREFIXES[0]}1.up_proj.weight"),
        (with_bias, f"1 unknown tensor(s): {PREFIXES[0]}gate_up_proj_bias"),
    ],
)
def test_what_is_not_certain_is_refused_by_name(
    tmp_path: Path, edit: Callable[[dict], None], words: str
) -> None:
    make_checkpoint(tmp_path / "src", dtype="BF16", edit=edit, **SIZES)
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "src", tmp_path / "dst")
    assert words in str(caught.value)


def test_square_experts_are_certain_where_gate_and_up_are_joined(tmp_path: Path) -> None:
    sizes = SIZES | {"moe_intermediate_size": HIDDEN}
    square = {"joined": False}
    make_checkpoint(tmp_path / "src", dtype="BF16", edit=lambda t: stack(t, **square), **sizes)
    with pytest.raises(CheckpointError, match="got shapes which may be transposed or not"):
        convert(tmp_path / "src", tmp_path / "dst")
    hashes = set()
    for name, form in (("plain", {}), ("transposed", {"transposed": True})):
        make_checkpoint(tmp_path / name, dtype="BF16", edit=lambda t, form=form: stack(t, **form), **sizes)
        hashes.add(convert(tmp_path / name, tmp_path / f"dst-{name}").model_hash)
    make_checkpoint(tmp_path / "each", dtype="BF16", **sizes)
    assert hashes == {convert(tmp_path / "each", tmp_path / "dst-each").model_hash}


@pytest.mark.parametrize("form", ["joined", "transposed"])
def test_bad_weights_are_named_with_their_expert(tmp_path: Path, form: str) -> None:
    def edit(tensors: dict) -> None:
        dtype, shape, data = tensors[PREFIXES[0] + "2.down_proj.weight"]
        tensors[PREFIXES[0] + "2.down_proj.weight"] = (dtype, shape, b"\x7f\xff" + data[2:])
        stack(tensors, scale="scale_inv", **FORMS[form])

    make_checkpoint(tmp_path / "src", edit=edit, **SIZES)
    with pytest.raises(WeightFormatError, match=r"mlp\.experts\.down_proj\[2\]: got 2 NaN byte"):
        convert(tmp_path / "src", tmp_path / "dst")


@pytest.mark.parametrize("form", ["joined", "transposed", "separate"])
def test_reading_an_expert_reads_no_other(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = TensorReader.read_part

    def counted(self: TensorReader, info: TensorInfo, start: int, length: int) -> np.ndarray:
        if ".experts." in info.name:
            read.append(length)
        return original(self, info, start, length)

    edit = FORMS[form] | {"scale": "scale_inv"}
    made = make_checkpoint(tmp_path / "src", edit=lambda t: stack(t, **edit), **SIZES)
    monkeypatch.setattr(TensorReader, "read_part", counted)
    convert(tmp_path / "src", tmp_path / "dst")
    held = sum(len(data) for name, (_, _, data) in made.tensors.items() if ".experts." in name)
    assert sum(read) == held
    assert max(read) == 2 * INNER * HIDDEN if form != "separate" else INNER * HIDDEN
