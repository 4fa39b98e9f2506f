"""A vocabulary of 64 tokens that can spell JSON, for tiny random models that have no tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from duckllm.engine.request import Request
from duckllm.sampling_params import SamplingParams, StructuredOutputsParams
from duckllm.text import Tokenizer
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


def new_request(
    table: GrammarTable,
    outputs: StructuredOutputsParams,
    tokenizer: Tokenizer | None = None,
    eos: tuple[int, ...] = (EOS,),
    **params: Any,
) -> Request:
    """A request whose reply must be so, greedy unless ``params`` say otherwise."""
    return Request(
        "0",
        [3],
        SamplingParams(**{"temperature": 0.0, "structured_outputs": outputs, **params}),
        vocab_size=table.end,
        max_model_len=1000,
        eos_token_ids=frozenset(eos),
        tokenizer=tokenizer,
        grammar_table=table,
    )


def random_logits(vocab_size: int, seed: int) -> Iterator[torch.Tensor]:
    """Logits without end."""
    numbers = np.random.default_rng(seed)
    while True:
        yield torch.from_numpy(3 * numbers.standard_normal(vocab_size).astype(np.float32))


def run(request: Request, logits: Iterator[torch.Tensor]) -> Request:
    """The same one, at its end."""
    while request.finish_reason is None:
        request.advance(next(logits))
    return request
