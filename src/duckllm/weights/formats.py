"""The weight formats as data: what tells one from another, and the sizes that follow.

A format is a row in ``FORMATS``, a module with its record, and kernels for it in csrc/kernels. Everything
else, from the converter to the worker, asks here; docs/weight-format.md is the specification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from duckllm.config import WEIGHT_FORMATS
from duckllm.weights import fp8, fp9
from duckllm.weights.e4m3 import SCALE_BLOCK, U8, ceil_div
from duckllm.weights.records import RECORD_ROWS, STRIPE_CHANNELS


@dataclass(frozen=True)
class WeightFormat:
    """One format.

    Args:
        name: As manifests, plans and flags name it.
        record_bytes: Bytes of a record of 32 rows of 16 lanes.
        encode_records: [..., 32, 16] e4m3 codes to [..., record_bytes]; refuses NaN.
        decode_records: The inverse; refuses what no e4m3 code is stored as.
    """

    name: str
    record_bytes: int
    encode_records: Callable[[U8], U8]
    decode_records: Callable[[U8], U8]


FORMATS = {
    "fp9": WeightFormat("fp9", fp9.RECORD_BYTES, fp9.encode_records, fp9.decode_records),
    "fp8": WeightFormat("fp8", fp8.RECORD_BYTES, fp8.encode_records, fp8.decode_records),
}
assert tuple(FORMATS) == WEIGHT_FORMATS


def padded_hidden(hidden_size: int) -> int:
    """H', the hidden size rounded up to whole records."""
    return ceil_div(hidden_size, RECORD_ROWS) * RECORD_ROWS


def num_stripes(intermediate_size: int) -> int:
    """Stripes of a whole expert, the last one padded."""
    return ceil_div(intermediate_size, STRIPE_CHANNELS)


def unit_scale_bytes(hidden_size: int) -> int:
    """Bytes of a unit's scale section: a multiple of 64."""
    return ceil_div(3 * 4 * ceil_div(hidden_size, SCALE_BLOCK), 64) * 64


def unit_bytes(hidden_size: int, weight_format: str) -> int:
    """Bytes of one unit = (expert, stripe) in a format: a multiple of 64."""
    records = 3 * (padded_hidden(hidden_size) // RECORD_ROWS)
    return unit_scale_bytes(hidden_size) + records * FORMATS[weight_format].record_bytes
