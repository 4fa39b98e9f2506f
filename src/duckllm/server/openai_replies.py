"""Parts of OpenAI's replies that chat and completions share: usage, timings, log probabilities, ids.

Called by :mod:`duckllm.server.openai_chat` and :mod:`duckllm.server.openai_completions`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from duckllm.outputs import Logprob, RequestMetrics
from duckllm.text import Tokenizer


def new_id(prefix: str) -> str:
    """A name that nobody can guess."""
    return prefix + secrets.token_hex(12)


@dataclass
class Tally:
    """What the replies to one prompt came to, by the last metrics of each.

    Args:
        num_prompt_tokens: Of the prompt.
    """

    num_prompt_tokens: int
    _metrics: dict[int, RequestMetrics] = field(default_factory=dict)
    _num_reasoning_tokens: dict[int, int] = field(default_factory=dict)
    _num_cached_tokens: int | None = None  # where they are several prompts'

    @classmethod
    def of_all(cls, tallies: Sequence[Tally]) -> Tally:
        """Those of several prompts together; what each of them found in the cache counts."""
        total = cls(sum(tally.num_prompt_tokens for tally in tallies))
        total._num_cached_tokens = sum(tally._num_cached() for tally in tallies)
        for tally in tallies:
            for index, metrics in tally._metrics.items():
                total.add(len(total._metrics), metrics, tally._num_reasoning_tokens[index])
        return total

    def add(self, index: int, metrics: RequestMetrics, num_reasoning_tokens: int = 0) -> None:
        """Notes how far a reply has come."""
        self._metrics[index] = metrics
        self._num_reasoning_tokens[index] = num_reasoning_tokens

    def usage(self) -> dict[str, Any]:
        """OpenAI's ``usage``: the prompt once, all replies together."""
        num_generated = sum(each.num_generated_tokens for each in self._metrics.values())
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_generated,
            "total_tokens": self.num_prompt_tokens + num_generated,
            "prompt_tokens_details": {"cached_tokens": self._num_cached()},
            "completion_tokens_details": {"reasoning_tokens": sum(self._num_reasoning_tokens.values())},
        }

    def timings(self) -> dict[str, Any]:
        """llama.cpp's ``timings``: of the replies together, in milliseconds and tokens a second."""
        each = list(self._metrics.values())
        firsts = [1e3 * one.time_to_first_token_s for one in each if one.time_to_first_token_s is not None]
        generated = sum(one.num_generated_tokens for one in each)
        # Between the first token of a reply and its last; replies of one prompt are computed side by side.
        decode_ms = max((1e3 * _decode_s(one) for one in each), default=0.0)
        after_first = sum(max(0, one.num_generated_tokens - 1) for one in each)
        return {
            "prompt_n": self.num_prompt_tokens - self._num_cached(),
            "cache_n": self._num_cached(),
            "prompt_ms": round(min(firsts, default=0.0), 3),
            "predicted_n": generated,
            "predicted_ms": round(decode_ms, 3),
            "predicted_per_second": round(1e3 * after_first / decode_ms, 3) if decode_ms else None,
            "draft_n": sum(one.num_draft_tokens for one in each),
            "draft_n_accepted": sum(one.num_accepted_tokens for one in each),
        }

    def _num_cached(self) -> int:
        """By the first of the replies: the others find all of its prompt."""
        if self._num_cached_tokens is not None:
            return self._num_cached_tokens
        return self._metrics[min(self._metrics)].num_cached_tokens if self._metrics else 0


def _decode_s(metrics: RequestMetrics) -> float:
    if metrics.decode_tokens_per_s is None:
        return 0.0
    return (metrics.num_generated_tokens - 1) / metrics.decode_tokens_per_s


def without_end(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], tokenizer: Tokenizer
) -> tuple[Sequence[int], Sequence[dict[int, Logprob]]]:
    """The same without end tokens, which are no text."""
    kept = [number for number, token in enumerate(token_ids) if token not in tokenizer.eos_token_ids]
    return [token_ids[number] for number in kept], [logprobs[number] for number in kept]


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], num_top: int, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """The ``content`` of a chat's ``logprobs``, one entry a token."""
    return [
        {
            **_entry(token_id, at[token_id], tokenizer),
            "top_logprobs": [_entry(other, logprob, tokenizer) for other, logprob in _likeliest(at, num_top)],
        }
        for token_id, at in zip(token_ids, logprobs, strict=True)
    ]


def _entry(token_id: int, logprob: Logprob, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": logprob.decoded_token,
        "logprob": finite(logprob.logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _likeliest(at: dict[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The likeliest tokens of a place, downwards."""
    return sorted(at.items(), key=lambda item: item[1].rank)[:num_top]


def legacy_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], num_top: int, offset: int
) -> dict[str, Any]:
    """The ``logprobs`` of the completions API; the text of the first token begins at ``offset``."""
    tokens, offsets = [], []
    for token_id, at in zip(token_ids, logprobs, strict=True):
        tokens.append(at[token_id].decoded_token or "")
        offsets.append(offset)
        offset += len(tokens[-1])
    return {
        "tokens": tokens,
        "token_logprobs": [
            finite(at[token_id].logprob) for token_id, at in zip(token_ids, logprobs, strict=True)
        ],
        "top_logprobs": [
            {other.decoded_token: finite(other.logprob) for _, other in _likeliest(at, num_top)}
            for at in logprobs
        ],
        "text_offset": offsets,
    }


def finite(logprob: float) -> float:
    """As OpenAI writes it: -9999 for what cannot be."""
    return max(logprob, -9999.0)
