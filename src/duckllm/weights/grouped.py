"""Experts of 4-bit codes with a scale for each group, and their units in numpy: the native packer's twin.

Called by sources of such experts, by the converter's checks and by tests. It knows arrays only, no files and
no models, and imports no torch; docs/weight-format.md is the specification.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from duckllm.errors import WeightFormatError
from duckllm.weights.e4m3 import F32, U8, ceil_div
from duckllm.weights.formats import (
    DOWN_GROUP,
    FORMATS,
    GATE_UP_GROUP,
    GroupedCodes,
    num_stripes,
    padded_hidden,
    unit_bytes,
    unit_scale_bytes,
)
from duckllm.weights.records import RECORD_ROWS, STRIPE_CHANNELS

U16 = npt.NDArray[np.uint16]

SCALE_TYPES = ("f16", "bf16")
KINDS = ("int4", "mxfp4")
# The value of each e2m1 code: sign, 2 exponent bits, 1 mantissa bit.
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_CODE_BYTES = RECORD_ROWS * STRIPE_CHANNELS // 2
_GATE_UP_SCALES = 2 * STRIPE_CHANNELS  # bytes


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix of 4-bit codes; groups run along its last axis. ``weight = (code - zero) * scale``.

    Args:
        codes: One code a byte, 0 to 15.
        scales: Exactly representable in ``scale_type``.
        scale_type: ``"f16"`` or ``"bf16"``.
        zeros: Zero points, 0 to 15; None for 8 (of kind ``"int4"``) or for codes that are values themselves.
        group_size: Columns that share a scale; the last group of a row may be smaller.
        kind: ``"int4"``, or ``"mxfp4"`` for e2m1 codes, which have no zero points.

    Shapes: codes: [rows, columns] u8; scales: [rows, ceil(columns / group_size)] f32; zeros: the same, u8.
    """

    codes: U8
    scales: F32
    scale_type: str
    zeros: U8 | None
    group_size: int
    kind: str = "int4"

    def values(self) -> F32:
        """The weights, exactly: products of at most 5 and 11 bits.

        Shapes: result: [rows, columns] f32.
        """
        result: F32 = self.without_scales() * self.scales[:, self._group_of()]
        return result

    def without_scales(self) -> F32:
        """The weights as if every scale was 1.

        Shapes: result: [rows, columns] f32.
        """
        if self.kind == "mxfp4":
            return E2M1_VALUES[self.codes]
        zeros = np.float32(8) if self.zeros is None else self.zeros[:, self._group_of()].astype(np.float32)
        result: F32 = self.codes.astype(np.float32) - zeros
        return result

    def _group_of(self) -> npt.NDArray[np.integer]:
        return np.arange(self.codes.shape[1]) // self.group_size


@dataclass(frozen=True)
class QuantisedExpert:
    """One expert of 4-bit codes.

    Shapes: gate, up: [I, H]; down: [H, I].
    """

    gate: QuantisedMatrix
    up: QuantisedMatrix
    down: QuantisedMatrix

    @property
    def format(self) -> str:
        """The format that holds it as it is: zero points where any matrix has some.

        Raises:
            WeightFormatError: Its matrices are of several kinds or types of scales.
        """
        matrices = (self.gate, self.up, self.down)
        kinds = {(matrix.kind, matrix.scale_type) for matrix in matrices}
        has_zeros = any(matrix.zeros is not None for matrix in matrices)
        for row in FORMATS.values():
            codes = row.grouped
            if codes and kinds == {(codes.kind, codes.scale_type)} and codes.has_zeros == has_zeros:
                return row.name
        got = ", ".join(f"{kind} with {scale_type} scales" for kind, scale_type in sorted(kinds))
        zeros = " and zero points" if has_zeros else ""
        raise WeightFormatError(f"expert: got {got}{zeros}, which no format holds")


