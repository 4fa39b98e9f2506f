"""Tokens that stand for bytes: how each kind of tokenizer spells them, and what broken characters become.

Called by :mod:`duckllm.text.tokenizer` and :mod:`duckllm.text.tiktoken_bpe`. Knows spellings and bytes only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
REPLACEMENT = "\ufffd"


def _char_of_byte() -> dict[int, str]:
    """The printable stand-in of each byte in byte-level BPE.

    Bytes that print in Latin-1 stand for themselves; the others count upwards from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}


_CHAR_OF_BYTE = _char_of_byte()
_BYTE_OF_CHAR = {char: byte for byte, char in _CHAR_OF_BYTE.items()}


def byte_level_spelling(data: bytes) -> str:
    """How byte-level BPE spells a token of these bytes."""
    return data.decode("latin-1").translate(_CHAR_OF_BYTE)


def byte_level_bytes(token: str) -> bytes | None:
    """The bytes that a token of byte-level BPE spells; None if it is spelled in other characters."""
    if not all(char in _BYTE_OF_CHAR for char in token):
        return None
    return bytes(_BYTE_OF_CHAR[char] for char in token)


def fallback_byte(token: str) -> bytes | None:
    """The byte that ``<0x41>`` and the like stand for; None for any other token."""
    return bytes.fromhex(token[3:5]) if _BYTE_TOKEN.fullmatch(token) else None


def mend_fallback_bytes(tokens: Iterable[str]) -> list[str]:
    """``tokens`` with one U+FFFD in the place of each broken character of their ``<0x41>`` tokens.

    A fallback decoder gives up a whole run of byte tokens for one bad byte in it. This way the run's good
    characters stay, and a text that ends inside a character is what it was before and one U+FFFD.
    """
    mended: list[str] = []
    run: list[str] = []
    for token in tokens:
        if fallback_byte(token) is not None:
            run.append(token)
        else:
            mended += [*_mend_run(run), token]
            run = []
    return mended + _mend_run(run)


def _mend_run(run: list[str]) -> list[str]:
    data = b"".join(fallback_byte(token) or b"" for token in run)
    mended: list[str] = []
    start = 0
    while start < len(run):
        try:
            data[start:].decode()
        except UnicodeDecodeError as error:
            mended += [*run[start : start + error.start], REPLACEMENT]
            start += error.end
        else:
            return mended + run[start:]
    return mended
