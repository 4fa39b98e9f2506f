"""The int8 record in numpy: 8 bits a weight, q + 128 with q from -127 to 127, in the record's order.

Called through :mod:`duckllm.weights.formats`; docs/weight-format.md is the specification.
"""

from __future__ import annotations

import numpy as np

from duckllm.errors import WeightFormatError
from duckllm.weights.e4m3 import U8
from duckllm.weights.records import RECORD_ROWS, RECORD_WEIGHTS, STRIPE_CHANNELS

RECORD_BYTES = RECORD_WEIGHTS
CODE_OF_ZERO = 128


def encode_records(rows: U8) -> U8:
    """Records of int8 codes: four rows of a lane side by side, in their order.

    Shapes: rows: [..., 32, 16] u8; result: [..., 512] u8.

    Raises:
        WeightFormatError: A code is 0, which would be -128.
    """
    _refuse_minus_128(rows)
    lead = rows.shape[:-2]
    fours = rows.reshape(*lead, RECORD_ROWS // 4, 4, STRIPE_CHANNELS).swapaxes(-1, -2)
    return fours.reshape(*lead, RECORD_WEIGHTS)


def decode_records(records: U8) -> U8:
    """The codes of records, the inverse of :func:`encode_records`.

    Raises:
        WeightFormatError: A code is 0.
    """
    _refuse_minus_128(records)
    lead = records.shape[:-1]
    fours = records.reshape(*lead, RECORD_ROWS // 4, STRIPE_CHANNELS, 4).swapaxes(-1, -2)
    return fours.reshape(*lead, RECORD_ROWS, STRIPE_CHANNELS)


def _refuse_minus_128(codes: U8) -> None:
    bad = int(np.count_nonzero(codes == 0))
    if bad:
        raise WeightFormatError(f"int8 codes: got {bad} byte(s) 0, which stand for -128, expected 1 to 255")
