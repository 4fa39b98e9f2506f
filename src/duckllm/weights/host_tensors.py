"""The host's tensors of a converted model, loaded into torch one by one as they are asked for.

Called by the models. It knows how FP8 weights and their block scales belong together, and no architecture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from duckllm.errors import CheckpointError
from duckllm.weights.checkpoint import FP8, SCALE_SUFFIXES, list_problems, scale_problems
from duckllm.weights.e4m3 import SCALE_BLOCK
from duckllm.weights.manifest import Manifest, check_sha256
from duckllm.weights.safetensors_file import TensorInfo, read_header

_VERIFIED: set[tuple[int, int, int, int, int, str]] = set()


class HostTensors:
    """Lazy access to the tensors that the host computes with.

    Args:
        folder: A converted model.

    Raises:
        ModelError: The folder is no converted model, or a tensor's scale is missing or unknown.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._infos: dict[str, TensorInfo] = {}
        self._sha256: dict[Path, str] = {}
        for file, entry in Manifest.load(self.folder).host_files.items():
            self._sha256[self.folder / file] = entry.sha256
            self._infos |= read_header(self.folder / file)
        problems = scale_problems(self._infos)
        if problems:
            raise CheckpointError(f"{self.folder}: {list_problems(problems)}")
        self._open: dict[Path, Any] = {}

    def names(self) -> list[str]:
        """Every tensor, sorted."""
        return sorted(self._infos)

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the header."""
        return self._info(name).shape

    def get(self, name: str) -> torch.Tensor:
        """A tensor as it is stored. Its file is hashed when it is first opened.

        Raises:
            CheckpointError: There is no such tensor, or its file cannot be read.
            WeightHashError: Its file is not what the manifest says.
        """
        info = self._info(name)
        if info.path not in self._open:
            _verify_once(info.path, self._sha256[info.path])
            self._open[info.path] = _open_file(info.path)
        tensor: torch.Tensor = self._open[info.path].get_tensor(name)
        return tensor

    def linear(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A linear layer's weight, dequantised in f32 and then rounded to ``dtype``.

        Args:
            name: The layer, without ``.weight``.
            dtype: Type of the result.

        Shapes: result: [out, in].

        Raises:
            CheckpointError: There is no such tensor, or it is not of a floating type.
        """
        weight = self.get(f"{name}.weight")
        if self._info(f"{name}.weight").dtype == FP8:
            return dequantise_blocks(weight, self.get(self._scale_name(name))).to(dtype)
        if not weight.is_floating_point():
            raise CheckpointError(f"{name}.weight: got {weight.dtype}, expected a floating type")
        return weight.to(dtype)

    def stored_linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A linear layer's weight as it is stored, and the block scales of an FP8 one.

        Shapes: [out, in]; scales: [ceil(out/128), ceil(in/128)] f32.

        Raises:
            CheckpointError: There is no such tensor.
        """
        weight = self.get(f"{name}.weight")
        if self._info(f"{name}.weight").dtype != FP8:
            return weight, None
        return weight, self.get(self._scale_name(name)).float()

    def _info(self, name: str) -> TensorInfo:
        if name not in self._infos:
            raise CheckpointError(f"{self.folder}: {name}: no such tensor")
        return self._infos[name]

    def _scale_name(self, name: str) -> str:
        return next(f"{name}.{suffix}" for suffix in SCALE_SUFFIXES if f"{name}.{suffix}" in self._infos)


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:  # it asks more of a file than our own reader
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


def _verify_once(path: Path, expected: str) -> None:
    """Hashes a file, unless this process has found the very same file to be right before."""
    try:
        stat = path.stat()
    except OSError as error:  # gone since its header was read
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    identity = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, expected)
    if identity not in _VERIFIED:
        check_sha256(path, expected)
        _VERIFIED.add(identity)


def dequantise_blocks(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weights that FP8 values and 128x128 block scales stand for.

    Shapes: weight: [rows, columns] float8_e4m3fn; scales: [ceil(rows/128), ceil(columns/128)]; result: [rows,
        columns] f32.
    Reference: :func:`duckllm.weights.e4m3.dequantise`, exact.
    """
    rows, columns = weight.shape
    wide = scales.float().repeat_interleave(SCALE_BLOCK, 0)[:rows]
    wide = wide.repeat_interleave(SCALE_BLOCK, 1)[:, :columns]
    return weight.float().mul_(wide)
