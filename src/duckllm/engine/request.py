"""One request and how far it has come. Called by the engine; knows token ids, no text and no tensors."""

from __future__ import annotations

import time
from collections.abc import Sequence

from duckllm.engine.sampler import Sampler
from duckllm.errors import PromptTooLongError, RequestError
from duckllm.outputs import RequestMetrics
from duckllm.sampling_params import SamplingParams


class Request:
    """A prompt and the reply that grows behind it.

    There is no prefill and no decode phase: a request has tokens, of which ``num_computed_tokens`` are in the
    KV cache, and each step computes some of the rest.

    Args:
        request_id: Unique name.
        prompt_token_ids: The prompt.
        params: Sampling.
        vocab_size: Tokens are below this.
        max_model_len: Most tokens of prompt and reply together.
        eos_token_ids: Tokens that end a reply.

    Raises:
        RequestError: The prompt is empty, or has a token outside the vocabulary.
        PromptTooLongError: The prompt leaves no room for a reply.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        if not prompt_token_ids:
            raise RequestError("prompt: got no tokens, expected at least 1")
        for token_id in prompt_token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(f"prompt: got token {token_id}, expected 0 to {vocab_size - 1}")
        if len(prompt_token_ids) >= max_model_len:
            raise PromptTooLongError(len(prompt_token_ids), max_model_len - 1)
        self.request_id, self.params = request_id, params
        self.num_prompt_tokens = len(prompt_token_ids)
        self.token_ids = list(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_given_tokens = self.num_prompt_tokens  # to whoever reads the reply
        self.finish_reason: str | None = None
        self.sampler = Sampler(params)
        self._max_model_len, self._eos_token_ids = max_model_len, eos_token_ids
        self._start_s = 0.0
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt."""
        return tuple(self.token_ids[: self.num_prompt_tokens])

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """The reply so far."""
        return tuple(self.token_ids[self.num_prompt_tokens :])

    def start_clock(self) -> None:
        """Times count from now."""
        self._start_s = time.perf_counter()

    def append(self, token_id: int) -> None:
        """Adds the next token of the reply and decides whether it was the last."""
        self.token_ids.append(token_id)
        self._last_token_s = time.perf_counter()
        if self._first_token_s is None:
            self._first_token_s = self._last_token_s
        num_generated = len(self.token_ids) - self.num_prompt_tokens
        if self.ends_reply(token_id):
            self.finish_reason = "stop"
        elif num_generated == self.params.max_tokens or len(self.token_ids) >= self._max_model_len:
            self.finish_reason = "length"

    def ends_reply(self, token_id: int) -> bool:
        """Whether the token is an end token that this request heeds."""
        return token_id in self._eos_token_ids and not self.params.ignore_eos

    def metrics(self) -> RequestMetrics:
        """Counts and times so far."""
        num_generated = len(self.token_ids) - self.num_prompt_tokens
        first_s = decode_rate = None
        if self._first_token_s is not None and self._last_token_s is not None:
            first_s = self._first_token_s - self._start_s
            if num_generated > 1:
                decode_rate = (num_generated - 1) / (self._last_token_s - self._first_token_s)
        return RequestMetrics(self.num_prompt_tokens, num_generated, first_s, decode_rate)
