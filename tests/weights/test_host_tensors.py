"""The host's tensors in torch: as stored, and dequantised."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from random_checkpoint import RandomCheckpoint, make_checkpoint

from duckllm.errors import CheckpointError, ModelNotFoundError, WeightHashError
from duckllm.weights import e4m3
from duckllm.weights.convert import convert
from duckllm.weights.host_tensors import HostTensors
from duckllm.weights.manifest import Manifest, content_hash


def converted(tmp_path: Path, **options: object) -> tuple[RandomCheckpoint, HostTensors]:
    made = make_checkpoint(tmp_path / "src", **options)  # type: ignore[arg-type]
    convert(tmp_path / "src", tmp_path / "dst")
    return made, HostTensors(tmp_path / "dst")


def replace_file(path: Path, data: bytes) -> None:
    """Replaces a host file of a converted model, whose manifest then is of the new one."""
    path.write_bytes(data)
    manifest = path.parent / "duck.json"
    value = json.loads(manifest.read_text())
    value["host_files"][path.name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    value["model_hash"] = content_hash(value)
    manifest.write_text(json.dumps(value))


def test_names_and_tensors_as_stored(tmp_path: Path) -> None:
    made, tensors = converted(tmp_path)
    expected = sorted(name for name in made.tensors if ".experts." not in name)
    assert tensors.names() == expected
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}
    for name in expected:
        dtype, shape, data = made.tensors[name]
        got = tensors.get(name)
        assert got.dtype == dtypes[dtype]
        assert tuple(got.shape) == shape == tensors.shape(name)
        assert got.view(torch.uint8).numpy().tobytes() == data
    assert "model.norm.weight" in tensors
    assert "model.layers.1.mlp.experts.0.up_proj.weight" not in tensors


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "scale"])
def test_fp8_linears_with_edge_blocks_are_dequantised_exactly(tmp_path: Path, suffix: str) -> None:
    made, tensors = converted(tmp_path, scale_suffix=suffix, intermediate_size=300, hidden_size=200)
    name = "model.layers.0.mlp.gate_proj"
    scales = made.array(f"{name}.{suffix}")
    assert scales.shape == (3, 2)
    got = tensors.linear(name, torch.float32)
    assert got.dtype == torch.float32
    np.testing.assert_array_equal(got.numpy(), e4m3.dequantise(made.array(f"{name}.weight"), scales))
    by_hand = e4m3.e4m3_values()[made.array(f"{name}.weight")[299, 199]] * scales[2, 1]
    assert got[299, 199].item() == by_hand
    assert torch.equal(tensors.linear(name, torch.bfloat16), got.to(torch.bfloat16))


def test_wide_linears_are_converted(tmp_path: Path) -> None:
    _, tensors = converted(tmp_path, dtype="BF16")
    stored = tensors.get("model.layers.0.mlp.gate_proj.weight")
    assert stored.dtype == torch.bfloat16
    assert torch.equal(tensors.linear("model.layers.0.mlp.gate_proj", torch.float32), stored.float())


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    _, tensors = converted(tmp_path)
    for call in (tensors.get, tensors.shape):
        with pytest.raises(CheckpointError, match=r"model\.nothing: no such tensor"):
            call("model.nothing")
    with pytest.raises(CheckpointError, match=r"model\.nothing\.weight: no such tensor"):
        tensors.linear("model.nothing", torch.float32)


def test_an_fp8_weight_whose_scale_is_gone_is_never_cast(tmp_path: Path) -> None:
    converted(tmp_path)
    file = tmp_path / "dst/host-00001.safetensors"
    data = file.read_bytes()
    lost, other = b"self_attn.o_proj.weight_scale_inv", b"self_attn.o_proj.weight_scale_xyz"
    assert lost in data
    file.write_bytes(data.replace(lost, other))
    with pytest.raises(CheckpointError, match=r"o_proj\.weight: FP8 without .*o_proj\.weight_scale_inv"):
        HostTensors(tmp_path / "dst")


def test_whole_numbers_are_no_linear_layer(tmp_path: Path) -> None:
    converted(tmp_path)
    file = tmp_path / "dst/host-00000.safetensors"
    data = file.read_bytes()
    bf16 = b'"model.layers.0.self_attn.indexer.weights_proj.weight":{"dtype":"BF16"'
    assert bf16 in data
    replace_file(file, data.replace(bf16, bf16.replace(b'"BF16"', b'"I16" ')))
    tensors = HostTensors(tmp_path / "dst")
    with pytest.raises(CheckpointError, match=r"got torch\.int16, expected a floating type"):
        tensors.linear("model.layers.0.self_attn.indexer.weights_proj", torch.float32)


def test_a_folder_that_is_not_converted(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    with pytest.raises(ModelNotFoundError):
        HostTensors(tmp_path / "src")


def test_every_tensor_of_the_demo_model(tmp_path: Path, demo_checkpoint: Path) -> None:
    from safetensors import safe_open

    convert(demo_checkpoint, tmp_path / "demo")
    tensors = HostTensors(tmp_path / "demo")
    index = json.loads((demo_checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    host = {name: file for name, file in index.items() if ".experts." not in name}
    assert tensors.names() == sorted(host)
    opened = {file: safe_open(demo_checkpoint / file, "pt") for file in set(host.values())}
    for name, file in host.items():
        expected = opened[file].get_tensor(name)
        got = tensors.get(name)
        assert got.dtype == expected.dtype
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    assert len(Manifest.load(tmp_path / "demo").host_files) == 8


def test_a_changed_byte_of_a_host_file_is_noticed(tmp_path: Path) -> None:
    _, tensors = converted(tmp_path)
    tensors.get("model.layers.1.input_layernorm.weight")
    file = tmp_path / "dst/host-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(WeightHashError, match=r"host-00001\.safetensors: got SHA-256 [0-9a-f]+, expected"):
        HostTensors(tmp_path / "dst").get("model.layers.1.input_layernorm.weight")


def test_a_file_that_only_our_own_reader_takes(tmp_path: Path) -> None:
    converted(tmp_path)
    path = tmp_path / "dst/host-other.safetensors"
    replace_file(path, path.read_bytes() + b"\0")  # behind the last tensor
    tensors = HostTensors(tmp_path / "dst")
    with pytest.raises(CheckpointError, match=r"host-other\.safetensors: cannot be read \("):
        tensors.get("model.norm.weight")


def test_a_file_that_is_gone_when_it_is_wanted(tmp_path: Path) -> None:
    _, tensors = converted(tmp_path)
    (tmp_path / "dst/host-other.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"host-other\.safetensors: cannot be read \(No such file"):
        tensors.get("model.norm.weight")
