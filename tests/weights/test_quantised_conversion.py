"""Conversion into int8 and int4: what lands in the units, layers in other formats, importance, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from random_checkpoint import RandomCheckpoint, make_checkpoint
from safetensors.numpy import save_file
from test_convert_command import app
from typer.testing import CliRunner

from duckllm.errors import CheckpointError, ConfigError, WeightHashError
from duckllm.weights import e4m3
from duckllm.weights.convert import convert
from duckllm.weights.formats import LayerFormat
from duckllm.weights.grouped import unpack_quantised_expert
from duckllm.weights.manifest import Manifest
from duckllm.weights.reader import ExpertFile
from duckllm.weights.rounding import int4_groups, int8_blocks, relative_importance
from duckllm.weights.units import unpack_expert_units

FIRST, MTP = 1, 3


@pytest.fixture
def made(tmp_path: Path) -> RandomCheckpoint:
    return make_checkpoint(tmp_path / "src")


def source_of(made: RandomCheckpoint, layer: int, expert: int) -> dict[str, np.ndarray]:
    values = {}
    for part in ("gate", "up", "down"):
        stem = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        values[part] = e4m3.dequantise(made.array(stem), made.array(stem + "_scale_inv"))
    return values


def test_int8_is_what_the_numpy_twin_rounds_to(made: RandomCheckpoint, tmp_path: Path) -> None:
    manifest = convert(tmp_path / "src", tmp_path / "dst", weight_format="int8", verify=True)
    assert (manifest.format, manifest.scale_layout, manifest.layer_formats()[MTP]) == (
        "int8",
        "block",
        "int8",
    )
    assert "scale_layout" not in manifest.to_json()
    file = ExpertFile.open(manifest, FIRST)
    file.verify()
    sizes = manifest.moe_intermediate_size, manifest.hidden_size
    got = unpack_expert_units(file.units[1], *sizes, "int8")
    for part, weights in source_of(made, FIRST, 1).items():
        codes, scales = int8_blocks(weights)
        np.testing.assert_array_equal(getattr(got, part), codes)
        np.testing.assert_array_equal(getattr(got, f"{part}_scales"), scales)
    assert 0.001 < manifest.source["quantisation_error"]["rms_relative"] < 0.02


def test_int4_leaves_mtp_in_fp8(made: RandomCheckpoint, tmp_path: Path) -> None:
    manifest = convert(tmp_path / "src", tmp_path / "dst", weight_format="int4", verify=True)
    assert manifest.layer_formats() == {1: "int4", 2: "int4", MTP: "fp8"}
    assert manifest.layer_format(MTP) == LayerFormat("fp8", "block")
    assert manifest.layer_format(FIRST) == LayerFormat("int4", "group")
    value = json.loads((tmp_path / "dst" / "duck.json").read_text())
    assert (value["format"], value["scale_layout"], value["block_size"]) == ("int4", "group", None)
    assert value["expert_layers"][str(MTP)]["format"] == "fp8"
    assert "format" not in value["expert_layers"]["1"]
    sizes = manifest.moe_intermediate_size, manifest.hidden_size
    file = ExpertFile.open(manifest, FIRST)
    got = unpack_quantised_expert(file.units[1], *sizes, "int4")
    for part, weights in source_of(made, FIRST, 1).items():
        codes, _ = int4_groups(weights, 16 if part == "down" else 32)
        np.testing.assert_array_equal(getattr(got, part).codes, codes)
    draft = unpack_expert_units(ExpertFile.open(manifest, MTP).units[1], *sizes, "fp8")
    stem = f"model.layers.{MTP}.mlp.experts.1.up_proj.weight"
    np.testing.assert_array_equal(draft.up, made.array(stem))
    assert manifest.check_files() is None
    again = convert(tmp_path / "src", tmp_path / "dst", weight_format="int4")
    assert again.model_hash == manifest.model_hash


def test_layers_that_are_kept_and_channel_scales(tmp_path: Path) -> None:
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    group = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    config |= {"config_groups": {"g": group}}
    src, dst = tmp_path / "src", tmp_path / "dst"
    make_checkpoint(src, quantization_config=config, scale_block=(1, 1 << 20), num_hidden_layers=4)
    manifest = convert(src, dst, weight_format="int4", keep=["fp8:first", "int8:mtp"], verify=True)
    assert manifest.layer_formats() == {1: "fp8", 2: "int4", 3: "int4", 4: "int8"}
    assert manifest.layer_format(1) == LayerFormat("fp8", "channel")
    assert manifest.layer_format(4) == LayerFormat("int8", "block")
    assert Manifest.load(dst).model_hash == manifest.model_hash
    for layer in manifest.expert_layers:
        ExpertFile.open(manifest, layer).verify()


def test_from_bf16(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src", dtype="BF16")
    manifest = convert(tmp_path / "src", tmp_path / "dst", weight_format="int4-bf16", verify=True)
    assert manifest.layer_formats() == {1: "int4-bf16", 2: "int4-bf16", MTP: "fp8"}
    assert 0.03 < manifest.source["quantisation_error"]["rms_relative"] < 0.15


def calibration(path: Path, manifest: Manifest, layers: tuple[int, ...] = (1, 2), name: str = "") -> Path:
    rng = np.random.default_rng(4)
    tensors = {}
    for layer in layers:
        shape = manifest.num_experts, manifest.moe_intermediate_size
        tensors[f"layers.{layer}.hidden"] = rng.uniform(0.01, 9, manifest.hidden_size).astype(np.float32)
        tensors[f"layers.{layer}.experts"] = rng.uniform(0.01, 9, shape).astype(np.float32)
        tensors[f"layers.{layer}.counts"] = np.ones(manifest.num_experts, np.int64)
    metadata = {"format": name or "duckllm-calibration-1", "config_sha256": manifest.config_sha256}
    save_file(tensors, path, metadata)
    return path


def test_importance_weights_the_rounding(made: RandomCheckpoint, tmp_path: Path) -> None:
    plain = convert(tmp_path / "src", tmp_path / "plain", weight_format="int4")
    file = calibration(tmp_path / "c.safetensors", plain)
    manifest = convert(tmp_path / "src", tmp_path / "dst", weight_format="int4", importance=file, verify=True)
    assert len(manifest.source["importance"]) == 64
    assert manifest.model_hash != plain.model_hash
    sizes = manifest.moe_intermediate_size, manifest.hidden_size
    got = unpack_quantised_expert(ExpertFile.open(manifest, 2).units[1], *sizes, "int4")
    from safetensors.numpy import load_file

    means = load_file(file)
    for part, weights in source_of(made, 2, 1).items():
        mean = means["layers.2.experts"][1] if part == "down" else means["layers.2.hidden"]
        codes, _ = int4_groups(weights, 16 if part == "down" else 32, "f16", relative_importance(mean))
        np.testing.assert_array_equal(getattr(got, part).codes, codes)
    with pytest.raises(ConfigError, match=r"it holds one in int4, fp8 in layer 3, importance \w{12}"):
        convert(tmp_path / "src", tmp_path / "dst", weight_format="int4")


def test_importance_that_is_none_or_of_no_use(made: RandomCheckpoint, tmp_path: Path) -> None:
    manifest = convert(tmp_path / "src", tmp_path / "plain", weight_format="int4")
    src, dst = tmp_path / "src", tmp_path / "dst"
    good = calibration(tmp_path / "c.safetensors", manifest)
    with pytest.raises(
        ConfigError, match=r"importance: .*expected nothing with a format that rounds nothing"
    ):
        convert(src, dst, weight_format="int8", importance=good)
    other = calibration(tmp_path / "d.safetensors", manifest, name="else")
    with pytest.raises(ConfigError, match="expected a file of duckllm calibrate"):
        convert(src, dst, weight_format="int4", importance=other)
    foreign = calibration(tmp_path / "e.safetensors", replace(manifest, hidden_size=8))
    with pytest.raises(ConfigError, match=r"importance: .*F32 \[\d+\] for layers.1.hidden, F32 \[8\]"):
        convert(src, dst, weight_format="int4", importance=foreign)
    with pytest.raises(ConfigError, match=r"importance: .*no such layer for layers.7.\w+, F32"):
        convert(src, dst, weight_format="int4", importance=calibration(good, manifest, (1, 7)))
    with pytest.raises(CheckpointError, match="cannot be read"):
        convert(src, dst, weight_format="int4", importance=tmp_path / "absent")
    from safetensors.numpy import load_file

    means = load_file(calibration(good, manifest))
    means["layers.1.hidden"][3] = -1
    save_file(means, good, {"format": "duckllm-calibration-1"})
    with pytest.raises(CheckpointError, match=r"layers.1.hidden: got 1 value\(s\) that are no mean square"):
        convert(src, dst, weight_format="int4", importance=good)
    assert not dst.exists(), "said before anything is written"
    tuned = calibration(good, replace(manifest, config_sha256="0" * 64))
    with pytest.raises(ConfigError, match="expected one of this model: it is of another"):
        convert(src, dst, weight_format="int4", importance=tuned)


def test_a_changed_unit_is_found(made: RandomCheckpoint, tmp_path: Path) -> None:
    manifest = convert(tmp_path / "src", tmp_path / "dst", weight_format="int4")
    path = manifest.expert_path(1)
    data = bytearray(path.read_bytes())
    data[ExpertFile.open(manifest, 1).data_offset + 7] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightHashError, match="layer 1, stripe 0"):
        ExpertFile.open(manifest, 1).verify()


def test_manifests_of_layers_that_make_no_sense(made: RandomCheckpoint, tmp_path: Path) -> None:
    convert(tmp_path / "src", tmp_path / "dst", weight_format="int4")
    path = tmp_path / "dst" / "duck.json"
    text = path.read_text()
    for change, message in (
        ({"format": "int5"}, r"expert_layers.3.format: got 'int5', expected one of fp9"),
        ({"format": "int4", "scale_layout": "group"}, "expert_layers.3.format: got the model's own"),
        (
            {"format": "int8", "scale_layout": "channel"},
            "expert_layers.3.scale_layout: got 'channel', expected",
        ),
        (
            {"format": "fp8", "scale_layout": "block"},
            "expert_layers.3.scale_layout: got 'block', expected one",
        ),
    ):
        value = json.loads(text)
        value["expert_layers"]["3"] |= change
        path.write_text(json.dumps(value))
        with pytest.raises(CheckpointError, match=message):
            Manifest.load(tmp_path / "dst")
    value = json.loads(text)
    value["expert_layers"]["1"]["scale_layout"] = "group"
    path.write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match=r"expert_layers\.1: got a scale_layout without a format"):
        Manifest.load(tmp_path / "dst")


def test_the_command_says_what_was_rounded(made: RandomCheckpoint, tmp_path: Path) -> None:
    args = [str(tmp_path / "src"), str(tmp_path / "dst"), "--format", "int4", "--keep", "fp8:first,mtp"]
    result = CliRunner().invoke(app, [*args, "--keep", "int8:2", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["layer_formats"] == "fp8, int8 in layer 2"
    result = CliRunner().invoke(app, [args[0], str(tmp_path / "other"), *args[2:4], "--verify"])
    assert "int4, fp8 in layer 3 from F8_E4M3, 3 MoE layers (one of them MTP), " in result.stdout
    assert "rounded to int4: rms error " in result.stdout
