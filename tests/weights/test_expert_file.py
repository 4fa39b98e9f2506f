"""Mapping and verifying expert files, slice by slice."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from random_checkpoint import FINITE_CODES, config, make_checkpoint

from duckllm.errors import CheckpointError, WeightHashError
from duckllm.weights import pack, reader
from duckllm.weights.architectures import layout_of
from duckllm.weights.convert import convert
from duckllm.weights.files import AtomicFile
from duckllm.weights.formats import LayerFormat, unit_bytes
from duckllm.weights.manifest import Manifest
from duckllm.weights.reader import ExpertFile
from duckllm.weights.safetensors_file import TensorInfo, TensorReader, read_header
from duckllm.weights.units import ExpertWeights, unpack_expert_units


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    make_checkpoint(tmp_path / "src", moe_intermediate_size=100)
    return convert(tmp_path / "src", tmp_path / "dst")


def test_units_are_mapped_read_only(manifest: Manifest) -> None:
    file = ExpertFile.open(manifest, 1)
    assert file.units.shape == (4, 7, 64 + 9 * 576)
    assert isinstance(file.units, np.memmap)
    assert not file.units.flags.writeable
    data = file.path.read_bytes()[file.data_offset :]
    assert file.units.tobytes() == data
    part = file.slice(2, 3)
    assert part.base is not None
    np.testing.assert_array_equal(part, file.units[:, 2:5])
    assert part[0].flags.c_contiguous


def test_a_path_of_the_callers_choice(manifest: Manifest, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.bin"
    manifest.expert_path(2).rename(moved)
    ExpertFile(moved, manifest, 2).verify()


@pytest.mark.parametrize("stripe", [0, 3, 6])
def test_verify_finds_a_flipped_bit_in_its_own_slice_only(manifest: Manifest, stripe: int) -> None:
    file = ExpertFile.open(manifest, 3)
    file.verify()
    place = file.data_offset + (2 * 7 + stripe) * manifest.unit_bytes + 500
    data = bytearray(file.path.read_bytes())
    data[place] ^= 0x10
    file.path.write_bytes(data)
    file = ExpertFile.open(manifest, 3)
    for other in set(range(7)) - {stripe}:
        file.verify(other, 1)
    with pytest.raises(WeightHashError) as caught:
        file.verify(max(0, stripe - 1), 2 if stripe else 1)
    assert f"experts-00003.safetensors: layer 3, stripe {stripe}: got SHA-256" in str(caught.value)
    with pytest.raises(WeightHashError, match=f"stripe {stripe}:"):
        file.verify()


def test_experts_with_a_scale_for_each_channel(manifest: Manifest, tmp_path: Path) -> None:
    """The file holds what its experts unpack to, has the length that is told before, and can be verified."""
    rng = np.random.default_rng(0)
    experts = [
        ExpertWeights(
            *(rng.choice(FINITE_CODES, shape) for shape in ((100, 72), (100, 72), (72, 100))),
            *(rng.uniform(0.5, 2, (rows, 1)).astype(np.float32) for rows in (100, 100, 72)),
        )
        for _ in range(4)
    ]

    class Given:
        scale_layout = "channel"

        def kept_format(self, _layer: int) -> str:
            return ""

        def read(self, _reader: TensorReader, _layer: int, expert: int) -> tuple[ExpertWeights, None]:
            return experts[expert], None

    layout = layout_of(config(moe_intermediate_size=100), {"model.layers.4.": None})
    path, told = tmp_path / "experts-00001.safetensors", []
    with AtomicFile(path) as out, TensorReader() as tensors:
        form = LayerFormat("fp8", "channel")
        entry, error = pack.write_expert_file(out, tensors, Given(), layout, 1, form, told.append)
        out.commit()
    assert error is None
    assert path.stat().st_size == entry.bytes == sum(told)
    assert entry.bytes == pack.expert_file_bytes(layout, 1, form)
    channel = replace(
        manifest,
        format="fp8",
        scale_layout="channel",
        unit_bytes=unit_bytes(72, "fp8", "channel"),
        expert_layers={1: entry},
    )
    file = ExpertFile(path, channel, 1)
    file.verify()
    for units, expert in zip(file.units, experts, strict=True):
        again = unpack_expert_units(units, 100, 72, "fp8", "channel")
        for field in fields(expert):
            np.testing.assert_array_equal(getattr(again, field.name), getattr(expert, field.name))


def test_files_of_another_shape_are_refused(manifest: Manifest, tmp_path: Path) -> None:
    path = manifest.expert_path(1)
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=f"truncated, got {len(data) - 1} bytes, expected {len(data)}"):
        ExpertFile.open(manifest, 1)
    path.write_bytes(data.replace(b'"shape":[4,7,', b'"shape":[7,4,', 1))
    with pytest.raises(CheckpointError, match=r"got U8 \[7, 4, 5248\], expected U8 \[4, 7, 5248\]"):
        ExpertFile.open(manifest, 1)
    path.write_bytes(data.replace(b'"units"', b'"other"', 1))
    with pytest.raises(CheckpointError, match="units: got no such tensor"):
        ExpertFile.open(manifest, 1)
    shifted = (int.from_bytes(data[:8], "little") + 64).to_bytes(8, "little")
    path.write_bytes(shifted + data[8:4096] + b" " * 64 + data[4096:])
    with pytest.raises(CheckpointError, match="data starts at 4160, expected a multiple of 4096"):
        ExpertFile.open(manifest, 1)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        ExpertFile.open(manifest, 1)
    with pytest.raises(CheckpointError, match="layer 0 has no experts"):
        ExpertFile(path, manifest, 0)


def test_a_file_that_shrinks_while_it_is_mapped_is_refused(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = manifest.expert_path(1)
    header = read_header(path)

    def shrink_after_reading(path: Path) -> dict[str, TensorInfo]:
        os.truncate(path, 8192)
        return header

    monkeypatch.setattr(reader, "read_header", shrink_after_reading)
    with pytest.raises(CheckpointError, match=r"experts-00001\.safetensors: cannot be mapped \("):
        ExpertFile.open(manifest, 1)


def test_reading_weights_imports_no_torch() -> None:
    code = (
        "import sys; import duckllm.weights.reader, duckllm.weights.convert, duckllm.weights.resolve;"
        "print(sorted({'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == "[]\n"
