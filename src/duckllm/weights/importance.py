"""What ``duckllm calibrate`` recorded, for the rounding of weights: how large the inputs of experts are.

Called by the converter; imports no torch. docs/checkpoints.md says how it is used.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from duckllm.errors import CheckpointError, ConfigError, show_value
from duckllm.paths import as_path
from duckllm.weights.e4m3 import F32
from duckllm.weights.files import hash_file
from duckllm.weights.layout import ModelLayout
from duckllm.weights.rounding import relative_importance
from duckllm.weights.safetensors_file import TensorInfo, TensorReader, read_header

FORMAT = "duckllm-calibration-1"


@dataclass(frozen=True)
class ImportanceFile:
    """A calibration file.

    Args:
        path: The file.
        sha256: Its hash.
        tensors: Its tensors by name: mean squares of experts' inputs, and of their activations.
    """

    path: Path
    sha256: str
    tensors: dict[str, TensorInfo]

    @classmethod
    def open(cls, path: str | Path, layout: ModelLayout, config_sha256: str) -> ImportanceFile:
        """Reads it and checks that it is of a model.

        Args:
            path: The file.
            layout: The model.
            config_sha256: Hash of its config.json, which a file of another model of these shapes has not.

        Raises:
            CheckpointError: The file cannot be read, or is malformed; a mean is negative or not finite.
            ConfigError: It is no path, no calibration file, or one of another model.
        """
        path = as_path("importance", path, "a file of duckllm calibrate")
        tensors = read_header(path)
        metadata = _metadata(path)
        if metadata.get("format") != FORMAT:
            raise ConfigError("importance", str(path), f"a file of duckllm calibrate, format {FORMAT}")
        if metadata.get("config_sha256", config_sha256) != config_sha256:
            expected = "one of this model: it is of another config.json"
            raise ConfigError("importance", str(path), expected)
        shapes = {
            "hidden": (layout.hidden_size,),
            "experts": (layout.num_experts, layout.moe_intermediate_size),
        }
        known = {
            f"layers.{layer}.{part}": shape for layer in layout.moe_layers for part, shape in shapes.items()
        }
        for name, info in tensors.items():
            shape = known.get(name)
            if name.endswith((".hidden", ".experts")) and (info.dtype, info.shape) != ("F32", shape):
                expected = "no such layer" if shape is None else f"F32 {list(shape)}"
                got = f"{name}, {info.dtype} {list(info.shape)}"
                raise ConfigError("importance", str(path), f"one of this model: {expected} for {got}")
        if not tensors.keys() & known.keys():
            raise ConfigError("importance", str(path), "means of at least one layer of this model")
        try:
            opened = cls(path, hash_file(path), tensors)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        with TensorReader() as reader:  # said before hours of conversion
            for name in tensors.keys() & known.keys():
                opened._means(reader, tensors[name], 0, tensors[name].num_bytes)
        return opened

    def of(self, reader: TensorReader, layer: int, expert: int) -> tuple[F32 | None, F32 | None]:
        """Relative importance of hidden indices and of an expert's channels; None for what is not recorded.

        Shapes: results: [H] and [I] f32, or None.

        Raises:
            CheckpointError: A mean is negative or not finite, or the file ends early.
        """
        hidden, experts = (self.tensors.get(f"layers.{layer}.{part}") for part in ("hidden", "experts"))
        return (
            None if hidden is None else self._relative(reader, hidden, 0, hidden.num_bytes),
            None
            if experts is None
            else self._relative(
                reader,
                experts,
                expert * (experts.num_bytes // experts.shape[0]),
                experts.num_bytes // experts.shape[0],
            ),
        )

    def _relative(self, reader: TensorReader, info: TensorInfo, start: int, length: int) -> F32:
        return relative_importance(self._means(reader, info, start, length))

    def _means(self, reader: TensorReader, info: TensorInfo, start: int, length: int) -> F32:
        means = reader.read_part(info, start, length).view("<f4").astype(np.float32)
        bad = means.size - int(np.count_nonzero(np.isfinite(means) & (means >= 0)))
        if bad:
            raise CheckpointError(f"{self.path}: {info.name}: got {bad} value(s) that are no mean square")
        return means


def _metadata(path: Path) -> dict[str, object]:
    """The free text of a safetensors file whose header was read before."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            value = json.loads(file.read(length)).get("__metadata__", {})
    except (OSError, ValueError, struct.error) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: __metadata__: got {show_value(value)}, expected an object")
    return value
