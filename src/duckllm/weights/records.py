"""What the records of every weight format have in common: 32 rows of 16 lanes, rows in pairs.

The numpy twin of csrc/kernels/weight_format.h; docs/weight-format.md is the specification.
"""

from __future__ import annotations

from duckllm.weights.e4m3 import U8

STRIPE_CHANNELS = 16
RECORD_ROWS = 32
RECORD_WEIGHTS = RECORD_ROWS * STRIPE_CHANNELS


def interleave(rows: U8) -> U8:
    """A record's bytes in the order of the file: rows 2p and 2p + 1 of a lane side by side.

    Shapes: rows: [..., 32, 16] u8; result: [..., 512] u8.
    """
    lead = rows.shape[:-2]
    pairs = rows.reshape(*lead, RECORD_ROWS // 2, 2, STRIPE_CHANNELS).swapaxes(-1, -2)
    return pairs.reshape(*lead, RECORD_WEIGHTS)


def rows_of(record: U8) -> U8:
    """The rows of a record's bytes, the inverse of :func:`interleave`.

    Shapes: record: [..., 512] u8; result: [..., 32, 16] u8.
    """
    lead = record.shape[:-1]
    pairs = record.reshape(*lead, RECORD_ROWS // 2, STRIPE_CHANNELS, 2)
    return pairs.swapaxes(-1, -2).reshape(*lead, RECORD_ROWS, STRIPE_CHANNELS)
