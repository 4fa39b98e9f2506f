"""Random experts in int8, int4 and mxfp4 for measurements: their units, and what their weights are.

Called by expert_step.py. Values come from codes and scales, units from the packers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from duckllm import _native
from duckllm.bench.memory import U8
from duckllm.weights.formats import DOWN_GROUP, FORMATS, GATE_UP_GROUP
from duckllm.weights.grouped import (
    QuantisedExpert,
    QuantisedMatrix,
    codes_of,
    pack_quantised_expert,
    scale_values,
    scale_words,
)

F32 = npt.NDArray[np.float32]
# Standard deviations of random codes, so that outputs are about as large as x.
_INT8_SPREAD, _INT4_SPREAD = 74.0, 4.6


def random_integer_expert(
    weight_format: str, hidden_size: int, channels: int, seed: int
) -> tuple[U8, tuple[F32, F32, F32]]:
    """Units [S, unit_bytes] of one expert, and its gate [I, H], up [I, H] and down [H, I]."""
    rng = np.random.default_rng(seed)
    sizes = ((channels, hidden_size), (channels, hidden_size), (hidden_size, channels))
    if FORMATS[weight_format].grouped is None:
        return _int8_expert(sizes, rng)
    groups = (GATE_UP_GROUP, GATE_UP_GROUP, DOWN_GROUP)
    matrices = [
        _grouped_matrix(weight_format, size, group, rng) for size, group in zip(sizes, groups, strict=True)
    ]
    expert = QuantisedExpert(*matrices)
    values = (expert.gate.values(), expert.up.values(), expert.down.values())
    return pack_quantised_expert(expert, weight_format), values


def _int8_expert(
    sizes: tuple[tuple[int, int], ...], rng: np.random.Generator
) -> tuple[U8, tuple[F32, F32, F32]]:
    codes = [rng.integers(1, 256, size, dtype=np.uint8) for size in sizes]
    scales = []
    for rows, columns in sizes:
        drawn = rng.uniform(0.5, 1.5, (-(-rows // 128), -(-columns // 128)))
        scales.append((drawn / _INT8_SPREAD / columns**0.5).astype(np.float32))
    gate, up, down = (
        (code.astype(np.float32) - 128)
        * scale.repeat(128, axis=0).repeat(128, axis=1)[: code.shape[0], : code.shape[1]]
        for code, scale in zip(codes, scales, strict=True)
    )
    units = _native.pack_expert_units(
        codes[0], codes[1], codes[2], scales[0], scales[1], scales[2], format="int8"
    )
    return units, (gate, up, down)


def _grouped_matrix(
    weight_format: str, size: tuple[int, int], group: int, rng: np.random.Generator
) -> QuantisedMatrix:
    row = codes_of(weight_format)
    shape = (size[0], -(-size[1] // group))
    scales = (rng.uniform(0.5, 1.5, shape) / _INT4_SPREAD / size[1] ** 0.5).astype(np.float32)
    return QuantisedMatrix(
        rng.integers(0, 16, size, dtype=np.uint8),
        scale_values(scale_words(scales, row.scale_type), row.scale_type),
        row.scale_type,
        rng.integers(6, 11, shape, dtype=np.uint8) if row.has_zeros else None,
        group,
        row.kind,
    )
