"""Tensors to a device: every bit, and no more CPU memory than was set aside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from random_checkpoint import make_checkpoint
from safetensors.torch import save_file

from duckllm.weights import host_tensors
from duckllm.weights.convert import convert
from duckllm.weights.host_tensors import HostTensors
from duckllm.weights.staging import Staging

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8]


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_bytes", [1, 127, 128, 129, 256, 1000, 4096])
def test_every_bit_arrives(dtype: torch.dtype, num_bytes: int, device: str) -> None:
    """Of tensors of less than a piece, of a whole one, of several and a rest; halves of 64 bytes."""
    staging = Staging(torch.device(device), 128)
    words = -(-num_bytes // dtype.itemsize)
    rng = np.random.default_rng(num_bytes)
    stored = torch.from_numpy(rng.integers(0, 256, words * dtype.itemsize, np.uint8)).view(dtype)
    got = staging.to_device(stored)
    assert (got.dtype, got.shape, got.device.type) == (dtype, stored.shape, device)
    assert bits_of(got) == bits_of(stored)
    assert got.data_ptr() != stored.data_ptr()


@pytest.mark.parametrize("device", DEVICES)
def test_shapes_are_kept_and_what_lies_apart_is_put_together(device: str) -> None:
    staging = Staging(torch.device(device), 64)
    whole = torch.arange(600.0).view(20, 30)
    for part in (whole, whole.mT, whole[3:7, ::2], whole[5], whole[2, 3], whole[:0]):
        got = staging.to_device(part)
        assert got.is_contiguous()
        assert torch.equal(got.cpu(), part)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_may_change_or_go_when_they_were_given(device: str) -> None:
    staging = Staging(torch.device(device), 1 << 20)
    source = torch.empty(3 << 20, dtype=torch.uint8)
    results = []
    for value in range(8):
        source.fill_(value)
        results.append(staging.to_device(source))
    for value, result in enumerate(results):
        assert (result == value).all()


def test_mapped_files_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are held stay as they were, whenever their files are mapped anew."""
    made = make_checkpoint(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst")
    opened: list[Path] = []
    true_open = host_tensors._open_file
    monkeypatch.setattr(host_tensors, "_open_file", lambda path: opened.append(path) or true_open(path))
    tensors = HostTensors(tmp_path / "dst")
    held = {name: tensors.get(name) for name in tensors.names()}
    assert len(opened) == len(set(opened)) > 0
    monkeypatch.setattr(host_tensors, "MAPPED_BYTES", 2000)
    again = {name: tensors.get(name) for name in tensors.names()}
    assert len(opened) > len(set(opened)) + 3
    for name, tensor in held.items():
        assert bits_of(tensor) == bits_of(again[name]) == made.tensors[name][2]


PEAK = """
import sys, torch
from pathlib import Path
from safetensors import safe_open
from duckllm.weights import host_tensors
from duckllm.weights.host_tensors import HostTensors
from duckllm.weights.safetensors_file import read_header
from duckllm.weights.staging import Staging

def resident_bytes():
    words = dict(line.split(":") for line in open("/proc/self/status").read().splitlines())
    return 1024 * (int(words["RssAnon"].split()[0]) + int(words["RssFile"].split()[0]))

path = Path(sys.argv[1])
host_tensors._verify_once = lambda *_: None
host_tensors.MAPPED_BYTES = 32 << 20
tensors = HostTensors.__new__(HostTensors)
tensors.folder, tensors._infos, tensors._sha256 = path.parent, read_header(path), {path: ""}
tensors._scales, tensors._open, tensors._mapped_bytes = {}, {}, 0
staging = Staging(torch.device(sys.argv[2]), 8 << 20)
staging.to_device(tensors.get("t0"))
before, most, read = resident_bytes(), 0, 0
for name in tensors.names():
    tensor = tensors.get(name)
    read += tensor.nbytes
    staging.to_device(tensor)
    most = max(most, resident_bytes())
print(read, most - before)
"""


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.usefixtures("visible_gpu")
def test_loading_takes_no_more_memory_than_the_mapping_may(tmp_path: Path, device: str) -> None:
    """192 MiB go to a device that keeps nothing: one tensor more than 32 MiB of the file are mapped in."""
    path = tmp_path / "host.safetensors"
    save_file({f"t{number}": torch.full((2 << 20,), float(number)) for number in range(24)}, path)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(path), device], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    read, grown = map(int, done.stdout.split())
    assert read == 192 << 20
    assert grown < 48 << 20
