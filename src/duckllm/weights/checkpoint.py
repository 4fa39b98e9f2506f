"""A checkpoint folder of Hugging Face's form: its configuration, its tensors, the scales of its FP8 weights.

Called by the converter and by the host's tensor loader; it knows names, types and shapes of what lies in the
folder and refuses what it does not understand, but no architecture.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from duckllm.errors import CheckpointError, ModelNotFoundError, show_value
from duckllm.weights.e4m3 import F32
from duckllm.weights.files import model_errors
from duckllm.weights.imports.gguf import GgufBlocks, read_gguf
from duckllm.weights.imports.packed import check_not_lost
from duckllm.weights.json_values import is_plain_name, parse_json_object
from duckllm.weights.quantisation import Quantisation
from duckllm.weights.safetensors_file import TensorInfo, read_header
from duckllm.weights.scales import ScaleFit, scale_fits

FP8 = "F8_E4M3"
WIDE_FLOATS = ("F32", "BF16", "F16")
SCALE_TYPES = (*WIDE_FLOATS, "F8_E8M0")
# Of activations and of the KV cache, neither of which is ever quantised here.
_NOT_NEEDED = re.compile(r"(.*[._])?((input|activation|output)_scale|(q|k|v|kv)_scale)")
# Where ModelOpt writes what others have in config.json.
MODELOPT_FILE = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
_SAMPLE_BYTES = 64 << 10
_SAMPLES = 16
_WHOLE_BYTES = 64 << 20
MOST_NAMED = 100
_MOST_SCALE = np.finfo(np.float32).max / np.float32(448)  # of codes up to e4m3's largest number


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
        quantisation: How its FP8 weights are scaled, and in which forms it has others.
        tensors: Every tensor by name.
    """

    folder: Path
    config: Mapping[str, Any]
    quantisation: Quantisation
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Reads the configuration and every header; no tensor data.

        Raises:
            ModelNotFoundError: No such folder, or no model in it.
            CheckpointError: A file is missing, truncated or malformed.
            UnsupportedModelError: A quantisation that is not supported.
            MissingPackageError: Its weights are in a GGUF file, and the gguf package is not installed.
        """
        with model_errors(folder):
            if not folder.is_dir():
                raise ModelNotFoundError(f"{folder}: no such folder")
            if not (folder / "config.json").is_file():
                raise ModelNotFoundError(
                    f"{folder}: got no config.json, expected a Hugging Face checkpoint folder"
                )
            config = load_json(folder / "config.json")
            if is_gguf(folder):
                return cls(folder, config, Quantisation("gguf", (), (GgufBlocks(),)), read_gguf(folder))
            return cls(folder, config, read_quantisation(folder, config), _read_tensors(folder))

    @property
    def shards(self) -> list[Path]:
        """The files of the tensors, sorted."""
        return sorted({info.path for info in self.tensors.values()})

    def fingerprint(self) -> str:
        """A hash that differs when the checkpoint does, without reading all of a large one.

        Files up to 64 MiB are hashed whole; larger ones by header, length, time of change and 16 samples.
        """
        digest = hashlib.sha256()
        said = [self.folder / name for name in ("config.json", MODELOPT_FILE)]
        for path in [*(path for path in said if path.is_file()), *self.shards]:
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


def read_quantisation(folder: Path, config: Mapping[str, Any]) -> Quantisation:
    """How the FP8 weights of a checkpoint folder, or of what was made from one, are scaled.

    Raises:
        UnsupportedModelError: A quantisation that is not FP8.
        CheckpointError: A file or a field is malformed.
    """
    path = folder / MODELOPT_FILE
    return Quantisation.of(str(folder), config, load_json(path) if path.is_file() else None)


def is_gguf(folder: Path) -> bool:
    """Whether a checkpoint's weights are in a GGUF file: one beside no safetensors, perhaps their index."""
    return any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors"))


