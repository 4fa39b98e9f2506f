"""From what a user calls a model to the folder of a converted one, converting once where that is needed.

Called by the host and by commands that take a model. A name is that of a folder, or of a model on the hub.
Conversions go into the model cache, a folder a model, named by its name, its fingerprint and the format's
version: a changed checkpoint gets a folder of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from duckllm.demo import CHECKPOINT
from duckllm.errors import ConfigError, ModelNotFoundError, show_value
from duckllm.paths import path_problem
from duckllm.weights.architectures import layout_of
from duckllm.weights.cache_folder import cache_folder
from duckllm.weights.checkpoint import Checkpoint, load_json, read_quantisation
from duckllm.weights.console import ConsoleProgress
from duckllm.weights.convert import Progress, convert
from duckllm.weights.files import hash_file, model_errors
from duckllm.weights.hub import HubModel
from duckllm.weights.layer_formats import QUANTISED_FORMATS
from duckllm.weights.manifest import FORMAT_VERSION, MANIFEST_FILE, Manifest
from duckllm.weights.progress_file import PROGRESS_FILE

DEMO_MODEL = "demo"  # what a user may call the model that ships, where a name has to be given
DEMO_NAME = "duck-demo"
_UNIT = re.compile(r"[KMGT]i?B", re.IGNORECASE)


@dataclass(frozen=True)
class ModelPlace:
    """Where a model lies.

    Args:
        folder: Its folder, a checkpoint's or a converted one.
        name: What its folder in the model cache is called after.
        origin: ``hub_id`` and ``revision``, where it is from the hub.
    """

    folder: Path
    name: str
    origin: Mapping[str, str]


def find_model(
    model: str | Path | None, *, whole: bool = True, check: Callable[[Path], object] | None = None
) -> ModelPlace:
    """The folder that a model's name stands for.

    Args:
        model: A folder, a model on the Hugging Face hub as ``org/name`` or ``org/name@revision``, or
            ``"demo"`` or None for the demo model. A folder of that name comes first, and the hub's local
            cache before a download.
        whole: Whether all of it is needed. Without, of a model on the hub config.json is enough, and alone
            is downloaded.
        check: Called with the folder of a model on the hub that has config.json, before its weights are
            downloaded: raises what is wrong with it, beside what no conversion takes.

    Raises:
        ModelNotFoundError: Neither a folder nor a model on the hub that can be had.
        CheckpointError: The hub's local cache holds a part of it, and the rest cannot be had; or its
            configuration is wrong.
        UnsupportedModelError: Its configuration asks for something that is not implemented.
        DiskSpaceError: No room for a download.
        MissingPackageError: A model on the hub, without huggingface_hub.
    """
    if model is not None and (problem := path_problem(str(model))):
        got = show_value(str(model)) if str(model) else "an empty name"
        why = f" ({problem})" if str(model) else ""
        raise ModelNotFoundError(f"model: got {got}, expected a folder or a model on the hub{why}")
    try:
        is_demo = is_demo_name(model)
        folder = CHECKPOINT if is_demo or model is None else Path(model).expanduser()
    except RuntimeError as error:
        raise ModelNotFoundError(f"{model}: no such folder ({error})") from error
    with model_errors(folder):
        found, is_free = folder.is_dir(), not folder.exists()
    if found:
        return ModelPlace(folder, DEMO_NAME if is_demo else folder.resolve().name, {})
    hub_model = HubModel.parse(str(model)) if is_free else None
    if hub_model is None:
        what = "no such folder" if is_free else "is a file, expected a model's folder"
        raise ModelNotFoundError(f"{folder}: {what}{_hint(str(model))}")
    early = partial(_check_configuration, check=check)
    folder = hub_model.find(early) if whole else hub_model.find_configuration()
    origin = {"hub_id": hub_model.repo_id, "revision": folder.name}
    return ModelPlace(folder, hub_model.repo_id.replace("/", "--"), origin)


def _check_configuration(folder: Path, check: Callable[[Path], object] | None) -> None:
    """Refuses a model by its config.json alone: what would be refused once its weights are here."""
    config = load_json(folder / "config.json")
    layout_of(config, {})
    read_quantisation(folder, config)
    if check is not None:
        check(folder)


def is_demo_name(model: str | Path | None) -> bool:
    """Whether a name stands for the demo model: none, or ``"demo"`` where no folder is called that."""
    return model is None or (str(model) == DEMO_MODEL and not Path(model).exists())


def check_new_folder(model: str | Path, destination: Path) -> None:
    """Refuses a new folder under the name by which the model that is converted is called, or the demo model.

    Folders come first, so that the same command would not go on where it stopped, and that the name would
    mean another model in every command that is given there.

    Raises:
        ConfigError: It is.
    """
    if os.path.lexists(destination):
        return
    place = os.path.realpath(destination)
    for name in (DEMO_MODEL, str(model), str(model).partition("@")[0]):
        if place == os.path.realpath(name):
            what = "the demo model" if name == DEMO_MODEL else "the model on the hub"
            hint = f"{name} would mean that folder here, and no longer {what}"
            raise ConfigError("dst", str(destination), "a folder of another name", hint)


def _hint(name: str) -> str:
    """What may have been meant by a name that is no model's."""
    if _UNIT.fullmatch(name):
        return " (a size is one word: 2GiB)"
    if name.endswith("?") or len(name.split()) > 1:
        return " (a question to a model is asked with --prompt)"
    return ""


