"""Log probabilities of a token and of the likeliest ones. Called by the request; knows logits and no text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class TokenLogprob:
    """The log probability of one token, and its place among all tokens, the likeliest one's being 1."""

    token_id: int
    logprob: float
    rank: int


def token_logprobs(logits: torch.Tensor, token_id: int, num_top: int) -> list[TokenLogprob]:
    """Of the chosen token, then of the ``num_top`` likeliest ones, the chosen one not twice.

    They are the log-softmax of the model's own logits, before bias, penalties and temperature, as of vLLM's
    default ``logprobs_mode``, ``raw_logprobs``: exponentials in f32, their sum in f64, so that they are exact
    to 2e-6 whatever the vocabulary. Of equally likely tokens the lowest id comes first.

    Shapes:
        logits: [V] f32, not changed
    """
    largest = float(logits.max())
    log_sum = largest + math.log(float((logits - largest).exp_().sum(dtype=torch.float64)))
    values = logits.numpy()
    top = _largest(values, min(num_top, len(values)))
    ranks = {number: rank for rank, number in enumerate(top, start=1)}
    if token_id not in ranks:
        value = values[token_id]
        before = np.count_nonzero(values > value) + np.count_nonzero(values[:token_id] == value)
        ranks = {token_id: int(before) + 1, **ranks}
    chosen_first = sorted(ranks, key=lambda number: number != token_id)
    return [TokenLogprob(number, float(values[number]) - log_sum, ranks[number]) for number in chosen_first]


def _largest(values: np.ndarray, count: int) -> list[int]:
    """Where the ``count`` largest values are, the largest first, the lowest number among equals."""
    if count == 0:
        return []
    least = np.partition(values, len(values) - count)[len(values) - count]
    candidates = np.flatnonzero(values >= least)  # more than asked for, where some are equal
    order = np.argsort(-values[candidates], kind="stable")[:count]
    return [int(number) for number in candidates[order]]
