"""The fp8 record in numpy: 8 bits a weight, e4m3 bytes as a checkpoint has them, in the record's order.

Called through :mod:`duckllm.weights.formats`; docs/weight-format.md is the specification.
"""

from __future__ import annotations

import numpy as np

from duckllm.weights.e4m3 import F32, U8, refuse_nans
from duckllm.weights.records import RECORD_WEIGHTS, interleave, rows_of

RECORD_BYTES = RECORD_WEIGHTS


def encode_records(rows: U8) -> U8:
    """Records of e4m3 codes.

    Shapes: rows: [..., 32, 16] u8; result: [..., 512] u8.

    Raises:
        WeightFormatError: A code is NaN (0x7f or 0xff), which kernels would take for a number.
    """
    refuse_nans(rows, "tensor")
    return interleave(rows)


def decode_records(records: U8) -> U8:
    """The e4m3 codes of records, the inverse of :func:`encode_records`.

    Raises:
        WeightFormatError: A code is NaN.
    """
    refuse_nans(records, "fp8 payload")
    return rows_of(records)


def decode_f32(codes: U8) -> F32:
    """The bits that the kernels make: f32 values equal to w * 2^-120, exactly.

    Shapes: codes: any, u8; result: the same, f32.
    Units: weight times 2^-120, before the block scale; e4m3's subnormals are denormals here.
    """
    bits = (codes.astype(np.uint32) & 0x7F) << 20 | (codes.astype(np.uint32) >> 7) << 31
    return bits.view(np.float32)
