"""The cluster token: the secret that host and workers share.

Called by the command line of both sides. Beyond loopback there must be one.
"""

from __future__ import annotations

import os
from pathlib import Path

from duckllm.errors import ConfigError

TOKEN_VARIABLE = "DUCKLLM_CLUSTER_TOKEN"


def read_token(token_file: str | Path | None = None) -> str | None:
    """The token in ``token_file``, else in $DUCKLLM_CLUSTER_TOKEN, else None.

    Raises:
        ConfigError: The file cannot be read, or holds nothing.
    """
    if token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        token = Path(token_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError("token_file", str(token_file), f"a readable file ({reason})") from error
    if not token:
        raise ConfigError("token_file", str(token_file), "a file that holds the token (this one is empty)")
    return token
