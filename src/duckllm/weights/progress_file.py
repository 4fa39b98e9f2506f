"""``.duck-progress.json``: which files of an unfinished conversion are whole, so that a later run keeps them.

Called by the converter. An entry is written before its file gets its final name: a file under its final name
always has its entry.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from duckllm.errors import CheckpointError
from duckllm.weights.checkpoint import load_json
from duckllm.weights.e4m3 import QuantisationError
from duckllm.weights.files import hash_file, write_atomically
from duckllm.weights.layer_formats import in_words
from duckllm.weights.manifest import ExpertLayer, HostFile, Manifest, rounding_of
from duckllm.weights.reader import UNITS
from duckllm.weights.safetensors_file import TensorReader, read_header

PROGRESS_FILE = ".duck-progress.json"
Entry = HostFile | ExpertLayer


@dataclass
class ProgressFile:
    """The finished files of a conversion.

    Args:
        folder: The destination.
        fingerprint: The checkpoint's.
        recipe: What its experts are made into, as text: formats by layer, and what weighted their rounding.
        entries: What is finished, by file name.
        errors: How far each expert file's weights were rounded, for those that were.
    """

    folder: Path
    fingerprint: str
    recipe: str
    entries: dict[str, Entry] = field(default_factory=dict)
    errors: dict[str, QuantisationError] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> ProgressFile | None:
        """The progress in a folder; None where there is none.

        Raises:
            CheckpointError: The file is malformed.
        """
        path = folder / PROGRESS_FILE
        if not path.is_file():
            return None
        value = load_json(path)
        try:
            return cls(
                folder,
                value["fingerprint"],
                value["format"],
                {name: _entry(name, entry) for name, entry in value["files"].items()},
                {name: QuantisationError.from_json(error) for name, error in value["errors"].items()},
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: malformed; remove the folder to start afresh") from error

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> ProgressFile:
        """The state before ``duck.json`` was written, for a conversion whose files were damaged since."""
        entries: dict[str, Entry] = dict(manifest.host_files)
        entries |= {entry.file: entry for entry in manifest.expert_layers.values()}
        errors = rounding_of(manifest.source)
        return cls(manifest.folder, manifest.source["fingerprint"], recipe_of(manifest), entries, errors)

    def add(self, name: str, entry: Entry, error: QuantisationError | None) -> None:
        """Notes a finished file, durably."""
        self.entries[name] = entry
        if error is not None:
            self.errors[name] = error
        self.save()

    def save(self) -> None:
        """Writes the progress file."""
        value = {
            "fingerprint": self.fingerprint,
            "format": self.recipe,
            "files": {name: asdict(entry) for name, entry in self.entries.items()},
            "errors": {name: asdict(error) for name, error in self.errors.items()},
        }
        write_atomically(self.folder / PROGRESS_FILE, json.dumps(value).encode())

    def remove(self) -> None:
        """Removes the progress file."""
        (self.folder / PROGRESS_FILE).unlink(missing_ok=True)

    def drop_damaged(self, on_file: Callable[[str], object]) -> None:
        """Forgets files that are missing or whose content is not what was written."""
        for name in list(self.entries):
            on_file(name)
            path, entry = self.folder / name, self.entries[name]
            if not (path.is_file() and path.stat().st_size == entry.bytes and _intact(path, entry)):
                del self.entries[name]
                self.errors.pop(name, None)


def recipe_in_words(formats: Mapping[int, str], importance: str) -> str:
    """What experts are made into: ``"fp9"``, or ``"int4, fp8 in layer 61, importance 0123456789ab"``.

    Args:
        formats: By layer.
        importance: SHA-256 of the file that weights their rounding; empty where none does.
    """
    return in_words(formats) + (f", importance {importance[:12]}" if importance else "")


def recipe_of(manifest: Manifest) -> str:
    """What a converted model's experts were made into."""
    return recipe_in_words(manifest.layer_formats(), manifest.source.get("importance", ""))


def _entry(name: str, value: dict[str, Any]) -> Entry:
    if "stripe_sha256" in value:
        if value["file"] != name:
            raise ValueError(f"{name}: got the entry of {value['file']}")
        return ExpertLayer(**{**value, "stripe_sha256": tuple(value["stripe_sha256"])})
    return HostFile(**value)


def _intact(path: Path, entry: Entry) -> bool:
    if isinstance(entry, HostFile):
        return hash_file(path) == entry.sha256
    try:
        return expert_hashes(path) == entry.stripe_sha256
    except CheckpointError:
        return False


def expert_hashes(path: Path) -> tuple[str, ...]:
    """The stripe hashes of an expert file as it is, read from front to back by pread.

    Raises:
        CheckpointError: The file is truncated or malformed.
    """
    info = read_header(path).get(UNITS)
    if info is None or info.dtype != "U8" or len(info.shape) != 3:
        raise CheckpointError(f"{path}: expected a tensor {UNITS} of three dimensions")
    experts, stripes, length = info.shape
    digests = [hashlib.sha256() for _ in range(stripes)]
    with TensorReader() as reader:
        for expert in range(experts):
            units = reader.read_part(info, expert * stripes * length, stripes * length)
            for stripe, digest in enumerate(digests):
                digest.update(units[stripe * length : (stripe + 1) * length].data)
    return tuple(digest.hexdigest() for digest in digests)
