"""What a request gives back; names as in vLLM."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Logprob:
    """The log probability of one token at one place of a reply.

    Args:
        logprob: Natural logarithm of the probability that the model itself gives the token.
        rank: Its place among all tokens: the likeliest one's is 1, and of equally likely ones the lowest id
            comes first.
        decoded_token: Its text alone; parts of characters as U+FFFD. None where no tokenizer is at hand.
    """

    logprob: float
    rank: int
    decoded_token: str | None


# Of each token of a prompt: its log probability and those of the likeliest tokens by id, as of a reply's
# tokens. The first one has none.
PromptLogprobs = tuple[dict[int, Logprob] | None, ...]


@dataclass(frozen=True)
class CachedTokens:
    """Tokens of a prompt that were not computed because they were in the KV cache, by where they lay.

    Args:
        device: In its pool.
        memory: In the memory tier.
        disk: In the disk tier.
    """

    device: int = 0
    memory: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.device + self.memory + self.disk


@dataclass(frozen=True)
class RequestMetrics:
    """Counts and times of one reply, or of all replies of a request.

    Args:
        num_prompt_tokens: Tokens of the prompt.
        num_generated_tokens: Tokens of the reply so far, an end token included; of all replies together.
        time_to_first_token_s: From the start of the request to its first token, seconds; None before that.
        decode_tokens_per_s: Tokens per second after the first one; None before there are two.
        num_draft_tokens: Guesses at its tokens that were checked.
        num_accepted_tokens: Guesses that were right.
        prefill_tokens_per_s: Prompt tokens that had to be computed per second, up to the first token of the
            reply; None before that.
        inter_token_p50_s: Median of the times between tokens, seconds; 0 where a guess was right. None
            before the reply has ended, or where it has one token.
        inter_token_p99_s: What 99 of 100 of these times are at most.
        cached_tokens: Tokens of the prompt that were found in the KV cache; of several replies, by the first.
    """

    num_prompt_tokens: int
    num_generated_tokens: int
    time_to_first_token_s: float | None
    decode_tokens_per_s: float | None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    prefill_tokens_per_s: float | None = None
    inter_token_p50_s: float | None = None
    inter_token_p99_s: float | None = None
    cached_tokens: CachedTokens = CachedTokens()

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed, as the KV cache had them."""
        return self.cached_tokens.total


@dataclass(frozen=True)
class WorkerTimes:
    """Where the time of steps goes, and how workers have fared; all empty where there are none.

    Times are means over a layer's last steps, of which the newest weighs 1/32; a step that was sent again is
    in none of them. A prompt's steps have many tokens and a reply's few: ``step_tokens`` says of which the
    means are.

    Args:
        addresses: Address of each worker, in worker order.
        layers: The layers that have experts, of which there were steps.
        num_steps: Steps of each of these layers in all.
        step_tokens: Tokens of a step of each layer.
        compute_us: By layer, then by worker: the worker's own time, microseconds.
        round_trip_us: Likewise, from the sending of a step until its answer was taken: computing, the way
            there and back, and what else the host did before it looked.
        wait_us: Likewise, how long the host had nothing to do but wait for that worker.
        num_losses: Of each worker, how often it was lost.
        num_replacements: Of each worker, how often it or another took its place again.
        is_lost: Of each worker, whether it is lost now, as far as steps have shown.
    """

    addresses: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    num_steps: tuple[int, ...] = ()
    step_tokens: tuple[float, ...] = ()
    compute_us: tuple[tuple[float, ...], ...] = ()
    round_trip_us: tuple[tuple[float, ...], ...] = ()
    wait_us: tuple[tuple[float, ...], ...] = ()
    num_losses: tuple[int, ...] = ()
    num_replacements: tuple[int, ...] = ()
    is_lost: tuple[bool, ...] = ()


