"""Parts of OpenAI's replies that chat and completions share: usage, timings, log probabilities, ids.

Called by :mod:`duckllm.server.openai_chat` and :mod:`duckllm.server.openai_completions`.
"""

from __future__ import annotations

import codecs
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from duckllm.outputs import Logprob, PromptLogprobs, RequestMetrics
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


def prompt_logprobs(
    token_ids: Sequence[int], logprobs: PromptLogprobs, num_top: int, text: str, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The ``logprobs`` of the completions API for a prompt, an entry for each of its tokens.

    The first one's are null. ``text`` is the prompt as it is echoed, by whose characters offsets count.
    """
    entries = [each or {} for each in logprobs]
    offsets = _offsets(token_ids, text, tokenizer)
    found = legacy_logprobs(token_ids[1:], entries[1:], num_top, offsets[1:])
    first = tokenizer.decode(token_ids[:1], skip_special_tokens=False)
    found["tokens"].insert(0, first)
    found["token_logprobs"].insert(0, None)
    found["top_logprobs"].insert(0, None)
    found["text_offset"].insert(0, offsets[0])
    return found


def _offsets(token_ids: Sequence[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Where each token begins in a text, in characters; in the midst of one, where that begins.

    A control token that the text does not spell, such as a BOS in front, takes no room.
    """
    data, place, num_begun = text.encode(), 0, 0
    offsets = []
    for token_id in token_ids:
        is_inside = place < len(data) and _continues(data[place])
        offsets.append(num_begun - is_inside)
        if token_id in tokenizer.control_token_ids:
            piece = tokenizer.token_bytes(token_id)
            piece = piece if data.startswith(piece, place) else b""
        else:
            piece = tokenizer.bytes_in_text(token_id, first=place == 0)
        own = data[place : place + len(piece)]
        num_begun += sum(not _continues(byte) for byte in own)
        place += len(own)
    return offsets


def _continues(byte: int) -> bool:
    """Whether a byte of UTF-8 is not a character's first."""
    return byte & 0xC0 == 0x80


def legacy_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[dict[int, Logprob]],
    num_top: int,
    offsets: Sequence[int],
) -> dict[str, Any]:
    """The ``logprobs`` of the completions API, with where each token begins in the text."""
    return {
        "tokens": [
            at[token_id].decoded_token or "" for token_id, at in zip(token_ids, logprobs, strict=True)
        ],
        "token_logprobs": [
            finite(at[token_id].logprob) for token_id, at in zip(token_ids, logprobs, strict=True)
        ],
        "top_logprobs": [
            {other.decoded_token: finite(other.logprob) for _, other in _likeliest(at, num_top)}
            for at in logprobs
        ],
        "text_offset": list(offsets),
    }


class ReplyOffsets:
    """Where each token of a reply begins in its text, in characters; in the midst of one, where that begins.

    Special tokens, which a reply's text leaves out, take no room.

    Args:
        tokenizer: Of the model.
        begin: Characters before the reply: those of a prompt that is echoed.
    """

    def __init__(self, tokenizer: Tokenizer, begin: int) -> None:
        self._tokenizer, self._num_chars, self._is_first = tokenizer, begin, True
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, token_ids: Sequence[int]) -> list[int]:
        """Of the tokens that come next."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._num_chars)
            if token_id not in self._tokenizer.special_token_ids:
                data = self._tokenizer.bytes_in_text(token_id, first=self._is_first)
                self._num_chars += len(self._utf8.decode(data))
                self._is_first = False
        return offsets


def finite(logprob: float) -> float:
    """As OpenAI writes it: -9999 for what cannot be."""
    return max(logprob, -9999.0)