def pack_quantised_expert(expert: QuantisedExpert, weight_format: str) -> U8:
    """All units of one expert in a grouped format, stripe by stripe; no code and no scale is changed.

    Groups larger than the format's are repeated, and a format with zero points takes experts without them.

    Shapes: result: [S_total, unit_bytes(H, weight_format)] u8, contiguous.

    Raises:
        WeightFormatError: The format has no place for the expert: names the matrix, what it has and what is
            expected.
    Reference: docs/weight-format.md; the native twin is :func:`duckllm.weights.pack.pack_quantised`.
    """
    row = codes_of(weight_format)
    intermediate, hidden = expert.gate.codes.shape
    check_expert(expert, weight_format)
    stripes, blocks = num_stripes(intermediate), padded_hidden(hidden) // RECORD_ROWS
    units = np.zeros((stripes, unit_bytes(hidden, weight_format)), np.uint8)
    zero_section, pairs, downs = _parts(units, hidden, weight_format)
    down_zeros_at = blocks * STRIPE_CHANNELS  # where down's zero points begin

    for half, matrix in enumerate((expert.gate, expert.up)):
        scales, zeros = _of_smaller_groups(matrix, GATE_UP_GROUP, row)
        shape = (stripes * STRIPE_CHANNELS, blocks * RECORD_ROWS)
        codes = _padded(matrix.codes, zeros, GATE_UP_GROUP, shape, row.code_of_zero)
        tiles = codes.reshape(stripes, STRIPE_CHANNELS, blocks, RECORD_ROWS).transpose(0, 2, 3, 1)
        pairs[:, :, half * _CODE_BYTES : (half + 1) * _CODE_BYTES] = _join_nibbles(tiles)
        by_channel = _grown(scales, stripes * STRIPE_CHANNELS, blocks, 0)
        start = 2 * _CODE_BYTES + half * _GATE_UP_SCALES
        pairs[:, :, start : start + _GATE_UP_SCALES] = _as_bytes(
            by_channel.reshape(stripes, STRIPE_CHANNELS, blocks).transpose(0, 2, 1)
        )
        if row.has_zeros:
            by_channel = _grown(zeros, stripes * STRIPE_CHANNELS, blocks, row.code_of_zero)
            nibbles = by_channel.reshape(stripes, STRIPE_CHANNELS // 2, 2, blocks).transpose(0, 3, 1, 2)
            section = zero_section[:, :down_zeros_at].reshape(stripes, blocks, 2, STRIPE_CHANNELS // 2)
            section[:, :, half] = nibbles[..., 0] | nibbles[..., 1] << 4

    scales, zeros = _of_smaller_groups(expert.down, DOWN_GROUP, row)
    shape = (blocks * RECORD_ROWS, stripes * STRIPE_CHANNELS)
    codes = _padded(expert.down.codes, zeros, DOWN_GROUP, shape, row.code_of_zero)
    tiles = codes.reshape(blocks, 2, 16, stripes, STRIPE_CHANNELS).transpose(3, 0, 1, 4, 2)
    downs[:, :, :_CODE_BYTES] = _join_nibbles(tiles.reshape(stripes, blocks, RECORD_ROWS, STRIPE_CHANNELS))
    by_output = _grown(scales, blocks * RECORD_ROWS, stripes, 0)
    downs[:, :, _CODE_BYTES:] = _as_bytes(by_output.reshape(blocks, RECORD_ROWS, stripes).transpose(2, 0, 1))
    if row.has_zeros:
        by_output = _grown(zeros, blocks * RECORD_ROWS, stripes, row.code_of_zero)
        nibbles = by_output.reshape(blocks, RECORD_ROWS // 2, 2, stripes).transpose(3, 0, 1, 2)
        joined = nibbles[..., 0] | nibbles[..., 1] << 4
        zero_section[:, down_zeros_at : 2 * down_zeros_at] = joined.reshape(stripes, down_zeros_at)
    return units


def unpack_quantised_expert(
    units: U8, intermediate_size: int, hidden_size: int, weight_format: str
) -> QuantisedExpert:
    """The codes, scales and zero points that one expert's units hold, in groups of 32, and of 16 in down.

    Shapes: units: [S_total, unit_bytes(H, weight_format)] u8.

    Raises:
        WeightFormatError: The shape differs.
    """
    row = codes_of(weight_format)
    stripes, blocks = num_stripes(intermediate_size), padded_hidden(hidden_size) // RECORD_ROWS
    expected = (stripes, unit_bytes(hidden_size, weight_format))
    if units.shape != expected:
        raise WeightFormatError(f"units: got shape {units.shape}, expected {expected}")
    zero_section, pairs, downs = _parts(units, hidden_size, weight_format)
    down_zeros_at = blocks * STRIPE_CHANNELS
    matrices = []
    for half in range(2):
        rows = _split_nibbles(pairs[:, :, half * _CODE_BYTES : (half + 1) * _CODE_BYTES])
        codes = rows.transpose(0, 3, 1, 2).reshape(stripes * STRIPE_CHANNELS, -1)
        start = 2 * _CODE_BYTES + half * _GATE_UP_SCALES
        words = _as_words(pairs[:, :, start : start + _GATE_UP_SCALES])
        scales = words.transpose(0, 2, 1).reshape(-1, blocks)[:intermediate_size]
        zeros = None
        if row.has_zeros:
            section = zero_section[:, :down_zeros_at].reshape(stripes, blocks, 2, STRIPE_CHANNELS // 2)
            zeros = _nibbles(section[:, :, half]).transpose(0, 2, 1).reshape(-1, blocks)[:intermediate_size]
        codes = codes[:intermediate_size, :hidden_size]
        matrices.append(_matrix(codes, scales, zeros, GATE_UP_GROUP, row))

    tiles = _split_nibbles(downs[:, :, :_CODE_BYTES]).reshape(stripes, blocks, 2, STRIPE_CHANNELS, 16)
    codes = tiles.transpose(1, 2, 4, 0, 3).reshape(blocks * RECORD_ROWS, -1)
    words = _as_words(downs[:, :, _CODE_BYTES:])
    scales = words.transpose(1, 2, 0).reshape(-1, stripes)[:hidden_size]
    zeros = None
    if row.has_zeros:
        of_down = zero_section[:, down_zeros_at : 2 * down_zeros_at].reshape(stripes, blocks, -1)
        zeros = _nibbles(of_down).transpose(1, 2, 0).reshape(-1, stripes)[:hidden_size]
    codes = codes[:hidden_size, :intermediate_size]
    matrices.append(_matrix(codes, scales, zeros, DOWN_GROUP, row))
    return QuantisedExpert(*matrices)


def codes_of(weight_format: str) -> GroupedCodes:
    """What a grouped format's codes stand for."""
    row = FORMATS[weight_format].grouped
    assert row is not None, weight_format
    return row


def check_expert(expert: QuantisedExpert, weight_format: str) -> None:
    """Checks that a grouped format has a place for an expert.

    Raises:
        WeightFormatError: Names the matrix, what it has and what is expected.
    """
    row = codes_of(weight_format)
    intermediate, hidden = expert.gate.codes.shape
    wide = (intermediate, hidden)
    for name, matrix, shape, multiple in (
        ("gate", expert.gate, wide, GATE_UP_GROUP),
        ("up", expert.up, wide, GATE_UP_GROUP),
        ("down", expert.down, wide[::-1], DOWN_GROUP),
    ):
        if matrix.codes.shape != shape:
            raise WeightFormatError(f"{name}: got codes of shape {matrix.codes.shape}, expected {shape}")
        size = matrix.group_size
        if size < 1 or (size % multiple and size < shape[1]):
            raise WeightFormatError(
                f"{name}: got groups of {size} weights, expected a multiple of {multiple} for {weight_format}"
            )
        groups = (shape[0], ceil_div(shape[1], size))
        if matrix.scales.shape != groups:
            raise WeightFormatError(f"{name}: got scales of shape {matrix.scales.shape}, expected {groups}")
        if (matrix.kind, matrix.scale_type) != (row.kind, row.scale_type):
            raise WeightFormatError(
                f"{name}: got {matrix.kind} with {matrix.scale_type} scales, expected {row.kind} with "
                f"{row.scale_type} scales for {weight_format}"
            )
        if matrix.zeros is not None and not row.has_zeros:
            raise WeightFormatError(f"{name}: got zero points, expected none for {weight_format}")
        if matrix.zeros is not None and matrix.zeros.shape != groups:
            got = matrix.zeros.shape
            raise WeightFormatError(f"{name}: got zero points of shape {got}, expected {groups}")
        for what, codes in (("codes", matrix.codes), ("zero points", matrix.zeros)):
            if codes is not None and codes.size and int(codes.max()) > 15:
                raise WeightFormatError(f"{name}: got {what} up to {int(codes.max())}, expected 0 to 15")
        if not np.isfinite(matrix.scales).all():
            raise WeightFormatError(f"{name}: got scales that are not finite")
        words = scale_words(matrix.scales, matrix.scale_type)
        if (scale_values(words, matrix.scale_type) != matrix.scales).any():
            raise WeightFormatError(f"{name}: got scales that {matrix.scale_type} does not hold exactly")


def scale_words(scales: F32, scale_type: str) -> U16:
    """The 16-bit patterns of scales, rounded to nearest, ties to even.

    Shapes: scales: any, f32; result: the same, u16.
    """
    if scale_type == "f16":
        with np.errstate(over="ignore"):
            return scales.astype("<f2").view("<u2")
    bits = scales.view(np.uint32)
    result: U16 = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    return result


def scale_values(words: U16, scale_type: str) -> F32:
    """The scales of 16-bit patterns, exactly.

    Shapes: words: any, u16; result: the same, f32.
    """
    if scale_type == "f16":
        return words.view("<f2").astype(np.float32)
    return (words.astype(np.uint32) << 16).view(np.float32)


def _matrix(codes: U8, words: U16, zeros: U8 | None, group_size: int, row: GroupedCodes) -> QuantisedMatrix:
    return QuantisedMatrix(
        np.ascontiguousarray(codes),
        np.ascontiguousarray(scale_values(np.ascontiguousarray(words), row.scale_type)),
        row.scale_type,
        None if zeros is None else np.ascontiguousarray(zeros),
        group_size,
        row.kind,
    )


def _of_smaller_groups(matrix: QuantisedMatrix, size: int, row: GroupedCodes) -> tuple[U16, U8]:
    """Scales as words and zero points (or codes of zero), one for each ``size`` columns."""
    groups = ceil_div(matrix.codes.shape[1], size)
    from_group = np.arange(groups) * size // matrix.group_size
    words = scale_words(np.ascontiguousarray(matrix.scales), row.scale_type)[:, from_group]
    if matrix.zeros is None:
        return words, np.full(words.shape, row.code_of_zero, np.uint8)
    return words, matrix.zeros[:, from_group]


def _padded(codes: U8, zeros: U8, size: int, shape: tuple[int, int], code_of_zero: int) -> U8:
    """Codes with rows and columns added: their group's zero point, and where no group is the code of zero."""
    result = np.full(shape, code_of_zero, np.uint8)
    group_of = np.minimum(np.arange(shape[1]) // size, zeros.shape[1] - 1)
    result[: codes.shape[0]] = zeros[:, group_of]
    result[: codes.shape[0], : codes.shape[1]] = codes
    return result


def _grown(values: npt.NDArray[np.integer], rows: int, columns: int, fill: int) -> npt.NDArray[np.integer]:
    result = np.full((rows, columns), fill, values.dtype)
    result[: values.shape[0], : values.shape[1]] = values
    return result


def _join_nibbles(rows: U8) -> U8:
    """Codes of records: eight rows of a lane are a word, rows j and j + 4 the halves of its byte j.

    Shapes: rows: [..., 32, 16] u8; result: [..., 256] u8.
    """
    lead = rows.shape[:-2]
    eights = rows.reshape(*lead, RECORD_ROWS // 8, 2, 4, STRIPE_CHANNELS)
    joined = eights[..., 0, :, :] | eights[..., 1, :, :] << np.uint8(4)
    return joined.swapaxes(-1, -2).reshape(*lead, _CODE_BYTES)


def _split_nibbles(records: U8) -> U8:
    """The inverse of :func:`_join_nibbles`.

    Shapes: records: [..., 256] u8; result: [..., 32, 16] u8.
    """
    lead = records.shape[:-1]
    words = records.reshape(*lead, RECORD_ROWS // 8, STRIPE_CHANNELS, 4).swapaxes(-1, -2)
    eights = np.stack([words & 15, words >> 4], axis=-3)
    return eights.reshape(*lead, RECORD_ROWS, STRIPE_CHANNELS)


def _nibbles(packed: U8) -> U8:
    """[..., n] bytes to [..., 2 n] codes, low halves first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _as_bytes(words: npt.NDArray[np.integer]) -> U8:
    return np.ascontiguousarray(words, "<u2").view(np.uint8)


def _as_words(packed: U8) -> U16:
    return np.ascontiguousarray(packed).view("<u2")


def _parts(units: U8, hidden_size: int, weight_format: str) -> tuple[U8, U8, U8]:
    """Views: scale sections [S, D], pairs of gate and up [S, H'/32, 576], records of down [S, H'/32, 320]."""
    row = FORMATS[weight_format]
    stripes, blocks = units.shape[0], padded_hidden(hidden_size) // RECORD_ROWS
    start = unit_scale_bytes(hidden_size, weight_format)
    middle = start + blocks * 2 * row.record_bytes
    pairs = units[:, start:middle].reshape(stripes, blocks, 2 * row.record_bytes)
    return units[:, :start], pairs, units[:, middle:].reshape(stripes, blocks, row.down_bytes)
