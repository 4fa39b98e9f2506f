"""The cluster token, as a file or as the environment gives it."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from duckllm.cluster.address import Address
from duckllm.cluster.token import MAX_TOKEN_BYTES, TOKEN_VARIABLE
from duckllm.config import is_utf8
from duckllm.doctor.finding import OK, PROBLEM, WARNING, Finding
from duckllm.doctor.machine_checks import HERE

_NEW = 'python3 -c "import secrets; print(secrets.token_hex(32))" > token; chmod 600 token'


def check_token(token_file: Path | None, addresses: Sequence[Address]) -> tuple[Finding, str | None]:
    """What is to be said of the token, and the token, if one can be used."""
    if token_file is None:
        given = os.environ.get(TOKEN_VARIABLE)
        if not given:
            return _missing(addresses), None
        if not is_utf8(given):
            return Finding(HERE, "token", PROBLEM, f"${TOKEN_VARIABLE} is not UTF-8", _NEW), None
        return Finding(HERE, "token", OK, f"in ${TOKEN_VARIABLE}"), given
    try:
        with token_file.open("rb") as file:
            content = file.read(MAX_TOKEN_BYTES + 1)
            mode = os.fstat(file.fileno()).st_mode
        token = content.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        return Finding(HERE, "token", PROBLEM, f"{token_file}: {reason}", _NEW), None
    if not token or len(content) > MAX_TOKEN_BYTES:
        size = "empty" if not token else f"more than {MAX_TOKEN_BYTES} bytes"
        return Finding(HERE, "token", PROBLEM, f"{token_file} is {size}", _NEW), None
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        found = f"others can read {token_file}"
        return Finding(HERE, "token", WARNING, found, f"chmod 600 {token_file}"), token
    return Finding(HERE, "token", OK, f"in {token_file}, its owner's alone"), token


def _missing(addresses: Sequence[Address]) -> Finding:
    beyond = [
        address for address in addresses if address.name not in ("localhost", "::1") and not _is_127(address)
    ]
    if not beyond:
        return Finding(HERE, "token", OK, "none, and none is needed on loopback")
    found = f"none, but {beyond[0]} is beyond loopback"
    return Finding(HERE, "token", PROBLEM, found, f"{_NEW}; then --token-file token here and on the nodes")


def _is_127(address: Address) -> bool:
    return address.name.startswith("127.")
