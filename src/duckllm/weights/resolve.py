"""From what a user calls a model to the folder of a converted one, converting once where that is needed.

Called by the host and by commands that take a model. Conversions go into the model cache, a folder a model,
named by its name, its fingerprint and the format's version: a changed checkpoint gets a folder of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

from duckllm.demo import CHECKPOINT
from duckllm.errors import ConfigError, ModelNotFoundError
from duckllm.weights.checkpoint import Checkpoint
from duckllm.weights.console import ConsoleProgress
from duckllm.weights.convert import Progress, convert
from duckllm.weights.files import model_errors
from duckllm.weights.manifest import FORMAT_VERSION, MANIFEST_FILE, Manifest
from duckllm.weights.progress_file import PROGRESS_FILE

CACHE_VARIABLE = "DUCKLLM_CACHE_DIR"
DEMO_NAME = "duck-demo"


def cache_folder() -> Path:
    """Where converted models are kept: ``$DUCKLLM_CACHE_DIR``, or ``~/.cache/duckllm/models``.

    Raises:
        ConfigError: Nothing names a folder, and this user has no home.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "duckllm" / "models"
    except RuntimeError as error:
        raise ConfigError(CACHE_VARIABLE, None, "a folder, as this user has no home") from error


def resolve_model(model: str | Path | None, progress: Progress | None = None) -> Path:
    """The folder of a converted model.

    Args:
        model: A converted folder (returned as it is), a Hugging Face checkpoint folder (converted once into
            the model cache), or None for the demo model.
        progress: As for :func:`duckllm.weights.convert.convert`; the console by default.

    Raises:
        ModelNotFoundError: No such folder, or no model in it.
        ModelError: The folder's content cannot be used.
        DiskSpaceError: No room in the model cache.

    Threading: safe from any number of processes at once; one converts, the others wait for it.
    """
    if model is not None and not str(model):
        raise ModelNotFoundError("model: got an empty name, expected a folder")
    try:
        folder = CHECKPOINT if model is None else Path(model).expanduser()
    except RuntimeError as error:
        raise ModelNotFoundError(f"{model}: no such folder ({error})") from error
    with model_errors(folder):
        found = folder.is_dir()
        is_converted = (folder / MANIFEST_FILE).is_file()
        is_unfinished = (folder / PROGRESS_FILE).is_file()
    if not found:
        raise ModelNotFoundError(f"{folder}: no such folder")
    if is_converted:
        Manifest.load(folder).check_files()
        return folder
    if is_unfinished:
        raise ModelNotFoundError(
            f"{folder}: holds an unfinished conversion, expected a whole one; run duckllm convert again"
        )
    name = DEMO_NAME if model is None else folder.resolve().name
    with model_errors(folder):
        fingerprint = Checkpoint.open(folder).fingerprint()[:12]
    # Another version of the format gets another folder: an older program may still use the old one.
    destination = cache_folder() / f"{name}-v{FORMAT_VERSION}-{fingerprint}"
    if progress is not None:
        convert(folder, destination, progress=progress)
    else:
        with ConsoleProgress(f"Converting {name} into {destination}") as shown:
            convert(folder, destination, progress=shown)
    return destination
