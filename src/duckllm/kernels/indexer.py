"""The indexer of DeepSeek sparse attention (DSA) on a GPU, in Triton: which earlier tokens a row attends to.

Called by the CUDA runtime; measured by benchmarks/gpu/indexer.py. What the CPU does for it, and why, is in
:mod:`duckllm.layers.indexer`.

Scores become integers of the same order. Of each 4, 16 and 64 neighbouring tokens the largest is stored as
well, so that a selection goes down a tree: of a level with few enough nodes the best are selected, then of
their children, down to tokens. Every token that is selected lies below nodes that are, as a node is as good
as its best token; among equal ones the first are better, of nodes and of tokens. A level's nodes lie in the
registers of one program, which finds the last one selected by bisection, so that no pass over a long context
is needed, and what is selected is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from duckllm.kernels.mla_rows import load_rotated
from duckllm.kernels.step_rows import PAGE_TOKENS, StepRows

# Tokens that are scored at a time, and the levels of nodes above them.
_TILE = 128
_LEVELS = 3
# Scores of more rows than fit are computed in groups of rows.
_WORKSPACE_BYTES = 200 << 20
# Programs that score a row: each takes every so-many-th tile.
_MAX_PROGRAMS = 264
_LEAST = tl.constexpr(-(2**31))


@dataclass(frozen=True)
class Selection:
    """The positions that each row attends to. What lies behind a row's number of them may be anything.

    Args:
        positions: Ascending.
        counts: Of each row; of nobody's row none.

    Shapes:
        positions: [R, topk] int32; counts: [R] int32
    """

    positions: torch.Tensor
    counts: torch.Tensor


@triton.jit
def _store_keys(  # type: ignore[no-untyped-def]
    k_ptr, weight_ptr, bias_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, cache_ptr,
    k_stride, width, half, eps, WIDTH: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        x = k_ptr + row.to(tl.int64) * k_stride
        out = cache_ptr + slot.to(tl.int64) * width
        wide, pair = tl.arange(0, WIDTH), tl.arange(0, HALF)
        k = tl.load(x + wide, mask=wide < width, other=0.0)
        mean = tl.sum(k, 0) / width
        distance = tl.where(wide < width, k - mean, 0.0)
        factor = tl.rsqrt(tl.sum(distance * distance, 0) / width + eps)
        weight = tl.load(weight_ptr + wide, mask=wide < width, other=0.0)
        y = distance * factor * weight + tl.load(bias_ptr + wide, mask=wide < width, other=0.0)
        rest = (wide >= 2 * half) & (wide < width)
        tl.store(out + wide, y.to(cache_ptr.dtype.element_ty), mask=rest)
        step = 2 if INTERLEAVED else 1
        apart = 1 if INTERLEAVED else half
        in_half = pair < half
        at = pair * step
        first = (tl.load(x + at, mask=in_half, other=0.0) - mean) * factor
        first = first * tl.load(weight_ptr + at, mask=in_half, other=0.0)
        first += tl.load(bias_ptr + at, mask=in_half, other=0.0)
        at += apart
        second = (tl.load(x + at, mask=in_half, other=0.0) - mean) * factor
        second = second * tl.load(weight_ptr + at, mask=in_half, other=0.0)
        second += tl.load(bias_ptr + at, mask=in_half, other=0.0)
        angles = tl.load(positions_ptr + row).to(tl.int64) * half + pair
        cos = tl.load(cos_ptr + angles, mask=in_half, other=0.0)
        sin = tl.load(sin_ptr + angles, mask=in_half, other=0.0)
        turned = first * cos - second * sin
        tl.store(out + pair, turned.to(cache_ptr.dtype.element_ty), mask=in_half)
        turned = second * cos + first * sin
        tl.store(out + half + pair, turned.to(cache_ptr.dtype.element_ty), mask=in_half)


def store_index_keys(
    k: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    rope_dim: int,
    interleaved: bool,
    rows: StepRows,
    cache: torch.Tensor,
) -> None:
    """Stores each row's index key, normed by mean and variance, its first part rotated.

    Args:
        k: Keys as projected.
        weight: Of the norm.
        bias: Of the norm.
        eps: Of the norm.
        rope_dim: Numbers that are rotated.
        interleaved: Whether rotated pairs are neighbours, or lie in the two halves.
        rows: Where rows belong.
        cache: Index keys, first elements of pairs before second ones.

    Shapes:
        k: [R, D] f32, any distance between rows; weight, bias: [D] f32; cache: [slots, D] bf16

    Reference:
        tests/kernels/test_gpu_indexer.py, float64: the cache's rounding.
    """
    width, half = k.shape[1], rope_dim // 2
    _store_keys[(rows.num_rows,)](
        k, weight, bias, rows.positions, rows.slots, rows.cos, rows.sin, cache, k.stride(0), width, half, eps,
        WIDTH=triton.next_power_of_2(width), HALF=triton.next_power_of_2(half), INTERLEAVED=interleaved,
        num_warps=1,
    )  # fmt: skip


@triton.jit
def _num_seen(row, positions_ptr, firsts_ptr, slots_ptr):  # type: ignore[no-untyped-def]
    """The first position that a row sees, and how many it sees; of nobody's row none."""
    first = tl.load(firsts_ptr + row)
    count = tl.load(positions_ptr + row) + 1 - first
    return first, tl.where(tl.load(slots_ptr + row) >= 0, count, 0)


