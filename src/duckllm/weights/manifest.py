"""duck.json, the manifest of a converted model: what is in the folder, and the hashes of all of it.

Written by the converter, read by the host and by workers; it imports no torch. docs/weight-format.md is its
specification.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import starmap
from pathlib import Path
from typing import Any

from duckllm.errors import (
    CheckpointError,
    ModelNotFoundError,
    WeightFormatError,
    WeightHashError,
    show_value,
)
from duckllm.weights.checkpoint import list_problems, load_json
from duckllm.weights.e4m3 import SCALE_BLOCK, QuantisationError
from duckllm.weights.files import hash_file, model_errors
from duckllm.weights.formats import FORMATS, LayerFormat, num_stripes, unit_bytes
from duckllm.weights.json_values import is_plain_name, is_sha256

MANIFEST_FILE = "duck.json"
FORMAT_VERSION = 2
_NOT_HASHED = ("created_by", "model_hash", "source")
_KINDS = (
    *((name, str, "a string") for name in ("architecture", "model_type", "created_by")),
    ("source", dict, "an object"),
)


@dataclass(frozen=True)
class HostFile:
    """A safetensors file of host tensors: its SHA-256 and its length in bytes."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class ExpertLayer:
    """A layer's expert file.

    Args:
        file: Its name.
        bytes: Its length.
        stripe_sha256: Per stripe the SHA-256 over all experts' units.
        format: The format of its experts where that is not the model's; else empty.
        scale_layout: The layout of their scales there; empty with the format.
    """

    file: str
    bytes: int
    stripe_sha256: tuple[str, ...]
    format: str = ""
    scale_layout: str = ""


