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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import duckllm
from duckllm.errors import CheckpointError, ConfigError, DiskSpaceError
from duckllm.paths import as_path
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
    is_partial,
    model_errors,
    write_atomically,
)
from duckllm.weights.formats import FORMATS, LayerFormat, num_stripes
from duckllm.weights.importance import ImportanceFile
from duckllm.weights.imports.packed import dequantised_summary
from duckllm.weights.layer_formats import LayerNumbers, check_rules, layer_formats, main_format
from duckllm.weights.layout import ModelLayout
from duckllm.weights.manifest import MANIFEST_FILE, HostFile, Manifest
from duckllm.weights.pack import expert_file_bytes, host_file_bytes, write_expert_file, write_host_file
from duckllm.weights.progress_file import (
    PROGRESS_FILE,
    Entry,
    ProgressFile,
    recipe_in_words,
    recipe_of,
)
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
    formats: Mapping[int, str]
    importance: ImportanceFile | None
    origin: Mapping[str, str]

    @property
    def recipe(self) -> str:
        """What its experts are made into, as text."""
        return recipe_in_words(self.formats, "" if self.importance is None else self.importance.sha256)

    def form(self, layer: int) -> LayerFormat:
        """How a layer's experts are stored."""
        return LayerFormat.of(self.formats[layer], self.tensors.experts.scale_layout)


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    weight_format: str = "auto",
    keep: Sequence[str] | None = None,
    importance: str | Path | None = None,
    requantise: bool = False,
    verify: bool = False,
    progress: Progress | None = None,
    origin: Mapping[str, str] | None = None,
    check: Callable[[Path], object] | None = None,
    shared_rules: bool = False,
) -> Manifest:
    """Converts a checkpoint folder; goes on where an earlier, interrupted conversion stopped.

    Args:
        src: Hugging Face checkpoint folder.
        dst: Folder to write; made if absent. A conversion of this checkpoint in it is completed or kept.
        weight_format: Format of the expert weights. ``"auto"`` keeps 4-bit experts as the checkpoint has them
            and makes fp9 of others; ``"fp9"`` and ``"fp8"`` hold the same weights; ``"int8"``, ``"int4"`` and
            ``"int4-bf16"`` round them.
        keep: Layers in another format, as :func:`duckllm.weights.layer_formats.layer_formats` takes them.
        importance: A file of ``duckllm calibrate`` that says which errors of rounding to 4 bits matter.
        requantise: Whether 4-bit experts of the checkpoint may be rounded to another format.
        verify: Read everything again and compare it with the source, bit for bit.
        progress: Called with what is being done, bytes done and bytes in all, often.
        origin: Where the folder is from, for the manifest's ``source``: ``hub_id`` and ``revision``.
        check: Called with ``src`` where there is something to convert, before anything is written: raises
            what is wrong with a model that could be converted but not used.
        shared_rules: Whether ``keep`` is for several formats, in some of which its rules change nothing.

    Raises:
        ConfigError: An unknown format, ``requantise``, ``importance`` or a rule of ``keep`` that would change
            nothing, a source that is converted already, or a destination that is the source, lies in it or
            holds other things.
        ModelError: The checkpoint is missing, broken or not supported.
        DiskSpaceError: The destination has not the room.

    Threading: any number of processes may convert into one folder; they take turns, the first does the work.
    """
    source = as_path("src", src, "a checkpoint's folder")
    destination = as_path("dst", dst, "a folder to write")
    report = progress or (lambda stage, done, total: None)
    _check_source(source)
    with _disk_errors(destination):
        _check_places(source, destination)
    checkpoint = Checkpoint.open(source)
    layout = layout_of(checkpoint.config, checkpoint.tensors)
    tensors = find_tensors(checkpoint, layout)
    numbers = LayerNumbers(layout.moe_layers, checkpoint.config["num_hidden_layers"])
    kept = {layer: tensors.experts.kept_format(layer) for layer in layout.moe_layers}
    formats = layer_formats(numbers, kept, weight_format=weight_format, keep=keep, requantise=requantise)
    if not shared_rules:
        check_rules(numbers, kept, weight_format=weight_format, keep=keep)
    if requantise and not any(kept[layer] not in ("", name) for layer, name in formats.items()):
        raise ConfigError("requantise", True, "nothing where no 4-bit experts are rounded to another format")
    weights = None if importance is None else _open_importance(importance, checkpoint, layout, kept, formats)
    tensors.check_host_scales()
    model = _Model(checkpoint, layout, tensors, formats, weights, dict(origin or {}))
    with model_errors(source):
        fingerprint = checkpoint.fingerprint()
    with _disk_errors(destination):
        manifest = _finished(destination, fingerprint, model.recipe)
    if manifest is None:
        if check is not None:
            check(source)
        manifest = _convert_locked(model, destination, fingerprint, report)
    with _disk_errors(destination):
        _copy_files(source, destination)
    if verify:
        verify_conversion(checkpoint, layout, model.tensors.experts, manifest, report, weights)
    return manifest


def _convert_locked(model: _Model, destination: Path, fingerprint: str, report: Progress) -> Manifest:
    made = not destination.exists()
    try:
        with _disk_errors(destination):
            destination.mkdir(parents=True, exist_ok=True)
            with FolderLock(destination, lambda: report("waiting for another conversion", 0, 1)):
                manifest = _finished(destination, fingerprint, model.recipe)
                if manifest is not None:
                    return manifest
                state = _open_state(destination, fingerprint, model.recipe)
                return _convert_files(model, state, report)
    finally:
        if made:
            with contextlib.suppress(OSError):
                destination.rmdir()


