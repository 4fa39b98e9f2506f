"""What the records of every weight format have in common: 32 rows of 16 lanes, four rows side by side.

The numpy twin of csrc/kernels/weight_format.h; docs/weight-format.md is the specification.
"""

from __future__ import annotations

from duckllm.weights.e4m3 import U8

STRIPE_CHANNELS = 16
RECORD_ROWS = 32
RECORD_WEIGHTS = RECORD_ROWS * STRIPE_CHANNELS
# Where the bytes of four rows of a lane lie; the permutation is its own inverse.
_PLACES = [0, 2, 1, 3]


def interleave(rows: U8) -> U8:
    """A record's bytes in the order of the file: four rows of a lane side by side, as 0, 2, 1, 3.

    Shapes: rows: [..., 32, 16] u8; result: [..., 512] u8.
    """
    lead = rows.shape[:-2]
    fours = rows.reshape(*lead, RECORD_ROWS // 4, 4, STRIPE_CHANNELS)[..., _PLACES, :].swapaxes(-1, -2)
    return fours.reshape(*lead, RECORD_WEIGHTS)


def rows_of(record: U8) -> U8:
    """The rows of a record's bytes, the inverse of :func:`interleave`.

    Shapes: record: [..., 512] u8; result: [..., 32, 16] u8.
    """
    lead = record.shape[:-1]
    fours = record.reshape(*lead, RECORD_ROWS // 4, STRIPE_CHANNELS, 4)[..., _PLACES]
    return fours.swapaxes(-1, -2).reshape(*lead, RECORD_ROWS, STRIPE_CHANNELS)
