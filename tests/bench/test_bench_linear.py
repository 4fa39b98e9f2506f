"""The measurement of dense layers: what it computes is checked, and its numbers belong together."""

from __future__ import annotations

import numpy as np
import pytest

from duckllm import _native
from duckllm.bench.ceilings import Spread
from duckllm.bench.linear import FORMATS, LinearResult, LinearShape, LinearWeights, linear_results

SHAPE = LinearShape("small", in_features=200, out_features=150)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_wrong_product_is_not_measured(weight_format: str) -> None:
    weights = LinearWeights(SHAPE, weight_format, footprint_bytes=200_000)
    runtime = _native.LinearRuntime(8, 200, 1, 0)
    x = np.random.default_rng(1).standard_normal((2, 200)).astype(np.float32)
    for copy in range(len(weights.copies)):
        y = weights.run(runtime, copy, x)
        weights.verify(y, x)
        for output in (0, 149):
            wrong = y.copy()
            wrong[1, output] += np.float32(1e-3) * abs(y).max()
            with pytest.raises(RuntimeError, match=r"^small is .* off: nothing measured$"):
                weights.verify(wrong, x)


def test_every_way_is_measured_for_every_number_of_rows() -> None:
    calls = []

    def other(shape: LinearShape, footprint_bytes: int) -> tuple[object, int, int]:
        return lambda copy, x: calls.append((copy, x.shape)), 3, 1000

    results = list(
        linear_results(SHAPE, [1, 9], threads=1, footprint_bytes=1 << 20, others={"none": other}, repeats=2)
    )
    ways = [(result.num_rows, result.way) for result in results]
    assert ways == [(rows, way) for rows in (1, 9) for way in (*FORMATS, "none")]
    assert {result.weight_bytes for result in results if result.way == "fp8"} == {5 * 2 * 7 * 512}
    assert {copy for copy, _ in calls} == {0, 1, 2}
    assert {shape for _, shape in calls} == {(1, 200), (9, 200)}


def test_rates_follow_from_times_and_bytes() -> None:
    result = LinearResult(SHAPE, 4, "fp8", (1e-3, 5e-4), 1_000_000, Spread(2.0, 1.0, 4.0))
    assert result.gb_per_s == pytest.approx(1.0)
    assert result.of_ceiling == pytest.approx(0.5)
    assert result.fastest_of_ceiling == pytest.approx(0.5)
    assert result.gflop_per_s == pytest.approx(2 * 4 * 200 * 150 / 1e-3 / 1e9)
