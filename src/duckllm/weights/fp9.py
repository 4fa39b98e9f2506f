"""The fp9 record in numpy: 9 bits a weight, a magnitude byte and a sign bit.

A magnitude byte has 5 exponent bits and 3 mantissa bits, and 0 is zero. Every finite e4m3 value has exactly
one such form, a normal number, so that the encoding is lossless and no kernel meets a denormal. Called
through :mod:`duckllm.weights.formats`; docs/weight-format.md is the specification.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from duckllm.errors import WeightFormatError
from duckllm.weights.e4m3 import F32, U8, refuse_nans
from duckllm.weights.records import RECORD_ROWS, RECORD_WEIGHTS, STRIPE_CHANNELS, interleave, rows_of

Bool = npt.NDArray[np.bool_]

RECORD_BYTES = RECORD_WEIGHTS + STRIPE_CHANNELS * 4

_SUBNORMAL_MAGNITUDES = (0x00, 0x70, 0x78, 0x7C, 0x80, 0x82, 0x84, 0x86)
_NOT_E4M3 = 0xFF
# The sign bit of each of a record's 32 rows in its lane's word.
_SIGN_BITS = np.array([16 * (row % 2) + 15 - row // 2 for row in range(RECORD_ROWS)], np.uint32)[:, None]


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


def encode_e4m3(codes: U8, name: str = "tensor") -> tuple[U8, Bool]:
    """The magnitude bytes and the sign bits of e4m3 codes.

    Args:
        codes: e4m3 bytes.
        name: Tensor name for the error.

    Shapes: codes: any, u8; results: the same shape, u8 and bool.

    Raises:
        WeightFormatError: The codes hold NaN (0x7f or 0xff), which fp9 has no form for.
    """
    refuse_nans(codes, name)
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


def encode_records(rows: U8) -> U8:
    """Records of e4m3 codes.

    Shapes: rows: [..., 32, 16] u8; result: [..., 576] u8.

    Raises:
        WeightFormatError: A code is NaN.
    """
    magnitudes, signs = encode_e4m3(rows)
    words = np.bitwise_or.reduce(signs.astype(np.uint32) << _SIGN_BITS, axis=-2)
    sign_bytes = np.ascontiguousarray(words, "<u4").view(np.uint8)
    return np.concatenate([interleave(magnitudes), sign_bytes], axis=-1)


def decode_records(records: U8) -> U8:
    """The e4m3 codes of records, the inverse of :func:`encode_records`.

    Raises:
        WeightFormatError: A magnitude is not that of an e4m3 value.
    """
    magnitudes = rows_of(records[..., :RECORD_WEIGHTS])
    words = np.ascontiguousarray(records[..., RECORD_WEIGHTS:]).view("<u4")
    signs = ((words[..., None, :] >> _SIGN_BITS) & 1).astype(np.bool_)
    return decode_e4m3(magnitudes, signs)
