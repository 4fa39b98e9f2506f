"""Where this user's caches lie: converted models, shards of models on a node, and how fast that node is.

Called by :mod:`duckllm.weights.resolve` and by workers; knows nothing of what is in them.
"""

from __future__ import annotations

import os
from pathlib import Path

from duckllm.errors import ConfigError

CACHE_VARIABLE = "DUCKLLM_CACHE_DIR"


def cache_folder() -> Path:
    """Where converted models are kept: ``$DUCKLLM_CACHE_DIR``, or ``~/.cache/duckllm/models``.

    Raises:
        ConfigError: Nothing names a folder, and this user has no home.
    """
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else _base() / "models"


def shard_folder() -> Path:
    """Where a node keeps shards: ``shards`` in ``$DUCKLLM_CACHE_DIR``, or ``~/.cache/duckllm/shards``.

    Raises:
        ConfigError: As :func:`cache_folder`.
    """
    return _beside_models("shards")


def speed_folder() -> Path:
    """Where a node keeps how fast it is: ``speed`` in ``$DUCKLLM_CACHE_DIR``, or ``~/.cache/duckllm/speed``.

    Raises:
        ConfigError: As :func:`cache_folder`.
    """
    return _beside_models("speed")


def _beside_models(name: str) -> Path:
    named = os.environ.get(CACHE_VARIABLE)
    return (Path(named) if named else _base()) / name


def _base() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "duckllm"
    except RuntimeError as error:
        raise ConfigError(CACHE_VARIABLE, None, "a folder, as this user has no home") from error
