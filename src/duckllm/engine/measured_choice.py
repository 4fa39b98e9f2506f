"""Whether something pays, found out by doing with it and without, again and again.

Used by the engine for drafts and for lanes: neither changes a token, so trying costs time alone. Knows
neither; is told how long steps took.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from statistics import fmean, median

TRIAL_STEPS = 8  # of the way that is not in use, before it is judged anew
FIRST_INTERVAL = 64  # steps between two trials; doubles while they change nothing
LONGEST_INTERVAL = 2048
_MEMORY = 32  # steps that a cost is taken from


@dataclass
class _Way:
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    amounts: deque[float] = field(default_factory=lambda: deque(maxlen=_MEMORY))

    @property
    def cost(self) -> float:
        """Seconds for one unit; the median of the times, as a machine's other work makes some steps long."""
        return median(self.seconds) / fmean(self.amounts)


@dataclass
class _Kind:
    ways: tuple[_Way, _Way] = field(default_factory=lambda: (_Way(), _Way()))  # without and with
    in_use: bool = True
    is_trial: bool = True
    left: int = TRIAL_STEPS
    interval: int = FIRST_INTERVAL


class MeasuredChoice:
    """Says for each step whether to do something, from what steps of its kind took with and without it."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}

    def choose(self, kind: Hashable) -> bool:
        """Whether to do it in the next step of this kind; both ways are tried first."""
        return self._kinds.setdefault(kind, _Kind()).in_use

    def record(self, kind: Hashable, used: bool, seconds: float, amount: float) -> None:
        """Notes what a step of a kind took, and how much it gave."""
        state = self._kinds.setdefault(kind, _Kind())
        way = state.ways[used]
        way.seconds.append(seconds)
        way.amounts.append(amount)
        if used != state.in_use:
            return
        state.left -= 1
        if state.left > 0:
            return
        if not all(each.seconds for each in state.ways):
            state.in_use, state.left = not state.in_use, TRIAL_STEPS
            return
        better = state.ways[True].cost < state.ways[False].cost
        if state.is_trial:  # judge, and use the better one for a while
            other_won = better == state.in_use
            state.interval = FIRST_INTERVAL if other_won else min(2 * state.interval, LONGEST_INTERVAL)
            state.in_use, state.is_trial, state.left = better, False, state.interval
        else:  # try the other one
            state.ways[not state.in_use].seconds.clear()
            state.ways[not state.in_use].amounts.clear()
            state.in_use, state.is_trial, state.left = not state.in_use, True, TRIAL_STEPS
