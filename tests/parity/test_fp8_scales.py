"""Models whose FP8 weights have a scale per tensor, per row or per finer block, with stacked experts too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from duckllm.weights import e4m3
from duckllm.weights.convert import convert
from duckllm.weights.manifest import Manifest
from duckllm.weights.reader import ExpertFile
from duckllm.weights.safetensors_file import read_header
from duckllm.weights.units import unpack_expert_units
from support.families import deepseek_v32, write_model
from support.models import TOLERANCE, all_logits, build_model, difference
from support.reference import load_reference, read_checkpoint, reference_logits

SIZES = {"hidden_size": 200, "moe_intermediate_size": 136, "num_hidden_layers": 3}
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}
CONFIGS = {
    "tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": WEIGHTS}},
    },
    "block_64": {"quant_method": "fp8", "weight_block_size": [64, 64]},
}


def scaled(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and, in f32, what they stand for."""
    rows, columns = weight.shape
    high, wide = {"tensor": (rows, columns), "channel": (1, columns), "block_64": (64, 64)}[kind]
    row, column = torch.arange(rows) // high, torch.arange(columns) // wide
    largest = torch.zeros(int(row[-1]) + 1, int(column[-1]) + 1)
    place = (row[:, None] * largest.shape[1] + column).flatten()
    largest.view(-1).scatter_reduce_(0, place, weight.abs().flatten(), "amax")
    scales = largest / 448
    spread = scales[row][:, column]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return codes, scales.reshape(1) if kind == "tensor" else scales, codes.float() * spread


def rewrite(source: Path, folder: Path, twin: Path, kind: str, stacked: bool) -> None:
    """The checkpoint with scales of another kind, and its twin in f32 for the reference."""
    config = json.loads((source / "config.json").read_text())
    stored = read_header(source / "model.safetensors")
    quantised = {name for name, info in stored.items() if info.dtype == "F8_E4M3"}
    if kind == "tensor":  # everything that is a matrix
        quantised = {
            name for name, info in stored.items() if len(info.shape) == 2 and name.endswith(".weight")
        }
    fp8, wide = {}, {}
    for name, weight in read_checkpoint(source).items():
        if name in quantised:
            fp8[name], fp8[f"{name}_scale"], wide[name] = scaled(weight, kind)
        else:
            fp8[name] = wide[name] = weight
    if stacked:
        _stack(fp8, config["n_routed_experts"])
    for place, tensors in ((folder, fp8), (twin, wide)):
        place.mkdir()
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, place / "model.safetensors"
        )
        (place / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[kind]}))


def _stack(tensors: dict[str, torch.Tensor], num_experts: int) -> None:
    """As transformers' modules have their experts, [E, 2I, H] and [E, H, I]."""
    for prefix in sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name}):
        for old, new in (("weight", ""), ("weight_scale", "_scale")):
            raw = {}
            for part in ("gate", "up", "down"):
                each = [tensors.pop(f"{prefix}.experts.{n}.{part}_proj.{old}") for n in range(num_experts)]
                kind = each[0].dtype
                raw[part] = [tensor.view(torch.uint8) for tensor in each]  # torch cannot join FP8 tensors
            both = [torch.cat(pair) for pair in zip(raw["gate"], raw["up"], strict=True)]
            tensors[f"{prefix}.experts.gate_up_proj{new}"] = torch.stack(both).view(kind)
            tensors[f"{prefix}.experts.down_proj{new}"] = torch.stack(raw["down"]).view(kind)


def put_experts(twin: Path, manifest: Manifest) -> None:
    """Replaces the twin's experts by those of the converted model, which have been rounded again."""
    tensors = load_file(twin / "model.safetensors")
    sizes = (manifest.moe_intermediate_size, manifest.hidden_size, manifest.format)
    for layer in manifest.expert_layers:
        for expert, units in enumerate(ExpertFile.open(manifest, layer).units):
            got = unpack_expert_units(units, *sizes)
            for part in ("gate", "up", "down"):
                weight = e4m3.dequantise(getattr(got, part), getattr(got, f"{part}_scales"))
                name = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
                assert (
                    0
                    < (tensors[name] - torch.from_numpy(weight)).abs().max()
                    < tensors[name].abs().max() / 16
                )
                tensors[name] = torch.from_numpy(weight)
    save_file(tensors, twin / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "stacked"),
    [("tensor", False), ("tensor", True), ("channel", False), ("channel", True), ("block_64", False)],
)
def test_logits_equal_the_reference(tmp_path: Path, kind: str, stacked: bool) -> None:
    write_model(tmp_path / "source", deepseek_v32("fp8_scales", **SIZES), 31)
    rewrite(tmp_path / "source", tmp_path / "src", tmp_path / "twin", kind, stacked)
    manifest = convert(tmp_path / "src", tmp_path / "dst", verify=True)
    assert manifest.scale_layout == ("channel" if kind == "channel" else "block")
    if kind == "block_64":
        put_experts(tmp_path / "twin", manifest)
    tokens = torch.randint(2, 320, (48,), generator=torch.Generator().manual_seed(5)).tolist()
    reference = reference_logits(load_reference(tmp_path / "twin"), tokens)
    got = difference(all_logits(build_model(tmp_path / "dst"), tokens, 16), reference)
    print(f"{kind}: largest {got:.3g}")  # pytest -s shows it
    assert got <= TOLERANCE
