"""Rounding of float weights to int8 blocks and int4 groups: in numpy, and by the native twin.

Called by the converter, its checks and benchmarks; it knows arrays only, no files and no models, and imports
no torch. csrc/kernels/quantise.h says how scales are searched.
"""

from __future__ import annotations

import numpy as np

from duckllm import _native
from duckllm.weights.e4m3 import F32, SCALE_BLOCK, U8, QuantisationError, ceil_div, expand_scales
from duckllm.weights.formats import DOWN_GROUP, GATE_UP_GROUP
from duckllm.weights.grouped import (
    U16,
    QuantisedExpert,
    QuantisedMatrix,
    codes_of,
    scale_values,
    scale_words,
)
from duckllm.weights.int8 import CODE_OF_ZERO
from duckllm.weights.units import ExpertWeights

# Where the weight of the largest magnitude is put: -6, -6.25, ... -11.
STARTS = tuple(-0.25 * start for start in range(24, 45))
_MOST_IMPORTANCE = 1e4
# A matrix whose largest scale is below this has lost what int4 could keep: f16 has steps of 2^-24 there.
_LEAST_F16_SCALE = 2.0**-19
_Sums = tuple[float, float, float, int]
# gate, up and down as f32.
FloatExpert = tuple[F32, F32, F32]


def relative_importance(mean_squares: F32) -> F32:
    """What the squared error of each column counts: mean squares of its inputs over their mean, and 1 more.

    The 1 is for prompts that the calibration has not seen: on such ones of the demo model the loss is that
    without calibration, and a quarter more without the 1 (docs/quality.md). At most 10^4.

    Shapes: mean_squares: [columns] f32, not negative; result: the same.
    """
    mean = float(np.mean(mean_squares, dtype=np.float64))
    if mean == 0.0:
        return np.ones(mean_squares.shape, np.float32)
    relative = mean_squares.astype(np.float64) / mean + 1.0
    return np.minimum(relative, _MOST_IMPORTANCE).astype(np.float32)


def int8_blocks(weights: F32) -> tuple[U8, F32]:
    """Codes q + 128 and the scales, amax / 127, of 128x128 blocks: the readable twin of the native function.

    Shapes: weights: [rows, columns] f32, finite; codes: the same, u8; scales: [ceil(rows/128),
        ceil(columns/128)] f32.
    Reference: ``duckllm._native.quantise_int8_blocks``, byte for byte.
    """
    rows, columns = weights.shape
    shape = ceil_div(rows, SCALE_BLOCK), ceil_div(columns, SCALE_BLOCK)
    padded = np.zeros((shape[0] * SCALE_BLOCK, shape[1] * SCALE_BLOCK), np.float32)
    np.abs(weights, out=padded[:rows, :columns])
    largest = padded.reshape(shape[0], SCALE_BLOCK, shape[1], SCALE_BLOCK).max(axis=(1, 3))
    raised = np.maximum(largest / np.float32(127), np.finfo(np.float32).tiny)
    scales: F32 = np.where(largest == 0, np.float32(1), raised)
    quotients = np.rint(weights / expand_scales(scales, rows, columns))
    return (quotients.astype(np.int16) + CODE_OF_ZERO).astype(np.uint8), scales


