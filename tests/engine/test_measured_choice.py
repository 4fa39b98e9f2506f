"""Whether something pays is found out by measuring, and found out again when it changes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from duckllm.engine.measured_choice import FIRST_INTERVAL, LONGEST_INTERVAL, TRIAL_STEPS, MeasuredChoice


def drive(choice: MeasuredChoice, steps: int, cost: Callable[[bool], tuple[float, float]]) -> list[bool]:
    """What is chosen in so many steps, which take seconds and give an amount by what is chosen."""
    used = []
    for _ in range(steps):
        used.append(choice.choose("kind"))
        choice.record("kind", used[-1], *cost(used[-1]))
    return used


def test_both_ways_are_tried_and_the_cheaper_one_is_used() -> None:
    for better in (True, False):
        used = drive(MeasuredChoice(), 3 * TRIAL_STEPS, lambda way, better=better: (1 + (way != better), 1))
        assert used == [True] * TRIAL_STEPS + [False] * TRIAL_STEPS + [better] * TRIAL_STEPS


@pytest.mark.parametrize(("accepted", "pays"), [(0.9, True), (0.3, False)])
def test_the_cost_of_a_token_decides_and_not_that_of_a_step(accepted: float, pays: bool) -> None:
    """A step with a guess takes half as long again, and gives one token and a part."""
    used = drive(MeasuredChoice(), 40, lambda way: (1.5, 1 + accepted) if way else (1.0, 1.0))
    assert used[-1] is pays


def test_one_slow_step_decides_nothing() -> None:
    seconds = iter([1.0, 1.0, 90.0] + [1.0] * 200)
    used = drive(MeasuredChoice(), 60, lambda way: (next(seconds) * (0.8 if way else 1.0), 1))
    assert used[-1] is True


def test_a_change_is_noticed_at_the_next_trial_and_back_again() -> None:
    choice = MeasuredChoice()
    assert drive(choice, 2 * TRIAL_STEPS + 1, lambda way: (2.0 if way else 1.0, 1))[-1] is False
    assert drive(choice, FIRST_INTERVAL + TRIAL_STEPS, lambda way: (1.0 if way else 2.0, 1))[-1] is True
    assert drive(choice, FIRST_INTERVAL + TRIAL_STEPS, lambda way: (2.0 if way else 1.0, 1))[-1] is False


def test_trials_become_rare_while_they_change_nothing() -> None:
    used = drive(MeasuredChoice(), 4 * LONGEST_INTERVAL, lambda way: (2.0 if way else 1.0, 1))
    trials = [step for step in range(1, len(used)) if used[step] and not used[step - 1]]
    gaps = [after - before for before, after in pairwise(trials)]
    assert gaps[0] == 2 * FIRST_INTERVAL + TRIAL_STEPS
    assert gaps == sorted(gaps)
    assert gaps[-1] == LONGEST_INTERVAL + TRIAL_STEPS
    assert sum(used) / len(used) < 0.02


def test_kinds_are_judged_on_their_own() -> None:
    choice = MeasuredChoice()
    for _ in range(40):
        for kind in ("a", "b"):
            way = choice.choose(kind)
            choice.record(kind, way, 1.0 if way == (kind == "a") else 2.0, 1)
    assert choice.choose("a") is True
    assert choice.choose("b") is False


def test_a_step_that_did_not_do_what_was_chosen_moves_nothing_on() -> None:
    choice = MeasuredChoice()
    for _ in range(10 * TRIAL_STEPS):
        choice.record("kind", False, 1.0, 1)
    assert choice.choose("kind") is True
