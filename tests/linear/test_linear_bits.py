"""A row's result does not depend on the rows beside it, on the threads, or on fp8 against fp9."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from linear_reference import Weight, assert_same_bits, rows

from duckllm import _native

NewRuntime = Callable[..., _native.LinearRuntime]

# More than two parts, so that few groups are cut into parts; odd in both directions.
OUT_FEATURES, IN_FEATURES = 75, 2090


def test_a_row_is_the_same_in_every_company(new_runtime: NewRuntime, weight_format: str) -> None:
    weight = Weight.random(OUT_FEATURES, IN_FEATURES, weight_format)
    runtime = new_runtime(IN_FEATURES, num_threads=2)
    x = rows(200, IN_FEATURES)
    alone = np.concatenate([weight.run(runtime, weight_format, x[row : row + 1]) for row in range(9)])
    for num_rows in (*range(2, 10), 40, 200):
        y = weight.run(runtime, weight_format, x[:num_rows])
        assert_same_bits(y[:9], alone[:num_rows])
    assert_same_bits(weight.run(runtime, weight_format, x[150:]), y[150:])


@pytest.mark.parametrize("num_rows", [1, 7, 23])
def test_threads_change_no_bit(new_runtime: NewRuntime, weight_format: str, num_rows: int) -> None:
    weight = Weight.random(OUT_FEATURES, IN_FEATURES, weight_format)
    x = rows(num_rows, IN_FEATURES)
    one = weight.run(new_runtime(IN_FEATURES), weight_format, x)
    for threads in range(2, 8):
        assert_same_bits(weight.run(new_runtime(IN_FEATURES, num_threads=threads), weight_format, x), one)


def test_whole_groups_and_parts_of_groups_give_the_same_bits(
    new_runtime: NewRuntime, weight_format: str
) -> None:
    """One thread takes 40 groups whole; two threads take parts of them."""
    weight = Weight.random(40 * 32, 1100, weight_format)
    x = rows(3, 1100)
    assert_same_bits(
        weight.run(new_runtime(1100), weight_format, x),
        weight.run(new_runtime(1100, num_threads=2), weight_format, x),
    )


@pytest.mark.parametrize("num_rows", [1, 4, 8, 12])
def test_fp8_and_fp9_give_the_same_bits(isa: str, new_runtime: NewRuntime, num_rows: int) -> None:
    weight = Weight.random(OUT_FEATURES, IN_FEATURES, "fp8")
    x = rows(num_rows, IN_FEATURES)
    runtime = new_runtime(IN_FEATURES)
    fp9 = weight.run(runtime, "fp9", x)
    assert_same_bits(weight.run(runtime, "fp8", x), fp9)
    assert_same_bits(weight.run(runtime, "fp8-normal", x), fp9)


@pytest.mark.parametrize("max_rows", [1, 8, 9, 20])
def test_more_rows_than_the_scratch_holds_are_taken_by_turns(
    new_runtime: NewRuntime, weight_format: str, max_rows: int
) -> None:
    weight = Weight.random(40, 150, weight_format)
    x = rows(53, 150)
    assert_same_bits(
        weight.run(new_runtime(150, max_rows=max_rows), weight_format, x),
        weight.run(new_runtime(150), weight_format, x),
    )


def test_runs_of_different_weights_leave_nothing_behind(new_runtime: NewRuntime, weight_format: str) -> None:
    """A wide weight first: a narrow one's padding must be zero again."""
    runtime = new_runtime(300)
    narrow = Weight.random(20, 33, weight_format)
    x = rows(12, 33)
    before = [narrow.run(runtime, weight_format, part) for part in (x[:2], x)]
    wide = np.full((12, 300), np.inf, np.float32)
    for part in (wide[:2], wide):
        Weight.random(20, 300, weight_format).run(runtime, weight_format, part)
    for part, expected in zip((x[:2], x), before, strict=True):
        assert_same_bits(narrow.run(runtime, weight_format, part), expected)
