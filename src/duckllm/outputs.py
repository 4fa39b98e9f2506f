"""What a request gives back; names as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestMetrics:
    """Counts and times of one request.

    Args:
        num_prompt_tokens: Tokens of the prompt.
        num_generated_tokens: Tokens of the reply so far, an end token included.
        time_to_first_token_s: From the start of the request to its first token, seconds; None before that.
        decode_tokens_per_s: Tokens per second after the first one; None before there are two.
    """

    num_prompt_tokens: int
    num_generated_tokens: int
    time_to_first_token_s: float | None
    decode_tokens_per_s: float | None


@dataclass(frozen=True)
class CompletionOutput:
    """One reply.

    Args:
        index: Its number within the request; always 0, as a request has one reply.
        text: The reply, without special tokens.
        token_ids: The reply's tokens, with the end token where one ended it.
        finish_reason: ``"stop"`` at an end token, ``"length"`` at ``max_tokens`` or at the context's end.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


@dataclass(frozen=True)
class RequestOutput:
    """A finished request: its prompt, its reply and its times.

    Args:
        request_id: Unique within its LLM.
        prompt: The prompt as text; None where it was given as tokens or messages.
        prompt_token_ids: The prompt as tokens.
        outputs: The one reply.
        finished: Whether the reply is complete; always True.
        metrics: Counts and times.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics


@dataclass(frozen=True)
class StreamOutput:
    """What one step adds to a reply.

    Args:
        request_id: Unique within its LLM.
        text: New text; may be empty, as a character may be spread over tokens.
        token_ids: New tokens.
        finish_reason: None until the last one; then as in :class:`CompletionOutput`.
        metrics: Counts and times so far.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    metrics: RequestMetrics
