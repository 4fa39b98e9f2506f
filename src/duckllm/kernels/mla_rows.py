"""What MLA does to rows before and after attention, on a GPU, in Triton.

Called by the CUDA runtime; what the CPU does for it is in :mod:`duckllm.layers.mla`. Latents are normed, keys
rotated, and both stored in the cache; queries are multiplied by the key up-projection, and attention's result
by the value up-projection, each head by its own matrix.

The up-projections of FP8 stay bytes, widened on their way into the matrix units. Rows are f32 and go into the
matrix units as f16 with a factor for each 128 numbers, as :mod:`duckllm.kernels.half_rows` has it, or as two
bf16 numbers each where weights are bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from duckllm.kernels.card import can_start_early, has_e4m3, has_large_shared_memory
from duckllm.kernels.fp8_linear import to_half_rows
from duckllm.kernels.half_rows import (
    DECODE_ROWS,
    MAX_GROUPED_ROWS,
    SCALE_BLOCK,
    Activations,
    empty_half_rows,
    halve,
)
from duckllm.kernels.step_rows import StepRows

# Rows of a tile of a prefill.
_PREFILL_ROWS = 64
# Outputs of a tile of absorbed queries, and if the matrix is read ahead.
_COLUMNS, _COLUMNS_AHEAD = 64, 128
# Most blocks of 128 columns that a program of few rows has in registers before it multiplies.
_MOST_AHEAD = 4


@dataclass(frozen=True)
class HeadWeights:
    """A matrix for each head, made of some rows of each head's part of a weight by :meth:`stored`.

    Numbers that are added up lie side by side, as a row of the matrix units' operand needs them.

    Args:
        weight: The matrices, each [outputs, inputs].
        scales: Of each block of 128 x 128 weights; None where the weight has its own values.

    Shapes:
        weight: [heads, N, K] uint8 (bytes of e4m3 without NaN), bf16 or f32, contiguous;
        scales: [heads, ceil(N / 128), ceil(K / 128)] f32
    """

    weight: torch.Tensor
    scales: torch.Tensor | None

    @classmethod
    def stored(
        cls, weight: torch.Tensor, scales: torch.Tensor | None, num_heads: int, first_row: int, size: int
    ) -> HeadWeights:
        """A copy of the ``size`` rows from ``first_row`` on of each head's part of ``kv_b_proj``.

        A head's first rows are its key up-projection, ``stored(..., 0, nope)``. They are inputs, so it is
        transposed. Its value up-projection follows, ``stored(..., nope, v)``, whose rows are outputs. FP8
        stays bytes where blocks of scales begin where matrices do, as in all published models; else it
        becomes f32.

        Shapes:
            weight: [heads * (nope + v), lora] of e4m3 or its bytes, bf16 or f32;
            scales: [ceil(heads * (nope + v) / 128), ceil(lora / 128)]
        """
        is_key, last_row = first_row == 0, first_row + size
        head_rows = weight.shape[0] // num_heads
        if scales is None:
            weight = weight if weight.dtype == torch.bfloat16 else weight.float()
        else:
            weight, scales = weight.view(torch.uint8), scales.float()
            if head_rows % SCALE_BLOCK or first_row % SCALE_BLOCK:
                spread = scales.repeat_interleave(SCALE_BLOCK, 0)[: weight.shape[0]]
                spread = spread.repeat_interleave(SCALE_BLOCK, 1)[:, : weight.shape[1]]
                weight, scales = weight.view(torch.float8_e4m3fn).float() * spread, None
        matrices = weight.view(num_heads, head_rows, -1)[:, first_row:last_row]
        if scales is not None:
            first, last = first_row // SCALE_BLOCK, triton.cdiv(last_row, SCALE_BLOCK)
            scales = scales.view(num_heads, head_rows // SCALE_BLOCK, -1)[:, first:last]
            scales = (scales.mT if is_key else scales).clone(memory_format=torch.contiguous_format)
        matrices = (matrices.mT if is_key else matrices).clone(memory_format=torch.contiguous_format)
        return cls(matrices, scales)


@triton.jit
def load_rotated(x, pair, mask, cos, sin, half, INTERLEAVED: tl.constexpr):  # type: ignore[no-untyped-def]
    """First and second results of pairs whose numbers lie at ``x``: neighbours, or in the two halves."""
    if INTERLEAVED:
        first = tl.load(x + 2 * pair, mask=mask, other=0.0)
        second = tl.load(x + 2 * pair + 1, mask=mask, other=0.0)
    else:
        first = tl.load(x + pair, mask=mask, other=0.0)
        second = tl.load(x + half + pair, mask=mask, other=0.0)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _store_latents(  # type: ignore[no-untyped-def]
    kv_ptr, norm_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, cache_ptr, kv_stride, lora, half, eps,
    LORA: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        x = kv_ptr + row.to(tl.int64) * kv_stride
        out = cache_ptr + slot.to(tl.int64) * (lora + 2 * half)
        wide, pair = tl.arange(0, LORA), tl.arange(0, HALF)
        latent = tl.load(x + wide, mask=wide < lora, other=0.0)
        weight = tl.load(norm_ptr + wide, mask=wide < lora, other=0.0)
        y = latent * tl.rsqrt(tl.sum(latent * latent, 0) / lora + eps) * weight
        tl.store(out + wide, y.to(cache_ptr.dtype.element_ty), mask=wide < lora)
        angles = tl.load(positions_ptr + row).to(tl.int64) * half + pair
        cos = tl.load(cos_ptr + angles, mask=pair < half, other=0.0)
        sin = tl.load(sin_ptr + angles, mask=pair < half, other=0.0)
        first, second = load_rotated(x + lora, pair, pair < half, cos, sin, half, INTERLEAVED)
        tl.store(out + lora + pair, first.to(cache_ptr.dtype.element_ty), mask=pair < half)
        tl.store(out + lora + half + pair, second.to(cache_ptr.dtype.element_ty), mask=pair < half)


def store_latents(
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    interleaved: bool,
    rows: StepRows,
    cache: torch.Tensor,
) -> None:
    """Stores each row's latent, normed by its root mean square, and its rotated key.

    Args:
        kv: Latents, and keys that are not rotated yet.
        norm_weight: Of the norm.
        eps: Of the norm.
        interleaved: Whether rotated pairs are neighbours, or lie in the two halves.
        rows: Where rows belong.
        cache: Latents and rotated keys, first elements of pairs before second ones.

    Shapes:
        kv: [R, lora + rope] f32, any distance between rows; norm_weight: [lora] f32;
        cache: [slots, lora + rope] bf16

    Reference:
        tests/kernels/test_mla_rows.py, float64: the cache's rounding.
    """
    lora, half = len(norm_weight), rows.cos.shape[1]
    _store_latents[(rows.num_rows,)](
        kv, norm_weight, rows.positions, rows.slots, rows.cos, rows.sin, cache, kv.stride(0), lora, half, eps,
        LORA=triton.next_power_of_2(lora), HALF=triton.next_power_of_2(half), INTERLEAVED=interleaved,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _widened(codes, HAS_E4M3: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes of e4m3 as f16, exactly; where there is no instruction for it, 2^-8 of them: their bits moved."""
    if HAS_E4M3:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    wide = codes.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def _add_product(total, x, w, scale, HAS_E4M3: tl.constexpr):  # type: ignore[no-untyped-def]
    """``total + x w``: x [M, K] f32, w [K, N] as stored, with one scale for all of FP8."""
    if w.dtype == tl.uint8:
        halves, factors = halve(x)
        if not HAS_E4M3:
            scale *= 256.0
        total += tl.dot(halves, _widened(w, HAS_E4M3)) * (factors * scale)[:, None]
    elif w.dtype == tl.float32:
        total = tl.dot(x, w, total, input_precision="tf32x3")
    else:  # two numbers of 8 bits are one of 16
        high = x.to(w.dtype)
        total = tl.dot(high, w, total)
        total = tl.dot((x - high.to(tl.float32)).to(w.dtype), w, total)
    return total


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    x_rows, in_rows, w_ptr, scales_ptr, head, first_column, num_columns, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_E4M3: tl.constexpr,
    AHEAD: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLUMNS] outputs of a head's matrix [num_columns, width]; COLUMNS divides 128.

    The matrix is read before the end of the kernel in front is waited for: AHEAD blocks, if that is all.
    """
    column = first_column + tl.arange(0, COLUMNS)
    w_rows = w_ptr + (head.to(tl.int64) * num_columns + column)[:, None] * width
    num_blocks = tl.cdiv(width, 128)
    scales = scales_ptr + (head * tl.cdiv(num_columns, 128) + first_column // 128) * num_blocks
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    scale = 1.0
    if AHEAD:
        codes = ()
        for block in tl.static_range(AHEAD):
            k = (block * 128 + tl.arange(0, 128))[None, :]
            in_w = (column < num_columns)[:, None] & (k < width)
            codes += (tl.load(w_rows + k, mask=in_w, other=0),)  # type: ignore[assignment]
    if EARLY:
        gdc_wait()
    for block in tl.static_range(AHEAD):
        k = (block * 128 + tl.arange(0, 128))[None, :]
        x = tl.load(x_rows + k, mask=in_rows & (k < width), other=0.0).to(tl.float32)
        if HAS_SCALES:
            scale = tl.load(scales + block)
        total = _add_product(total, x, codes[block].T, scale, HAS_E4M3)
    for block in tl.range(AHEAD, num_blocks, num_stages=STAGES):
        k = (block * 128 + tl.arange(0, 128))[None, :]
        w = tl.load(w_rows + k, mask=(column < num_columns)[:, None] & (k < width), other=0)
        x = tl.load(x_rows + k, mask=in_rows & (k < width), other=0.0).to(tl.float32)
        if HAS_SCALES:
            scale = tl.load(scales + block)
        total = _add_product(total, x, w.T, scale, HAS_E4M3)
    return total


@triton.jit
def _absorb(  # type: ignore[no-untyped-def]
    heads_ptr, w_ptr, scales_ptr, positions_ptr, cos_ptr, sin_ptr, q_ptr,
    num_rows, heads_stride, num_heads, nope, lora, half,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_E4M3: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of [ROWS, COLUMNS] of a head's queries; the last tile of a head is its rotated part."""
    group, tile, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = group * ROWS + tl.arange(0, ROWS)
    in_rows = (row < num_rows)[:, None]
    x_rows = heads_ptr + row.to(tl.int64)[:, None] * heads_stride + head * (nope + 2 * half)
    q_rows = q_ptr + (row.to(tl.int64) * num_heads + head)[:, None] * (lora + 2 * half)
    if tile == tl.num_programs(1) - 1:
        if EARLY:
            gdc_wait()
        pair = tl.arange(0, HALF)[None, :]
        mask = in_rows & (pair < half)
        angles = tl.load(positions_ptr + row, mask=row < num_rows, other=0).to(tl.int64)[:, None] * half
        cos = tl.load(cos_ptr + angles + pair, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + angles + pair, mask=mask, other=0.0)
        first, second = load_rotated(x_rows + nope, pair, mask, cos, sin, half, INTERLEAVED)
        tl.store(q_rows + lora + pair, first.to(q_ptr.dtype.element_ty), mask=mask)
        tl.store(q_rows + lora + half + pair, second.to(q_ptr.dtype.element_ty), mask=mask)
    else:
        total = _product(
            x_rows, in_rows, w_ptr, scales_ptr, head, tile * COLUMNS, lora, nope,
            ROWS, COLUMNS, HAS_SCALES, HAS_E4M3, AHEAD, 1, EARLY,
        )  # fmt: skip
        column = (tile * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        tl.store(q_rows + column, total.to(q_ptr.dtype.element_ty), mask=in_rows & (column < lora))


@triton.jit
def _raise(  # type: ignore[no-untyped-def]
    context_ptr, w_ptr, scales_ptr, values_ptr, half_ptr, factors_ptr,
    num_rows, padded_rows, num_heads, size, lora,
    ROWS: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_E4M3: tl.constexpr, HALVED: tl.constexpr,
    AHEAD: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of [ROWS, 128] of a head's values."""
    group, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = group * ROWS + tl.arange(0, ROWS)
    in_rows = (row < num_rows)[:, None]
    x_rows = context_ptr + (row.to(tl.int64) * num_heads + head)[:, None] * lora
    total = _product(
        x_rows, in_rows, w_ptr, scales_ptr, head, tile * 128, size, lora,
        ROWS, 128, HAS_SCALES, HAS_E4M3, AHEAD, STAGES, EARLY,
    )  # fmt: skip
    if EARLY:  # not before: the output projection would take the room in which this is computed
        gdc_launch_dependents()
    column = (tile * 128 + tl.arange(0, 128))[None, :]
    at = row.to(tl.int64)[:, None] * num_heads * size + head * size + column
    tl.store(values_ptr + at, total, mask=in_rows & (column < size))
    if HALVED:  # a tile is a block of 128 numbers
        halves, factors = halve(total)
        tl.store(half_ptr + at, halves, mask=in_rows)
        block = (head * size) // 128 + tile
        tl.store(factors_ptr + block * padded_rows + row, factors, mask=row < num_rows)


def _tile_rows(num_rows: int, weight: torch.Tensor) -> int:
    """Rows of a tile: few of f32, whose products take many registers."""
    return DECODE_ROWS if num_rows <= MAX_GROUPED_ROWS or weight.dtype == torch.float32 else _PREFILL_ROWS


def _blocks_ahead(tile: int, weight: torch.Tensor) -> int:
    """Blocks of 128 columns that are read while the kernel in front may run: all of them, or none."""
    blocks: int = triton.cdiv(weight.shape[2], SCALE_BLOCK)
    return blocks if tile == DECODE_ROWS and weight.dtype == torch.uint8 and blocks <= _MOST_AHEAD else 0


def _raise_stages(weight: torch.Tensor, tile: int) -> int:
    """Blocks of 128 columns on their way at a time: as many as there is shared memory for."""
    if tile == DECODE_ROWS:
        return 4 if weight.dtype == torch.uint8 else 2
    return 2 if has_large_shared_memory(weight.device.index or 0) else 1


def absorb(
    heads: torch.Tensor, key_up: HeadWeights, interleaved: bool, rows: StepRows, dtype: torch.dtype
) -> torch.Tensor:
    """Queries in the absorbed form: each head's first part times its key up-projection, and the rest rotated.

    Up to 64 rows each row's bits depend on that row alone.

    Args:
        heads: Queries, each head's rotated part last, which is not rotated yet.
        key_up: A head's matrix is [lora, nope].
        interleaved: Whether rotated pairs are neighbours, or lie in the two halves.
        rows: Where rows belong.
        dtype: Of the result: the cache's.

    Shapes:
        heads: [R, heads * (nope + rope)] f32, any distance between rows; result: [R, heads, lora + rope]

    Reference:
        tests/kernels/test_mla_rows.py, float64: 2^-11 of the sum of magnitudes.
    """
    num_rows, half = rows.num_rows, rows.cos.shape[1]
    num_heads, lora, nope = key_up.weight.shape
    q = torch.empty(num_rows, num_heads, lora + 2 * half, dtype=dtype, device=heads.device)
    tile, device = _tile_rows(num_rows, key_up.weight), heads.device.index or 0
    ahead, is_early = _blocks_ahead(tile, key_up.weight), can_start_early(device)
    columns = _COLUMNS_AHEAD if ahead else _COLUMNS
    _absorb[(triton.cdiv(num_rows, tile), triton.cdiv(lora, columns) + 1, num_heads)](
        heads, key_up.weight, key_up.weight if key_up.scales is None else key_up.scales,
        rows.positions, rows.cos, rows.sin, q, num_rows, heads.stride(0), num_heads, nope, lora, half,
        ROWS=tile, COLUMNS=columns, HALF=triton.next_power_of_2(half), INTERLEAVED=interleaved,
        HAS_SCALES=key_up.scales is not None, HAS_E4M3=has_e4m3(device),
        AHEAD=ahead, EARLY=is_early, num_warps=4, launch_pdl=is_early,
    )  # fmt: skip
    return q


def raise_values(context: torch.Tensor, value_up: HeadWeights) -> Activations:
    """Attention's result for each head times its value up-projection, as the output projection takes it.

    Up to 64 rows each row's bits depend on that row alone.

    Args:
        context: Weighted latents.
        value_up: A head's matrix is [v, lora].

    Shapes:
        context: [R, heads, lora] f32 or bf16, contiguous; result: [R, heads * v]

    Reference:
        tests/kernels/test_mla_rows.py, float64: 2^-11 of the sum of magnitudes.
    """
    num_rows, num_heads, lora = context.shape
    size = value_up.weight.shape[1]
    width, tile = num_heads * size, _tile_rows(num_rows, value_up.weight)
    values = torch.empty(num_rows, width, dtype=torch.float32, device=context.device)
    half = empty_half_rows(num_rows, width, context.device)
    is_halved, device = size % SCALE_BLOCK == 0, context.device.index or 0
    is_early = can_start_early(device)
    _raise[(triton.cdiv(num_rows, tile), num_heads, triton.cdiv(size, SCALE_BLOCK))](
        context, value_up.weight, value_up.weight if value_up.scales is None else value_up.scales,
        values, half.values, half.factors, num_rows, half.values.shape[0], num_heads, size, lora, ROWS=tile,
        HAS_SCALES=value_up.scales is not None, HAS_E4M3=has_e4m3(device),
        HALVED=is_halved, AHEAD=_blocks_ahead(tile, value_up.weight),
        STAGES=_raise_stages(value_up.weight, tile), EARLY=is_early,
        num_warps=8 if tile == DECODE_ROWS else 4, launch_pdl=is_early,
    )  # fmt: skip
    return Activations(values, half if is_halved else to_half_rows(values))
