"""Rounding to int8 and int4: native against numpy byte for byte, the search against others, importance."""

from __future__ import annotations

import numpy as np
import pytest
from test_grouped_formats import GROUPED, random_quantised

from duckllm import _native
from duckllm.weights.e4m3 import dequantise, quantise_blocks, quantise_rows
from duckllm.weights.grouped import QuantisedExpert, pack_quantised_expert, scale_values
from duckllm.weights.pack import pack_quantised
from duckllm.weights.rounding import (
    int4_groups,
    int8_blocks,
    quantise_int4,
    quantise_int8,
    relative_importance,
)

KINDS = ["gauss", "heavy", "tiny", "zeros", "ties"]


def weights_of(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = {
        "gauss": lambda: rng.standard_normal((rows, columns)),
        "heavy": lambda: rng.standard_t(3, (rows, columns)),
        "tiny": lambda: rng.standard_normal((rows, columns)) * 10.0 ** rng.uniform(-42, -5, (rows, 1)),
        "zeros": lambda: np.where(
            rng.random((rows, columns)) < 0.97, 0, rng.standard_normal((rows, columns))
        ),
        "ties": lambda: rng.integers(-16, 17, (rows, columns)) / 4,
    }
    return values[kind]().astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (17, 72), (40, 96), (130, 257)])
def test_int8_is_its_numpy_twin(kind: str, shape: tuple[int, int]) -> None:
    weights = weights_of(kind, *shape)
    codes, scales, (squared_error, squared_source, max_relative, flushed) = _native.quantise_int8_blocks(
        weights
    )
    expected_codes, expected_scales = int8_blocks(weights)
    np.testing.assert_array_equal(codes, expected_codes)
    assert scales.tobytes() == expected_scales.tobytes()
    wide = np.repeat(np.repeat(scales, 128, 0), 128, 1)[: shape[0], : shape[1]].astype(np.float64)
    error = (codes.astype(np.float64) - 128) * wide - weights
    size = float(np.sum(weights.astype(np.float64) ** 2))
    assert squared_error == pytest.approx(np.sum(error**2), rel=1e-3, abs=1e-9 * size + 1e-30)
    assert squared_source == pytest.approx(size, rel=1e-3, abs=1e-30)
    assert max_relative <= 0.5 / 127 * 1.001
    assert flushed == np.count_nonzero((codes == 128) & (weights != 0))
    assert codes.min() >= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (17, 72), (40, 96)])
@pytest.mark.parametrize(("group_size", "scale_type"), [(32, "f16"), (16, "bf16")])
def test_int4_is_its_numpy_twin_on_every_isa(
    kind: str, shape: tuple[int, int], group_size: int, scale_type: str
) -> None:
    weights = weights_of(kind, *shape)
    for importance in (None, np.random.default_rng(1).uniform(1e-3, 9, shape[1]).astype(np.float32)):
        expected_codes, expected_words = int4_groups(weights, group_size, scale_type, importance)
        for isa in _native.available_isas():
            codes, words, sums = _native.quantise_int4_groups(
                weights, group_size, scale_type, importance, isa
            )
            np.testing.assert_array_equal(words, expected_words)
            np.testing.assert_array_equal(codes, expected_codes)
        wide = np.repeat(scale_values(words, scale_type), group_size, 1)[:, : shape[1]].astype(np.float64)
        error = (codes.astype(np.float64) - 8) * wide - weights
        size = float(np.sum(weights.astype(np.float64) ** 2))
        assert sums[0] == pytest.approx(np.sum(error**2), rel=1e-3, abs=1e-9 * size + 1e-30)
        assert sums[3] == np.count_nonzero((codes == 8) & (weights != 0))


def error_of(weights: np.ndarray, codes: np.ndarray, words: np.ndarray, importance: np.ndarray) -> float:
    scales = np.repeat(scale_values(words, "f16"), 32, 1).astype(np.float64)
    error = (codes.astype(np.float64) - 8) * scales - weights
    return float(np.sum(error**2 * importance))


@pytest.mark.parametrize(("kind", "most"), [("gauss", 0.9), ("heavy", 0.94)])
def test_the_search_beats_rounding_to_the_largest_magnitude(kind: str, most: float) -> None:
    weights = weights_of(kind, 400, 96)
    ones = np.ones(96)
    codes, words, _ = _native.quantise_int4_groups(weights, 32)
    groups = weights.reshape(400, 3, 32)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(2)[..., None], 2)
    plain = (largest / -8).astype(np.float16)
    rounded = np.clip(np.rint(groups / plain.astype(np.float32)), -8, 7) + 8
    naive = error_of(weights, rounded.reshape(400, 96), plain[..., 0].view(np.uint16), ones)
    assert error_of(weights, codes, words, ones) < most * naive
    # No scale near the one that was chosen is better by more than its rounding to f16.
    for factor in np.linspace(0.7, 1.4, 15):
        others = (scale_values(words, "f16") * factor).astype(np.float16)
        wide = np.repeat(others.astype(np.float32), 32, 1)
        again = np.clip(np.rint(weights / wide), -8, 7) + 8
        assert error_of(weights, codes, words, ones) <= 1.001 * error_of(
            weights, again, others.view(np.uint16), ones
        )


def test_importance_moves_the_error_to_where_it_counts_less() -> None:
    weights = weights_of("heavy", 400, 96)
    importance = np.where(np.arange(96) % 4 == 0, 20, 0.05).astype(np.float32)
    with_it = _native.quantise_int4_groups(weights, 32, importance=importance)
    without = _native.quantise_int4_groups(weights, 32)
    assert error_of(weights, *with_it[:2], importance) < 0.8 * error_of(weights, *without[:2], importance)
    ones = np.ones(96)
    assert error_of(weights, *with_it[:2], ones) > error_of(weights, *without[:2], ones)