@dataclass(frozen=True)
class EngineMetrics:
    """What the engine has done in all, and over its last steps (the window).

    Args:
        num_steps: Steps in all.
        num_prompt_tokens: Tokens of prompts computed in all; what was cached is not counted.
        num_generated_tokens: Tokens of replies in all.
        num_draft_tokens: Guesses checked in all.
        num_accepted_tokens: Guesses that were right in all.
        window_steps: Steps in the window.
        step_s: Time of a step of the window, seconds.
        step_parts_s: The same by part; the names are those of :class:`duckllm.models.step_times.StepTimes`.
        total_step_s: Time of all steps, seconds.
        total_step_parts_s: The same by part.
        prefill_tokens_per_s: Of the window, a step's time being divided between prompts and replies by their
            tokens; None where no prompt was computed.
        decode_tokens_per_s: Likewise, of replies.
        acceptance: Share of the window's guesses that were right; None where there were none.
        time_to_first_token_p50_s: Of the last requests that have ended; None before there are ten.
        time_to_first_token_p99_s: Likewise.
        inter_token_p50_s: Likewise, of the times between two tokens of a reply.
        inter_token_p99_s: Likewise.
    """

    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    window_steps: int
    step_s: float
    step_parts_s: Mapping[str, float]
    total_step_s: float
    total_step_parts_s: Mapping[str, float]
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    acceptance: float | None
    time_to_first_token_p50_s: float | None
    time_to_first_token_p99_s: float | None
    inter_token_p50_s: float | None
    inter_token_p99_s: float | None


@dataclass(frozen=True)
class CachePages:
    """Pages of the KV cache and of the tiers below it, by what is in them.

    Args:
        used: Of the pool, those that requests under way have.
        reusable: Of the pool, those that nobody uses and whose content waits for a prompt that begins alike.
        free: Of the pool, those without content.
        memory: In the memory tier.
        max_memory: Most that it holds; 0 where there is none.
        disk: In the disk tier.
        max_disk: Most that it holds; 0 where there is none.
        page_bytes: Size of a page.
    """

    used: int
    reusable: int
    free: int
    memory: int
    max_memory: int
    disk: int
    max_disk: int
    page_bytes: int


@dataclass(frozen=True)
class EngineState:
    """What is under way at the moment.

    Args:
        num_running: Replies that are computed; each has pages of the KV cache.
        num_waiting: Replies that wait for room.
        cache: The KV cache.
    """

    num_running: int
    num_waiting: int
    cache: CachePages


def percentile(values: Iterable[float], percent: float) -> float | None:
    """The smallest value that ``percent`` of the values do not exceed; None of none."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass(frozen=True)
class CompletionOutput:
    """One reply.

    Args:
        index: Its number among the ``n`` replies of the request.
        text: The reply, up to a stop string, without special tokens; SamplingParams may ask for these.
        token_ids: The reply's tokens, with the one that ended it or that completed the stop string.
        cumulative_logprob: Sum of the tokens' log probabilities; None without ``logprobs``.
        logprobs: For each token, its log probability and those of the likeliest tokens by id, the reply's own
            first, then the likeliest one downwards; None without ``logprobs``.
        finish_reason: ``"stop"`` at an end token, a stop token, a stop string or where nothing may follow in
            structured outputs, ``"length"`` at ``max_tokens`` or at the context's end, ``"error"`` where
            structured outputs cannot go on: the grammar needs more work than one token may, or says what the
            model has no tokens for.
        stop_reason: The stop string, or the one of ``stop_token_ids``, that ended the reply, or what the
            error is; else None.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: tuple[dict[int, Logprob], ...] | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True)
class RequestOutput:
    """A finished request: its prompt, its replies and its times.

    Args:
        request_id: Unique within its LLM.
        prompt: The prompt as text; None where it was given as tokens or messages.
        prompt_token_ids: The prompt as tokens.
        outputs: The replies, by their index.
        finished: Whether they are complete; always True.
        metrics: Counts and times.
        prompt_logprobs: For each token of the prompt what :class:`CompletionOutput` has for one of a reply,
            and None for the first, which nothing goes before; None without ``prompt_logprobs``.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed, as the KV cache had them."""
        return self.metrics.num_cached_tokens


@dataclass(frozen=True)
class StreamOutput:
    """What one step adds to a reply.

    Args:
        request_id: Unique within its LLM.
        text: New text; may be empty, as a character may be spread over tokens, and as what may be the
            beginning of a stop string is held back.
        token_ids: New tokens.
        finish_reason: None until the reply's last one; then as in :class:`CompletionOutput`.
        metrics: Counts and times of the reply so far.
        index: The reply's number among the ``n`` of the request.
        logprobs: For each new token, as in :class:`CompletionOutput`.
        stop_reason: As in :class:`CompletionOutput`.
        inter_token_s: Time since the reply's token before, seconds; None of the first one.
        prompt_logprobs: As in :class:`RequestOutput`, with the first token of the first reply; else None.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    metrics: RequestMetrics
    index: int = 0
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    stop_reason: str | int | None = None
    inter_token_s: float | None = None
    prompt_logprobs: PromptLogprobs | None = None