@triton.jit
def _score(  # type: ignore[no-untyped-def]
    q_ptr, weights_ptr, cache_ptr, pages_ptr, contexts_ptr, positions_ptr, firsts_ptr, slots_ptr,
    cos_ptr, sin_ptr, orders_ptr, first_row, q_stride, weights_stride, num_heads, width, half, num_pages,
    entries, order_stride, topk,
    PAGE: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    LEVELS: tl.constexpr, INTERLEAVED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Scores of a row for every so-many-th tile of tokens, and the largest of neighbours."""
    own = tl.program_id(0)
    row = first_row + own
    origin, count = _num_seen(row, positions_ptr, firsts_ptr, slots_ptr)
    num_tiles = tl.cdiv(count, TILE)
    if count > topk and tl.program_id(1) < num_tiles:
        dtype = cache_ptr.dtype.element_ty
        head, pair, rest = tl.arange(0, HEADS), tl.arange(0, HALF)[None, :], tl.arange(0, REST)[None, :]
        in_heads = (head < num_heads)[:, None]
        q_rows = q_ptr + row.to(tl.int64) * q_stride + head[:, None] * width
        angles = tl.load(positions_ptr + row).to(tl.int64) * half + pair
        cos = tl.load(cos_ptr + angles, mask=pair < half, other=0.0)
        sin = tl.load(sin_ptr + angles, mask=pair < half, other=0.0)
        first, second = load_rotated(q_rows, pair, in_heads & (pair < half), cos, sin, half, INTERLEAVED)
        first, second = first.to(dtype).T, second.to(dtype).T
        in_rest = rest < width - 2 * half
        others = tl.load(q_rows + 2 * half + rest, mask=in_heads & in_rest, other=0.0).to(dtype).T
        weights = tl.load(
            weights_ptr + row.to(tl.int64) * weights_stride + head, mask=head < num_heads, other=0.0
        )
        pages = pages_ptr + tl.load(contexts_ptr + row).to(tl.int64) * num_pages
        for tile in tl.range(tl.program_id(1), num_tiles, tl.num_programs(1), num_stages=STAGES):
            entry = tile * TILE + tl.arange(0, TILE)
            position = origin + entry
            is_there = entry < count
            page = tl.load(pages + position // PAGE, mask=is_there, other=0)
            keys = cache_ptr + (page.to(tl.int64) * PAGE + position % PAGE)[:, None] * width
            there = is_there[:, None]
            scores = tl.dot(tl.load(keys + pair, mask=there & (pair < half), other=0.0), first)
            k = tl.load(keys + half + pair, mask=there & (pair < half), other=0.0)
            scores = tl.dot(k, second, scores)
            k = tl.load(keys + 2 * half + rest, mask=there & in_rest, other=0.0)
            scores = tl.dot(k, others, scores)
            score = tl.sum(tl.maximum(scores, 0.0) * weights[None, :], 1)
            # Integers of the scores' order; both zeros are one.
            bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
            order = tl.where(is_there, bits ^ ((bits >> 31) & 0x7FFFFFFF), _LEAST)
            level = orders_ptr + own.to(tl.int64) * order_stride
            tl.store(level + entry, order)
            for height in tl.static_range(1, LEVELS + 1):
                level += entries >> (2 * height - 2)
                order = tl.max(tl.reshape(order, (TILE >> 2 * height, 4)), 1)
                tl.store(level + (tile * (TILE >> 2 * height) + tl.arange(0, TILE >> 2 * height)), order)


@triton.jit
def _select(  # type: ignore[no-untyped-def]
    orders_ptr, positions_ptr, firsts_ptr, slots_ptr, out_ptr, counts_ptr, first_row, entries, order_stride,
    topk, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best entries of a row, level by level."""
    own = tl.program_id(0)
    row = first_row + own
    origin, count = _num_seen(row, positions_ptr, firsts_ptr, slots_ptr)
    out = out_ptr + row.to(tl.int64) * topk
    i = tl.arange(0, BLOCK)
    tl.store(counts_ptr + row, tl.minimum(count, topk))
    if count <= topk:
        tl.store(out + i, origin + i, mask=i < count)
    else:
        level, base, size, nodes = 0, 0, entries, count
        while nodes > BLOCK:
            base += size
            size = size // 4
            nodes = tl.cdiv(nodes, 4)
            level += 1
        node, is_node = i, i < nodes
        while level >= 0:
            orders = tl.load(
                orders_ptr + own.to(tl.int64) * order_stride + base + node, mask=is_node, other=_LEAST
            )
            # At least topk are `low` or more, and fewer than that `high` or more.
            low = tl.min(tl.where(is_node, orders, 0x7FFFFFFF), 0).to(tl.int64)
            high = tl.max(orders, 0).to(tl.int64) + 1
            num_low = tl.sum(is_node.to(tl.int32), 0)
            while (high - low > 1) & (num_low > topk):
                middle = (low + high) >> 1
                num = tl.sum((orders >= middle.to(tl.int32)).to(tl.int32), 0)
                is_low = num >= topk
                low = tl.where(is_low, middle, low)
                num_low = tl.where(is_low, num, num_low)
                high = tl.where(is_low, high, middle)
            last = low.to(tl.int32)
            is_above, is_last = orders > last, is_node & (orders == last)
            room = topk - tl.sum(is_above.to(tl.int32), 0)
            # Of equal ones the first: both ranks are counted in one number.
            ranks = tl.cumsum(is_above.to(tl.int32) + (is_last.to(tl.int32) << 16), 0)
            above, equal = ranks & 0xFFFF, (ranks >> 16) & 0xFFFF
            at = above + tl.minimum(equal, room) - 1
            first = tl.where(level == 0, origin, 0)
            tl.store(out + at, first + node, mask=is_above | (is_last & (equal <= room)))
            tl.debug_barrier()
            if level > 0:
                size = size * 4
                base -= size
                is_node = i < 4 * topk
                node = tl.load(out + i // 4, mask=is_node, other=0) * 4 + i % 4
                tl.debug_barrier()
            level -= 1


def select(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    rope_dim: int,
    interleaved: bool,
    rows: StepRows,
    cache: torch.Tensor,
    topk: int,
) -> Selection:
    """The positions of the ``topk`` best tokens that each row sees, the first of equal ones; or all it sees.

    A token's score is the sum over heads of ``w_h relu(q_h . k)``, q rounded to the cache's type, sums f32.

    Args:
        q: Queries, not rotated yet.
        head_weights: Of each head.
        rope_dim: Numbers that are rotated, each head's first.
        interleaved: Whether rotated pairs are neighbours, or lie in the two halves.
        rows: Where rows and contexts lie.
        cache: Index keys.
        topk: Tokens to select.

    Shapes:
        q: [R, heads * D] f32 and head_weights: [R, heads] f32, any distance between rows;
        cache: [slots, D] bf16

    Reference:
        tests/kernels/test_gpu_indexer.py, float64.
    """
    num_rows, (num_heads, width), half = rows.num_rows, (head_weights.shape[1], cache.shape[1]), rope_dim // 2
    selected = Selection(
        torch.empty(num_rows, topk, dtype=torch.int32, device=q.device),
        torch.empty(num_rows, dtype=torch.int32, device=q.device),
    )
    num_tiles = triton.cdiv(rows.pages.shape[1] * PAGE_TOKENS, _TILE)
    entries = num_tiles * _TILE
    stride = sum(entries >> 2 * level for level in range(_LEVELS + 1))
    # A level's nodes that are computed at a time: all of the highest, and all children of topk.
    block = triton.next_power_of_2(max(4 * topk, entries >> 2 * _LEVELS, 1024))
    turn = max(1, min(num_rows, _WORKSPACE_BYTES // (4 * stride)))
    orders = torch.empty(turn, stride, dtype=torch.int32, device=q.device)
    seen = (rows.positions, rows.firsts, rows.slots)
    for first_row in range(0, num_rows, turn):
        own = min(turn, num_rows - first_row)
        _score[(own, min(num_tiles, _MAX_PROGRAMS))](
            q, head_weights, cache, rows.pages, rows.contexts, *seen, rows.cos, rows.sin, orders, first_row,
            q.stride(0), head_weights.stride(0), num_heads, width, half, rows.pages.shape[1], entries, stride,
            topk, PAGE=PAGE_TOKENS, TILE=_TILE, HEADS=max(16, triton.next_power_of_2(num_heads)),
            HALF=max(16, triton.next_power_of_2(half)),
            REST=max(16, triton.next_power_of_2(width - rope_dim)), LEVELS=_LEVELS, INTERLEAVED=interleaved,
            STAGES=2, num_warps=4,
        )  # fmt: skip
        _select[(own,)](
            orders, *seen, selected.positions, selected.counts, first_row, entries, stride, topk, BLOCK=block,
            num_warps=16 if block >= 4096 else 4,
        )  # fmt: skip
    return selected