def _check_source(source: Path) -> None:
    """Refuses what a conversion has made, or has begun, as what is to be converted."""
    with model_errors(source):
        is_whole, is_part = (source / MANIFEST_FILE).is_file(), (source / PROGRESS_FILE).is_file()
    if is_whole:
        hint = "it is a converted model: use it as it is, or convert the checkpoint that it was made from"
        raise ConfigError("src", str(source), "a checkpoint", hint)
    if is_part:
        hint = "it holds an unfinished conversion: the same command as before goes on with it"
        raise ConfigError("src", str(source), "a checkpoint", hint)


def _check_places(source: Path, destination: Path) -> None:
    if destination.exists() and not destination.is_dir():
        raise ConfigError("dst", str(destination), "a folder, or a name that is free")
    # Path.resolve() would not turn a loop of links into an OSError.
    inside, outside = Path(os.path.realpath(destination)), Path(os.path.realpath(source))
    if inside == outside or outside in inside.parents:
        raise ConfigError("dst", str(destination), f"a folder outside the source, {source}")


def _finished(destination: Path, fingerprint: str, recipe: str) -> Manifest | None:
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
        if recipe_of(manifest) != recipe:
            raise ConfigError(field, str(destination), wanted, f"it holds one in {recipe_of(manifest)}")
        return None if manifest.file_problems() else manifest
    state = ProgressFile.load(destination)
    if state is not None:
        if state.fingerprint != fingerprint:
            raise ConfigError(field, str(destination), wanted, "it holds a part of another model")
        if state.recipe != recipe:
            held = f"it holds a part of one in {state.recipe}"
            raise ConfigError(field, str(destination), wanted, held)
        return None
    if not all(each.name == LOCK_FILE or is_partial(each.name) for each in destination.iterdir()):
        raise ConfigError(field, str(destination), wanted, "it holds other files")
    return None


def _open_state(destination: Path, fingerprint: str, recipe: str) -> ProgressFile:
    """What is finished already; a manifest whose files were damaged becomes progress again."""
    if (destination / MANIFEST_FILE).is_file():
        state = ProgressFile.from_manifest(Manifest.load(destination))
        state.save()
        (destination / MANIFEST_FILE).unlink()
        return state
    return ProgressFile.load(destination) or ProgressFile(destination, fingerprint, recipe)


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
    forms = {layer: model.form(layer) for layer in layout.moe_layers}
    folder, plan = state.folder, plan_files(model.tensors, layout, forms)
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
                        *(out, reader, experts, layout, file.layer, model.form(file.layer)),
                        on_bytes,
                        model.importance,
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
    main = main_format(model.formats)
    main_form = LayerFormat.of(main, experts.scale_layout)
    host_files, expert_layers = {}, {}
    for file in plan:
        entry = state.entries[file.name]
        if isinstance(entry, HostFile):
            host_files[file.name] = entry
        elif file.layer is not None:
            form = model.form(file.layer)
            own = ("", "") if form.format == main else (form.format, form.scale_layout)
            entry = replace(entry, format=own[0], scale_layout=own[1])
            expert_layers[file.layer] = entry
    source: dict[str, Any] = {
        **model.origin,
        "fingerprint": state.fingerprint,
        "dtype": experts.dtype,
        "requantised": experts.requantised,
        **({} if model.importance is None else {"importance": model.importance.sha256}),
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
        format=main,
        architecture=layout.architecture,
        model_type=layout.model_type,
        source=source,
        hidden_size=layout.hidden_size,
        moe_intermediate_size=layout.moe_intermediate_size,
        num_experts=layout.num_experts,
        num_experts_per_tok=layout.num_experts_per_tok,
        num_stripes=num_stripes(layout.moe_intermediate_size),
        unit_bytes=main_form.unit_bytes(layout.hidden_size),
        scale_layout=main_form.scale_layout,
        config_sha256=hash_file(state.folder / "config.json"),
        host_files=host_files,
        expert_layers=expert_layers,
        created_by=f"duckllm {duckllm.__version__}",
    )


def _open_importance(
    path: str | Path,
    checkpoint: Checkpoint,
    layout: ModelLayout,
    kept: Mapping[int, str],
    formats: Mapping[int, str],
) -> ImportanceFile:
    """The calibration, where there is rounding that it could weight."""
    if not any(FORMATS[name].grouped and name != kept[layer] for layer, name in formats.items()):
        raise ConfigError("importance", str(path), "nothing with a format that rounds nothing to 4 bits")
    with model_errors(checkpoint.folder):
        config_sha256 = hash_file(checkpoint.folder / "config.json")
    return ImportanceFile.open(path, layout, config_sha256)


def plan_files(
    tensors: ModelTensors, layout: ModelLayout, forms: Mapping[int, LayerFormat]
) -> list[PlannedFile]:
    """The files to write, in order: per layer its host tensors, then its experts; the rest last."""
    by_layer: dict[int | None, list[TensorInfo]] = {}
    for info in tensors.host:
        by_layer.setdefault(layout.layer_of(info.name), []).append(info)
    files = []
    for layer in sorted({n for n in by_layer if n is not None} | set(layout.moe_layers)):
        if layer in by_layer:
            files.append(_planned_host_file(f"host-{layer:05d}.safetensors", by_layer[layer]))
        if layer in layout.moe_layers:
            num_bytes = expert_file_bytes(layout, layer, forms[layer])
            files.append(PlannedFile(f"experts-{layer:05d}.safetensors", num_bytes, layer))
    files.append(_planned_host_file(OTHER_HOST_FILE, by_layer.get(None, [])))
    return files


def _planned_host_file(name: str, tensors: list[TensorInfo]) -> PlannedFile:
    ordered = tuple(sorted(tensors, key=lambda info: (-DTYPE_BYTES[info.dtype], info.name)))
    return PlannedFile(name, host_file_bytes(ordered), None, ordered)
