"""An expert of a checkpoint as e4m3 codes with block scales, whatever type the checkpoint has it in.

Called by the packer and by the verifier. It reads tensors and knows their types, not the converted form.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from duckllm import _native
from duckllm.errors import CheckpointError, WeightFormatError
from duckllm.weights.checkpoint import FP8, scale_of
from duckllm.weights.e4m3 import F32, SCALE_BLOCK, U8, QuantisationError, quantisation_error, scale_shape
from duckllm.weights.layout import ModelLayout
from duckllm.weights.safetensors_file import TensorInfo, TensorReader
from duckllm.weights.units import ExpertWeights


def widen_to_f32(raw: U8, info: TensorInfo) -> F32:
    """The tensor's values as f32, exactly.

    Shapes: raw: [num_bytes] u8 of an F32, F16 or BF16 tensor; result: info.shape, f32.
    """
    if info.dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(info.shape)
    stored = raw.view("<f4" if info.dtype == "F32" else "<f2")
    return stored.astype(np.float32, copy=False).reshape(info.shape)


def read_scales(reader: TensorReader, info: TensorInfo) -> F32:
    """The block scales of an FP8 weight.

    Shapes: result: [ceil(rows/128), ceil(columns/128)] f32.

    Raises:
        CheckpointError: A scale is negative, NaN or infinite.
    """
    scales = widen_to_f32(reader.read(info), info)
    bad = int(np.count_nonzero(~(np.isfinite(scales) & (scales >= 0))))
    if bad:
        raise CheckpointError(f"{info.name}: got {bad} negative or non-finite scale(s), expected none")
    return scales


def read_weight(
    reader: TensorReader, tensors: Mapping[str, TensorInfo], name: str
) -> tuple[U8, F32, QuantisationError | None]:
    """A weight matrix as codes and block scales; the error is None where nothing was rounded.

    Shapes: codes: [rows, columns] u8; scales: [ceil(rows/128), ceil(columns/128)] f32.

    Raises:
        WeightFormatError: The weight holds NaN or infinity.
        CheckpointError: A scale is negative or non-finite, or an FP8 weight has none.
    """
    info = tensors[name]
    rows, columns = info.shape
    raw = reader.read(info)
    if info.dtype == FP8:
        nans = _native.count_nan_e4m3(raw)
        if nans:
            raise WeightFormatError(f"{name}: got {nans} NaN byte(s) (0x7f or 0xff), expected finite weights")
        scale = scale_of(tensors, name)
        if scale is None:
            raise CheckpointError(f"{name}: FP8 without its block scales")
        return raw.reshape(rows, columns), read_scales(reader, scale), None
    weights = widen_to_f32(raw, info)
    bad = weights.size - int(np.count_nonzero(np.isfinite(weights)))
    if bad:
        raise WeightFormatError(f"{name}: got {bad} non-finite weight(s), expected finite weights")
    codes = np.empty((rows, columns), np.uint8)
    scales: npt.NDArray[np.float32] = np.empty(scale_shape(rows, columns), np.float32)
    total = QuantisationError()
    for band in range(scales.shape[0]):
        part = slice(band * SCALE_BLOCK, (band + 1) * SCALE_BLOCK)
        codes[part], scales[band : band + 1] = _native.quantize_e4m3_blocks(weights[part])
        total += quantisation_error(weights[part], codes[part], scales[band : band + 1])
    return codes, scales, total


def read_expert(
    reader: TensorReader, tensors: Mapping[str, TensorInfo], layout: ModelLayout, layer: int, expert: int
) -> tuple[ExpertWeights, QuantisationError | None]:
    """One expert, and how far its weights were rounded; None where they were not."""
    gate, gate_scales, gate_error = read_weight(
        reader, tensors, layout.expert_weight(layer, expert, "gate_proj")
    )
    up, up_scales, up_error = read_weight(reader, tensors, layout.expert_weight(layer, expert, "up_proj"))
    down, down_scales, down_error = read_weight(
        reader, tensors, layout.expert_weight(layer, expert, "down_proj")
    )
    weights = ExpertWeights(gate, up, down, gate_scales, up_scales, down_scales)
    errors = [error for error in (gate_error, up_error, down_error) if error is not None]
    if not errors:
        return weights, None
    total = QuantisationError()
    for error in errors:
        total += error
    return weights, total
