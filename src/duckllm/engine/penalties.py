"""Penalties on tokens that a request has seen. Called by the sampler; knows token ids and logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from duckllm.sampling_params import SamplingParams

_LARGEST = torch.finfo(torch.float32).max


class Penalties:
    """The penalties of one reply, with a count of each distinct token that grows by what is new.

    Args:
        params: ``repetition_penalty`` p makes a logit x of a token of prompt or reply x / p, or x * p where
            x is not positive; then ``frequency_penalty`` times its count in the reply is taken off, and
            ``presence_penalty`` where it is in the reply.
        num_prompt_tokens: How many of a request's tokens are its prompt.
    """

    def __init__(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        self._params = params
        self._num_prompt_tokens = num_prompt_tokens
        # The prompt matters to the repetition penalty alone.
        self._num_counted = num_prompt_tokens if params.repetition_penalty == 1 else 0
        self._slot_of: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._counts = np.zeros(64, np.float64)

    def apply_(self, logits: torch.Tensor, token_ids: Sequence[int]) -> None:
        """Changes the logits of tokens that were seen, computing in f64.

        Shapes:
            logits: [V] f32, changed
            token_ids: prompt and reply so far, what was given before and more
        """
        self._count(token_ids)
        params, size = self._params, len(self._slot_of)
        ids, counts = torch.from_numpy(self._ids[:size]), torch.from_numpy(self._counts[:size])
        values = logits[ids].double()
        if params.repetition_penalty != 1:
            divided, multiplied = values / params.repetition_penalty, values * params.repetition_penalty
            values = torch.where(values > 0, divided, multiplied)
        values -= params.frequency_penalty * counts
        values -= params.presence_penalty * counts.clamp(max=1)
        logits[ids] = values.clamp(-_LARGEST, _LARGEST).float()

    def _count(self, token_ids: Sequence[int]) -> None:
        for position, token_id in enumerate(token_ids[self._num_counted :], self._num_counted):
            slot = self._slot_of.setdefault(token_id, len(self._slot_of))
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token_id
            self._counts[slot] += position >= self._num_prompt_tokens
        self._num_counted = len(token_ids)
