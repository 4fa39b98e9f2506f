"""Norms and gated activations: within their bounds of float64, and each a pure function of its row."""

from __future__ import annotations

import re

import numpy as np
import pytest
from rowwise_reference import EPS, OPERATIONS, UNIT_ROUNDOFF, Operation, assert_same_bits

from duckllm import _native

# Less than a vector of any ISA, whole ones, less and more than the chains of a sum.
SIZES = [1, 2, 15, 16, 17, 31, 33, 72, 500, 2049]


@pytest.fixture(params=OPERATIONS)
def operation(request: pytest.FixtureRequest) -> Operation:
    return OPERATIONS[request.param]


@pytest.mark.parametrize("size", SIZES)
def test_values_are_within_the_bound(operation: Operation, isa: str, size: int) -> None:
    x, parameters = operation.inputs(9, size)
    exact, bound = operation.exact(x, parameters)
    y = operation.run(x, parameters, isa)
    assert y.shape == exact.shape == (9, size)
    assert (abs(y - exact) <= bound).all()
    assert np.abs(y).max() > 0.01


def test_every_isa_gives_the_same_bits(operation: Operation) -> None:
    x, parameters = operation.inputs(50, 517)
    x[3] *= np.float32(1e-30)
    x[4] *= np.float32(1e15)
    first, *others = [operation.run(x, parameters, isa) for isa in _native.available_isas()]
    for other in others:
        assert_same_bits(other, first)
    assert_same_bits(operation.run(x, parameters, "auto"), first)


@pytest.mark.parametrize("size", SIZES)
def test_a_row_is_the_same_bits_in_any_company(operation: Operation, isa: str, size: int) -> None:
    """In any place of the step, and at any address: an array that begins an element later is aligned less."""
    x, parameters = operation.inputs(33, size, seed=size)
    alone = np.concatenate([operation.run(row[None], parameters, isa) for row in x])
    for num_rows in (2, 3, 7, 33):
        for first in (0, 33 - num_rows):
            rows = slice(first, first + num_rows)
            assert_same_bits(operation.run(x[rows].copy(), parameters, isa), alone[rows])
    shifted = np.empty(x.size + 1, np.float32)[1:].reshape(x.shape)
    shifted[:] = x
    assert_same_bits(operation.run(shifted, parameters, isa), alone)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_a_bad_row_harms_no_other(operation: Operation, isa: str, value: float) -> None:
    x, parameters = operation.inputs(5, 37)
    good = operation.run(x, parameters, isa)
    x[2, 0] = value
    y = operation.run(x, parameters, isa)
    others = np.arange(5) != 2
    assert_same_bits(y[others], good[others])
    if np.isnan(value):
        assert np.isnan(y[2, 0])


def test_norms_of_rows_that_squares_of_float32_could_not_hold(isa: str) -> None:
    weight = np.ones(40, np.float32)
    x = np.linspace(-2, 3, 40, dtype=np.float32)
    expected = _native.rms_norm(x, weight, 0.0, isa)
    for exponent in (-100, 100):
        scaled = x * np.float32(2.0**exponent)
        np.testing.assert_allclose(_native.rms_norm(scaled, weight, 0.0, isa), expected, rtol=1e-6)


def test_mean_and_variance_are_of_the_whole_row(isa: str) -> None:
    """A large mean is subtracted before the square, not its square after."""
    x = (np.arange(70) % 2 + 1e4).astype(np.float32)[None]
    one, zero = np.ones(70, np.float32), np.zeros(70, np.float32)
    y = _native.layer_norm(x, one, zero, 0.0, isa)
    np.testing.assert_array_equal(y[0], np.arange(70) % 2 * 2 - 1)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 20.0, 87.0])