def test_importance_is_relative_and_bounded() -> None:
    squares = np.array([0, 1, 2, 5], np.float32)
    np.testing.assert_allclose(relative_importance(squares), [1, 1.5, 2, 3.5])
    assert relative_importance(np.zeros(3, np.float32)).tolist() == [1, 1, 1]
    assert relative_importance(np.array([1e30, *[0] * 99_999], np.float32))[0] == np.float32(1e4)


def test_what_is_refused() -> None:
    bad = np.array([[np.nan, 1, np.inf]], np.float32)
    for call in (_native.quantise_int8_blocks, lambda w: _native.quantise_int4_groups(w, 32)):
        with pytest.raises(ValueError, match="weights: got 2 values that are not finite, expected none"):
            call(bad)
    good = np.ones((1, 3), np.float32)
    with pytest.raises(ValueError, match="group_size: got 33, expected 1 to 32"):
        _native.quantise_int4_groups(good, 33)
    with pytest.raises(ValueError, match=r"importance: got 0\.0000"):
        _native.quantise_int4_groups(good, 32, "f16", np.array([1, 0, 1], np.float32))
    large = np.full((16, 32), 1e7, np.float32)
    with pytest.raises(
        ValueError, match=r"gate: got weights up to 1e\+07, beyond scales of f16, expected int4-bf16"
    ):
        quantise_int4((large, large, large.T.copy()), "int4")
    assert quantise_int4((large, large, large.T.copy()), "int4-bf16")[1].rms_relative < 0.01


def test_weights_that_scales_of_f16_would_make_nothing_of_are_refused() -> None:
    weights = weights_of("gauss", 16, 32)
    small = weights * np.float32(1e-7)
    with pytest.raises(
        ValueError, match=r"down: got weights up to .*e-07, below scales of f16, expected int4-bf16"
    ):
        quantise_int4((weights, weights, small.T.copy()), "int4")
    assert quantise_int4((small, small, small.T.copy()), "int4-bf16")[1].rms_relative < 0.09
    nothing = np.zeros((16, 32), np.float32)
    assert quantise_int4((nothing, nothing, nothing.T.copy()), "int4")[1].flushed == 0
    little = weights * np.float32(1e-5)  # the least that is taken is rounded as others are
    assert quantise_int4((little, little, little.T.copy()), "int4")[1].rms_relative < 0.09


@pytest.mark.parametrize("factor", [1e-42, 1e-30, 1e-20, 1e20, 3e37])
def test_errors_of_very_small_and_very_large_weights_are_numbers(factor: float) -> None:
    """Their squares are beyond f32, or 0 in it."""
    weights = weights_of("gauss", 40, 96) * np.float32(factor)
    size = np.sum(weights.astype(np.float64) ** 2)
    codes, scales, sums = _native.quantise_int8_blocks(weights)
    wide = (codes.astype(np.float64) - 128) * scales.astype(np.float64)
    assert sums[:2] == pytest.approx((np.sum((wide - weights) ** 2), size), rel=1e-4)
    for isa in _native.available_isas():
        codes, words, sums = _native.quantise_int4_groups(weights, 32, "bf16", isa=isa)
        wide = (codes.astype(np.float64) - 8) * np.repeat(scale_values(words, "bf16"), 32, 1)
        assert sums[:2] == pytest.approx((np.sum((wide - weights) ** 2), size), rel=1e-4)
    for quantise in (quantise_blocks, quantise_rows):
        codes, scales, error = quantise(weights)
        distance = dequantise(codes, scales).astype(np.float64) - weights
        assert error.squared_error == pytest.approx(np.sum(distance**2), rel=1e-6)
        assert error.squared_source == pytest.approx(size, rel=1e-6)


def test_an_expert_in_int8_and_int4() -> None:
    gate, up = weights_of("gauss", 40, 72), weights_of("gauss", 40, 72, 1)
    down = weights_of("gauss", 72, 40, 2)
    weights, error = quantise_int8((gate, up, down))
    assert weights.down.shape == (72, 40)
    assert 0.005 < error.rms_relative < 0.015
    grouped, error = quantise_int4((gate, up, down), "int4")
    assert (grouped.gate.group_size, grouped.down.group_size) == (32, 16)
    assert grouped.format == "int4"
    assert 0.06 < error.rms_relative < 0.09
    assert error.weights == 3 * 40 * 72
    for matrix, source in ((grouped.gate, gate), (grouped.up, up), (grouped.down, down)):
        distance = np.sqrt(np.sum((matrix.values() - source) ** 2) / np.sum(source**2))
        assert distance < 0.09


@pytest.mark.parametrize("weight_format", GROUPED)
@pytest.mark.parametrize(("intermediate", "hidden"), [(16, 32), (40, 72), (138, 140), (1, 1)])
def test_the_native_packer_is_its_numpy_twin(weight_format: str, intermediate: int, hidden: int) -> None:
    for groups in ((32, 16), (64, 48)):
        expert = random_quantised(3, intermediate, hidden, weight_format, *groups)
        expected = pack_quantised_expert(expert, weight_format)
        np.testing.assert_array_equal(pack_quantised(expert, weight_format), expected)
    if weight_format == "int4-zero":  # without zero points they are 8
        plain = random_quantised(3, intermediate, hidden, "int4")
        mixed = QuantisedExpert(expert.gate, plain.up, plain.down)
        expected = pack_quantised_expert(mixed, weight_format)
        np.testing.assert_array_equal(pack_quantised(mixed, weight_format), expected)
