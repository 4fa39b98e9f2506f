"""Moments of a request at which something is done to its workers: in its prompt, in its reply, before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from duckllm.transport.flock import Flock

PREFILL, DECODE, IDLE = 1, 40, -1  # numbers of a step of each; before the first one
AtStep = Callable[[int, Callable[[], object]], list[int]]


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> AtStep:
    """Has something done before the n-th step from now, or at once; the list grows by one when it was."""
    submit = Flock.submit
    waiting: list[tuple[list[int], Callable[[], object], list[int]]] = []

    def counted(flock: Flock, *inputs: Any, **named: Any) -> int:
        for left, action, done in list(waiting):
            left[0] -= 1
            if left[0] < 0:
                waiting.remove((left, action, done))
                action()
                done.append(1)
        return submit(flock, *inputs, **named)

    monkeypatch.setattr(Flock, "submit", counted)

    def plan(step: int, action: Callable[[], object]) -> list[int]:
        if step == IDLE:
            action()
            return [1]
        done: list[int] = []
        waiting.append(([step], action, done))
        return done

    return plan
