"""The weight formats as data: what tells one from another, and the sizes that follow.

A format is a row in ``FORMATS``, a module with its record, and kernels for it in csrc/kernels. Either comes
in two layouts of its scales: ``"block"``, one for 128 x 128 weights, and ``"channel"``, one for a row of a
matrix. Everything else, from the converter to the worker, asks here; docs/weight-format.md is the
specification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from duckllm.config import SCALE_LAYOUTS, WEIGHT_FORMATS
from duckllm.weights import fp8, fp9
from duckllm.weights.e4m3 import SCALE_BLOCK, U8, ceil_div, scale_shape
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


def scale_shapes(
    hidden_size: int, intermediate_size: int, scale_layout: str
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of the scales of gate and up ``[I, H]``, and of down ``[H, I]``, of one expert."""
    assert scale_layout in SCALE_LAYOUTS, scale_layout
    if scale_layout == "channel":
        return (intermediate_size, 1), (hidden_size, 1)
    return scale_shape(intermediate_size, hidden_size), scale_shape(hidden_size, intermediate_size)


def unit_scale_bytes(hidden_size: int, scale_layout: str = "block") -> int:
    """Bytes of a unit's scale section: a multiple of 64."""
    assert scale_layout in SCALE_LAYOUTS, scale_layout
    if scale_layout == "channel":
        return 4 * (2 * STRIPE_CHANNELS + padded_hidden(hidden_size))
    return ceil_div(3 * 4 * ceil_div(hidden_size, SCALE_BLOCK), 64) * 64


def unit_bytes(hidden_size: int, weight_format: str, scale_layout: str = "block") -> int:
    """Bytes of one unit = (expert, stripe) in a format and a layout of its scales: a multiple of 64."""
    records = 3 * (padded_hidden(hidden_size) // RECORD_ROWS)
    return unit_scale_bytes(hidden_size, scale_layout) + records * FORMATS[weight_format].record_bytes
