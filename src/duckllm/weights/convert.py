"""Conversion of a Hugging Face checkpoint into a duck-llm model folder, resumable and atomic per file.

Called by ``duckllm convert`` and by :func:`duckllm.weights.resolve.resolve_model`. It goes layer by layer and
expert by expert, so that memory holds a few experts whatever the model's size. A file appears under its final
name only when it is whole; ``.duck-progress.json`` lists the finished ones, so that a killed conversion goes
on where it was.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import duckllm
from duckllm.config import LOSSLESS_FORMATS
from duckllm.errors import CheckpointError, ConfigError, DiskSpaceError
from duckllm.weights.architectures import layout_of
from duckllm.weights.checkpoint import MODELOPT_FILE, Checkpoint
from duckllm.weights.e4m3 import QuantisationError
from duckllm.weights.files import (
    LOCK_FILE,
    PARTIAL_SUFFIX,
    AtomicFile,
    FolderLock,
    free_bytes,
    hash_file,
    model_errors,
    write_atomically,
)
from duckllm.weights.formats import num_stripes, unit_bytes
from duckllm.weights.imports.packed import dequantised_summary
from duckllm.weights.layout import ModelLayout
from duckllm.weights.manifest import MANIFEST_FILE, HostFile, Manifest
from duckllm.weights.pack import expert_file_bytes, host_file_bytes, write_expert_file, write_host_file
from duckllm.weights.progress_file import PROGRESS_FILE, Entry, ProgressFile
from duckllm.weights.safetensors_file import DTYPE_BYTES, TensorInfo, TensorReader
from duckllm.weights.tensor_check import ModelTensors, find_tensors
from duckllm.weights.verify import verify_conversion

Progress = Callable[[str, int, int], None]
OTHER_HOST_FILE = "host-other.safetensors"
# What belongs to a model beside its tensors: configuration, tokenizer, chat template, licence. No code.
COPIED_FILES = (
    "config.json",
    "generation_config.json",
    MODELOPT_FILE,
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.tiktoken",
    "tiktoken.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE*",
    "NOTICE*",
)
_SPARE_BYTES = 1 << 20


@dataclass(frozen=True)
class PlannedFile:
    """A file that the conversion writes.

    Args:
        name: File name in the destination.
        num_bytes: Its exact length.
        layer: The layer whose experts it holds; None for host tensors.
        tensors: The host tensors in it, in order; empty for experts.
    """

    name: str
    num_bytes: int
    layer: int | None
    tensors: tuple[TensorInfo, ...] = ()


@dataclass(frozen=True)
class _Model:
    """What is converted, and where it is from."""

    checkpoint: Checkpoint
    layout: ModelLayout
    tensors: ModelTensors
    origin: Mapping[str, str]


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    weight_format: str = "fp9",
    verify: bool = False,
    progress: Progress | None = None,
    origin: Mapping[str, str] | None = None,
) -> Manifest:
    """Converts a checkpoint folder; goes on where an earlier, interrupted conversion stopped.

    Args:
        src: Hugging Face checkpoint folder.
        dst: Folder to write; made if absent. A conversion of this checkpoint in it is completed or kept.
        weight_format: Format of the expert weights, ``"fp9"`` or ``"fp8"``; both hold the same weights.
        verify: Read everything again and compare it with the source, bit for bit.
        progress: Called with what is being done, bytes done and bytes in all, often.
        origin: Where the folder is from, for the manifest's ``source``: ``hub_id`` and ``revision``.

    Raises:
        ConfigError: An unknown format, or a destination that is the source, lies in it or holds other things.
        ModelError: The checkpoint is missing, broken or not supported.
        DiskSpaceError: The destination has not the room.

    Threading: any number of processes may convert into one folder; they take turns, the first does the work.
    """
    source, destination = Path(src), Path(dst)
    report = progress or (lambda stage, done, total: None)
    if weight_format not in LOSSLESS_FORMATS:
        raise ConfigError("format", weight_format, "one of " + ", ".join(LOSSLESS_FORMATS))
    with _disk_errors(destination):
        _check_places(source, destination)
    checkpoint = Checkpoint.open(source)
    layout = layout_of(checkpoint.config, checkpoint.tensors)
    model = _Model(checkpoint, layout, find_tensors(checkpoint, layout), dict(origin or {}))
    with model_errors(source):
        fingerprint = checkpoint.fingerprint()
    with _disk_errors(destination):
        manifest = _finished(destination, fingerprint, weight_format)
    if manifest is None:
        manifest = _convert_locked(model, destination, fingerprint, weight_format, report)
    with _disk_errors(destination):
        _copy_files(source, destination)
    if verify:
        verify_conversion(checkpoint, layout, model.tensors.experts, manifest, report)
    return manifest


def _convert_locked(
    model: _Model, destination: Path, fingerprint: str, weight_format: str, report: Progress
) -> Manifest:
    made = not destination.exists()
    try:
        with _disk_errors(destination):
            destination.mkdir(parents=True, exist_ok=True)
            with FolderLock(destination, lambda: report("waiting for another conversion", 0, 1)):
                manifest = _finished(destination, fingerprint, weight_format)
                if manifest is not None:
                    return manifest
                state = _open_state(destination, fingerprint, weight_format)
                return _convert_files(model, state, report)
    finally:
        if made:
            with contextlib.suppress(OSError):
                destination.rmdir()


def _check_places(source: Path, destination: Path) -> None:
    if destination.exists() and not destination.is_dir():
        raise ConfigError("dst", str(destination), "a folder, or a name that is free")
    # Path.resolve() would not turn a loop of links into an OSError.
    inside, outside = Path(os.path.realpath(destination)), Path(os.path.realpath(source))
    if inside == outside or outside in inside.parents:
        raise ConfigError("dst", str(destination), f"a folder outside the source, {source}")


def _finished(destination: Path, fingerprint: str, weight_format: str) -> Manifest | None:
    """The manifest, if this very conversion is complete in the folder.

    Raises:
        ConfigError: The folder holds something else.
    """
    field, wanted = "dst", "an empty folder, or one with a conversion of this checkpoint"
    if not destination.is_dir():
        return None
    if (destination / MANIFEST_FILE).is_file():
        manifest = Manifest.load(destination)
        if manifest.source.get("fingerprint") != fingerprint:
            raise ConfigError(field, str(destination), wanted, "it holds another model")
        if manifest.format != weight_format:
            raise ConfigError(field, str(destination), wanted, f"it holds one in {manifest.format}")
        return None if manifest.file_problems() else manifest
    state = ProgressFile.load(destination)
    if state is not None:
        if state.fingerprint != fingerprint:
            raise ConfigError(field, str(destination), wanted, "it holds a part of another model")
        if state.weight_format != weight_format:
            held = f"it holds a part of one in {state.weight_format}"
            raise ConfigError(field, str(destination), wanted, held)
        return None
    ours = (LOCK_FILE, f".{PROGRESS_FILE}{PARTIAL_SUFFIX}")
    if any(entry.name not in ours for entry in destination.iterdir()):
        raise ConfigError(field, str(destination), wanted, "it holds other files")
    return None


def _open_state(destination: Path, fingerprint: str, weight_format: str) -> ProgressFile:
    """What is finished already; a manifest whose files were damaged becomes progress again."""
    if (destination / MANIFEST_FILE).is_file():
        state = ProgressFile.from_manifest(Manifest.load(destination))
        state.save()
        (destination / MANIFEST_FILE).unlink()
        return state
    return ProgressFile.load(destination) or ProgressFile(destination, fingerprint, weight_format)


@contextmanager
def _disk_errors(destination: Path) -> Iterator[None]:
    """Turns what the file system says into errors of ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskSpaceError(
                f"{destination}: no room left on the disk; make room and run the same command again"
            ) from error
        raise ConfigError(
            "dst", str(destination), f"a folder that can be written ({error.strerror})"
        ) from error


