"""What is read out of JSON, checked: whole objects, hashes, file names.

Called wherever JSON of a model's folder or of a host is read; knows no meaning of what it checks.
"""

from __future__ import annotations

import json
import re
from pathlib import PurePath
from typing import Any, TypeGuard

from duckllm.errors import CheckpointError

_SHA256 = re.compile(r"[0-9a-f]{64}")


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object that ``data`` spells.

    Args:
        data: UTF-8 text.
        where: What the data are, for the error.

    Raises:
        CheckpointError: Names ``where``, and what is wrong.
    """
    try:
        value = json.loads(data)
    except ValueError as error:
        raise CheckpointError(f"{where}: no valid JSON ({error})") from error
    except RecursionError as error:
        raise CheckpointError(f"{where}: no usable JSON (nested too deeply)") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: got a JSON {type(value).__name__}, expected an object")
    return value


def is_sha256(value: object) -> TypeGuard[str]:
    """Whether a value is a SHA-256 in lower-case hex."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def is_plain_name(value: object) -> TypeGuard[str]:
    """Whether a value names a file inside a folder: no other folder, no NUL, not too long."""
    if not isinstance(value, str) or not 0 < len(value) <= 255 or value in (".", "..") or "\0" in value:
        return False
    return PurePath(value).name == value
