"""Logits to the next token. Called by the engine, one sampler a request; knows no model and no text."""

from __future__ import annotations

import torch

from duckllm.errors import ModelError
from duckllm.sampling_params import SamplingParams


class Sampler:
    """Chooses tokens for one request, with a random generator of its own.

    The order is vLLM's: temperature, then min-p, then top-k, then top-p over what is left.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def sample(self, logits: torch.Tensor) -> int:
        """The next token; the lowest number among equally likely ones when greedy.

        Shapes:
            logits: [V] f32, not changed

        Raises:
            ModelError: A logit is not a finite number, so that the weights or a step's result are broken.
        """
        likeliest = logits.argmax()
        if not torch.isfinite(logits[likeliest]):
            raise ModelError(f"logits: got {float(logits[likeliest])}, expected finite numbers")
        if self.params.greedy:
            return int(likeliest)
        probabilities = self.probabilities(logits)
        # Dividing by exponential variates and taking the largest draws from the distribution.
        noise = torch.empty_like(probabilities).exponential_(generator=self._generator)
        return int((probabilities / noise).argmax())

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """The distribution that is sampled from.

        Shapes:
            logits, result: [V] f32
        """
        params = self.params
        # In f64, and from the largest down, so that a small temperature cannot overflow.
        scaled = (logits.double() - logits.max().double()) / params.temperature
        logits = scaled.to(logits.dtype)
        if params.min_p > 0:
            probabilities = logits.softmax(dim=-1)
            logits = logits.masked_fill(probabilities < params.min_p * probabilities.max(), -torch.inf)
        if 0 < params.top_k < logits.shape[-1]:
            least = logits.topk(params.top_k).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if params.top_p < 1:
            ascending, order = logits.sort(stable=True)
            removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - params.top_p
            removed[-1] = False
            logits = logits.masked_fill(torch.empty_like(removed).scatter_(0, order, removed), -torch.inf)
        return logits.softmax(dim=-1)
