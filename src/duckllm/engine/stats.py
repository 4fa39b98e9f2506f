"""What the engine has done and how long it took: in all, and over the last steps.

Filled by the engine, read through :meth:`duckllm.LLM.stats`; decides by measurement what a step does beside
the necessary, through :mod:`duckllm.engine.measured_choice`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from duckllm.engine.measured_choice import MeasuredChoice
from duckllm.engine.request import Request
from duckllm.engine.scheduler import Scheduled
from duckllm.models.step_times import StepTimes
from duckllm.outputs import EngineMetrics, percentile

WINDOW_STEPS = 512
WINDOW_REQUESTS = 256
LEAST_VALUES = 10  # of fewer a percentile says nothing


@dataclass(frozen=True)
class StepRecord:
    """One step.

    Args:
        seconds: From scheduling to the end.
        num_prompt_tokens: Tokens computed of which the next one was known.
        num_decode_tokens: Tokens computed at the end of a request, guesses included.
        num_new_tokens: Tokens chosen.
        num_draft_tokens: Guesses checked.
        num_accepted_tokens: Guesses that were right.
        times: Seconds by part.
    """

    seconds: float
    num_prompt_tokens: int
    num_decode_tokens: int
    num_new_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    times: StepTimes


class EngineStats:
    """Counts in all and the last steps and requests; ``on_step`` is called with each step, if it is set."""

    def __init__(self) -> None:
        self.num_steps = self.num_prompt_tokens = self.num_new_tokens = 0
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self.step_s = 0.0
        self.on_step: Callable[[StepRecord], None] | None = None
        self.parts_s = {field.name: 0.0 for field in fields(StepTimes)}
        self._steps: deque[StepRecord] = deque(maxlen=WINDOW_STEPS)
        self._first_token_s: deque[float] = deque(maxlen=WINDOW_REQUESTS)
        self._gaps_s: deque[float] = deque(maxlen=16 * WINDOW_REQUESTS)

    def record(self, step: StepRecord) -> None:
        """Notes a step."""
        self._steps.append(step)
        self.num_steps += 1
        self.num_prompt_tokens += step.num_prompt_tokens
        self.num_new_tokens += step.num_new_tokens
        self.num_draft_tokens += step.num_draft_tokens
        self.num_accepted_tokens += step.num_accepted_tokens
        self.step_s += step.seconds
        for name in self.parts_s:
            self.parts_s[name] += getattr(step.times, name)
        if self.on_step is not None:
            self.on_step(step)

    def record_end(self, request: Request) -> None:
        """Notes the times of a request that has ended."""
        metrics = request.metrics()
        if metrics.time_to_first_token_s is not None:
            self._first_token_s.append(metrics.time_to_first_token_s)
        self._gaps_s.extend(request.inter_token_s())

    def metrics(self) -> EngineMetrics:
        """The figures so far."""
        steps = list(self._steps)
        seconds = sum(step.seconds for step in steps)
        prompt_s = sum(step.seconds * _prompt_share(step) for step in steps)
        drafts = sum(step.num_draft_tokens for step in steps)
        times = {
            field.name: sum(getattr(step.times, field.name) for step in steps) / len(steps) if steps else 0.0
            for field in fields(StepTimes)
        }
        return EngineMetrics(
            num_steps=self.num_steps,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_new_tokens,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            window_steps=len(steps),
            step_s=seconds / len(steps) if steps else 0.0,
            step_parts_s=times,
            total_step_s=self.step_s,
            total_step_parts_s=dict(self.parts_s),
            prefill_tokens_per_s=_rate(sum(step.num_prompt_tokens for step in steps), prompt_s),
            decode_tokens_per_s=_rate(sum(step.num_new_tokens for step in steps), seconds - prompt_s),
            acceptance=sum(step.num_accepted_tokens for step in steps) / drafts if drafts else None,
            time_to_first_token_p50_s=_percentile(self._first_token_s, 50),
            time_to_first_token_p99_s=_percentile(self._first_token_s, 99),
            inter_token_p50_s=_percentile(self._gaps_s, 50),
            inter_token_p99_s=_percentile(self._gaps_s, 99),
        )


def _prompt_share(step: StepRecord) -> float:
    return step.num_prompt_tokens / max(1, step.num_prompt_tokens + step.num_decode_tokens)


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return percentile(values, percent) if len(values) >= LEAST_VALUES else None


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count and seconds > 0 else None


class Choices:
    """What steps do beside the necessary.

    Args:
        drafts: ``"on"``, ``"off"``, or ``"auto"`` for where it pays.
        lanes: Likewise.
    """

    def __init__(self, drafts: str, lanes: str) -> None:
        self.policies = {"drafts": drafts, "lanes": lanes}
        self._measured = {"drafts": MeasuredChoice(), "lanes": MeasuredChoice()}

    def choose(self, what: str, kind: tuple[object, ...]) -> bool:
        """Whether the next step of this kind does it."""
        policy = self.policies[what]
        return policy == "on" or (policy == "auto" and self._measured[what].choose(kind))

    def record(self, what: str, kind: tuple[object, ...], used: bool, seconds: float, amount: float) -> None:
        """Notes what it took."""
        if self.policies[what] == "auto":
            self._measured[what].record(kind, used, seconds, amount)


class StepWatch:
    """One step under the watch: what it is to do, and then what it took.

    Args:
        step: What is scheduled.
        choices: Decides, and learns.
        max_step_tokens: Most tokens of a step.
    """

    def __init__(self, step: Sequence[Scheduled], choices: Choices, max_step_tokens: int) -> None:
        self._step, self._choices = step, choices
        self._lengths = [(each, len(each.request.token_ids)) for each in step]
        self._accepted = sum(each.request.num_accepted_tokens for each in step)
        self.times = StepTimes()
        num_rows = sum(len(each.token_ids) for each in step)
        self._num_decode = sum(1 + len(each.drafts) for each in step if each.ends)
        self._num_prompt = num_rows - self._num_decode
        # Powers of two: steps of a kind cost about the same a token.
        self._draft_kind = (sum(each.ends for each in step).bit_length(),)
        self._lane_kind = (num_rows.bit_length(), self._num_prompt > 0)
        self.guesses = choices.choose("drafts", self._draft_kind)
        self.uses_lanes = num_rows > 1 and choices.choose("lanes", self._lane_kind)
        self._num_rows, self._is_full = num_rows, num_rows == max_step_tokens
        self._start_s = time.perf_counter()

    def finish(self, stats: EngineStats) -> None:
        """Notes what the step took."""
        seconds = time.perf_counter() - self._start_s
        num_new = sum(len(each.request.token_ids) - before for each, before in self._lengths)
        num_drafts = sum(len(each.drafts) for each in self._step)
        accepted = sum(each.request.num_accepted_tokens for each in self._step) - self._accepted
        stats.record(
            StepRecord(seconds, self._num_prompt, self._num_decode, num_new, num_drafts, accepted, self.times)
        )
        for each in self._step:
            if each.request.finish_reason is not None:
                stats.record_end(each.request)
        # Steps in which all guess, and checked guesses, or nobody does either: the rest is on the way. Where
        # there is no room for everybody's guesses, some are all that there will be.
        num_guessed = sum(bool(each.drafts) for each in self._step)
        enough = 1 if self._is_full else len(self._step)
        if self._num_prompt == 0 and (num_guessed >= enough if self.guesses else num_guessed == 0):
            self._choices.record("drafts", self._draft_kind, self.guesses, seconds, num_new)
        if self._num_rows > 1:
            layers_s = seconds - self.times.draft_s - self.times.head_s - self.times.sampling_s
            self._choices.record("lanes", self._lane_kind, self.uses_lanes, layers_s, self._num_rows)
