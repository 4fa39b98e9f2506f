"""Linear layers of FP8 weights on a GPU, in Triton: y = x W^T, each 128 x 128 weights having a scale.

Measured by benchmarks/gpu/fp8_linear.py; calls nothing of ours. Weights stay e4m3 bytes as a checkpoint has
them and are widened on their way into the matrix units, so that a decode step reads one byte a weight.

Every e4m3 value is an f16 value, and so is every bf16 one within a range, which a factor for each 128
numbers of a row keeps; products of f16 are exact in the matrix units, and sums are f32. So there is one path
for all cards, and nothing is rounded that a checkpoint's own arithmetic does not round. The e4m3 matrix units
of Hopper would take activations as two e4m3 numbers each without loss, and are faster for large weights, but
add up with some 13 bits: 3e-4 of the result instead of 2e-7 (docs/log.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from duckllm.kernels.half_rows import (
    DECODE_ROWS,
    MAX_GROUPED_ROWS,
    SCALE_BLOCK,
    TILE_ROWS,
    HalfRows,
    empty_half_rows,
    store_half_blocks,
)
from duckllm.kernels.shared_memory import has_large_shared_memory


def to_half_rows(x: torch.Tensor) -> HalfRows:
    """``x`` in f16 with a factor for each 128 numbers.

    Exact for bf16 numbers of more than 2^-21 of their block's largest; of smaller ones within 2^-32 of that,
    or of 1e-33.

    Shapes:
        x: [M, K] bf16 or f32, cuda, rows contiguous
    """
    num_rows, width = x.shape
    rows = empty_half_rows(num_rows, width, x.device)
    _half_rows[(num_rows, len(rows.factors))](
        x, rows.values, rows.factors, width, x.stride(0), rows.values.shape[0], num_warps=1
    )
    return rows


@triton.jit
def _half_rows(x_ptr, values_ptr, factors_ptr, width, x_stride, padded_rows):  # type: ignore[no-untyped-def]
    row, block = tl.program_id(0), tl.program_id(1)
    k = block * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + k, mask=k < width, other=0.0).to(tl.float32)
    store_half_blocks(values_ptr, factors_ptr, row, block, x, width, padded_rows, 1)


@triton.jit
def _widen(codes, HAS_E4M3: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes of e4m3 as f16, exactly; where there is no instruction for it, 2^-8 of them: their bits moved."""
    if HAS_E4M3:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    wide = codes.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def _multiply_rows(  # type: ignore[no-untyped-def]
    values_ptr, factors_ptr, w_ptr, s_ptr, y_ptr, partial_ptr, count_ptr,
    num_rows, padded_rows, N, K, y_stride, split,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    HAS_E4M3: tl.constexpr,
):  # fmt: skip
    """A tile of [ROWS, BLOCK_N] outputs over one part of K."""
    # Groups of rows that share weights are neighbours, so that all but one find them in the L2 cache.
    group, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_blocks = tl.cdiv(K, 128)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = group * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, 128)
    w_rows = w_ptr + n.to(tl.int64)[:, None] * K
    x_rows = values_ptr + m.to(tl.int64)[:, None] * K
    scales = s_ptr + (tile * BLOCK_N // 128) * num_blocks  # BLOCK_N divides 128
    total = tl.zeros((ROWS, BLOCK_N), tl.float32)
    first, last = num_blocks * part // split, num_blocks * (part + 1) // split
    for block in tl.range(first, last, num_stages=STAGES):
        columns = block * 128 + k
        if EVEN:
            codes = tl.load(w_rows + columns[None, :])
            x = tl.load(x_rows + columns[None, :])
        else:
            codes = tl.load(
                w_rows + columns[None, :], mask=(n < N)[:, None] & (columns < K)[None, :], other=0
            )
            x = tl.load(x_rows + columns[None, :], mask=(columns < K)[None, :], other=0.0)
        factor = tl.load(factors_ptr + block * padded_rows + m) * tl.load(scales + block)
        total += tl.dot(x, _widen(codes, HAS_E4M3).T) * factor[:, None]
    if not HAS_E4M3:
        total *= 256.0
    in_y = (n < N)[None, :] & (m < num_rows)[:, None]
    y_at = y_ptr + m.to(tl.int64)[:, None] * y_stride + n[None, :]
    if split == 1:
        tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=in_y)
    else:
        # Whoever is last adds up all parts in their order, so that it does not matter who that is.
        slot = tile * tl.num_programs(0) + group
        inner = tl.arange(0, ROWS)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        at = partial_ptr + slot.to(tl.int64) * split * BLOCK_N * ROWS + inner
        tl.store(at + part * BLOCK_N * ROWS, total, mask=in_y)
        tl.debug_barrier()
        if tl.atomic_add(count_ptr + slot, 1, sem="acq_rel") == split - 1:
            total = tl.zeros((ROWS, BLOCK_N), tl.float32)
            for other in range(split):
                total += tl.load(at + other * BLOCK_N * ROWS, mask=in_y, other=0.0, cache_modifier=".cg")
            tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=in_y)
            tl.store(count_ptr + slot, 0)


