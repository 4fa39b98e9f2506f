"""Every kind of FP8 checkpoint: what its experts and the host's matrices become, against the checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import random_checkpoint
import torch
from random_checkpoint import FP8_CONFIG, RandomCheckpoint, make_checkpoint, to_bytes

from duckllm.errors import CheckpointError
from duckllm.layers.cpu_runtime import CpuRuntime
from duckllm.layers.linear import GatedMLP, Linear
from duckllm.models.inspection import inspect_model
from duckllm.weights import e4m3
from duckllm.weights.convert import convert
from duckllm.weights.host_tensors import HostTensors
from duckllm.weights.manifest import Manifest
from duckllm.weights.reader import ExpertFile
from duckllm.weights.tensor_check import ModelTensors
from duckllm.weights.units import ExpertWeights, unpack_expert_units
from support.checkpoints import BASE_CONFIG

# Blocks at every edge: none of the sizes divides by 128.
SIZES = {
    "hidden_size": 272,
    "intermediate_size": 336,
    "moe_intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 0,
    "n_routed_experts": 2,
}


def group(**weights: object) -> dict:
    return {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", **weights}}


def compressed(**groups: dict) -> dict:
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


@dataclass(frozen=True)
class Kind:
    """One form in which checkpoints come, and what becomes of it."""

    config: dict | None
    block: tuple[int | None, int | None]
    suffix: str = "weight_scale_inv"
    rank: int = 2
    dtype: str = "F32"
    layout: str = "block"
    requantised: str = ""
    more: dict = field(default_factory=dict)


FINE = {"weight_block_size": [64, 64], "quant_method": "fp8"}
KINDS = {
    "block-128": Kind(FP8_CONFIG, (128, 128)),
    "block-256x128": Kind(FP8_CONFIG | {"weight_block_size": [256, 128]}, (256, 128)),
    "block-128x256": Kind(FP8_CONFIG | {"weight_block_size": [128, 256]}, (128, 256), suffix="scale"),
    "block-larger-than-all": Kind(FP8_CONFIG | {"weight_block_size": [1000, 1000]}, (1000, 1000)),
    "e8m0": Kind(FP8_CONFIG | {"scale_fmt": "ue8m0"}, (128, 128), dtype="F8_E8M0"),
    "transformers-per-tensor": Kind({"quant_method": "fp8", "weight_block_size": None}, (None, None), rank=0),
    "vllm-static": Kind(
        {"quant_method": "fp8", "activation_scheme": "static"}, (None, None), suffix="weight_scale", rank=1
    ),
    "compressed-tensor": Kind(
        compressed(group_0=group(strategy="tensor")),
        (None, None),
        suffix="weight_scale",
        rank=1,
        dtype="BF16",
    ),
    "compressed-channel": Kind(
        compressed(group_0=group(strategy="channel", symmetric=True, dynamic=False)),
        (1, None),
        suffix="weight_scale",
        dtype="BF16",
        layout="channel",
    ),
    "compressed-channel-flat": Kind(
        compressed(group_0=group(strategy="channel")),
        (1, None),
        suffix="weight_scale",
        rank=1,
        layout="channel",
    ),
    "compressed-block": Kind(
        compressed(group_0=group(strategy="block", block_structure=[128, 128])), (128, 128), "weight_scale"
    ),
    "compressed-block-text": Kind(
        compressed(group_0=group(strategy="block", block_structure="128x128")), (128, 128), "weight_scale"
    ),
    "modelopt": Kind(
        {"quant_method": "modelopt", "quant_algo": "FP8"}, (None, None), suffix="weight_scale", rank=0
    ),
    "modelopt-file": Kind(
        None,
        (None, None),
        suffix="weight_scale",
        rank=0,
        more={"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
    ),
    "block-64": Kind(FP8_CONFIG | FINE, (64, 64), requantised="a scale for 64 x 64 weights"),
    "block-1x128": Kind(
        FP8_CONFIG | {"weight_block_size": [1, 128]}, (1, 128), requantised="a scale for 1 x 128 weights"
    ),
    "block-128x64": Kind(
        FP8_CONFIG | {"weight_block_size": [128, 64]}, (128, 64), requantised="a scale for 128 x 64 weights"
    ),
    "block-192": Kind(
        FP8_CONFIG | {"weight_block_size": [192, 192]},
        (192, 192),
        # All rows or columns of a matrix that has fewer.
        requantised="a scale for 144 x 192 weights and a scale for 192 x 144 weights",
    ),
}
# What a model must have beside what the converter reads.
FULL = {
    field: value
    for field, value in BASE_CONFIG.items()
    if field not in random_checkpoint.config() and field != "quantization_config"
}
EXACT = [name for name, kind in KINDS.items() if not kind.requantised]
ROUNDED = [name for name, kind in KINDS.items() if kind.requantised]


def make(folder: Path, name: str, **options: object) -> RandomCheckpoint:
    kind = KINDS[name]
    made = make_checkpoint(
        folder,
        scale_suffix=kind.suffix,
        scale_dtype=kind.dtype,
        scale_block=kind.block,
        scale_rank=kind.rank,
        quantization_config=kind.config,
        **(SIZES | options),  # type: ignore[arg-type]
    )
    if kind.more:
        (folder / "hf_quant_config.json").write_text(json.dumps(kind.more))
    return made


def values(made: RandomCheckpoint, name: str, suffix: str) -> np.ndarray:
    """f32 scales as the checkpoint has them."""
    dtype, stored = made.tensors[name + suffix][0], made.array(name + suffix)
    if dtype == "F8_E8M0":
        return np.ldexp(1.0, stored.astype(int) - 127).astype(np.float32)
    if dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def wide(made: RandomCheckpoint, stem: str, kind: Kind) -> np.ndarray:
    """A matrix of the checkpoint in float64, element by element by what its scales' blocks say."""
    codes = made.array(stem + "weight")
    scales = values(made, stem, kind.suffix)
    rows, columns = codes.shape
    scales = scales.reshape(-(-rows // (kind.block[0] or rows)), -(-columns // (kind.block[1] or columns)))
    row = np.arange(rows) // (kind.block[0] or rows)
    column = np.arange(columns) // (kind.block[1] or columns)
    return e4m3.e4m3_values()[codes].astype(np.float64) * scales[row][:, column]


def decoded(manifest: Manifest, layer: int, expert: int) -> ExpertWeights:
    units = np.array(ExpertFile.open(manifest, layer).units[expert])
    sizes = (manifest.moe_intermediate_size, manifest.hidden_size)
    return unpack_expert_units(units, *sizes, manifest.format, manifest.scale_layout)


def read_back(manifest: Manifest, layer: int, expert: int, part: str) -> np.ndarray:
    """A matrix of the converted model in float64."""
    got = decoded(manifest, layer, expert)
    codes, scales = getattr(got, part), getattr(got, f"{part}_scales")
    if manifest.scale_layout == "channel":
        assert scales.shape == (codes.shape[0], 1)
    spread = np.broadcast_to(e4m3.expand_scales(scales, *codes.shape), codes.shape)
    return e4m3.e4m3_values()[codes].astype(np.float64) * spread


@pytest.mark.parametrize("name", EXACT)
def test_experts_are_kept_exactly(tmp_path: Path, name: str) -> None:
    kind, made = KINDS[name], make(tmp_path / "src", name)
    manifest = convert(tmp_path / "src", tmp_path / "dst", verify=True)
    assert manifest.scale_layout == kind.layout
    assert manifest.source["quantisation_error"] is None
    assert manifest.source["requantised"] == ""
    for expert in range(2):
        for part in ("gate", "up", "down"):
            stem = f"model.layers.1.mlp.experts.{expert}.{part}_proj."
            assert getattr(decoded(manifest, 1, expert), part).tobytes() == made.tensors[stem + "weight"][2]
            np.testing.assert_array_equal(read_back(manifest, 1, expert, part), wide(made, stem, kind))


@pytest.mark.parametrize("name", ROUNDED)
def test_experts_of_finer_blocks_are_rounded_again_and_the_error_is_told(tmp_path: Path, name: str) -> None:
    kind, made = KINDS[name], make(tmp_path / "src", name)
    manifest = convert(tmp_path / "src", tmp_path / "dst", verify=True)
    assert manifest.scale_layout == "block"
    assert manifest.source["requantised"] == kind.requantised
    squares = errors = 0.0
    for expert in range(2):
        for part in ("gate", "up", "down"):
            expected = wide(made, f"model.layers.1.mlp.experts.{expert}.{part}_proj.", kind)
            got = read_back(manifest, 1, expert, part)
            errors += np.sum((got - expected) ** 2)
            squares += np.sum(expected**2)
            largest = np.abs(expected).max()
            assert np.all(np.abs(got - expected) <= np.abs(expected) / 16 + largest * 2.0**-9 / 448)
    report = manifest.source["quantisation_error"]
    assert report["rms_relative"] == pytest.approx((errors / squares) ** 0.5, rel=1e-4)
    assert 0.005 < report["rms_relative"] < 0.04
    assert report["max_relative"] <= 1 / 16


def test_finer_blocks_that_agree_are_exact(tmp_path: Path) -> None:
    """A tool may write 64 x 64 blocks of what was scaled by 128 x 128 ones."""
    whole = make_checkpoint(tmp_path / "whole", **SIZES)

    def edit(tensors: dict) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale_inv")]:
            _, (rows, columns), _ = tensors[name.replace("_scale_inv", "")]
            scales = np.repeat(np.repeat(whole.array(name), 2, axis=0), 2, axis=1)
            scales = scales[: -(-rows // 64), : -(-columns // 64)]
            tensors[name] = ("F32", scales.shape, scales.tobytes())

    config = FP8_CONFIG | {"weight_block_size": [64, 64]}
    make_checkpoint(tmp_path / "fine", edit=edit, quantization_config=config, **SIZES)
    fine = convert(tmp_path / "fine", tmp_path / "dst-fine", verify=True)
    assert fine.source["quantisation_error"] is None
    assert fine.expert_layers == convert(tmp_path / "whole", tmp_path / "dst-whole").expert_layers


def test_a_mixture_with_rows_keeps_the_rows(tmp_path: Path) -> None:
    """As of a tool that leaves one layer's experts in BF16, or has single ones with a scale per tensor."""
    rng = np.random.default_rng(7)
    stem = "model.layers.1.mlp.experts.0."
    bf16 = rng.standard_normal((144, 272)).astype(np.float32)

    def edit(tensors: dict) -> None:
        tensors.pop(stem + "gate_proj.weight_scale")
        tensors[stem + "gate_proj.weight"] = ("BF16", (144, 272), to_bytes(bf16, "BF16"))
        tensors[stem + "up_proj.weight_scale"] = ("F32", (1,), np.float32([0.25]).tobytes())

    groups = {"group_0": group(strategy="channel"), "group_1": group(strategy="tensor")}
    made = make_checkpoint(
        tmp_path / "src",
        edit=edit,
        scale_suffix="weight_scale",
        scale_block=(1, None),
        quantization_config=compressed(**groups),
        **SIZES,
    )
    manifest = convert(tmp_path / "src", tmp_path / "dst", verify=True)
    assert manifest.scale_layout == "channel"
    expected = (made.array(stem + "gate_proj.weight").astype(np.uint32) << 16).view(np.float32)
    got = read_back(manifest, 1, 0, "gate")
    scales = np.abs(expected).max(axis=1, keepdims=True) / 448
    assert np.all(np.abs(got - expected) <= np.maximum(np.abs(expected) / 16, scales * 2.0**-9))
    assert manifest.source["quantisation_error"]["weights"] == 144 * 272
    up = e4m3.e4m3_values()[made.array(stem + "up_proj.weight")].astype(np.float64) * 0.25
    np.testing.assert_array_equal(read_back(manifest, 1, 0, "up"), up)
    down = wide(made, stem + "down_proj.", KINDS["compressed-channel"])
    np.testing.assert_array_equal(read_back(manifest, 1, 0, "down"), down)


@pytest.mark.parametrize("name", KINDS)
def test_the_hosts_matrices_are_exact(tmp_path: Path, name: str) -> None:
    kind, made = KINDS[name], make(tmp_path / "src", name)
    convert(tmp_path / "src", tmp_path / "dst")
    tensors = HostTensors(tmp_path / "dst")
    layer = "model.layers.0.mlp"
    runtime = CpuRuntime.new(512, 1)
    rng = np.random.default_rng(1)
    for part, (out, inp) in (("gate_proj", (336, 272)), ("down_proj", (272, 336))):
        expected = wide(made, f"{layer}.{part}.", kind)
        got = tensors.linear(f"{layer}.{part}", torch.float32)
        np.testing.assert_array_equal(got.numpy(), expected.astype(np.float32))
        stored, scales = tensors.stored_linear(f"{layer}.{part}")
        native = not kind.requantised
        assert stored.dtype == (torch.float8_e4m3fn if native else torch.float32)
        if native:
            assert scales is not None
            by_row = kind.layout == "channel"
            assert tuple(scales.shape) == ((out, 1) if by_row else (-(-out // 128), -(-inp // 128)))
        x = torch.from_numpy(rng.standard_normal((3, inp)).astype(np.float32))
        linear = Linear.load(tensors, f"{layer}.{part}", out, inp, runtime=runtime, factor=0.3)
        assert [weight.format == "f32" for weight in linear.weights] == [not native]
        size = np.abs(x.numpy().astype(np.float64)) @ np.abs(expected).T
        product = x.numpy().astype(np.float64) @ expected.T
        assert np.all(np.abs(linear(x).numpy() - 0.3 * product) <= 1e-6 * size)


@pytest.mark.parametrize("name", ["block-128", "compressed-channel", "vllm-static", "block-64"])
def test_gate_and_up_of_the_host_are_joined(tmp_path: Path, name: str) -> None:
    kind, made = KINDS[name], make(tmp_path / "src", name)
    convert(tmp_path / "src", tmp_path / "dst")
    layer = "model.layers.0.mlp"
    mlp = GatedMLP(HostTensors(tmp_path / "dst"), layer, 272, 336, CpuRuntime.new(512, 1))
    assert len(mlp.gate_up.weights) == (1 if name in ("compressed-channel", "block-64") else 2)
    gate, up, down = (wide(made, f"{layer}.{part}_proj.", kind) for part in ("gate", "up", "down"))
    x = np.random.default_rng(2).standard_normal((2, 272)) / 100
    gated = x @ gate.T
    expected = (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T
    got = mlp(torch.from_numpy(x.astype(np.float32))).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())


ROW, TENSOR, BLOCK = "one scale per row", "one scale per tensor", "one scale per block of"
WRONG = [
    ("compressed-channel", "gate_proj.weight_scale", (1, 144), f"[144, 1] ({ROW})"),
    ("compressed-channel", "down_proj.weight_scale", (144, 1), f"[272, 1] ({ROW})"),
    ("block-128", "gate_proj.weight_scale_inv", (3, 2), f"[2, 3] ({BLOCK} 128 x 128)"),
    ("block-64", "gate_proj.weight_scale_inv", (2, 3), f"[3, 5] ({BLOCK} 64 x 64)"),
    ("modelopt", "gate_proj.weight_scale", (144, 1), f"[1, 1] ({TENSOR})"),
    ("vllm-static", "up_proj.weight_scale", (2,), f"[2, 3] ({BLOCK} 128 x 128) or [1, 1] ({TENSOR})"),
]


@pytest.mark.parametrize(("name", "tensor", "shape", "expected"), WRONG)
def test_scales_of_another_shape_are_refused(
    tmp_path: Path, name: str, tensor: str, shape: tuple[int, ...], expected: str
) -> None:
    def edit(tensors: dict) -> None:
        dtype, _, data = tensors[f"model.layers.1.mlp.experts.1.{tensor}"]
        size = int(np.prod(shape)) * (4 if dtype == "F32" else 2)
        tensors[f"model.layers.1.mlp.experts.1.{tensor}"] = (dtype, shape, (data * 300)[:size])

    make(tmp_path / "src", name, edit=edit)
    message = f"experts.1.{tensor}: got shape {list(shape)}, expected {expected} for "
    with pytest.raises(CheckpointError, match=re.escape(message)):
        convert(tmp_path / "src", tmp_path / "dst")


def test_scales_that_fit_in_two_ways_are_refused(tmp_path: Path) -> None:
    groups = {
        "group_0": group(strategy="block", block_structure=[128, 128]),
        "group_1": group(strategy="block", block_structure=[136, 128]),
    }
    make_checkpoint(
        tmp_path / "src", scale_suffix="weight_scale", quantization_config=compressed(**groups), **SIZES
    )
    with pytest.raises(CheckpointError, match=r"got shape \[2, 3\], which fits in several ways, expected"):
        convert(tmp_path / "src", tmp_path / "dst")


@pytest.mark.parametrize("byte", [0xFF, 0])
def test_powers_of_two_at_the_ends_of_e8m0(tmp_path: Path, byte: int) -> None:
    """0xff is NaN; 0 is 2^-127, which f32 has as a denormal."""
    name = "model.layers.1.mlp.experts.0.up_proj.weight_scale_inv"

    def edit(tensors: dict) -> None:
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape, bytes([byte]) + data[1:])

    made = make(tmp_path / "src", "e8m0", edit=edit)
    if byte == 0xFF:
        with pytest.raises(CheckpointError, match=r"got a scale of nan \(1 of 6 are out of range\)"):
            convert(tmp_path / "src", tmp_path / "dst")
        return
    manifest = convert(tmp_path / "src", tmp_path / "dst", verify=True)
    assert decoded(manifest, 1, 0).up_scales[0, 0] == 2.0**-127
    expected = wide(made, "model.layers.1.mlp.experts.0.up_proj.", KINDS["e8m0"])
    np.testing.assert_array_equal(read_back(manifest, 1, 0, "up"), expected)


def without_scales(*names: str) -> Callable[[dict], None]:
    def edit(tensors: dict) -> None:
        for name in names:
            dtype, shape, data = tensors[name]
            tensors[name] = (dtype, shape, bytes(len(data)))

    return edit


def test_a_matrix_without_any_scale_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expert = "model.layers.1.mlp.experts.1.up_proj.weight"
    host = "model.layers.0.mlp.down_proj.weight"
    edit = without_scales(f"{expert}_scale_inv")
    make(tmp_path / "src", "block-128", edit=edit)
    words = r"experts\.1\.up_proj\.weight_scale_inv: got 6 scale\(s\) of zero, expected others for codes"
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path / "src", tmp_path / "dst")
    make(tmp_path / "zeros", "block-128", edit=without_scales(f"{expert}_scale_inv", expert))
    manifest = convert(tmp_path / "zeros", tmp_path / "of-zeros")
    assert not read_back(manifest, 1, 1, "up").any()
    make(tmp_path / "host", "block-128", edit=without_scales(f"{host}_scale_inv"))
    with pytest.raises(CheckpointError, match=r"down_proj\.weight_scale_inv: got \d scale\(s\) of zero"):
        convert(tmp_path / "host", tmp_path / "host-dst")
    monkeypatch.setattr(ModelTensors, "check_host_scales", lambda tensors: None)  # as an earlier version did
    convert(tmp_path / "host", tmp_path / "host-dst")
    tensors = HostTensors(tmp_path / "host-dst")
    for read in (tensors.linear, tensors.stored_linear):
        with pytest.raises(CheckpointError, match=r"down_proj\.weight_scale_inv: got \d scale\(s\) of zero"):
            read(host.removesuffix(".weight"))


def test_scales_of_activations_and_the_cache_are_not_needed(tmp_path: Path) -> None:
    """Nothing but weights is quantised here."""
    names = [
        "model.layers.1.mlp.experts.0.up_proj.input_scale",
        "model.layers.0.self_attn.o_proj.input_scale",
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.v_proj.v_scale",
        "model.layers.0.self_attn.k_proj.output_scale",
        "model.layers.0.mlp.up_proj.activation_scale",
    ]
    one = np.float32([0.5]).tobytes()
    make(tmp_path / "with", "vllm-static", edit=lambda t: t.update({n: ("F32", (1,), one) for n in names}))
    make(tmp_path / "without", "vllm-static")
    manifest = convert(tmp_path / "with", tmp_path / "dst-with", verify=True)
    assert manifest.model_hash == convert(tmp_path / "without", tmp_path / "dst-without").model_hash


@pytest.mark.parametrize("name", ["vllm-static", "compressed-channel", "block-64"])
def test_a_checkpoint_is_inspected_as_it_will_be_converted(tmp_path: Path, name: str) -> None:
    make(tmp_path / "src", name, **(FULL | {"num_key_value_heads": 2}))
    convert(tmp_path / "src", tmp_path / "dst")
    before, after = inspect_model(tmp_path / "src"), inspect_model(tmp_path / "dst")
    assert before.scale_layout == after.scale_layout == KINDS[name].layout
    assert before.expert_bytes("fp9") == after.expert_bytes("fp9")
    assert before.parts == after.parts
