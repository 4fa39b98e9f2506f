"""The host's tensors of a converted model, loaded into torch one by one as they are asked for.

Called by the models. It knows how FP8 weights and their scales belong together, and no architecture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from duckllm.errors import CheckpointError
from duckllm.weights.checkpoint import check_scales, fp8_scales, list_problems, load_json, read_quantisation
from duckllm.weights.manifest import Manifest, check_sha256
from duckllm.weights.safetensors_file import TensorInfo, read_header
from duckllm.weights.scales import ScaleGrid

# Files are mapped anew when so much of them was given: what nobody holds any more leaves the process.
MAPPED_BYTES = 256 << 20
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
        quantisation = read_quantisation(self.folder, load_json(self.folder / "config.json"))
        self._scales, problems = fp8_scales(self._infos, self._infos.values(), quantisation)
        if problems:
            raise CheckpointError(f"{self.folder}: {list_problems(problems)}")
        self._open: dict[Path, Any] = {}
        self._mapped_bytes = 0

    def names(self) -> list[str]:
        """Every tensor, sorted."""
        return sorted(self._infos)

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the header."""
        return self._info(name).shape

    def get(self, name: str) -> torch.Tensor:
        """A tensor as it is stored, mapped from its file, which is hashed when it is first opened.

        What was read of tensors that are gone takes memory until some hundred MiB were given.

        Raises:
            CheckpointError: There is no such tensor, or its file cannot be read.
            WeightHashError: Its file is not what the manifest says.
        """
        info = self._info(name)
        if self._mapped_bytes >= MAPPED_BYTES:
            self._open.clear()
            self._mapped_bytes = 0
        self._mapped_bytes += info.num_bytes
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
        if not weight.is_floating_point():
            raise CheckpointError(f"{name}.weight: got {weight.dtype}, expected a floating type")
        grid = self._grid(name, weight)
        return weight.to(dtype) if grid is None else dequantise(weight, grid).to(dtype)

    def stored_linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A linear layer's weight as it is stored, with the scales of an FP8 one.

        Scales that neither blocks nor rows can say make it f32: the weight is dequantised, exactly.

        Shapes: [out, in]; scales: [ceil(out/128), ceil(in/128)] for blocks or [out, 1] for rows, f32.

        Raises:
            CheckpointError: There is no such tensor, a scale is negative, NaN or infinite, or all are zero.
        """
        weight = self.get(f"{name}.weight")
        grid = self._grid(name, weight)
        if grid is None:
            return weight, None
        for scales in (grid.blocks(), grid.by_row()):
            if scales is not None:
                return weight, torch.from_numpy(scales)
        return dequantise(weight, grid), None

    def _grid(self, name: str, weight: torch.Tensor) -> ScaleGrid | None:
        if f"{name}.weight" not in self._scales:
            return None
        info, fit = self._scales[f"{name}.weight"]
        values = self.get(info.name).float().numpy()
        check_scales(values, info.name, lambda: bool(weight.view(torch.uint8).bitwise_and(0x7F).any()))
        rows, columns = self.shape(f"{name}.weight")
        return ScaleGrid.of(values, fit, (rows, columns))

    def _info(self, name: str) -> TensorInfo:
        if name not in self._infos:
            raise CheckpointError(f"{self.folder}: {name}: no such tensor")
        return self._infos[name]


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


def dequantise(weight: torch.Tensor, scales: ScaleGrid) -> torch.Tensor:
    """The weights that FP8 values and their scales stand for.

    Shapes: weight: [rows, columns] float8_e4m3fn; result: [rows, columns] f32.
    Reference: :func:`duckllm.weights.e4m3.dequantise`, exact.
    """
    return weight.float().mul_(torch.from_numpy(np.ascontiguousarray(scales.expand())))
