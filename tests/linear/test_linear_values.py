"""The native linear layers against float64, within the bound that csrc/kernels/linear.h states."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from linear_reference import Weight, from_bf16, product, rows, to_bf16

from duckllm import _native

NewRuntime = Callable[..., _native.LinearRuntime]

# (N, K): odd ones, whole ones, one with three parts, one group, several blocks of scales.
SIZES = [(1, 1), (15, 33), (33, 31), (130, 257), (256, 128), (32, 2100)]


@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
@pytest.mark.parametrize("num_rows", [1, 3, 8, 9, 30])
def test_product_is_within_the_bound(
    new_runtime: NewRuntime, weight_format: str, out_features: int, in_features: int, num_rows: int
) -> None:
    weight = Weight.random(out_features, in_features, weight_format)
    x = rows(num_rows, in_features)
    exact, bound = product(weight, x)
    y = weight.run(new_runtime(in_features), weight_format, x)
    assert y.shape == (num_rows, out_features)
    assert (abs(y - exact) <= bound).all()
    assert abs(exact).max() > 1e3 * bound.max()  # the bound is one that a wrong term would break


@pytest.mark.parametrize("num_rows", [2, 20])
def test_bf16_rows_are_the_f32_rows_of_the_same_values(
    new_runtime: NewRuntime, weight_format: str, num_rows: int
) -> None:
    weight = Weight.random(70, 300, weight_format)
    words = to_bf16(rows(num_rows, 300))
    runtime = new_runtime(300)
    y = weight.run(runtime, weight_format, words)
    np.testing.assert_array_equal(y, weight.run(runtime, weight_format, from_bf16(words)))
    assert np.abs(y).min() > 0


def test_every_e4m3_byte_is_worth_what_its_definition_says(isa: str, new_runtime: NewRuntime) -> None:
    codes = np.array([byte for byte in range(256) if byte & 0x7F != 0x7F], np.uint8)
    for weight_format in ("fp8", "fp9"):
        weight = Weight(codes[:, None], np.full((2, 1), 0.125, np.float32))
        for num_rows in (1, 9):
            y = weight.run(new_runtime(1), weight_format, np.full((num_rows, 1), 3.0, np.float32))
            np.testing.assert_array_equal(y, np.tile(weight.dense()[:, 0] * 3, (num_rows, 1)))


def test_every_bf16_exponent_is_multiplied_exactly(isa: str, new_runtime: NewRuntime) -> None:
    """One weight each: every sign, exponent (denormals too) and two mantissas, no infinity and no NaN."""
    words = np.array(
        [
            sign << 15 | exponent << 7 | mantissa
            for sign in (0, 1)
            for exponent in range(255)
            for mantissa in (0, 0x55)
        ],
        np.uint16,
    )
    weight = Weight(words[:, None], None)
    for num_rows in (1, 9):
        y = weight.run(new_runtime(1), "bf16", np.full((num_rows, 1), 0.5, np.float32))
        np.testing.assert_array_equal(y, np.tile(from_bf16(words) * np.float32(0.5), (num_rows, 1)))


def test_every_f32_exponent_is_multiplied_exactly(isa: str, new_runtime: NewRuntime) -> None:
    bits = np.array(
        [sign << 31 | e << 23 | m for sign in (0, 1) for e in range(255) for m in (0, 0x2AAAAA)], np.uint32
    )
    values = bits.view(np.float32)
    for num_rows in (1, 9):
        y = Weight(values[:, None], None).run(new_runtime(1), "f32", np.full((num_rows, 1), 2, np.float32))
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(y, np.tile(values * np.float32(2), (num_rows, 1)))


@pytest.mark.parametrize("exponent", [-39, -20, 0, 20, 40])
def test_scales_and_rows_of_every_size(new_runtime: NewRuntime, weight_format: str, exponent: int) -> None:
    weight = Weight.random(40, 200, weight_format)
    x = rows(10, 200) * np.float32(2.0**exponent)
    x[abs(x) < 2.0**-40] = 0
    if weight.scales is not None:
        weight.scales *= np.float32(2.0 ** -(exponent // 4))
    for part in (x[:2], x):
        exact, bound = product(weight, part)
        y = weight.run(new_runtime(200), weight_format, part)
        assert (abs(y - exact) <= bound).all()
        assert np.isfinite(y).all()


@pytest.mark.parametrize("num_rows", [5, 17])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_row_harms_no_other(
    new_runtime: NewRuntime, weight_format: str, num_rows: int, value: float
) -> None:
    weight = Weight.random(50, 140, weight_format)
    runtime = new_runtime(140)
    x = rows(num_rows, 140)
    good = weight.run(runtime, weight_format, x)
    x[2, 77] = value
    y = weight.run(runtime, weight_format, x)
    assert not np.isfinite(y[2][weight.dense()[:, 77] != 0]).any()
    others = np.arange(num_rows) != 2
    np.testing.assert_array_equal(y[others], good[others])