def _read_tensors(folder: Path) -> dict[str, TensorInfo]:
    if not (folder / INDEX).is_file():
        files = sorted(folder.glob("*.safetensors"))
        if len(files) != 1:
            raise (ModelNotFoundError if not files else CheckpointError)(
                f"{folder}: got {len(files)} safetensors files and no {INDEX}, expected one or an index"
            )
        return read_header(files[0])
    weight_map = load_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{folder / INDEX}: weight_map: expected an object of file names")
    for file in weight_map.values():
        if not is_plain_name(file):
            raise CheckpointError(
                f"{folder / INDEX}: weight_map: got {show_value(file)}, expected a plain file name"
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


def scale_names(weight: str) -> tuple[str, ...]:
    """The names under which checkpoints have the scales of a weight."""
    stem = weight.removesuffix(".weight")
    if stem != weight:
        return tuple(f"{stem}.{name}" for name in ("weight_scale_inv", "scale", "weight_scale"))
    return f"{weight}_scale_inv", f"{weight}_scale"


def check_type(info: TensorInfo) -> None:
    """Checks that a tensor is of a type that a model's may have.

    Raises:
        CheckpointError: Names it and its type.
    """
    if info.dtype != FP8 and info.dtype not in WIDE_FLOATS:
        raise CheckpointError(f"{info.name}: got dtype {info.dtype}, expected {FP8}, BF16, F16 or F32")


def find_scale(tensors: Mapping[str, TensorInfo], weight: str) -> TensorInfo:
    """The scales of an FP8 weight, under whichever name.

    Raises:
        CheckpointError: There are none, or several, or their type is none for scales.
    """
    names = scale_names(weight)
    found = [tensors[name] for name in names if name in tensors]
    if not found:
        raise CheckpointError(f"{weight}: FP8 without {names[0]} (or {', '.join(names[1:])})")
    if len(found) > 1:
        raise CheckpointError(f"{weight}: FP8 with several scales: {', '.join(info.name for info in found)}")
    if found[0].dtype not in SCALE_TYPES:
        raise CheckpointError(
            f"{found[0].name}: got dtype {found[0].dtype}, expected one of {', '.join(SCALE_TYPES)}"
        )
    return found[0]


def is_not_needed(name: str) -> bool:
    """Whether a tensor is a scale of activations or of the KV cache, neither of which is quantised here."""
    return _NOT_NEEDED.fullmatch(name) is not None


def only_fit(
    scale: TensorInfo,
    matrix: tuple[int, int],
    shape: tuple[int, ...],
    quantisation: Quantisation,
    *,
    joined: bool = False,
) -> ScaleFit:
    """How scales lie over a matrix.

    Args:
        scale: They.
        matrix: The matrix's shape.
        shape: Their shape for this matrix alone.
        quantisation: What the configuration says.
        joined: Whether the matrix is two of the same height, one above the other.

    Raises:
        CheckpointError: In no way that the configuration allows, or in several.
    """
    fits = scale_fits(matrix, shape, quantisation.kinds, joined=joined)
    if len(fits) == 1:
        return fits[0]
    shapes = [f"{list(kind.grid(matrix))} ({kind})" for kind in quantisation.kinds]
    several = ", which fits in several ways" if fits else ""
    raise CheckpointError(
        f"{scale.name}: got shape {list(scale.shape)}{several}, expected {' or '.join(shapes) or 'none'} "
        f"for {matrix[0]} x {matrix[1]} weights"
    )


def fp8_scales(
    tensors: Mapping[str, TensorInfo], weights: Iterable[TensorInfo], quantisation: Quantisation
) -> tuple[dict[str, tuple[TensorInfo, ScaleFit]], list[str]]:
    """The scales of FP8 matrices by weight, and what is wrong with any, one clause each."""
    found, problems = {}, []
    for info in weights:
        if info.dtype != FP8:
            continue
        try:
            scale = find_scale(tensors, info.name)
            if len(info.shape) != 2:
                raise CheckpointError(f"{info.name}: FP8 of shape {list(info.shape)}, expected a matrix")
            fit = only_fit(scale, (info.shape[0], info.shape[1]), scale.shape, quantisation)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        found[info.name] = (scale, fit)
    return found, problems


def check_scales(values: F32, name: str, has_weights: Callable[[], bool]) -> None:
    """Checks that the scales of an FP8 matrix are not negative and give finite weights, and are not all lost.

    Args:
        values: Them.
        name: What messages call their tensor.
        has_weights: Whether any code of the matrix stands for something else than 0.

    Raises:
        CheckpointError: Names the tensor, and the first that is not.
    """
    bad = values[~((values >= 0) & (values <= _MOST_SCALE))]
    if bad.size:
        raise CheckpointError(
            f"{name}: got a scale of {bad[0]:.6g} ({bad.size} of {values.size} are out of range), "
            f"expected scales from 0 to {_MOST_SCALE:.2g}, with which weights are finite"
        )
    check_not_lost(values, name, has_weights)
