"""The fp9 weight format in numpy: the readable twin of csrc/kernels/weight_format.h and the native packer.

Called by the converter's checks and by tests; docs/weight-format.md is the specification. It knows bytes and
arrays only, no files and no models, and imports no torch.

An fp9 weight is a magnitude byte (5 exponent bits, 3 mantissa bits, 0 is zero) and a sign bit. Every finite
e4m3 value has exactly one fp9 form, so from FP8 the encoding is lossless; other sources are rounded onto the
e4m3 grid first (:func:`quantise_blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from duckllm.errors import WeightFormatError

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]

STRIPE_CHANNELS = 16
RECORD_ROWS = 32
RECORD_MAGNITUDES = RECORD_ROWS * STRIPE_CHANNELS
RECORD_BYTES = RECORD_MAGNITUDES + STRIPE_CHANNELS * 4
SCALE_BLOCK = 128
EXPONENT_BIAS = 23
DECODE_EXPONENT = -104
E4M3_MAX = 448.0

_SMALLEST_NORMAL_F32 = np.float32(2.0**-126)
_SUBNORMAL_MAGNITUDES = (0x00, 0x70, 0x78, 0x7C, 0x80, 0x82, 0x84, 0x86)
_NOT_E4M3 = 0xFF


def _magnitude_table() -> U8:
    low = np.arange(256, dtype=np.uint16) & 0x7F
    table = (low + 0x80).astype(np.uint8)
    for code, magnitude in enumerate(_SUBNORMAL_MAGNITUDES):
        table[[code, code | 0x80]] = magnitude
    return table


def _inverse_table(magnitudes: U8) -> U8:
    table = np.full(256, _NOT_E4M3, np.uint8)
    for code in range(0x7F):
        table[magnitudes[code]] = code
    return table


MAGNITUDE_OF_E4M3 = _magnitude_table()
_E4M3_OF_MAGNITUDE = _inverse_table(MAGNITUDE_OF_E4M3)


def ceil_div(a: int, b: int) -> int:
    """The smallest integer that is at least ``a / b``."""
    return -(-a // b)


def padded_hidden(hidden_size: int) -> int:
    """H', the hidden size rounded up to whole records."""
    return ceil_div(hidden_size, RECORD_ROWS) * RECORD_ROWS


def num_stripes(intermediate_size: int) -> int:
    """Stripes of a whole expert, the last one padded."""
    return ceil_div(intermediate_size, STRIPE_CHANNELS)


def unit_scale_bytes(hidden_size: int) -> int:
    """Bytes of a unit's scale section: a multiple of 64."""
    return ceil_div(3 * 4 * ceil_div(hidden_size, SCALE_BLOCK), 64) * 64


