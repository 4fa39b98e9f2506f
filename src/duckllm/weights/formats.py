"""The weight formats as data: what tells one from another, and the sizes that follow.

A format is a row in ``FORMATS``, a module with its record, and kernels for it in csrc/kernels. Those of bytes
come in layouts of their scales: ``"block"``, one for 128 x 128 weights, and ``"channel"``, one for a row of a
matrix (fp9 and fp8 only); those of 4 bits have the scale of each group in its record: ``"group"``. Everything
else, from the converter to the worker, asks here; docs/weight-format.md is the specification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from duckllm.config import LOSSLESS_FORMATS, SCALE_LAYOUTS, WEIGHT_FORMATS
from duckllm.weights import fp8, fp9, int8
from duckllm.weights.e4m3 import SCALE_BLOCK, U8, ceil_div, scale_shape
from duckllm.weights.records import RECORD_ROWS, RECORD_WEIGHTS, STRIPE_CHANNELS

GATE_UP_GROUP = RECORD_ROWS  # hidden indices of a channel that share a scale in gate and up, at least
DOWN_GROUP = STRIPE_CHANNELS  # channels of an output that share one in down, at least
_GROUP_CODE_BYTES = RECORD_WEIGHTS // 2


@dataclass(frozen=True)
class ByteRecord:
    """How a format of one byte, or nine bits, a weight makes its records.

    Args:
        encode: [..., 32, 16] codes to [..., record_bytes]; refuses codes that the format has not.
        decode: The inverse; refuses what no code is stored as.
        padding: The code that fills rows and lanes that no weight has.
    """

    encode: Callable[[U8], U8]
    decode: Callable[[U8], U8]
    padding: int = 0


@dataclass(frozen=True)
class GroupedCodes:
    """What the 4-bit codes of a format stand for.

    Args:
        kind: ``"int4"``, or ``"mxfp4"`` for e2m1 codes.
        scale_type: ``"f16"`` or ``"bf16"``.
        has_zeros: Whether each group has a zero point of its own.
        code_of_zero: The code of the value 0, without one.
    """

    kind: str
    scale_type: str
    has_zeros: bool = False
    code_of_zero: int = 8


@dataclass(frozen=True)
class WeightFormat:
    """One format.

    Args:
        name: As manifests, plans and flags name it.
        record_bytes: Bytes of a record of 32 rows of 16 lanes of gate or up.
        down_bytes: Bytes of one of down.
        scale_layouts: Layouts of scales that it comes in.
        record: Its records, where a weight is a byte or nine bits.
        grouped: Its codes, where a weight is 4 bits.
    """

    name: str
    record_bytes: int
    down_bytes: int
    scale_layouts: tuple[str, ...]
    record: ByteRecord | None = None
    grouped: GroupedCodes | None = None


def _of_bytes(name: str, record_bytes: int, record: ByteRecord, *scale_layouts: str) -> WeightFormat:
    return WeightFormat(name, record_bytes, record_bytes, scale_layouts, record=record)


def _of_groups(name: str, codes: GroupedCodes) -> WeightFormat:
    gate_up, down = 2 * STRIPE_CHANNELS, 2 * RECORD_ROWS  # bytes of 16-bit scales
    return WeightFormat(
        name, _GROUP_CODE_BYTES + gate_up, _GROUP_CODE_BYTES + down, ("group",), grouped=codes
    )


FORMATS = {
    row.name: row
    for row in (
        _of_bytes(
            "fp9", fp9.RECORD_BYTES, ByteRecord(fp9.encode_records, fp9.decode_records), "block", "channel"
        ),
        _of_bytes(
            "fp8", fp8.RECORD_BYTES, ByteRecord(fp8.encode_records, fp8.decode_records), "block", "channel"
        ),
        _of_bytes(
            "int8",
            int8.RECORD_BYTES,
            ByteRecord(int8.encode_records, int8.decode_records, int8.CODE_OF_ZERO),
            "block",
        ),
        _of_groups("int4", GroupedCodes("int4", "f16")),
        _of_groups("int4-bf16", GroupedCodes("int4", "bf16")),
        _of_groups("int4-zero", GroupedCodes("int4", "f16", has_zeros=True)),
        _of_groups("int4-zero-bf16", GroupedCodes("int4", "bf16", has_zeros=True)),
        _of_groups("mxfp4", GroupedCodes("mxfp4", "bf16", code_of_zero=0)),
    )
}
assert tuple(FORMATS) == WEIGHT_FORMATS


def is_lossless(weight_format: str) -> bool:
    """Whether a format holds e4m3 weights as they are: such formats can be made from each other."""
    return weight_format in LOSSLESS_FORMATS


def layout_in(weight_format: str, scale_layout: str) -> str:
    """The layout of scales that a format comes in: the given one where it can, else its only one."""
    layouts = FORMATS[weight_format].scale_layouts
    return scale_layout if scale_layout in layouts else layouts[0]


def padded_hidden(hidden_size: int) -> int:
    """H', the hidden size rounded up to whole records."""
    return ceil_div(hidden_size, RECORD_ROWS) * RECORD_ROWS