def test_exponentials_are_right_all_along_their_range(isa: str, scale: float) -> None:
    gate = np.random.default_rng(1).uniform(-scale, scale, (1, 20001)).astype(np.float32)
    exact = gate / (1 + np.exp(-gate.astype(np.float64)))
    y = _native.silu_mul(np.concatenate([gate, np.ones_like(gate)], axis=1), isa)
    assert (abs(y / exact - 1) <= 6 * UNIT_ROUNDOFF).all()
    logits = np.ascontiguousarray(gate.T)
    values = np.ones_like(logits)
    _native.scale_by_sigmoid(values, logits, isa)
    assert (abs(values * (1 + np.exp(-logits.astype(np.float64))) - 1) <= 5 * UNIT_ROUNDOFF).all()


def test_the_ends_of_the_range(isa: str) -> None:
    gates = np.array([88.0, 100.0, np.inf, -88.5, -1e30, -np.inf, 0.0, np.nan], np.float32)
    y = _native.silu_mul(np.concatenate([gates, np.ones_like(gates)])[None], isa)[0]
    np.testing.assert_array_equal(y, [88, 100, np.inf, 0, 0, np.nan, 0, np.nan])
    values = np.ones((8, 1), np.float32)
    _native.scale_by_sigmoid(values, gates[:, None].copy(), isa)
    np.testing.assert_array_equal(values[:, 0], [1, 1, 1, 0, 0, 0, 0.5, np.nan])


def test_rows_that_lie_apart_are_read_where_they_are(isa: str) -> None:
    x, (weight, bias) = OPERATIONS["layer_norm"].inputs(30, 9)
    heads = x.reshape(5, 6, 9)
    for part in (heads[:, 2:5], heads[1:4, :1], heads[::2, 1], heads[3]):
        near = part.copy()
        assert_same_bits(_native.rms_norm(part, weight, EPS, isa), _native.rms_norm(near, weight, EPS, isa))
        assert_same_bits(
            _native.layer_norm(part, weight, bias, EPS, isa), _native.layer_norm(near, weight, bias, EPS, isa)
        )


def test_no_rows_give_no_rows(operation: Operation, isa: str) -> None:
    x, parameters = operation.inputs(0, 5)
    assert operation.run(x, parameters, isa).shape == (0, 5)


ROWS, ONES = np.ones((2, 4), np.float32), np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _native.rms_norm(ROWS, ONES[:3], 0.1), "weight: got shape [3], expected shape [4]"),
        (lambda: _native.rms_norm(ROWS.T, ONES[:2], 0.1), "x: got strides that skip elements, expected"),
        (lambda: _native.rms_norm(ROWS.astype(np.float64), ONES, 0.1), "x: got elements of type float64"),
        (lambda: _native.rms_norm(ROWS[:, :0], ONES, 0.1), "x: got shape [2, 0], expected shape [size]"),
        (lambda: _native.rms_norm(ROWS[None, None], ONES, 0.1), "x: got shape [1, 1, 2, 4], expected"),
        (lambda: _native.rms_norm(ROWS, ONES, -1.0), "eps: got -1.000000, expected a finite number"),
        (lambda: _native.layer_norm(ROWS, ONES, ONES[:1], 0.1), "bias: got shape [1], expected shape [4]"),
        (lambda: _native.layer_norm(ROWS, ONES, ONES, np.nan), "eps: got nan, expected"),
        (lambda: _native.silu_mul(ROWS[:, :3]), "gate_up: got shape [2, 3], expected shape [T, 2 I]"),
        (lambda: _native.silu_mul(ROWS[:, :2]), "gate_up: got strides that skip elements"),
        (lambda: _native.silu_mul(ROWS, "sse9"), "isa: got 'sse9', expected one of"),
        (lambda: _native.scale_by_sigmoid(ROWS, ONES), "logits: got shape [4], expected shape [2, 1]"),
        (lambda: _native.scale_by_sigmoid(3, ONES), "values: got something else, expected a writable array"),
        (lambda: _native.scale_by_sigmoid(ONES, ONES), "values: got shape [4], expected shape [T, H]"),
    ],
)
def test_wrong_arguments_are_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        call()
    assert (ROWS == 1).all()
