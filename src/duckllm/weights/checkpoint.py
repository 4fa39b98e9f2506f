"""A Hugging Face checkpoint folder: its configuration, its tensors, and the scales of its FP8 weights.

Called by the converter and by the host's tensor loader; it knows names, types and shapes of what lies in the
folder and refuses what it does not understand, but no architecture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duckllm.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError, show_value
from duckllm.weights.e4m3 import SCALE_BLOCK, scale_shape
from duckllm.weights.files import model_errors
from duckllm.weights.json_values import is_plain_name, parse_json_object
from duckllm.weights.safetensors_file import TensorInfo, read_header

FP8 = "F8_E4M3"
WIDE_FLOATS = ("F32", "BF16", "F16")
SCALE_SUFFIXES = ("weight_scale_inv", "scale")
_INDEX = "model.safetensors.index.json"
_SAMPLE_BYTES = 64 << 10
_SAMPLES = 16
_WHOLE_BYTES = 64 << 20
MOST_NAMED = 100


def load_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: The file cannot be read or holds no JSON object.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    return parse_json_object(data, str(path))


def list_names(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    shown = ", ".join(names[:MOST_NAMED])
    return shown if len(names) <= MOST_NAMED else f"{shown} and {len(names) - MOST_NAMED} more"


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint folder.

    Args:
        folder: Where it lies.
        config: config.json.
        tensors: Every tensor by name.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Reads the configuration and every header; no tensor data.

        Raises:
            ModelNotFoundError: No such folder, or no model in it.
            CheckpointError: A file is missing, truncated or malformed.
            UnsupportedModelError: A quantisation that is not 128x128-block FP8.
        """
        with model_errors(folder):
            if not folder.is_dir():
                raise ModelNotFoundError(f"{folder}: no such folder")
            if not (folder / "config.json").is_file():
                raise ModelNotFoundError(
                    f"{folder}: got no config.json, expected a Hugging Face checkpoint folder"
                )
            config = load_json(folder / "config.json")
            _check_quantisation(folder, config)
            return cls(folder, config, _read_tensors(folder))

    @property
    def shards(self) -> list[Path]:
        """The safetensors files, sorted."""
        return sorted({info.path for info in self.tensors.values()})

    def fingerprint(self) -> str:
        """A hash that differs when the checkpoint does, without reading all of a large one.

        Files up to 64 MiB are hashed whole; larger ones by header, length, time of change and 16 samples.
        """
        digest = hashlib.sha256()
        for path in [self.folder / "config.json", *self.shards]:
            stat = path.stat()
            digest.update(f"{path.name}\0{stat.st_size}\0".encode())
            with path.open("rb") as file:
                if stat.st_size <= _WHOLE_BYTES:
                    while chunk := file.read(1 << 20):
                        digest.update(chunk)
                    continue
                digest.update(f"{stat.st_mtime_ns}\0".encode())
                for sample in range(_SAMPLES):
                    file.seek(sample * (stat.st_size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()


def list_problems(problems: list[str]) -> str:
    """Several problems as one sentence."""
    shown = "; ".join(problems[:MOST_NAMED])
    return shown if len(problems) <= MOST_NAMED else f"{shown}; and {len(problems) - MOST_NAMED} more"


def _check_quantisation(folder: Path, config: Mapping[str, Any]) -> None:
    quantisation = config.get("quantization_config")
    if quantisation is None:
        return
    if not isinstance(quantisation, dict):
        raise CheckpointError(f"{folder}: quantization_config: got {quantisation!r}, expected an object")
    expected = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [SCALE_BLOCK, SCALE_BLOCK]}
    for field, value in expected.items():
        got = quantisation.get(field, value if field == "fmt" else None)
        if got != value:
            raise UnsupportedModelError(
                f"{folder}: quantization_config.{field}: got {got!r}, expected {value!r} "
                "(128x128-block FP8 or an unquantised checkpoint)"
            )


def _read_tensors(folder: Path) -> dict[str, TensorInfo]:
    if not (folder / _INDEX).is_file():
        files = sorted(folder.glob("*.safetensors"))
        if len(files) != 1:
            raise (ModelNotFoundError if not files else CheckpointError)(
                f"{folder}: got {len(files)} safetensors files and no {_INDEX}, expected one or an index"
            )
        return read_header(files[0])
    weight_map = load_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{folder / _INDEX}: weight_map: expected an object of file names")
    for file in weight_map.values():
        if not is_plain_name(file):
            raise CheckpointError(
                f"{folder / _INDEX}: weight_map: got {show_value(file)}, expected a plain file name"
            )
    files = sorted(folder / file for file in set(weight_map.values()))
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise CheckpointError(f"{folder}: missing files that the index names: {list_names(absent)}")
    headers = {path.name: read_header(path) for path in files}
    lost = [name for name, file in weight_map.items() if name not in headers[file]]
    if lost:
        raise CheckpointError(f"{folder}: tensors that the index names are in no file: {list_names(lost)}")
    return {name: headers[file][name] for name, file in weight_map.items()}


def scale_of(tensors: Mapping[str, TensorInfo], weight: str) -> TensorInfo | None:
    """The block scales of a weight, under either name that checkpoints use; None if it has none."""
    stem = weight.removesuffix("weight")
    found = [tensors[stem + suffix] for suffix in SCALE_SUFFIXES if stem + suffix in tensors]
    return found[0] if len(found) == 1 else None


def scale_problems(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """What is wrong with FP8 weights and their scales, one clause each; an unknown scale is never ignored."""
    problems = []
    known: set[str] = set()
    for name, info in tensors.items():
        if info.dtype in ("F8_E5M2", "F8_E8M0"):
            problems.append(f"{name}: got dtype {info.dtype}, expected {FP8}, BF16, F16 or F32")
        if info.dtype != FP8:
            continue
        scale = scale_of(tensors, name) if name.endswith(".weight") else None
        if scale is None:
            stem = name.removesuffix("weight")
            problems.append(f"{name}: FP8 without {stem}weight_scale_inv (or {stem}scale)")
            continue
        known.add(scale.name)
        if len(info.shape) != 2 or scale.shape != scale_shape(*info.shape):
            expected = list(scale_shape(*info.shape)) if len(info.shape) == 2 else "a matrix of blocks"
            problems.append(f"{scale.name}: got shape {list(scale.shape)}, expected {expected}")
        if scale.dtype not in WIDE_FLOATS and scale.dtype != "F8_E8M0":
            problems.append(f"{scale.name}: got dtype {scale.dtype}, expected F32, BF16 or F16")
    for name in tensors:
        last = name.rsplit(".", 1)[-1].lower()
        if name not in known and ("scale" in last or "zero_point" in last or last in ("qweight", "qzeros")):
            problems.append(f"{name}: belongs to no FP8 weight that is understood")
    return problems