def int4_groups(
    weights: F32, group_size: int, scale_type: str = "f16", importance: F32 | None = None
) -> tuple[U8, U16]:
    """Codes q + 8 and the words of the scales of groups: the readable twin of the native function.

    Shapes: weights: [rows, columns] f32, finite; importance: [columns] f32, above 0; codes: as weights, u8;
        words: [rows, ceil(columns / group_size)] u16.
    Reference: ``duckllm._native.quantise_int4_groups``, byte for byte.
    """
    rows, columns = weights.shape
    groups = ceil_div(columns, group_size)
    padded = np.zeros((rows, groups * group_size), np.float32)
    padded[:, :columns] = weights
    by_group = padded.reshape(rows, groups, group_size)
    by_column = np.zeros(groups * group_size, np.float32)  # nothing for what is beyond the last column
    by_column[:columns] = 1 if importance is None else importance
    counts = by_column.reshape(groups, group_size)

    place = np.abs(by_group).argmax(axis=2)[..., None]
    largest = np.take_along_axis(by_group, place, axis=2)[..., 0]
    largest = np.where(largest == 0, np.float32(1), largest)
    parts: F32 = by_group / largest[..., None]
    best = np.full((rows, groups), -1, np.float32)
    ratio = np.zeros((rows, groups), np.float32)
    for start in STARTS:
        along, squares = np.zeros_like(best), np.zeros_like(best)
        for i in range(group_size):
            q = _rounded(parts[..., i] * np.float32(start))
            scaled = counts[:, i] * q
            along += scaled * parts[..., i]
            squares += scaled * q
        divisor = np.where(squares == 0, np.float32(1), squares)
        gain = along * along / divisor
        more = gain > best
        best = np.where(more, gain, best)
        ratio = np.where(more, along / divisor, ratio)
    words = scale_words(ratio * largest, scale_type)
    scales = scale_values(words, scale_type)[..., None]
    divisors: F32 = np.where(scales == 0, np.float32(1), scales)
    quotients = _rounded(by_group / divisors)
    codes = (np.where(scales == 0, np.float32(0), quotients) + 8).astype(np.uint8)
    return codes.reshape(rows, -1)[:, :columns], words


def _rounded(values: F32) -> F32:
    result: F32 = np.rint(np.clip(values, np.float32(-8), np.float32(7)))
    return result


def quantise_int8(expert: FloatExpert) -> tuple[ExpertWeights, QuantisationError]:
    """An expert in int8, and how far it was rounded.

    Raises:
        ValueError: A weight is not finite (with their count).
    """
    codes: list[U8] = []
    scales: list[F32] = []
    total = QuantisationError()
    for weights in expert:
        its_codes, its_scales, sums = _native.quantise_int8_blocks(weights)
        codes.append(its_codes)
        scales.append(its_scales)
        total += _as_error(sums, weights.size)
    gate, up, down = codes
    return ExpertWeights(gate, up, down, *scales), total


def quantise_int4(
    expert: FloatExpert, weight_format: str, hidden: F32 | None = None, activations: F32 | None = None
) -> tuple[QuantisedExpert, QuantisationError]:
    """An expert in int4 or int4-bf16, and how far it was rounded.

    Args:
        expert: Its weights.
        weight_format: The format.
        hidden: Relative importance of hidden indices, which gate and up are weighted with; None for all 1.
        activations: The same of intermediate channels, for down.

    Shapes: hidden: [H] f32; activations: [I] f32.

    Raises:
        ValueError: A weight is not finite (with their count), or the matrix's are too large or too small for
            the type of scales.
    """
    scale_type = codes_of(weight_format).scale_type
    matrices, total = [], QuantisationError()
    for name, weights, importance, size in (
        ("gate", expert[0], hidden, GATE_UP_GROUP),
        ("up", expert[1], hidden, GATE_UP_GROUP),
        ("down", expert[2], activations, DOWN_GROUP),
    ):
        codes, words, sums = _native.quantise_int4_groups(weights, size, scale_type, importance)
        scales = scale_values(words, scale_type)
        largest = np.abs(scales).max()
        is_lost = scale_type == "f16" and largest < _LEAST_F16_SCALE and weights.any()
        if is_lost or not np.isfinite(largest):
            where = "below" if is_lost else "beyond"
            other = ", expected int4-bf16 for those" if scale_type == "f16" else ""
            top = np.abs(weights).max()
            raise ValueError(f"{name}: got weights up to {top:g}, {where} scales of {scale_type}{other}")
        matrices.append(QuantisedMatrix(codes, scales, scale_type, None, size))
        total += _as_error(sums, weights.size)
    return QuantisedExpert(*matrices), total


def _as_error(sums: _Sums, weights: int) -> QuantisationError:
    squared_error, squared_source, max_relative, flushed = sums
    return QuantisationError(squared_error, squared_source, max_relative, flushed, weights)
