"""Linear layers of FP8 weights on a GPU, in Triton: y = x W^T, each 128 x 128 weights having a scale.

Measured by benchmarks/gpu/fp8_linear.py; calls nothing of ours. Weights stay e4m3 bytes as a checkpoint has
them and are widened on their way into the matrix units, so that a decode step reads one byte a weight.

Every e4m3 value is an f16 value, and so is every bf16 one within a range, which a factor for each 128
numbers of a row keeps; products of f16 are exact in the matrix units, and sums are f32. So there is one path
for all cards, and nothing is rounded that a checkpoint's own arithmetic does not round. The e4m3 matrix units
of Hopper would take activations as two e4m3 numbers each without loss, and are faster for large weights, but
add up with some 13 bits: 3e-4 of the result instead of 2e-7 (docs/log.md).

A product may be summed over K in any order, if both sides have the same. So in a decode step a thread reads
16 weights that are neighbours in memory, and they are its part of the matrix units' operand as they are:
bytes go to registers by the widest loads and never through shared memory. Each warp of a program has blocks
of K of its own, so that a program has whole sums, and adds the warps' once, at its end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from duckllm.kernels.card import can_start_early, has_e4m3, has_large_shared_memory
from duckllm.kernels.half_rows import (
    DECODE_ROWS,
    MAX_GROUPED_ROWS,
    SCALE_BLOCK,
    TILE_ROWS,
    HalfRows,
    empty_half_rows,
    store_half_blocks,
)


def to_half_rows(x: torch.Tensor) -> HalfRows:
    """``x`` in f16 with a factor for each 128 numbers.

    Exact for bf16 numbers of more than 2^-21 of their block's largest; of smaller ones within 2^-32 of that,
    or of 1e-33.

    Shapes:
        x: [M, K] bf16 or f32, cuda, rows contiguous
    """
    num_rows, width = x.shape
    rows = empty_half_rows(num_rows, width, x.device)
    # Few rows fill the card by many programs, of many rows each program has enough to do.
    blocks, num_warps = (1, 1) if num_rows <= MAX_GROUPED_ROWS else (16, 4)
    _half_rows[(num_rows, triton.cdiv(len(rows.factors), blocks))](
        x, rows.values, rows.factors, width, x.stride(0), rows.values.shape[0],
        BLOCKS=blocks, EARLY=can_start_early(x.device.index or 0), num_warps=num_warps,
    )  # fmt: skip
    return rows


@triton.jit
def _half_rows(  # type: ignore[no-untyped-def]
    x_ptr, values_ptr, factors_ptr, width, x_stride, padded_rows, BLOCKS: tl.constexpr, EARLY: tl.constexpr
):
    if EARLY:
        gdc_launch_dependents()
    row, first = tl.program_id(0), tl.program_id(1) * BLOCKS
    k = (first + tl.arange(0, BLOCKS))[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + k, mask=k < width, other=0.0).to(tl.float32)
    store_half_blocks(values_ptr, factors_ptr, row, first, x, width, padded_rows, BLOCKS)


@triton.jit
def _widen(codes, HAS_E4M3: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes of e4m3 as f16, exactly; where there is no instruction for it, 2^-8 of them: their bits moved."""
    if HAS_E4M3:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    # Four at a time: each byte to the top of a half, and all but the sign moved down by one.
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 low, high, low_bits, high_bits;
            prmt.b32 low, $2, 0, 0x1404;
            prmt.b32 high, $2, 0, 0x3424;
            shr.u32 low_bits, low, 1;
            shr.u32 high_bits, high, 1;
            and.b32 low_bits, low_bits, 0x3F803F80;
            and.b32 high_bits, high_bits, 0x3F803F80;
            lop3.b32 $0, low, 0x80008000, low_bits, 0xEA;
            lop3.b32 $1, high, 0x80008000, high_bits, 0xEA;
        }
        """,
        "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _load(at, k, width, EVEN: tl.constexpr, ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What is at ``at``: column ``k`` of a block, of which ``width`` columns are there."""
    if EVEN and ONCE:
        return tl.load(at, eviction_policy="evict_first")
    elif EVEN:
        return tl.load(at)
    return tl.load(at, mask=k < width, other=0)


