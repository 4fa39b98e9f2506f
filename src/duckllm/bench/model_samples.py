"""One iteration of one load on a loaded model: times of tokens, and what the engine's steps were.

Called by model_runs.py. The caller drives the steps itself, as the server's thread does, so that all requests
of a batch are computed together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from duckllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from duckllm import LLM
    from duckllm.engine.request import Request
    from duckllm.outputs import EngineMetrics


@dataclass(frozen=True)
class Sample:
    """What one iteration gave.

    Args:
        num_tokens: Tokens that were measured: of replies after all had begun, or of prompts computed.
        seconds: The time that they took together.
        first_s: From the start to the first token, of each request.
        gaps_s: Times between two tokens of a reply; 0 where a guess was right.
        num_steps: Steps of the engine in ``seconds``.
        num_draft_tokens: Guesses that were checked in them.
        num_accepted_tokens: Guesses that were right.
        parts_s: Where the time of these steps went, all steps together.
        token_ids: The replies.
    """

    num_tokens: int
    seconds: float
    first_s: tuple[float, ...]
    gaps_s: tuple[float, ...]
    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    parts_s: dict[str, float]
    token_ids: tuple[tuple[int, ...], ...]

    @property
    def tokens_per_s(self) -> float:
        """The rate of all requests together."""
        return self.num_tokens / self.seconds


def decode_once(llm: LLM, prompts: Sequence[list[int]], output_len: int) -> Sample:
    """Replies of so many tokens to all prompts together, measured from when all of them have begun.

    The prompts are computed before, so that the KV cache has them: what is measured is decoding alone.
    """
    llm.generate(list(prompts), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    times, stats, requests = _run(llm, prompts, output_len)
    begun = max(own[0] for own in times)
    inside = [[each for each in own if each >= begun] for own in times]
    # What each request had before the last one began is not counted, nor the token that it had just then.
    num_tokens = sum(each > begun for own in inside for each in own)
    return _sample(
        num_tokens,
        max(own[-1] for own in times) - begun,
        tuple(own[0] for own in times),
        tuple(after - before for own in inside for before, after in pairwise(own)),
        stats[1:],
        requests,
    )


def prefill_once(llm: LLM, prompts: Sequence[list[int]]) -> Sample:
    """All prompts together up to the first token of each; none may be in the KV cache."""
    times, stats, requests = _run(llm, prompts, 1)
    firsts = tuple(own[0] for own in times)
    computed = sum(map(len, prompts)) - sum(request.metrics().num_cached_tokens for request in requests)
    return _sample(computed, max(firsts), firsts, (), (stats[0], stats[-1]), requests)


def _run(
    llm: LLM, prompts: Sequence[list[int]], output_len: int
) -> tuple[list[list[float]], tuple[EngineMetrics, EngineMetrics, EngineMetrics], list[Request]]:
    """Runs requests to their end.

    Returns:
        The times of each one's tokens since the start, seconds; the engine's counts at the start, when all
        replies had begun, and at the end; the requests.
    """
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    requests = [request for prompt in prompts for request in llm.new_requests(prompt, params)]
    times: dict[Request, list[float]] = {request: [] for request in requests}
    waiting = set(requests)
    before = begun = llm.stats()
    pool = llm.new_pool()
    start = time.perf_counter()
    pool.add(requests)
    try:
        while pool:
            outputs = pool.step()
            now = time.perf_counter() - start
            for request, _ in outputs:
                times[request].append(now)
                if request in waiting:
                    waiting.remove(request)
                    if not waiting:
                        begun = llm.stats()
    finally:
        pool.abort(requests)
    return list(times.values()), (before, begun, llm.stats()), requests


def _sample(
    num_tokens: int,
    seconds: float,
    first_s: tuple[float, ...],
    gaps_s: tuple[float, ...],
    span: tuple[EngineMetrics, ...],
    requests: Sequence[Request],
) -> Sample:
    first, last = span
    return Sample(
        num_tokens,
        seconds,
        first_s,
        gaps_s,
        last.num_steps - first.num_steps,
        last.num_draft_tokens - first.num_draft_tokens,
        last.num_accepted_tokens - first.num_accepted_tokens,
        {name: value - first.total_step_parts_s[name] for name, value in last.total_step_parts_s.items()},
        tuple(tuple(request.token_ids[request.num_prompt_tokens :]) for request in requests),
    )
