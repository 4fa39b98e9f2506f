"""Units of an expert in numpy, in formats of bytes: the readable twin of the native packer.

:mod:`duckllm.weights.grouped` has the same for formats of 4 bits.

Called by the converter's checks, by tests and by whoever wants the weights of a unit back. It knows bytes and
arrays only, no files and no models, and imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from duckllm.errors import WeightFormatError
from duckllm.weights.e4m3 import F32, SCALE_BLOCK, U8, ceil_div
from duckllm.weights.formats import (
    FORMATS,
    ByteRecord,
    num_stripes,
    padded_hidden,
    scale_shapes,
    unit_bytes,
    unit_scale_bytes,
)
from duckllm.weights.records import RECORD_ROWS, STRIPE_CHANNELS


@dataclass(frozen=True)
class ExpertWeights:
    """One expert's three matrices as e4m3 codes with their scales, or as int8 codes q + 128.

    Shapes: gate, up: [I, H] u8; down: [H, I] u8. In the layout ``"block"`` gate_scales, up_scales:
        [ceil(I/128), ceil(H/128)] f32; down_scales: [ceil(H/128), ceil(I/128)] f32. In ``"channel"``
        gate_scales, up_scales: [I, 1] f32; down_scales: [H, 1] f32. All contiguous.
    """

    gate: U8
    up: U8
    down: U8
    gate_scales: F32
    up_scales: F32
    down_scales: F32


def pack_expert_units(expert: ExpertWeights, weight_format: str, scale_layout: str = "block") -> U8:
    """All units of one expert in a format and a layout of its scales, stripe by stripe.

    Shapes: result: [S_total, unit_bytes(H, weight_format, scale_layout)] u8, contiguous.

    Raises:
        WeightFormatError: A code is NaN (0 in int8), or the scales are not of the layout.
    Reference: docs/weight-format.md; the native twin is ``duckllm._native.pack_expert_units``, byte for byte.
    """
    record = _record_of(weight_format)
    intermediate, hidden = expert.gate.shape
    stripes, blocks = num_stripes(intermediate), padded_hidden(hidden) // RECORD_ROWS
    units = np.zeros((stripes, unit_bytes(hidden, weight_format, scale_layout)), np.uint8)
    scales = _stripe_scales(expert, scale_layout).astype("<f4")
    units[:, : scales.shape[1] * 4] = scales.view(np.uint8)

    halves, down_records = _record_views(units, hidden, weight_format, scale_layout)
    for half, matrix in enumerate((expert.gate, expert.up)):
        padded = np.full((stripes * STRIPE_CHANNELS, blocks * RECORD_ROWS), record.padding, np.uint8)
        padded[:intermediate, :hidden] = matrix
        tiles = padded.reshape(stripes, STRIPE_CHANNELS, blocks, RECORD_ROWS).transpose(0, 2, 3, 1)
        halves[:, :, half] = record.encode(tiles)

    padded = np.full((blocks * RECORD_ROWS, stripes * STRIPE_CHANNELS), record.padding, np.uint8)
    padded[:hidden, :intermediate] = expert.down
    tiles = padded.reshape(blocks, 2, 16, stripes, STRIPE_CHANNELS).transpose(3, 0, 1, 4, 2)
    down_records[:] = record.encode(tiles.reshape(stripes, blocks, RECORD_ROWS, STRIPE_CHANNELS))
    return units


def unpack_expert_units(
    units: U8, intermediate_size: int, hidden_size: int, weight_format: str, scale_layout: str = "block"
) -> ExpertWeights:
    """The codes and scales that one expert's units hold, the inverse of :func:`pack_expert_units`.

    Shapes: units: [S_total, unit_bytes(H, weight_format, scale_layout)] u8.

    Raises:
        WeightFormatError: The shape differs, a weight is none of the format's, or the stripes that share a
            scale disagree about it.
    """
    record = _record_of(weight_format)
    stripes, blocks = num_stripes(intermediate_size), padded_hidden(hidden_size) // RECORD_ROWS
    expected = (stripes, unit_bytes(hidden_size, weight_format, scale_layout))
    if units.shape != expected:
        raise WeightFormatError(f"units: got shape {units.shape}, expected {expected}")
    read_scales = _channel_scales if scale_layout == "channel" else _block_scales
    gate_scales, up_scales, down_scales = read_scales(units, intermediate_size, hidden_size)

    halves, down_records = _record_views(units, hidden_size, weight_format, scale_layout)
    padded_shape = (2, stripes * STRIPE_CHANNELS, blocks * RECORD_ROWS)
    both = record.decode(halves).transpose(2, 0, 4, 1, 3).reshape(padded_shape)
    gate, up = both[:, :intermediate_size, :hidden_size]
    tiles = (
        record.decode(down_records).reshape(stripes, blocks, 2, STRIPE_CHANNELS, 16).transpose(1, 2, 4, 0, 3)
    )
    down = tiles.reshape(blocks * RECORD_ROWS, stripes * STRIPE_CHANNELS)[:hidden_size, :intermediate_size]
    return ExpertWeights(
        gate=np.ascontiguousarray(gate),
        up=np.ascontiguousarray(up),
        down=np.ascontiguousarray(down),
        gate_scales=np.ascontiguousarray(gate_scales),
        up_scales=np.ascontiguousarray(up_scales),
        down_scales=np.ascontiguousarray(down_scales),
    )


def _record_of(weight_format: str) -> ByteRecord:
    record = FORMATS[weight_format].record
    assert record is not None, weight_format
    return record


def _stripe_scales(expert: ExpertWeights, scale_layout: str) -> F32:
    """What the scale sections hold before their padding, one row a stripe."""
    intermediate, hidden = expert.gate.shape
    stripes = num_stripes(intermediate)
    scales = (expert.gate_scales, expert.up_scales, expert.down_scales)
    gate_up, down = scale_shapes(hidden, intermediate, scale_layout)
    got = tuple(each.shape for each in scales)
    if got != (gate_up, gate_up, down):
        raise WeightFormatError(
            f"scales of gate, up and down: got shapes {got}, expected {(gate_up, gate_up, down)} "
            f"in the layout {scale_layout}"
        )
    if scale_layout == "block":
        return np.concatenate([*scales[:2], scales[2].T], axis=1)[_block_of_stripe(stripes)]
    rows = np.zeros((2, stripes * STRIPE_CHANNELS), np.float32)
    rows[:, :intermediate] = scales[0][:, 0], scales[1][:, 0]
    outputs = np.zeros((stripes, padded_hidden(hidden)), np.float32)
    outputs[:, :hidden] = scales[2][:, 0]
    gate, up = rows.reshape(2, stripes, STRIPE_CHANNELS)
    return np.concatenate([gate, up, outputs], axis=1)


def _block_scales(units: U8, intermediate_size: int, hidden_size: int) -> tuple[F32, F32, F32]:
    stripes, columns = units.shape[0], ceil_div(hidden_size, SCALE_BLOCK)
    section = np.ascontiguousarray(units[:, : 3 * 4 * columns]).view("<f4")
    scales = section.reshape(stripes, 3, columns).astype(np.float32)
    block_of_stripe = _block_of_stripe(stripes)
    chosen = scales[np.unique(block_of_stripe, return_index=True)[1]]
    if scales.tobytes() != chosen[block_of_stripe].tobytes():
        raise WeightFormatError("units: got several scales in one 128-channel block, expected one")
    return chosen[:, 0], chosen[:, 1], chosen[:, 2].T


def _channel_scales(units: U8, intermediate_size: int, hidden_size: int) -> tuple[F32, F32, F32]:
    section = np.ascontiguousarray(units[:, : 4 * (2 * STRIPE_CHANNELS + padded_hidden(hidden_size))])
    scales = section.view("<f4").astype(np.float32)
    gate, up, down = np.split(scales, (STRIPE_CHANNELS, 2 * STRIPE_CHANNELS), axis=1)
    if len({stripe.tobytes() for stripe in down}) != 1:
        raise WeightFormatError("units: got several scales of one output of down, expected one")
    gate_scales, up_scales = (each.reshape(-1, 1)[:intermediate_size] for each in (gate, up))
    return gate_scales, up_scales, down[0, :hidden_size, None]


def _block_of_stripe(stripes: int) -> npt.NDArray[np.int64]:
    return np.arange(stripes) * STRIPE_CHANNELS // SCALE_BLOCK


def _record_views(units: U8, hidden_size: int, weight_format: str, scale_layout: str) -> tuple[U8, U8]:
    """Views of the records: gate and up ``[S, H'/32, 2, bytes]``, down ``[S, H'/32, bytes]``."""
    stripes, blocks = units.shape[0], padded_hidden(hidden_size) // RECORD_ROWS
    record_bytes = FORMATS[weight_format].record_bytes
    start = unit_scale_bytes(hidden_size, weight_format, scale_layout)
    middle = start + 2 * blocks * record_bytes
    halves = units[:, start:middle].reshape(stripes, blocks, 2, record_bytes)
    return halves, units[:, middle:].reshape(stripes, blocks, record_bytes)