@dataclass(frozen=True)
class Manifest:
    """A converted model.

    Args:
        folder: Where it lies.
        format: Weight format of the experts of most layers, a name in
            :data:`duckllm.weights.formats.FORMATS`; a layer may have another (:meth:`layer_format`).
        architecture: Hugging Face's class name.
        model_type: config.json's model_type.
        source: What it was converted from: fingerprint, dtype and, where weights were rounded, how far.
        hidden_size: H.
        moe_intermediate_size: I.
        num_experts: E.
        num_experts_per_tok: K.
        num_stripes: Stripes of a whole expert, ceil(I / 16).
        unit_bytes: Bytes of one unit = (expert, stripe) in that format.
        config_sha256: SHA-256 of config.json.
        host_files: Host tensors, by file name.
        expert_layers: Expert files, by layer.
        created_by: The program that wrote it.
        scale_layout: Which weights of an expert share a scale: ``"block"``, 128 x 128 of them,
            ``"channel"``, a row of a matrix, or ``"group"``, some of a row.
        format_version: Version of this file's layout.
        model_hash: SHA-256 over everything above that defines the content.
    """

    folder: Path
    format: str
    architecture: str
    model_type: str
    source: Mapping[str, Any]
    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    num_stripes: int
    unit_bytes: int
    config_sha256: str
    host_files: Mapping[str, HostFile]
    expert_layers: Mapping[int, ExpertLayer]
    created_by: str
    scale_layout: str = "block"
    format_version: int = FORMAT_VERSION
    model_hash: str = field(default="")

    def __post_init__(self) -> None:
        if not self.model_hash:
            object.__setattr__(self, "model_hash", content_hash(self.to_json()))

    @classmethod
    def load(cls, folder: str | Path) -> Manifest:
        """Reads and checks duck.json; opens no other file.

        Raises:
            ModelNotFoundError: No such folder, or no converted model in it.
            WeightFormatError: A format or a version that this program does not know.
            CheckpointError: duck.json is malformed.
            WeightHashError: duck.json's content is not what its model_hash says.
        """
        folder = Path(folder)
        path = folder / MANIFEST_FILE
        with model_errors(folder):
            if not folder.is_dir():
                raise ModelNotFoundError(f"{folder}: no such folder, expected a converted model's")
            if not path.is_file():
                raise ModelNotFoundError(f"{folder}: got no {MANIFEST_FILE}, expected a converted model")
        value = load_json(path)
        _check_version(path, value)
        _check_scale_layout(path, value)
        for name, kind, wanted in _KINDS:
            if not isinstance(value.get(name), kind):
                raise CheckpointError(f"{path}: {name}: got {show_value(value.get(name))}, expected {wanted}")
        for name in ("model_hash", "config_sha256"):
            if not is_sha256(value.get(name)):
                got = show_value(value.get(name))
                raise CheckpointError(f"{path}: {name}: got {got}, expected a SHA-256 in hex")
        try:
            block_size = value.pop("block_size")
            manifest = cls(
                folder=folder,
                host_files={file: HostFile(**entry) for file, entry in value.pop("host_files").items()},
                expert_layers=dict(starmap(_expert_layer, value.pop("expert_layers").items())),
                **value,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: malformed manifest ({error})") from error
        problems = list(_problems(manifest))
        if block_size != manifest.block_size:
            expected_size = json.dumps(manifest.block_size)
            problems.append(f"block_size: got {show_value(block_size)}, expected {expected_size}")
        if problems:
            raise CheckpointError(f"{path}: {list_problems(problems)}")
        expected = content_hash(manifest.to_json())
        if manifest.model_hash != expected:
            raise WeightHashError(f"{path}: model_hash: got {manifest.model_hash}, expected {expected}")
        return manifest

    @property
    def block_size(self) -> list[int] | None:
        """Rows and columns that share a scale; None where rows of a matrix have one each."""
        return [SCALE_BLOCK, SCALE_BLOCK] if self.scale_layout == "block" else None

    def to_json(self) -> dict[str, Any]:
        """The manifest as duck.json holds it."""
        # Without the key where readers older than the layout understand the model.
        scale_layout = {} if self.scale_layout == "block" else {"scale_layout": self.scale_layout}
        return scale_layout | {
            "format_version": self.format_version,
            "format": self.format,
            "architecture": self.architecture,
            "model_type": self.model_type,
            "source": dict(self.source),
            "hidden_size": self.hidden_size,
            "moe_intermediate_size": self.moe_intermediate_size,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
            "num_stripes": self.num_stripes,
            "unit_bytes": self.unit_bytes,
            "block_size": self.block_size,
            "config_sha256": self.config_sha256,
            "host_files": {
                name: {"sha256": entry.sha256, "bytes": entry.bytes}
                for name, entry in sorted(self.host_files.items())
            },
            "expert_layers": {
                str(layer): {
                    "file": entry.file,
                    "bytes": entry.bytes,
                    "stripe_sha256": list(entry.stripe_sha256),
                    **({"format": entry.format} if entry.format else {}),
                    **(
                        {"scale_layout": entry.scale_layout}
                        if entry.scale_layout not in ("", "block")
                        else {}
                    ),
                }
                for layer, entry in sorted(self.expert_layers.items())
            },
            "model_hash": self.model_hash,
            "created_by": self.created_by,
        }

    def layer_format(self, layer: int) -> LayerFormat:
        """How a layer's experts are stored."""
        entry = self.expert_layers[layer]
        return LayerFormat(entry.format or self.format, entry.scale_layout or self.scale_layout)

    def layer_formats(self) -> dict[int, str]:
        """The format of each layer's experts."""
        return {layer: entry.format or self.format for layer, entry in sorted(self.expert_layers.items())}

    def units_shape(self, layer: int) -> tuple[int, int, int]:
        """Experts, stripes and bytes of a unit of a layer's file."""
        unit = self.layer_format(layer).unit_bytes(self.hidden_size)
        return self.num_experts, self.num_stripes, unit

    def expert_path(self, layer: int) -> Path:
        """The expert file of a layer.

        Raises:
            CheckpointError: The layer has no experts.
        """
        if layer not in self.expert_layers:
            known = ", ".join(map(str, sorted(self.expert_layers)))
            raise CheckpointError(f"{self.folder}: layer {layer} has no experts, expected one of {known}")
        return self.folder / self.expert_layers[layer].file

    def check_config(self) -> None:
        """Checks that config.json is the one that was converted.

        Raises:
            CheckpointError: The file cannot be read.
            WeightHashError: The file is another one.
        """
        check_sha256(self.folder / "config.json", self.config_sha256)

    def check_files(self) -> None:
        """Checks that every file is there with its length; reads none.

        Raises:
            CheckpointError: Names every file that is missing or of another length.
        """
        problems = list(self.file_problems())
        if problems:
            raise CheckpointError(f"{self.folder}: {list_problems(problems)}")

    def file_problems(self) -> list[str]:
        """What :meth:`check_files` would complain of."""
        expected: dict[str, int | None] = {name: entry.bytes for name, entry in self.host_files.items()}
        expected |= {entry.file: entry.bytes for entry in self.expert_layers.values()}
        expected["config.json"] = None
        problems = []
        for name, length in expected.items():
            try:
                got = (self.folder / name).stat().st_size
            except OSError:
                problems.append(f"{name}: missing")
                continue
            if length is not None and got != length:
                problems.append(f"{name}: got {got} bytes, expected {length}")
        return problems


def check_sha256(path: Path, expected: str) -> None:
    """Compares a file with the hash that the manifest has of it.

    Raises:
        CheckpointError: The file cannot be read.
        WeightHashError: Names the file, the hash got and the hash expected.
    """
    try:
        got = hash_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if got != expected:
        raise WeightHashError(f"{path}: got SHA-256 {got}, expected {expected}")


def content_hash(value: Mapping[str, Any]) -> str:
    """SHA-256 of the manifest as canonical JSON (sorted keys, no spaces) without what defines no content."""
    content = {key: entry for key, entry in value.items() if key not in _NOT_HASHED}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _check_version(path: Path, value: Mapping[str, Any]) -> None:
    version, name = value.get("format_version"), value.get("format")
    if type(version) is not int or version != FORMAT_VERSION:
        raise WeightFormatError(
            f"{path}: format_version: got {show_value(version)}, expected {FORMAT_VERSION}; "
            "convert the checkpoint again, into another folder"
        )
    if not isinstance(name, str) or name not in FORMATS:
        raise WeightFormatError(
            f"{path}: format: got {show_value(name)}, expected one of {', '.join(FORMATS)}"
        )


def _check_scale_layout(path: Path, value: Mapping[str, Any]) -> None:
    """A model with block scales has no such key, so that its hash is that of models without the choice."""
    layouts = FORMATS[value["format"]].scale_layouts
    name = value.get("scale_layout", "block")
    if name not in layouts or value.get("scale_layout") == "block":
        others = [repr(each) for each in layouts if each != "block"]
        absent = ["no such key"] if "block" in layouts else []
        raise WeightFormatError(
            f"{path}: scale_layout: got {show_value(name)}, expected {', or '.join(others + absent)}"
        )


def _expert_layer(layer: str, entry: dict[str, Any]) -> tuple[int, ExpertLayer]:
    if not (layer.isascii() and layer.isdigit() and len(layer) <= 9 and str(int(layer)) == layer):
        raise ValueError(f"expert_layers: got {show_value(layer)}, expected the number of a layer")
    found = ExpertLayer(**{**entry, "stripe_sha256": tuple(entry["stripe_sha256"])})
    if "format" not in entry:
        if "scale_layout" in entry:
            raise ValueError(f"expert_layers.{layer}: got a scale_layout without a format, expected both")
        return int(layer), found
    if not isinstance(found.format, str) or found.format not in FORMATS:
        known = ", ".join(FORMATS)
        raise ValueError(
            f"expert_layers.{layer}.format: got {show_value(found.format)}, expected one of {known}"
        )
    layouts = FORMATS[found.format].scale_layouts
    name = entry.get("scale_layout", "block")
    if name not in layouts or entry.get("scale_layout") == "block":
        raise ValueError(
            f"expert_layers.{layer}.scale_layout: got {show_value(name)}, "
            f"expected one of {', '.join(layouts)}, "
            "and no such key for block"
        )
    return int(layer), replace(found, scale_layout=name)


def rounding_of(source: Mapping[str, Any]) -> dict[str, QuantisationError]:
    """How far each expert file's weights were rounded, by file; empty where nothing was.

    Args:
        source: As in :class:`Manifest`.

    Raises:
        ValueError: Names what is malformed.
    """
    total = source.get("quantisation_error")
    if total is None:
        return {}
    field = "source.quantisation_error"
    files = total.get("files") if isinstance(total, dict) else None
    if not isinstance(files, dict):
        raise ValueError(f"{field}: got {show_value(total)}, expected null, or an object with files")
    for name in ("rms_relative", "max_relative", "flushed", "weights"):
        if type(total.get(name)) not in (int, float):
            raise ValueError(f"{field}.{name}: got {show_value(total.get(name))}, expected a number")
    errors = {}
    for name, error in files.items():
        try:
            errors[name] = QuantisationError.from_json(error)
        except ValueError as reason:
            raise ValueError(f"{field}.files.{name}: {reason}") from None
    return errors


def _source_problems(source: Mapping[str, Any]) -> list[str]:
    problems = [
        f"source.{name}: got {show_value(source[name])}, expected a string"
        for name in ("fingerprint", "dtype", "requantised", "hub_id", "revision", "importance")
        if not isinstance(source.get(name, ""), str)
    ]
    try:
        rounding_of(source)
    except ValueError as error:
        problems.append(str(error))
    host = source.get("host_dequantised")
    if host is not None and not (
        isinstance(host, dict)
        and isinstance(host.get("form"), str)
        and all(type(host.get(name)) is int for name in ("matrices", "stored_bytes", "bytes"))
    ):
        problems.append(
            f"source.host_dequantised: got {show_value(host)}, expected null, or an object with form, "
            "matrices, stored_bytes and bytes"
        )
    return problems


def _problems(manifest: Manifest) -> list[str]:
    problems = _source_problems(manifest.source)
    for name in (
        "hidden_size",
        "moe_intermediate_size",
        "num_experts",
        "num_experts_per_tok",
        "num_stripes",
        "unit_bytes",
    ):
        if type(getattr(manifest, name)) is not int or getattr(manifest, name) < 1:
            got = show_value(getattr(manifest, name))
            return [f"{name}: got {got}, expected a whole number of at least 1"]
    expected: dict[str, object] = {
        "num_stripes": num_stripes(manifest.moe_intermediate_size),
        "unit_bytes": unit_bytes(manifest.hidden_size, manifest.format, manifest.scale_layout),
    }
    for name, value in expected.items():
        if getattr(manifest, name) != value:
            problems.append(f"{name}: got {show_value(getattr(manifest, name))}, expected {value}")
    if manifest.num_experts_per_tok > manifest.num_experts:
        problems.append(
            f"num_experts_per_tok: got {manifest.num_experts_per_tok}, "
            f"expected at most num_experts, {manifest.num_experts}"
        )
    files = [*manifest.host_files, *(entry.file for entry in manifest.expert_layers.values())]
    odd = [file for file in files if not is_plain_name(file)]
    problems += [f"files: got {show_value(file)}, expected a plain file name" for file in odd]
    if not odd and len(set(files)) < len(files):
        problems.append("files: got one of them twice, expected each once")
    entries: list[tuple[str, HostFile | ExpertLayer]] = list(manifest.host_files.items())
    entries += [(entry.file, entry) for entry in manifest.expert_layers.values()]
    for name, described in entries:
        if type(described.bytes) is not int or described.bytes < 0:
            got = show_value(described.bytes)
            problems.append(f"{show_value(name)}: bytes: got {got}, expected a whole number from 0")
        hashes = described.stripe_sha256 if isinstance(described, ExpertLayer) else (described.sha256,)
        problems += [
            f"{show_value(name)}: got {show_value(sha256)}, expected a SHA-256 in hex"
            for sha256 in hashes
            if not is_sha256(sha256)
        ]
    for layer, entry in manifest.expert_layers.items():
        if entry.format == manifest.format:
            problems.append(f"expert_layers.{layer}.format: got the model's own, expected no such key")
        if len(entry.stripe_sha256) != manifest.num_stripes:
            problems.append(
                f"expert_layers.{layer}.stripe_sha256: got {len(entry.stripe_sha256)} hashes, "
                f"expected {manifest.num_stripes}"
            )
    return problems