@triton.jit
def _load_halves(at, k, width, other, OTHER_K: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Four pieces for each thread, [T, E, 2, 2]: at an offset of 0 or ``other``, and of 0 or 64 columns."""
    near = tl.join(_load(at, k, width, EVEN, ONCE), _load(at + other, k + OTHER_K, width, EVEN, ONCE))
    at, k = at + 64, k + 64
    far = tl.join(_load(at, k, width, EVEN, ONCE), _load(at + other, k + OTHER_K, width, EVEN, ONCE))
    return tl.join(near, far)


@triton.jit
def _load_weights(at, k, width, K, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block's bytes of BLOCK_N outputs for each warp: [T, 16, 2 (8 outputs on), 2 (half), BLOCK_N / 16]."""
    # Lanes have the first 8 outputs, and 16 bytes of them each.
    codes = _load_halves(at, k, width, 8 * K, 0, EVEN, ONCE)
    if BLOCK_N == 32:
        codes = tl.join(codes, _load_halves(at + 16 * K, k, width, 8 * K, 0, EVEN, ONCE))
    return codes


@triton.jit
def _weight_operand(codes, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Those bytes as [WARPS, BLOCK_N, 128], columns in the order in which the matrix units want them."""
    # Column 64 h + 16 t + 8 j + i of memory, with t a lane's, is column 64 h + 32 j + 8 t + i of the operand.
    codes = tl.reshape(codes, (WARPS, 8, 4, 2, 8, 2, 2, BLOCK_N // 16))
    return tl.reshape(tl.permute(codes, (0, 7, 5, 1, 6, 3, 2, 4)), (WARPS, BLOCK_N, 128))


@triton.jit
def _load_rows(at, k, width, next_rows, ROWS: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block's numbers of ROWS rows for each warp: [T, 8, 2 (8 columns on), 2 (half), ROWS / 8]."""
    x = _load_halves(at, k, width, 8, 8, EVEN, False)
    if ROWS == 16:
        x = tl.join(x, _load_halves(at + next_rows, k, width, 8, 8, EVEN, False))
    return x


@triton.jit
def _row_operand(x, ROWS: tl.constexpr, WARPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Those numbers as [WARPS, 128, ROWS], columns in the order of the weights'."""
    x = tl.reshape(x, (WARPS, 8, 4, 8, 2, 2, ROWS // 8))
    return tl.reshape(tl.permute(x, (0, 5, 4, 2, 3, 6, 1)), (WARPS, 128, ROWS))


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_rows(  # type: ignore[no-untyped-def]
    values_ptr, factors_ptr, w_ptr, s_ptr, y_ptr, num_rows, padded_rows, N, K, y_stride,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr,
    ONCE: tl.constexpr, HAS_E4M3: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of [ROWS, BLOCK_N] outputs. Warp w takes each WARPS-th block of 128 columns, from block w on."""
    if EARLY:
        gdc_launch_dependents()
    # Groups of rows that share weights are neighbours, so that all but one find them in the L2 cache.
    group, tile = tl.program_id(0), tl.program_id(1)
    num_blocks = tl.cdiv(K, 128)
    thread = tl.arange(0, 32 * WARPS)[:, None]
    warp, lane_row, lane_column = thread // 32, thread % 32 // 4, thread % 4
    # Rows past the last one read that again, so that no load has to be masked for them.
    n = tl.minimum(tile * BLOCK_N + lane_row, N - 1)
    m = tl.minimum(group * ROWS + lane_row, num_rows - 1)
    next_rows = (tl.minimum(group * ROWS + lane_row + 8, num_rows - 1) - m) * K
    w_k = lane_column * 16 + tl.arange(0, 16)[None, :]
    x_k = lane_column * 16 + tl.arange(0, 8)[None, :]
    w_at = w_ptr + n.to(tl.int64) * K + w_k
    x_at = values_ptr + m * K + x_k
    rows = group * ROWS + tl.arange(0, ROWS)
    scales = s_ptr + (tile * BLOCK_N // 128) * num_blocks  # BLOCK_N divides 128
    total = tl.zeros((WARPS, BLOCK_N, ROWS), tl.float32)
    for first in tl.range(0, num_blocks, WARPS * AHEAD, num_stages=1):
        # All weights of AHEAD blocks are asked for before anything else is.
        codes = ()
        for i in tl.static_range(AHEAD):
            block = tl.minimum(first + i * WARPS + warp, num_blocks - 1)
            loaded = _load_weights(w_at + block * 128, w_k, K - block * 128, K, BLOCK_N, EVEN, ONCE)
            codes += (loaded,)  # type: ignore[assignment]
        # The compiler would move loads down, between the products, to use fewer registers.
        if EARLY:
            gdc_wait()
        else:
            tl.debug_barrier()
        factors = ()
        for i in tl.static_range(AHEAD):
            block = first + i * WARPS + tl.arange(0, WARPS)
            scale = tl.where(block < num_blocks, tl.load(scales + tl.minimum(block, num_blocks - 1)), 0.0)
            at = factors_ptr + tl.minimum(block, num_blocks - 1)[:, None] * padded_rows + rows[None, :]
            factors += (tl.load(at) * scale[:, None],)  # type: ignore[assignment]
        for i in tl.static_range(AHEAD):
            block = tl.minimum(first + i * WARPS + warp, num_blocks - 1)
            x = _load_rows(x_at + block * 128, x_k, K - block * 128, next_rows, ROWS, EVEN)
            w = _widen(_weight_operand(codes[i], BLOCK_N, WARPS), HAS_E4M3)
            total += tl.dot(w, _row_operand(x, ROWS, WARPS)) * factors[i][:, None, :]
    if not HAS_E4M3:
        total *= 256.0
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    y_at = y_ptr + rows.to(tl.int64)[None, :] * y_stride + n[:, None]
    y = tl.sum(total, 0).to(y_ptr.dtype.element_ty)
    tl.store(y_at, y, mask=(n < N)[:, None] & (rows < num_rows)[None, :])


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
    """How the product of a decode step is cut.

    Args:
        block_n: Outputs of a program.
        num_warps: Warps of a program, each of which adds up a part of K. A row's bits depend on it.
        ahead: Blocks of 128 columns that a warp asks for at a time.
        max_registers: Of a thread; none is the compiler's choice.
    """

    block_n: int
    num_warps: int
    ahead: int
    max_registers: int | None


@lru_cache
def decode_tiling(out_features: int, in_features: int, device: int) -> Tiling:
    """The cut for up to 8 rows.

    It depends on the weight and the card alone, so that a row gives the same bits whatever goes with it.
    """
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    num_blocks = triton.cdiv(in_features, SCALE_BLOCK)
    num_warps = 2 if num_blocks < 16 else 4 if num_blocks < 96 else 8
    # Wide tiles read x less often, if enough warps have enough on its way: 12 on a multiprocessor with 8 KB
    # each; where there are far more, a block less on its way leaves room for another program.
    if num_warps == 2 and out_features >= 2 * 64 * num_processors:
        return Tiling(32, num_warps, 2, None)
    if out_features * num_warps >= 12 * 32 * num_processors:
        return Tiling(32, num_warps, 8 // num_warps, None)
    if num_blocks >= 48 and num_warps == 4:  # few tiles, long sums: more warps, with less on its way each
        if out_features <= 20 * num_processors:
            return Tiling(32, 8, 4, None)
        return Tiling(16, 8, 2, 128)
    # Few tiles have all of K on its way in two turns, or as much as there are registers for.
    rounds = triton.cdiv(num_blocks, num_warps)
    ahead = triton.cdiv(rounds, max(2, triton.cdiv(rounds, 7)))
    return Tiling(16, num_warps, ahead, 128 if ahead <= 4 else None)


def _tile_stages(num_programs: int, device: int) -> int:
    """How many blocks of 128 columns a program of many rows has on their way."""
    # With two a multiprocessor has room for two programs, one of which widens while the other one multiplies.
    is_alone = num_programs <= torch.cuda.get_device_properties(device).multi_processor_count
    return 4 if is_alone and has_large_shared_memory(device) else 2


def multiply(x: HalfRows, weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x W^T``, with f32 sums.

    Up to 64 rows each row's bits depend on that row alone. The kernel may start before the one in front of it
    has ended, and read weights: nothing that is still on its way in the stream may be writing them.

    Args:
        x: Activations.
        weight: W.
        scales: Of each block of 128 x 128 weights.
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
    if padded_rows > MAX_GROUPED_ROWS:
        is_even = out_features % 64 == 0 and in_features % SCALE_BLOCK == 0
        grid = (padded_rows // TILE_ROWS, triton.cdiv(out_features, 64))
        _multiply_tiles[grid](
            x.values, x.factors, weight, scales, y, x.num_rows, padded_rows, out_features, in_features,
            y.stride(0), ROWS=TILE_ROWS, BLOCK_N=64, STAGES=_tile_stages(grid[0] * grid[1], device),
            EVEN=is_even, HAS_E4M3=has_e4m3(device), num_warps=4,
        )  # fmt: skip
        return y
    tiling = decode_tiling(out_features, in_features, device)
    rows, is_even = 8 if x.num_rows <= 8 else DECODE_ROWS, in_features % SCALE_BLOCK == 0
    if rows > 8 or not is_even:  # which take more registers
        tiling = replace(tiling, ahead=tiling.ahead if is_even else 1, max_registers=None)
    groups, is_early = triton.cdiv(x.num_rows, rows), can_start_early(device)
    _multiply_rows[(groups, triton.cdiv(out_features, tiling.block_n))](
        x.values, x.factors, weight, scales, y, x.num_rows, padded_rows, out_features, in_features,
        y.stride(0), ROWS=rows, BLOCK_N=tiling.block_n, WARPS=tiling.num_warps, AHEAD=tiling.ahead,
        EVEN=is_even, ONCE=groups == 1, HAS_E4M3=has_e4m3(device), EARLY=is_early,
        num_warps=tiling.num_warps, maxnreg=tiling.max_registers, launch_pdl=is_early,
    )  # fmt: skip
    return y
