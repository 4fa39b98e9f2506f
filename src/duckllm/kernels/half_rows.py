"""Activations as the FP8 kernels take them: f16, with a power of two for each 128 numbers of a row.

Written by the kernels that make activations, read by :mod:`duckllm.kernels.fp8_linear`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

SCALE_BLOCK = 128
# Rows of a decode step: the least that the matrix units take at once. More go through larger tiles.
DECODE_ROWS = 16
# Most rows that are computed in groups of that; more go through tiles that read a weight once for 128 rows.
MAX_GROUPED_ROWS = 64
TILE_ROWS = 128
# Largest number of a row's block after its factor: f16 has room above, and small ones keep their bits.
_TOP: tl.constexpr = tl.constexpr(256.0)


@dataclass(frozen=True)
class HalfRows:
    """Activations in f16. What is in the rows behind the first ``num_rows`` may be anything.

    Args:
        values: Numbers in f16, each block of 128 within [-256, 256].
        factors: What a block's numbers are multiplied with, powers of two.
        num_rows: M.

    Shapes:
        values: [R, K] f16, R being M or the next multiple of 16, or above 64 of 128;
        factors: [ceil(K / 128), R] f32
    """

    values: torch.Tensor
    factors: torch.Tensor
    num_rows: int


@dataclass(frozen=True)
class Activations:
    """Rows that linear layers take: as they are, and as the FP8 kernels take them.

    Shapes:
        values: [M, K] f32
    """

    values: torch.Tensor
    half: HalfRows


def empty_half_rows(num_rows: int, width: int, device: torch.device) -> HalfRows:
    """Room for rows that a kernel writes."""
    multiple = DECODE_ROWS if num_rows <= MAX_GROUPED_ROWS else TILE_ROWS
    padded = triton.cdiv(num_rows, multiple) * multiple
    return HalfRows(
        torch.empty(padded, width, dtype=torch.float16, device=device),
        torch.empty(triton.cdiv(width, SCALE_BLOCK), padded, dtype=torch.float32, device=device),
        num_rows,
    )


@triton.jit
def halve(x):  # type: ignore[no-untyped-def]
    """Blocks [B, 128] f32, in f16, and their factors [B]."""
    # The power of two at or above the largest, by its bits; a block of zeros has any.
    bits = tl.maximum(tl.max(tl.abs(x), 1), 1e-33).to(tl.int32, bitcast=True)
    power = (((bits + 0x7FFFFF) >> 23) << 23).to(tl.float32, bitcast=True)
    return (x / power[:, None] * _TOP).to(tl.float16), power / _TOP


@triton.jit
def store_half_blocks(values_ptr, factors_ptr, row, first_block, x, width, padded_rows, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes BLOCKS blocks of a row, from ``first_block`` on: [BLOCKS, 128], zeros past ``width``."""
    values, factors = halve(x)
    block = first_block + tl.arange(0, BLOCKS)
    k = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(values_ptr + row.to(tl.int64) * width + k, values, mask=k < width)
    tl.store(factors_ptr + block * padded_rows + row, factors, mask=block * 128 < width)
