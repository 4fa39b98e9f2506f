"""Linear layers of BF16 or F32 weights on a GPU, in Triton: y = x W^T for the head, router gates and more.

Measured by benchmarks/gpu/small_kernels.py; takes memory from kernels/workspace.py. Results are those
of f32 arithmetic, and a decode step reads weights once, as a checkpoint has them. There are two ways:

- Small weights in a decode step, where the time is that of the way to memory and not of the bytes: f32
  products and sums, each output whole in one program, which takes one row after the other. For one row this
  is half the time of the matrix units, for eight the same, and for 64 three times as much (256 x 7168 on an
  H200: 3.5, 7.8 and 50 us instead of 7.0, 7.2 and 14 us).
- Everything else: x is cut into three bf16 numbers of 8 bits each, which are all of its bits, on its way into
  the matrix units, where products are exact. F32 weights are cut the same way, and products below 2^-24 are
  left out. More than 64 rows of F32 weights go through cuBLAS, which computes in f32.

Prompts of BF16 weights would be faster as three cuBLAS products with f32 results (2048 rows and 5120 x 2048
took 247 us on an H200, and 477 here), but cuBLAS leaves all of a sum to the matrix units, which do not add in
f32: 2e-6 off for K of 2048 and 8e-6 for 7168, instead of 1e-7 and 2e-7.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from duckllm.kernels.card import can_start_early, has_large_shared_memory
from duckllm.kernels.half_rows import DECODE_ROWS, MAX_GROUPED_ROWS, TILE_ROWS
from duckllm.kernels.workspace import Workspace

# Weights that are small: at most so many numbers, in rows that a program holds whole.
SMALL_WEIGHT = 1 << 21
_SMALL_WIDTH = 8192
# Rows that a program takes one after the other.
_SMALL_ROWS = 4
_BLOCK_N = 64
_BLOCK_K = 64
# Most parts of K that a tile is computed in: they are added up one after the other.
MAX_SPLIT = 16
_PART: tl.constexpr = tl.constexpr(tl.bfloat16)


@triton.jit
def _cut(x):  # type: ignore[no-untyped-def]
    """Three bf16 numbers that add up to an f32 one."""
    high = x.to(_PART)
    rest = x - high.to(tl.float32)
    middle = rest.to(_PART)
    return high, middle, (rest - middle.to(tl.float32)).to(_PART)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_small(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, y_ptr, num_rows, N, K, x_stride,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """ROWS rows of BLOCK_N outputs: each row goes through the same instructions."""
    if EARLY:
        gdc_launch_dependents()
    group, n = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, WIDTH)
    in_w = (n < N)[:, None] & (k < K)[None, :]
    w = tl.load(w_ptr + n.to(tl.int64)[:, None] * K + k[None, :], mask=in_w, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    for which in range(tl.minimum(ROWS, num_rows - group * ROWS)):
        row = group.to(tl.int64) * ROWS + which
        x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0)
        tl.store(y_ptr + row * N + n, tl.sum(w * x[None, :], 1), mask=n < N)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_tiles(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, y_ptr, partial_ptr, count_ptr, num_rows, N, K, x_stride,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, IS_F32: tl.constexpr,
):  # fmt: skip
    """A tile of [ROWS, BLOCK_N] outputs over one part of K."""
    # Groups of rows that share weights are neighbours, so that all but one find them in the L2 cache.
    group, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_blocks = tl.cdiv(K, BLOCK_K)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = group * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    w_rows = w_ptr + n.to(tl.int64)[:, None] * K
    x_rows = x_ptr + m.to(tl.int64)[:, None] * x_stride
    in_m = (m < num_rows)[:, None]
    # Three sums, so that products need not wait for each other.
    highs = tl.zeros((ROWS, BLOCK_N), tl.float32)
    middles = tl.zeros((ROWS, BLOCK_N), tl.float32)
    lows = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for block in tl.range(num_blocks * part // SPLIT, num_blocks * (part + 1) // SPLIT, num_stages=STAGES):
        columns = (block * BLOCK_K + k)[None, :]
        if EVEN:
            w = tl.load(w_rows + columns)
            x = tl.load(x_rows + columns, mask=in_m, other=0.0)
        else:
            w = tl.load(w_rows + columns, mask=(n < N)[:, None] & (columns < K), other=0.0)
            x = tl.load(x_rows + columns, mask=in_m & (columns < K), other=0.0)
        high, middle, low = _cut(x)
        if IS_F32:
            w, w_middle, w_low = _cut(w)
            lows = tl.dot(middle, w_middle.T, lows)
            lows = tl.dot(high, w_low.T, lows)
            middles = tl.dot(high, w_middle.T, middles)
        lows = tl.dot(low, w.T, lows)
        middles = tl.dot(middle, w.T, middles)
        # Matrix units add up in shorter numbers than f32, which of the high parts they may within a block
        # only. It is a difference because of a sum the compiler would make one long sum of theirs.
        highs -= tl.dot(-high, w.T)
    total = highs + (middles + lows)
    in_y = in_m & (n < N)[None, :]
    y_at = y_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    if SPLIT == 1:
        tl.store(y_at, total, mask=in_y)
    else:
        # Whoever is last adds up all parts in their order, so that it does not matter who that is.
        slot = tile * tl.num_programs(0) + group
        inner = tl.arange(0, ROWS)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        at = partial_ptr + slot.to(tl.int64) * (SPLIT * BLOCK_N * ROWS) + inner
        tl.store(at + part * (BLOCK_N * ROWS), total, mask=in_y)
        tl.debug_barrier()
        if tl.atomic_add(count_ptr + slot, 1, sem="acq_rel") == SPLIT - 1:
            total = tl.zeros((ROWS, BLOCK_N), tl.float32)
            for other in tl.static_range(SPLIT):
                total += tl.load(at + other * (BLOCK_N * ROWS), mask=in_y, other=0.0, cache_modifier=".cg")
            tl.store(y_at, total, mask=in_y)
            tl.store(count_ptr + slot, 0)


@dataclass(frozen=True)
class Tiling:
    """How a product is cut among programs.

    Args:
        rows: Rows of a program.
        block_n: Outputs of a program.
        split: Parts of K that an output is computed in, a power of two.
        num_stages: Blocks of K that are on their way at a time.
        num_warps: Warps of a program.
    """

    rows: int
    block_n: int
    split: int
    num_stages: int
    num_warps: int


@lru_cache
def small_tiling(in_features: int, itemsize: int) -> Tiling:
    """The cut of a small weight: a program reads up to 32 KB of it, all at once."""
    warps = max(1, min(8, triton.next_power_of_2(in_features) // 512))
    return Tiling(_SMALL_ROWS, 4 // itemsize, 1, 1, warps)


def _split(programs: int, in_features: int, wanted: int) -> int:
    """Parts of K that give the wanted number of programs, or nearly so."""
    most: int = max(1, min(MAX_SPLIT, triton.cdiv(in_features, _BLOCK_K), wanted // programs))
    return 1 << (most.bit_length() - 1)


@lru_cache
def decode_tiling(out_features: int, in_features: int, device: int) -> Tiling:
    """The cut of a decode step.

    It depends on the weight and the card alone, so that a row gives the same bits whatever goes with it.
    """
    # Some five programs for each multiprocessor: one's products take time that the others' bytes need.
    wanted = 5 * torch.cuda.get_device_properties(device).multi_processor_count
    split = _split(triton.cdiv(out_features, _BLOCK_N), in_features, wanted)
    stages = 4 if split == 1 and has_large_shared_memory(device) else 3
    return Tiling(DECODE_ROWS, _BLOCK_N, split, stages, 2)


def _prefill_tiling(num_rows: int, out_features: int, in_features: int, device: int) -> Tiling:
    """The cut of many rows: a program for each multiprocessor."""
    tiles = triton.cdiv(num_rows, TILE_ROWS) * triton.cdiv(out_features, _BLOCK_N)
    wanted = torch.cuda.get_device_properties(device).multi_processor_count
    stages = 3 if has_large_shared_memory(device) else 2
    return Tiling(TILE_ROWS, _BLOCK_N, _split(tiles, in_features, wanted), stages, 8)


def multiply_dense(x: torch.Tensor, weight: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """``x W^T``, with f32 sums.

    Up to 64 rows each row's bits depend on that row alone.

    Args:
        x: Activations.
        weight: W.
        workspace: For partial sums of up to 64 rows.

    Shapes:
        x: [M, K] f32, the last dimension contiguous; weight: [N, K] bf16 or f32, contiguous; all cuda;
        result: [M, N] f32

    Reference:
        tests/kernels/test_dense_linear.py, float64: 1e-6 of |x| |W|.
    """
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    device = weight.device.index or 0
    if num_rows > MAX_GROUPED_ROWS and weight.dtype == torch.float32:
        return x @ weight.T
    y = torch.empty(num_rows, out_features, dtype=torch.float32, device=x.device)
    if num_rows > MAX_GROUPED_ROWS:
        tiling = _prefill_tiling(num_rows, out_features, in_features, device)
        workspace = Workspace(weight.device)  # captured steps have the caller's, which is not to grow
    elif out_features * in_features <= SMALL_WEIGHT and in_features <= _SMALL_WIDTH:
        tiling, is_early = small_tiling(in_features, weight.itemsize), can_start_early(device)
        _multiply_small[(triton.cdiv(num_rows, tiling.rows), triton.cdiv(out_features, tiling.block_n))](
            x, weight, y, num_rows, out_features, in_features, x.stride(0),
            ROWS=tiling.rows, BLOCK_N=tiling.block_n, WIDTH=triton.next_power_of_2(in_features),
            EARLY=is_early, num_warps=tiling.num_warps, launch_pdl=is_early,
        )  # fmt: skip
        return y
    else:
        tiling = decode_tiling(out_features, in_features, device)
    groups, tiles = triton.cdiv(num_rows, tiling.rows), triton.cdiv(out_features, tiling.block_n)
    slots = groups * tiles if tiling.split > 1 else 0
    partials, counts = workspace.reserve(slots, slots * tiling.split * tiling.rows * tiling.block_n)
    is_even = out_features % tiling.block_n == 0 and in_features % _BLOCK_K == 0
    _multiply_tiles[(groups, tiles, tiling.split)](
        x, weight, y, partials, counts, num_rows, out_features, in_features, x.stride(0),
        ROWS=tiling.rows, BLOCK_N=tiling.block_n, BLOCK_K=_BLOCK_K, SPLIT=tiling.split,
        STAGES=tiling.num_stages, EVEN=is_even, IS_F32=weight.dtype == torch.float32,
        num_warps=tiling.num_warps,
    )  # fmt: skip
    return y
