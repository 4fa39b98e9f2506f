"""Logits to the next token. Called by the request, one sampler each; knows no model and no text.

A token is drawn by a race: each one's number from an exponential distribution, divided by its probability,
and the smallest wins, which is token i with probability p_i exactly. The numbers are a function of the seed
and the token's place in the reply alone. So a reply is the same whatever was computed beside it, repeated or
guessed ahead; and two distributions that are alike draw the same token with the same numbers, which is what
a draft is good for (:meth:`Sampler.draft`).

Source:
    Daliri, Musco and Suresh, Coupling without Communication and Drafter-Invariant Speculative Decoding
    (arXiv 2408.07978): the race agrees with probability of at least (1 - d) / (1 + d) for distributions at
    total variation distance d, where 1 - d, of rejection sampling, is the most that any way can give.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from duckllm.engine.penalties import Penalties
from duckllm.errors import ModelError
from duckllm.sampling_params import SamplingParams


class Sampler:
    """Chooses tokens for one reply, with random numbers of its own.

    The order is vLLM's: bias, penalties for repetition, frequency and presence, temperature, min-p, top-k,
    then top-p over what is left. Before ``min_tokens`` tokens the tokens that end a reply have no chance.
    What a grammar does not allow is taken out behind the penalties; where it allows nothing but tokens that
    end a reply, it goes before ``min_tokens``.

    Args:
        params: Sampling.
        num_prompt_tokens: How many of the tokens that :meth:`sample` is given are the prompt.
        end_token_ids: The tokens that end a reply.
        index: The number of this reply among the n of its prompt; a seed is counted up by it.
    """

    def __init__(
        self,
        params: SamplingParams,
        num_prompt_tokens: int = 0,
        *,
        end_token_ids: Iterable[int] = (),
        index: int = 0,
    ) -> None:
        self.params = params
        self._num_prompt_tokens = num_prompt_tokens
        self._seed = secrets.randbits(63) if params.seed is None else (params.seed + index) % 2**63
        bias = params.logit_bias or {}
        self._bias_ids = torch.tensor(list(bias), dtype=torch.int64)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32)
        self._end_ids = torch.tensor(sorted(end_token_ids), dtype=torch.int64)
        penalised = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (
            1,
            0,
            0,
        )
        self._penalties = Penalties(params, num_prompt_tokens) if penalised else None
        self._is_plain = not bias and not penalised and params.min_tokens == 0

    def forget(self) -> None:
        """Counts the tokens anew that it is given, as an interruption may have left the counts half way."""
        if self._penalties is not None:
            self._penalties = Penalties(self.params, self._num_prompt_tokens)

    def sample(
        self,
        logits: torch.Tensor,
        token_ids: Sequence[int] = (),
        allowed: npt.NDArray[np.bool_] | None = None,
    ) -> int:
        """The next token; the lowest number among equally likely ones when greedy.

        Shapes:
            logits: [V] f32, not changed
            token_ids: prompt and reply so far, what was given before and more
            allowed: [V], which tokens may be chosen, at least one; None for all

        Raises:
            ModelError: A logit is not a finite number, so that the weights or a step's result are broken.
        """
        check_logits(logits)
        token_id = self._choose(logits, token_ids, len(token_ids), allowed)
        if allowed is not None and not allowed[token_id]:
            raise ModelError("logits: got -inf for every token that is allowed, expected finite numbers")
        return token_id

    def draft(
        self,
        logits: torch.Tensor,
        token_ids: Sequence[int],
        num_ahead: int,
        allowed: npt.NDArray[np.bool_] | None = None,
    ) -> int:
        """A guess at what :meth:`sample` will give, from another model's logits.

        It is what these logits themselves would give at that place. Penalties are those of the tokens that
        are certain.

        Args:
            logits: What is thought to follow ``num_ahead`` tokens that were guessed before.
            token_ids: Prompt and reply so far.
            num_ahead: Tokens guessed between these and the one to choose.
            allowed: As for :meth:`sample`.

        Shapes:
            logits: [V] f32, not changed
        """
        return self._choose(logits, token_ids, len(token_ids) + num_ahead, allowed)

    def _choose(
        self,
        logits: torch.Tensor,
        token_ids: Sequence[int],
        position: int,
        allowed: npt.NDArray[np.bool_] | None,
    ) -> int:
        if not self._is_plain or allowed is not None:
            logits = self.adjusted(logits, token_ids, position, allowed)
        if self.params.greedy:
            return int(logits.numpy().argmax())
        return self._draw(self.probabilities(logits), position)

    def adjusted(
        self,
        logits: torch.Tensor,
        token_ids: Sequence[int] = (),
        position: int | None = None,
        allowed: npt.NDArray[np.bool_] | None = None,
    ) -> torch.Tensor:
        """The logits with bias and penalties, of what may be chosen: no end token where it is too early.

        Args:
            logits: As for :meth:`sample`.
            token_ids: As for :meth:`sample`.
            position: Of the token to choose; None for the one behind ``token_ids``.
            allowed: As for :meth:`sample`.

        Shapes:
            logits: [V] f32, not changed; result: [V] f32
        """
        if position is None:
            position = len(token_ids)
        logits = logits.clone()
        logits[self._bias_ids] += self._bias
        if self._penalties is not None:
            self._penalties.apply_(logits, token_ids)
        is_too_early = position - self._num_prompt_tokens < self.params.min_tokens
        if allowed is not None:
            logits.masked_fill_(torch.from_numpy(~allowed), -torch.inf)
            is_too_early = is_too_early and allowed.sum() > allowed[self._end_ids.numpy()].sum()
        if is_too_early:
            logits[self._end_ids] = -torch.inf
        return logits

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """The distribution that is sampled from, given logits that are adjusted.

        Shapes:
            logits, result: [V] f32
        """
        params = self.params
        # In f64, and from the largest down, so that a small temperature cannot overflow. In place, as each
        # temporary of a whole vocabulary costs more in page faults than in arithmetic.
        scaled = logits.double()
        scaled -= float(logits.max())
        scaled /= params.temperature
        logits = scaled.float()
        if params.min_p > 0:  # the likeliest token's is 0
            logits.masked_fill_(logits < math.log(params.min_p), -torch.inf)
        if 0 < params.top_k < len(logits):
            place = len(logits) - params.top_k
            logits.masked_fill_(logits < float(np.partition(logits.numpy(), place)[place]), -torch.inf)
        if params.top_p < 1:
            logits.masked_fill_(~_is_in_top_p(logits.softmax(dim=-1), params.top_p), -torch.inf)
        return logits.softmax(dim=-1)

    def _draw(self, probabilities: torch.Tensor, position: int) -> int:
        """The winner of the race at a place of the reply; a token without probability never wins."""
        generator = np.random.Generator(np.random.Philox(key=(self._seed, position)))
        return _winner(generator.standard_exponential(len(probabilities)), probabilities.numpy())


def check_logits(logits: torch.Tensor) -> None:
    """Refuses logits of broken weights, or of a step with a broken result.

    Shapes:
        logits: [V] f32

    Raises:
        ModelError: The largest one is not a finite number.
    """
    # NumPy's argmax takes a tenth of torch's time (13 and 142 us for 129280 on an AMD EPYC, one thread).
    # NaN is the largest number to both.
    largest = float(logits[int(logits.numpy().argmax())])
    if not math.isfinite(largest):
        raise ModelError(f"logits: got {largest}, expected finite numbers")


def _winner(numbers: npt.NDArray[np.float64], probabilities: npt.NDArray[np.float32]) -> int:
    """The token with the smallest number over its probability; one without probability never wins."""
    times = np.full_like(numbers, np.inf)
    np.divide(numbers, probabilities, out=times, where=probabilities > 0)
    return int(times.argmin())


def _is_in_top_p(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Which tokens make up the smallest set of likeliest ones that reaches ``top_p``.

    Of equally likely tokens at its end those with the lowest numbers are in it.

    Shapes:
        probabilities: [V]; result: [V] bool
    """
    # NumPy sorts 129280 numbers in 1.2 ms, torch in 13, which sorts their places too.
    largest = torch.from_numpy(np.sort(probabilities.numpy())).flip(0)
    sums = largest.double().cumsum(dim=-1)
    num_kept = 1 + int((sums[:-1] < top_p).sum())
    least = largest[num_kept - 1]
    kept = probabilities >= least
    equal = (probabilities == least).nonzero()[:, 0]
    kept[equal[num_kept - int((largest > least).sum()) :]] = False
    return kept
