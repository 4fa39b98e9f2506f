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

TOKEN_VARIABLE = "DUCKLLM_CLUSTER_TOKEN"
MAX_TOKEN_BYTES = 4096


def read_token(token_file: str | Path | None = None) -> str | None:
    """The token in ``token_file``, else in $DUCKLLM_CLUSTER_TOKEN, else None.

    A file that its group or others can read is used too, after a sentence of warning on stderr.

    Raises:
        ConfigError: The file cannot be read, or holds nothing or more than 4096 bytes; or the token is not
            UTF-8.
    """
    if token_file is None:
        given = os.environ.get(TOKEN_VARIABLE) or None
        if given is not None and not is_utf8(given):
            raise ConfigError(TOKEN_VARIABLE, InWords("bytes that are not UTF-8"), "a token of valid text")
        return given
    try:
        path = Path(token_file)
        with path.open("rb") as file:  # a device, or the wrong file, may never end
            content = file.read(MAX_TOKEN_BYTES + 1)
            is_open = bool(os.fstat(file.fileno()).st_mode & (stat.S_IRGRP | stat.S_IROTH))
        token = content.decode("utf-8").strip() if len(content) <= MAX_TOKEN_BYTES else ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError("token_file", str(token_file), f"a readable file ({reason})") from error
    if len(content) > MAX_TOKEN_BYTES:
        raise ConfigError("token_file", str(token_file), f"a file of at most {MAX_TOKEN_BYTES} bytes")
    if not token:
        raise ConfigError("token_file", str(token_file), "a file that holds the token (this one is empty)")
    if is_open:
        print(
            f"duckllm: warning: token_file: others can read {path}, expected only its owner (chmod 600)",
            file=sys.stderr,
        )
    return token