def _convert_files(model: _Model, state: ProgressFile, report: Progress) -> Manifest:
    source, layout, experts = model.checkpoint.folder, model.layout, model.tensors.experts
    folder, plan = state.folder, plan_files(model.tensors, layout, state.weight_format)
    total, done = sum(file.num_bytes for file in plan), 0
    state.drop_damaged(lambda name: report(f"checking {name}", 0, total))
    for partial in folder.glob(f".*{PARTIAL_SUFFIX}"):
        partial.unlink()
    copied = _files_to_copy(source)
    left = [file for file in plan if file.name not in state.entries]
    _check_room(folder, left, copied)
    state.save()
    done = total - sum(file.num_bytes for file in left)
    with TensorReader() as reader:
        for file in left:

            def on_bytes(count: int, name: str = file.name) -> None:
                nonlocal done
                done += count
                report(name, done, total)

            with AtomicFile(folder / file.name) as out:
                entry: Entry
                error = None
                if file.layer is None:
                    entry = write_host_file(out, reader, file.tensors, on_bytes)
                else:
                    entry, error = write_expert_file(
                        out, reader, experts, layout, file.layer, state.weight_format, on_bytes
                    )
                out.sync()
                state.add(file.name, entry, error)
                out.commit()
    _copy_files(source, folder)
    manifest = _manifest(model, state, plan)
    write_atomically(folder / MANIFEST_FILE, (json.dumps(manifest.to_json(), indent=1) + "\n").encode())
    state.remove()
    return manifest


