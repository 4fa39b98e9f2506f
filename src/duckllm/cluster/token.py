"""The cluster token: the secret that host and workers share.

Called by the command line of both sides. Beyond loopback there must be one.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from duckllm.config import is_utf8
from duckllm.errors import ConfigError, InWords
from duckllm.paths import as_path

TOKEN_VARIABLE = "DUCKLLM_CLUSTER_TOKEN"
MAX_TOKEN_BYTES = 4096


def read_token(token_file: str | Path | None = None) -> str | None:
    """The token in ``token_file``, else in $DUCKLLM_CLUSTER_TOKEN, else None.

    Raises:
        ConfigError: As of :func:`read_secret`, or the token is not UTF-8.
    """
    if token_file is None:
        given = os.environ.get(TOKEN_VARIABLE) or None
        if given is not None and not is_utf8(given):
            raise ConfigError(TOKEN_VARIABLE, InWords("bytes that are not UTF-8"), "a token of valid text")
        return given
    return read_secret("token_file", token_file, "the token")


def read_secret(field: str, file_name: str | Path, what: str) -> str:
    """What a file holds that is somebody's secret, without white space around it.

    A file that its group or others can read is used too, after a sentence of warning on stderr.

    Args:
        field: What named the file.
        file_name: The file.
        what: What it holds, for the message about an empty one.

    Raises:
        ConfigError: It is no path, the file cannot be read, or holds nothing or more than 4096 bytes.
    """
    path = as_path(field, file_name, "a readable file")
    try:
        with path.open("rb") as file:  # a device, or the wrong file, may never end
            content = file.read(MAX_TOKEN_BYTES + 1)
            is_open = bool(os.fstat(file.fileno()).st_mode & (stat.S_IRGRP | stat.S_IROTH))
        secret = content.decode("utf-8").strip() if len(content) <= MAX_TOKEN_BYTES else ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(field, str(file_name), f"a readable file ({reason})") from error
    if len(content) > MAX_TOKEN_BYTES:
        raise ConfigError(field, str(file_name), f"a file of at most {MAX_TOKEN_BYTES} bytes")
    if not secret:
        raise ConfigError(field, str(file_name), f"a file that holds {what} (this one is empty)")
    if is_open:
        print(
            f"duckllm: warning: {field}: others can read {path}, expected only its owner (chmod 600)",
            file=sys.stderr,
        )
    return secret