def num_stripes(intermediate_size: int) -> int:
    """Stripes of a whole expert, the last one padded."""
    return ceil_div(intermediate_size, STRIPE_CHANNELS)


def scale_shapes(
    hidden_size: int, intermediate_size: int, scale_layout: str
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of the scales of gate and up ``[I, H]``, and of down ``[H, I]``, of one expert of bytes."""
    assert scale_layout in ("block", "channel"), scale_layout
    if scale_layout == "channel":
        return (intermediate_size, 1), (hidden_size, 1)
    return scale_shape(intermediate_size, hidden_size), scale_shape(hidden_size, intermediate_size)


def unit_scale_bytes(hidden_size: int, weight_format: str, scale_layout: str = "block") -> int:
    """Bytes of a unit's scale section: a multiple of 64. A format of groups has its own layout alone."""
    assert scale_layout in SCALE_LAYOUTS, scale_layout
    grouped = FORMATS[weight_format].grouped
    if grouped is not None:
        return ceil_div(padded_hidden(hidden_size), 64) * 64 if grouped.has_zeros else 0
    if scale_layout == "channel":
        return 4 * (2 * STRIPE_CHANNELS + padded_hidden(hidden_size))
    return ceil_div(3 * 4 * ceil_div(hidden_size, SCALE_BLOCK), 64) * 64


def unit_bytes(hidden_size: int, weight_format: str, scale_layout: str = "block") -> int:
    """Bytes of one unit = (expert, stripe) in a format and a layout of its scales: a multiple of 64."""
    row = FORMATS[weight_format]
    blocks = padded_hidden(hidden_size) // RECORD_ROWS
    records = blocks * (2 * row.record_bytes + row.down_bytes)
    return unit_scale_bytes(hidden_size, weight_format, scale_layout) + records


@dataclass(frozen=True)
class LayerFormat:
    """How a layer's experts are stored.

    Args:
        format: A name in :data:`duckllm.weights.formats.FORMATS`.
        scale_layout: Layout of their scales, one of the format's.
    """

    format: str
    scale_layout: str

    @classmethod
    def of(cls, weight_format: str, scale_layout: str) -> LayerFormat:
        """A format with a layout of scales where it has that, else with its own."""
        return cls(weight_format, layout_in(weight_format, scale_layout))

    def unit_bytes(self, hidden_size: int) -> int:
        """Bytes of one unit."""
        return unit_bytes(hidden_size, self.format, self.scale_layout)


def bits_per_weight(weight_format: str) -> float:
    """Bits of a weight with all its scales, where H is large and a multiple of 128, in the layout block."""
    many = 128 * 1024
    return 8 * unit_bytes(many, weight_format) / (3 * STRIPE_CHANNELS * many)
