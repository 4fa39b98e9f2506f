"""A vocabulary of 64 tokens that can spell JSON, for tiny random models that have no tokenizer."""

from __future__ import annotations

from collections.abc import Iterable

from duckllm.text.grammar import GrammarTable

EOS = 1
_SINGLE = b'{}[]",:- .0123456789abcdefghijklmnopqrstuvwxyz'
_BROKEN = "é🦆".encode()
_PIECES = [b'{"', b'":', b'", "', b"ab", b"12", "é".encode(), "🦆".encode()[1:3], b"tr", b"},"]
# Tokens 0 to 2 are no text.
TOKENS = [b"", b"", b"", *(bytes([byte]) for byte in _SINGLE + _BROKEN), *_PIECES]


def tiny_table() -> GrammarTable:
    """These tokens as grammars need them."""
    assert len(TOKENS) == 64
    return GrammarTable(TOKENS)


def spell(token_ids: Iterable[int]) -> str:
    """The text of tokens, which must be whole characters."""
    return b"".join(TOKENS[token_id] for token_id in token_ids).decode()