def _files_to_copy(folder: Path) -> list[Path]:
    found = {path for pattern in COPIED_FILES for path in folder.glob(pattern)}
    return sorted(path for path in found if path.is_file())


def _copy_files(source: Path, destination: Path) -> None:
    """Brings the tokenizer and the like up to date; what is the same already is left as it is."""
    for path in _files_to_copy(source):
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        copy = destination / path.name
        if not copy.is_file() or copy.read_bytes() != data:
            write_atomically(copy, data)


def _check_room(folder: Path, files: list[PlannedFile], copied: list[Path]) -> None:
    need = sum(file.num_bytes for file in files) + sum(path.stat().st_size for path in copied) + _SPARE_BYTES
    have = free_bytes(folder)
    if have < need:
        raise DiskSpaceError(
            f"{folder}: got {have:,} bytes free ({have / 1e9:.1f} GB), "
            f"expected at least {need:,} ({need / 1e9:.1f} GB) for the converted model"
        )


def _manifest(model: _Model, state: ProgressFile, plan: list[PlannedFile]) -> Manifest:
    layout, experts = model.layout, model.tensors.experts
    host_files, expert_layers = {}, {}
    for file in plan:
        entry = state.entries[file.name]
        if isinstance(entry, HostFile):
            host_files[file.name] = entry
        elif file.layer is not None:
            expert_layers[file.layer] = entry
    source: dict[str, Any] = {
        **model.origin,
        "fingerprint": state.fingerprint,
        "dtype": experts.dtype,
        "requantised": experts.requantised,
        "quantisation_error": None,
        "host_dequantised": dequantised_summary(model.tensors.host),
    }
    if state.errors:
        total = QuantisationError()
        for error in state.errors.values():
            total += error
        source["quantisation_error"] = {
            "rms_relative": total.rms_relative,
            "max_relative": total.max_relative,
            "flushed": total.flushed,
            "weights": total.weights,
            "files": {name: asdict(error) for name, error in sorted(state.errors.items())},
        }
    return Manifest(
        folder=state.folder,
        format=state.weight_format,
        architecture=layout.architecture,
        model_type=layout.model_type,
        source=source,
        hidden_size=layout.hidden_size,
        moe_intermediate_size=layout.moe_intermediate_size,
        num_experts=layout.num_experts,
        num_experts_per_tok=layout.num_experts_per_tok,
        num_stripes=num_stripes(layout.moe_intermediate_size),
        unit_bytes=unit_bytes(layout.hidden_size, state.weight_format, experts.scale_layout),
        scale_layout=experts.scale_layout,
        config_sha256=hash_file(state.folder / "config.json"),
        host_files=host_files,
        expert_layers=expert_layers,
        created_by=f"duckllm {duckllm.__version__}",
    )


def plan_files(tensors: ModelTensors, layout: ModelLayout, weight_format: str) -> list[PlannedFile]:
    """The files to write, in order: per layer its host tensors, then its experts; the rest last."""
    by_layer: dict[int | None, list[TensorInfo]] = {}
    for info in tensors.host:
        by_layer.setdefault(layout.layer_of(info.name), []).append(info)
    files = []
    for layer in sorted({n for n in by_layer if n is not None} | set(layout.moe_layers)):
        if layer in by_layer:
            files.append(_planned_host_file(f"host-{layer:05d}.safetensors", by_layer[layer]))
        if layer in layout.moe_layers:
            num_bytes = expert_file_bytes(layout, layer, weight_format, tensors.experts.scale_layout)
            files.append(PlannedFile(f"experts-{layer:05d}.safetensors", num_bytes, layer))
    files.append(_planned_host_file(OTHER_HOST_FILE, by_layer.get(None, [])))
    return files


def _planned_host_file(name: str, tensors: list[TensorInfo]) -> PlannedFile:
    ordered = tuple(sorted(tensors, key=lambda info: (-DTYPE_BYTES[info.dtype], info.name)))
    return PlannedFile(name, host_file_bytes(ordered), None, ordered)