def unit_bytes(hidden_size: int) -> int:
    """Bytes of one unit = (expert, stripe): a multiple of 64."""
    return unit_scale_bytes(hidden_size) + 3 * (padded_hidden(hidden_size) // RECORD_ROWS) * RECORD_BYTES


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the block scales of a ``[rows, columns]`` matrix; edge blocks count."""
    return ceil_div(rows, SCALE_BLOCK), ceil_div(columns, SCALE_BLOCK)


def count_e4m3_nans(codes: U8) -> int:
    """How many bytes are one of the two e4m3 NaNs, 0x7f and 0xff."""
    return int(np.count_nonzero((codes & 0x7F) == 0x7F))


def encode_e4m3(codes: U8, name: str = "tensor") -> tuple[U8, Bool]:
    """The magnitude bytes and the sign bits of e4m3 codes.

    Args:
        codes: e4m3 bytes.
        name: Tensor name for the error.

    Shapes: codes: any, u8; results: the same shape, u8 and bool.

    Raises:
        WeightFormatError: The codes hold NaN (0x7f or 0xff), which fp9 has no form for.
    """
    nans = count_e4m3_nans(codes)
    if nans:
        raise WeightFormatError(
            f"{name}: got {nans} NaN value(s) among its e4m3 bytes (0x7f or 0xff), expected finite weights"
        )
    return MAGNITUDE_OF_E4M3[codes], codes >= 0x80


def decode_e4m3(magnitudes: U8, signs: Bool) -> U8:
    """The e4m3 codes of fp9 weights, the inverse of :func:`encode_e4m3`.

    Raises:
        WeightFormatError: A magnitude is not that of an e4m3 value.
    """
    codes = _E4M3_OF_MAGNITUDE[magnitudes]
    bad = int(np.count_nonzero(codes == _NOT_E4M3))
    if bad:
        raise WeightFormatError(
            f"fp9 payload: got {bad} magnitude byte(s) outside the e4m3 values, expected none"
        )
    return codes | np.where(signs, np.uint8(0x80), np.uint8(0))


def decode_f32(magnitudes: U8, signs: Bool) -> F32:
    """The bits that the kernels make: f32 values equal to w * 2^-104, exactly.

    Shapes: magnitudes: any, u8; signs: the same, bool; result: the same, f32.
    Units: weight times 2^-104, before the block scale.
    """
    bits = (magnitudes.astype(np.uint32) << 20) | (signs.astype(np.uint32) << 31)
    return bits.view(np.float32)


def e4m3_values() -> F32:
    """The f32 value of each of the 256 e4m3 codes; 0x7f and 0xff are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = np.ldexp(1.0 + mantissa / 8.0, exponent - 7)
    value = np.where(exponent == 0, mantissa * 2.0**-9, normal) * np.where(code >= 0x80, -1.0, 1.0)
    value[[0x7F, 0xFF]] = np.nan
    return value.astype(np.float32)


def expand_scales(scales: F32, rows: int, columns: int) -> F32:
    """Block scales repeated to one per weight.

    Shapes: scales: [ceil(rows/128), ceil(columns/128)] f32; result: [rows, columns] f32.
    """
    wide: F32 = np.repeat(np.repeat(scales, SCALE_BLOCK, axis=0), SCALE_BLOCK, axis=1)
    return wide[:rows, :columns]


def dequantise(codes: U8, scales: F32) -> F32:
    """The weights that e4m3 codes and block scales stand for.

    Shapes: codes: [rows, columns] u8; scales: [ceil(rows/128), ceil(columns/128)] f32; result: as codes, f32.
    """
    return e4m3_values()[codes] * expand_scales(scales, *codes.shape)


def round_to_e4m3(values: F32) -> U8:
    """The e4m3 codes nearest to the values, ties to even, subnormals included, clamped to +-448.

    Shapes: values: any, f32, finite; result: the same, u8.
    """
    bits = values.view(np.uint32)
    size = np.minimum(np.abs(values), np.float32(E4M3_MAX))
    size_bits = size.view(np.uint32)
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = np.rint(size * np.float32(512.0))
    codes = np.where(size < np.float32(2.0**-6), subnormal.astype(np.uint32), normal)
    result: U8 = (codes | ((bits >> 31) << 7)).astype(np.uint8)
    return result


@dataclass
class QuantisationError:
    """Sums that describe how far quantised weights lie from their source; add up over tensors with ``+=``.

    Args:
        squared_error: Sum of (quantised - source)^2.
        squared_source: Sum of source^2.
        max_relative: Largest |quantised - source| / |source| over weights of at least 2^-6 of the block's
            scale, at most 1/17; smaller weights change by at most 2^-10 of the scale.
        flushed: Non-zero source weights that became zero (below 2^-10 of the block's scale).
        weights: Number of weights.
    """

    squared_error: float = 0.0
    squared_source: float = 0.0
    max_relative: float = 0.0
    flushed: int = 0
    weights: int = 0

    def __iadd__(self, other: QuantisationError) -> QuantisationError:
        self.squared_error += other.squared_error
        self.squared_source += other.squared_source
        self.max_relative = max(self.max_relative, other.max_relative)
        self.flushed += other.flushed
        self.weights += other.weights
        return self

    @classmethod
    def from_json(cls, value: object) -> QuantisationError:
        """What ``dataclasses.asdict`` made of one.

        Raises:
            ValueError: A sum is missing, unknown or no number.
        """
        if not isinstance(value, dict) or value.keys() != cls.__dataclass_fields__.keys():
            raise ValueError(f"expected an object with {sorted(cls.__dataclass_fields__)}")
        for name, got in value.items():
            whole = name in ("flushed", "weights")
            if type(got) is not int and (whole or type(got) is not float):
                raise ValueError(f"{name}: expected a {'whole ' if whole else ''}number")
        return cls(**value)

    @property
    def rms_relative(self) -> float:
        """Root mean square error over the root mean square of the source."""
        return (self.squared_error / self.squared_source) ** 0.5 if self.squared_source else 0.0


def block_scales(weights: F32) -> F32:
    """The scales that map each 128x128 block's largest magnitude to 448; 1 for a block of zeros.

    A scale below the smallest normal f32 is raised to it, so that no kernel multiplies by a denormal.

    Shapes: weights: [rows, columns] f32; result: [ceil(rows/128), ceil(columns/128)] f32.
    """
    rows, columns = weights.shape
    block_rows, block_columns = scale_shape(rows, columns)
    padded = np.zeros((block_rows * SCALE_BLOCK, block_columns * SCALE_BLOCK), np.float32)
    np.abs(weights, out=padded[:rows, :columns])
    blocks = padded.reshape(block_rows, SCALE_BLOCK, block_columns, SCALE_BLOCK)
    largest = blocks.max(axis=(1, 3))
    scales = np.maximum(largest / np.float32(E4M3_MAX), _SMALLEST_NORMAL_F32)
    return np.where(largest == 0, np.float32(1.0), scales)


def quantise_blocks(weights: F32, name: str = "tensor") -> tuple[U8, F32, QuantisationError]:
    """Codes on the e4m3 grid, their block scales, and how far they lie from the weights.

    Shapes: weights: [rows, columns] f32; codes: same, u8; scales: [ceil(rows/128), ceil(columns/128)] f32.

    Raises:
        WeightFormatError: The weights hold NaN or infinity.
    Reference: the native twin is ``duckllm._native.quantize_e4m3_blocks``, byte for byte.
    """
    bad = weights.size - int(np.count_nonzero(np.isfinite(weights)))
    if bad:
        raise WeightFormatError(f"{name}: got {bad} non-finite weight(s), expected finite weights")
    scales = block_scales(weights)
    codes = round_to_e4m3(weights / expand_scales(scales, *weights.shape))
    return codes, scales, quantisation_error(weights, codes, scales)


def quantisation_error(weights: F32, codes: U8, scales: F32) -> QuantisationError:
    """How far quantised weights lie from their source.

    Shapes: weights: [rows, columns] f32; codes: same, u8; scales: [ceil(rows/128), ceil(columns/128)] f32.
    """
    distance = np.abs(dequantise(codes, scales) - weights)
    size = np.abs(weights)
    is_normal = size >= expand_scales(scales * np.float32(2.0**-6), *weights.shape)
    relative = np.divide(distance, size, out=np.zeros_like(size), where=is_normal & (size > 0))
    return QuantisationError(
        squared_error=float(np.sum(np.square(distance), dtype=np.float64)),
        squared_source=float(np.sum(np.square(size), dtype=np.float64)),
        max_relative=float(relative.max()),
        flushed=int(np.count_nonzero((codes & 0x7F == 0) & (size > 0))),
        weights=weights.size,
    )


@dataclass(frozen=True)
class ExpertWeights:
    """One expert's three matrices as e4m3 codes with their block scales.

    Shapes: gate, up: [I, H] u8; down: [H, I] u8; gate_scales, up_scales: [ceil(I/128), ceil(H/128)] f32;
        down_scales: [ceil(H/128), ceil(I/128)] f32. All contiguous.
    """

    gate: U8
    up: U8
    down: U8
    gate_scales: F32
    up_scales: F32
    down_scales: F32


# The sign bit of each of a record's 32 rows in its lane's word.
_SIGN_BITS = np.array([16 * (row % 2) + 15 - row // 2 for row in range(RECORD_ROWS)], np.uint32)[:, None]


def _records(rows: U8) -> U8:
    """Records of ``[..., 32, 16]`` e4m3 codes: ``[..., 576]``."""
    magnitudes, signs = encode_e4m3(np.ascontiguousarray(rows))
    words = np.bitwise_or.reduce(signs.astype(np.uint32) << _SIGN_BITS, axis=-2)
    lead = rows.shape[:-2]
    pairs = magnitudes.reshape(*lead, RECORD_ROWS // 2, 2, STRIPE_CHANNELS).swapaxes(-1, -2)
    flat = pairs.reshape(*lead, RECORD_MAGNITUDES)
    return np.concatenate([flat, np.ascontiguousarray(words, "<u4").view(np.uint8)], axis=-1)


def _codes(records: U8) -> U8:
    """The ``[..., 32, 16]`` e4m3 codes of ``[..., 576]`` records."""
    lead = records.shape[:-1]
    pairs = records[..., :RECORD_MAGNITUDES].reshape(*lead, RECORD_ROWS // 2, STRIPE_CHANNELS, 2)
    magnitudes = pairs.swapaxes(-1, -2).reshape(*lead, RECORD_ROWS, STRIPE_CHANNELS)
    words = np.ascontiguousarray(records[..., RECORD_MAGNITUDES:]).view("<u4")
    signs = ((words[..., None, :] >> _SIGN_BITS) & 1).astype(np.bool_)
    return decode_e4m3(magnitudes, signs)


def pack_expert_units(expert: ExpertWeights) -> U8:
    """All units of one expert, stripe by stripe.

    Shapes: result: [S_total, unit_bytes(H)] u8, contiguous.

    Raises:
        WeightFormatError: A code is NaN.
    Reference: docs/weight-format.md; the native twin is ``duckllm._native.pack_expert_units``, byte for byte.
    """
    intermediate, hidden = expert.gate.shape
    stripes, blocks = num_stripes(intermediate), padded_hidden(hidden) // RECORD_ROWS
    units = np.zeros((stripes, unit_bytes(hidden)), np.uint8)
    by_block = np.concatenate([expert.gate_scales, expert.up_scales, expert.down_scales.T], axis=1)
    scales = by_block[_block_of_stripe(stripes)].astype("<f4")
    units[:, : scales.shape[1] * 4] = scales.view(np.uint8)

    halves, down_records = _record_views(units, hidden)
    for half, matrix in enumerate((expert.gate, expert.up)):
        padded = np.zeros((stripes * STRIPE_CHANNELS, blocks * RECORD_ROWS), np.uint8)
        padded[:intermediate, :hidden] = matrix
        tiles = padded.reshape(stripes, STRIPE_CHANNELS, blocks, RECORD_ROWS).transpose(0, 2, 3, 1)
        halves[:, :, half] = _records(tiles)

    padded = np.zeros((blocks * RECORD_ROWS, stripes * STRIPE_CHANNELS), np.uint8)
    padded[:hidden, :intermediate] = expert.down
    tiles = padded.reshape(blocks, 2, 16, stripes, STRIPE_CHANNELS).transpose(3, 0, 1, 4, 2)
    down_records[:] = _records(tiles.reshape(stripes, blocks, RECORD_ROWS, STRIPE_CHANNELS))
    return units


def unpack_expert_units(units: U8, intermediate_size: int, hidden_size: int) -> ExpertWeights:
    """The e4m3 codes and block scales that one expert's units hold, the inverse of :func:`pack_expert_units`.

    Shapes: units: [S_total, unit_bytes(H)] u8.

    Raises:
        WeightFormatError: The shape differs, a magnitude is no e4m3 value, or the stripes of one scale block
            disagree about its scale.
    """
    stripes, blocks = num_stripes(intermediate_size), padded_hidden(hidden_size) // RECORD_ROWS
    expected = (stripes, unit_bytes(hidden_size))
    if units.shape != expected:
        raise WeightFormatError(f"units: got shape {units.shape}, expected {expected}")
    scale_columns = ceil_div(hidden_size, SCALE_BLOCK)
    scale_section = np.ascontiguousarray(units[:, : 3 * 4 * scale_columns])
    scales = scale_section.view("<f4").reshape(stripes, 3, scale_columns)
    block_of_stripe = _block_of_stripe(stripes)
    chosen = scales[np.unique(block_of_stripe, return_index=True)[1]].astype(np.float32)
    if scales.tobytes() != chosen.astype("<f4")[block_of_stripe].tobytes():
        raise WeightFormatError("units: got several scales in one 128-channel block, expected one")

    halves, down_records = _record_views(units, hidden_size)
    padded_shape = (2, stripes * STRIPE_CHANNELS, blocks * RECORD_ROWS)
    both = _codes(halves).transpose(2, 0, 4, 1, 3).reshape(padded_shape)
    gate, up = both[:, :intermediate_size, :hidden_size]
    tiles = _codes(down_records).reshape(stripes, blocks, 2, STRIPE_CHANNELS, 16).transpose(1, 2, 4, 0, 3)
    down = tiles.reshape(blocks * RECORD_ROWS, stripes * STRIPE_CHANNELS)[:hidden_size, :intermediate_size]
    return ExpertWeights(
        gate=np.ascontiguousarray(gate),
        up=np.ascontiguousarray(up),
        down=np.ascontiguousarray(down),
        gate_scales=np.ascontiguousarray(chosen[:, 0]),
        up_scales=np.ascontiguousarray(chosen[:, 1]),
        down_scales=np.ascontiguousarray(chosen[:, 2].T),
    )


def _block_of_stripe(stripes: int) -> npt.NDArray[np.int64]:
    return np.arange(stripes) * STRIPE_CHANNELS // SCALE_BLOCK


def _record_views(units: U8, hidden_size: int) -> tuple[U8, U8]:
    """Views of the records: gate and up ``[S, H'/32, 2, 576]``, down ``[S, H'/32, 576]``."""
    stripes, blocks = units.shape[0], padded_hidden(hidden_size) // RECORD_ROWS
    start = unit_scale_bytes(hidden_size)
    middle = start + 2 * blocks * RECORD_BYTES
    halves = units[:, start:middle].reshape(stripes, blocks, 2, RECORD_BYTES)
    return halves, units[:, middle:].reshape(stripes, blocks, RECORD_BYTES)