@triton.jit
def _multiply_tiles(  # type: ignore[no-untyped-def]
    values_ptr, factors_ptr, w_ptr, s_ptr, y_ptr, num_rows, padded_rows, N, K, y_stride,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    HAS_E4M3: tl.constexpr,
):  # fmt: skip
    """A tile of [ROWS, BLOCK_N] outputs; W is the left operand, which may come from registers."""
    group, tile = tl.program_id(0), tl.program_id(1)
    num_blocks = tl.cdiv(K, 128)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = group * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, 128)
    w_rows = w_ptr + n.to(tl.int64)[:, None] * K
    x_rows = values_ptr + m.to(tl.int64)[:, None] * K
    scales = s_ptr + (tile * BLOCK_N // 128) * num_blocks
    total = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for block in tl.range(0, num_blocks, num_stages=STAGES):
        columns = block * 128 + k
        if EVEN:
            codes = tl.load(w_rows + columns[None, :])
            x = tl.load(x_rows + columns[None, :])
        else:
            in_k = (columns < K)[None, :]
            codes = tl.load(w_rows + columns[None, :], mask=(n < N)[:, None] & in_k, other=0)
            x = tl.load(x_rows + columns[None, :], mask=in_k, other=0.0)
        factor = tl.load(factors_ptr + block * padded_rows + m) * tl.load(scales + block)
        total += tl.dot(_widen(codes, HAS_E4M3), x.T) * factor[None, :]
    if not HAS_E4M3:
        total *= 256.0
    y_at = y_ptr + m.to(tl.int64)[None, :] * y_stride + n[:, None]
    tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=(n < N)[:, None] & (m < num_rows)[None, :])


@dataclass(frozen=True)
class Tiling:
    """How a product is cut among programs.

    Args:
        block_n: Outputs of a tile.
        split: Parts of K that a tile is computed in.
        num_stages: Blocks of 128 columns that are on their way at a time.
        num_warps: Warps of a program.
    """

    block_n: int
    split: int
    num_stages: int
    num_warps: int


@lru_cache
def decode_tiling(out_features: int, in_features: int, device: int) -> Tiling:
    """The cut of a decode step.

    It depends on the weight and the card alone, so that a row gives the same bits whatever goes with it.
    """
    properties = torch.cuda.get_device_properties(device)
    tiles = triton.cdiv(out_features, 64)
    num_blocks = triton.cdiv(in_features, SCALE_BLOCK)
    # Two programs for each multiprocessor keep enough bytes on their way; more only add to the sums.
    split = max(1, min(num_blocks, round(2 * properties.multi_processor_count / tiles)))
    return Tiling(64, split, 8 if has_large_shared_memory(device) else 4, 2)


class Workspace:
    """Partial sums of products on one stream: one at a time.

    Args:
        device: Where.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._partials = torch.empty(0, dtype=torch.float32, device=device)
        self._counts = torch.zeros(0, dtype=torch.int32, device=device)

    def reserve(self, num_tiles: int, num_partials: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for so many numbers, and zeroed counters for so many tiles.

        What is captured in a graph has to be reserved before.
        """
        if self._partials.numel() < num_partials:
            self._partials = torch.empty(num_partials, dtype=torch.float32, device=self._device)
        if self._counts.numel() < num_tiles:
            self._counts = torch.zeros(num_tiles, dtype=torch.int32, device=self._device)
        return self._partials, self._counts


def multiply(
    x: HalfRows, weight: torch.Tensor, scales: torch.Tensor, workspace: Workspace, dtype: torch.dtype
) -> torch.Tensor:
    """``x W^T``, with f32 sums.

    Up to 64 rows each row's bits depend on that row alone.

    Args:
        x: Activations.
        weight: W.
        scales: Of each block of 128 x 128 weights.
        workspace: For partial sums.
        dtype: Of the result.

    Shapes:
        weight: [N, K] uint8, bytes of e4m3 without NaN; scales: [ceil(N / 128), ceil(K / 128)] f32;
        result: [M, N] f32 or bf16

    Reference:
        tests/kernels/test_fp8_linear.py, float64: 1e-6 of the result's norm in f32.
    """
    out_features, in_features = weight.shape
    y = torch.empty(x.num_rows, out_features, dtype=dtype, device=weight.device)
    padded_rows, device = x.values.shape[0], weight.device.index or 0
    has_e4m3 = torch.cuda.get_device_capability(weight.device) >= (8, 9)
    if padded_rows > MAX_GROUPED_ROWS:
        is_even = out_features % 64 == 0 and in_features % SCALE_BLOCK == 0
        grid = (padded_rows // TILE_ROWS, triton.cdiv(out_features, 64))
        _multiply_tiles[grid](
            x.values, x.factors, weight, scales, y, x.num_rows, padded_rows, out_features, in_features,
            y.stride(0), ROWS=TILE_ROWS, BLOCK_N=64, STAGES=4 if has_large_shared_memory(device) else 2,
            EVEN=is_even, HAS_E4M3=has_e4m3, num_warps=4,
        )  # fmt: skip
        return y
    tiling = decode_tiling(out_features, in_features, device)
    groups, tiles = padded_rows // DECODE_ROWS, triton.cdiv(out_features, tiling.block_n)
    slots = groups * tiles
    partials, counts = workspace.reserve(slots, slots * tiling.split * DECODE_ROWS * tiling.block_n)
    is_even = out_features % tiling.block_n == 0 and in_features % SCALE_BLOCK == 0
    _multiply_rows[(groups, tiles, tiling.split)](
        x.values, x.factors, weight, scales, y, partials, counts,
        x.num_rows, padded_rows, out_features, in_features, y.stride(0), tiling.split,
        ROWS=DECODE_ROWS, BLOCK_N=tiling.block_n, STAGES=tiling.num_stages, EVEN=is_even, HAS_E4M3=has_e4m3,
        num_warps=tiling.num_warps,
    )  # fmt: skip
    return y