def resolve_model(
    model: str | Path | None,
    progress: Progress | None = None,
    weight_format: str = "auto",
    keep: Sequence[str] | None = None,
    importance: Path | None = None,
    check: Callable[[Path], object] | None = None,
) -> Path:
    """The folder of a converted model.

    Args:
        model: What :func:`find_model` takes. A converted folder is returned as it is; a checkpoint is
            converted once into the model cache.
        progress: As for :func:`duckllm.weights.convert.convert`; the console by default.
        weight_format: A format that weights are rounded to (int8, int4) is what a checkpoint is converted
            into; any other converts as ``"auto"`` does, without rounding more than e4m3 has to.
        keep: Layers of such a checkpoint in other formats, as :func:`duckllm.weights.convert.convert` has it.
        importance: What ``duckllm calibrate`` recorded, for the rounding to 4 bits.
        check: As for :func:`duckllm.weights.convert.convert`, and for :func:`find_model`.

    Raises:
        ModelNotFoundError: No such folder, or no model in it, and none on the hub.
        ModelError: The folder's content cannot be used.
        DiskSpaceError: No room in the model cache, or for a download.
        MissingPackageError: A model on the hub, without huggingface_hub.

    Threading: safe from any number of processes at once; one converts, the others wait for it.
    """
    place = find_model(model, check=check)
    folder = place.folder
    with model_errors(folder):
        is_converted = (folder / MANIFEST_FILE).is_file()
        is_unfinished = (folder / PROGRESS_FILE).is_file()
    if is_converted:
        Manifest.load(folder).check_files()
        return folder
    if is_unfinished:
        raise ModelNotFoundError(
            f"{folder}: holds an unfinished conversion, expected a whole one; run duckllm convert again"
        )
    with model_errors(folder):
        fingerprint = Checkpoint.open(folder).fingerprint()[:12]
    # Another version of the format gets another folder: an older program may still use the old one.
    rounded = weight_format if weight_format in QUANTISED_FORMATS else "auto"
    suffix = ("" if rounded == "auto" else f"-{rounded}") + _rules(keep, importance)
    destination = cache_folder() / f"{place.name}-v{FORMAT_VERSION}-{fingerprint}{suffix}"
    options: dict[str, Any] = {"weight_format": rounded, "keep": keep, "importance": importance}
    # A caller that compares formats gives the same rules with each.
    options |= {"check": check, "shared_rules": True}
    if progress is not None:
        convert(folder, destination, progress=progress, origin=place.origin, **options)
    else:
        with ConsoleProgress(f"Converting {place.name} into {destination}") as shown:
            convert(folder, destination, progress=shown, origin=place.origin, **options)
    return destination


def _rules(keep: Sequence[str] | None, importance: Path | None) -> str:
    """What tells a folder from others of the same checkpoint and format; empty for the usual one."""
    if keep is None and importance is None:
        return ""
    recorded = ""
    if importance is not None:
        with model_errors(importance):
            recorded = hash_file(importance)
    text = json.dumps([keep, recorded])
    return f"-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
