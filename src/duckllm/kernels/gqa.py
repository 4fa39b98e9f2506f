"""Grouped-query attention on a GPU, in Triton: heads are normed, rotated and stored; queries attend.

Measured by benchmarks/gpu/gqa.py; calls gqa_prefill.py for long runs of rows. Query heads that share a head
of keys and values are one tile of the matrix units, so that keys and values are read once for all of them.

In a step of up to 64 rows each row is computed alone: what it sees is cut into parts by its own length alone,
whose results are merged in their order, so that a row's bits do not depend on the rows beside it. In a larger
step the rows of a context go together, many of them to a tile; contexts of a few rows are computed as before.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from duckllm.kernels.card import can_start_early
from duckllm.kernels.fp8_linear import to_half_rows
from duckllm.kernels.gqa_prefill import LOG2_E, ONE_TILE_ROWS, HeadShape, attend_tiles, power_of_2
from duckllm.kernels.half_rows import MAX_GROUPED_ROWS, Activations, empty_half_rows, store_half_blocks
from duckllm.kernels.step_rows import PAGE_TOKENS, StepRows

# A part has 64 tokens at least. A context of more than 32 of them is cut into 32 parts of up to 128 tokens,
# then into more: each costs a start, and sums to be merged.
PART_TOKENS: tl.constexpr = tl.constexpr(64)
FEW_PARTS: tl.constexpr = tl.constexpr(32)
LARGE_PART_TOKENS: tl.constexpr = tl.constexpr(128)
MOST_PARTS = 64


@triton.jit
def _norm(x, other, norm_ptr, inverse, chosen, d, partner, D: tl.constexpr, ROTARY: tl.constexpr):  # type: ignore[no-untyped-def]
    """The chosen heads times the norm's weights, and likewise their partners in the rotation."""
    x *= tl.where(chosen, inverse * tl.load(norm_ptr + d, mask=d < D, other=0.0), 1.0)
    other *= tl.where(chosen, inverse * tl.load(norm_ptr + partner, mask=d < ROTARY, other=0.0), 1.0)
    return x, other


@triton.jit
def _store_heads(  # type: ignore[no-untyped-def]
    qkv_ptr, q_norm_ptr, k_norm_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, q_ptr, keys_ptr, values_ptr,
    num_heads, num_kv_heads, eps, scaling,
    D: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Some heads of a row, which may be queries, keys and values."""
    if EARLY:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    d = tl.arange(0, DIM)[None, :]
    first_value = num_heads + num_kv_heads
    is_query, is_value = head < num_heads, head >= first_value
    is_key = (head >= num_heads) & (head < first_value)
    in_heads = (head < first_value + num_kv_heads) & (d < D)
    heads = qkv_ptr + (row * (first_value + num_kv_heads) + head) * D
    x = tl.load(heads + d, mask=in_heads, other=0.0)
    HALF: tl.constexpr = ROTARY // 2
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    other = tl.load(heads + partner, mask=in_heads & (d < ROTARY), other=0.0)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    if q_norm_ptr is not None:
        x, other = _norm(x, other, q_norm_ptr, inverse, is_query, d, partner, D, ROTARY)
    if k_norm_ptr is not None:
        x, other = _norm(x, other, k_norm_ptr, inverse, is_key, d, partner, D, ROTARY)
    if ROTARY > 0:
        angle = tl.load(positions_ptr + row).to(tl.int64) * HALF + d % HALF
        cos = tl.load(cos_ptr + angle, mask=d < ROTARY, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=d < ROTARY, other=0.0)
        rotated = x * cos + tl.where(d < HALF, -other, other) * sin
        x = tl.where((d < ROTARY) & (head < first_value), rotated, x)
    q_at = q_ptr + (row * num_heads + head) * D + d
    tl.store(q_at, (x * scaling).to(q_ptr.dtype.element_ty), mask=in_heads & is_query)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    stored = in_heads & (slot >= 0)
    at = (slot * num_kv_heads + head - num_heads) * D + d
    tl.store(keys_ptr + at, x.to(keys_ptr.dtype.element_ty), mask=stored & is_key)
    at -= num_kv_heads * D
    tl.store(values_ptr + at, x.to(values_ptr.dtype.element_ty), mask=stored & is_value)


def store_heads(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    rotary_dim: int,
    scaling: float,
    rows: StepRows,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """The queries, normed, rotated and scaled; keys and values are stored in the cache.

    Args:
        qkv: Heads of queries, then of keys, then of values.
        num_heads: Of queries.
        num_kv_heads: Of keys, and of values.
        q_norm: Weights of the root mean square norm of each query head; None for no norm.
        k_norm: Likewise of each key head.
        eps: Of the norms.
        rotary_dim: Numbers of a head that are rotated, the first ones: the first half against the second.
        scaling: Factor on queries.
        rows: Positions and slots of the rows.
        keys: The layer's keys.
        values: Its values.

    Shapes:
        qkv: [R, (num_heads + 2 num_kv_heads) * D] f32, contiguous; q_norm, k_norm: [D] f32;
        keys, values: [N, num_kv_heads * D], contiguous, of any float type; result: [R, num_heads, D] of it
    """
    num_rows, head_dim = len(qkv), keys.shape[1] // num_kv_heads
    q = torch.empty(num_rows, num_heads, head_dim, dtype=keys.dtype, device=qkv.device)
    heads, is_early = 1 if num_rows <= MAX_GROUPED_ROWS else 8, can_start_early(qkv.device.index or 0)
    _store_heads[(num_rows, triton.cdiv(num_heads + 2 * num_kv_heads, heads))](
        qkv, q_norm, k_norm, rows.positions, rows.slots, rows.cos, rows.sin, q, keys, values,
        num_heads, num_kv_heads, eps, scaling,
        D=head_dim, DIM=power_of_2(head_dim), ROTARY=rotary_dim, HEADS=heads,
        EARLY=is_early, num_warps=1 if heads == 1 else 4, launch_pdl=is_early,
    )  # fmt: skip
    return q


@triton.jit
def _seen(row, positions_ptr, firsts_ptr, slots_ptr, window):  # type: ignore[no-untyped-def]
    """The first position that a row sees, and how many: none for a row that is nobody's."""
    position = tl.load(positions_ptr + row)
    first = tl.maximum(tl.load(firsts_ptr + row), position - window + 1)
    return first, tl.where(tl.load(slots_ptr + row) < 0, 0, position - first + 1)


@triton.jit
def _part_of(length, part, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """First and last entry of a part, and how many parts there are: functions of the length alone."""
    size = tl.minimum(tl.maximum(tl.cdiv(length, FEW_PARTS), PART_TOKENS), LARGE_PART_TOKENS)
    size = tl.cdiv(tl.maximum(size, tl.cdiv(length, PARTS)), 32) * 32
    return part * size, tl.minimum((part + 1) * size, length), tl.cdiv(length, size)


@triton.jit
def _attend_part(  # type: ignore[no-untyped-def]
    q_ptr, keys_ptr, values_ptr, pages_ptr, positions_ptr, contexts_ptr, firsts_ptr, slots_ptr, list_ptr,
    sums_ptr, logs_ptr, num_kv_heads, num_pages, window,
    PAGE: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    TOKENS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One part of what a row sees, for query heads that share a head of keys."""
    # Not started early itself: its programs would crowd where the kernel before leaves room at that moment.
    if EARLY:
        gdc_launch_dependents()
    index, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = index if list_ptr is None else tl.load(list_ptr + index)
    context = tl.load(contexts_ptr + row)
    seen_from, length = _seen(row, positions_ptr, firsts_ptr, slots_ptr, window)
    first, last, _ = _part_of(length, part, PARTS)
    if first < last:
        tiles: tl.constexpr = (GROUP + HEADS - 1) // HEADS
        kv_head = tile // tiles
        in_group = tile % tiles * HEADS + tl.arange(0, HEADS)
        head = kv_head * GROUP + in_group
        num_heads = num_kv_heads * GROUP
        d = tl.arange(0, DIM)[None, :]
        in_heads = (in_group < GROUP)[:, None] & (d < D)
        q_at = q_ptr + (row.to(tl.int64) * num_heads + head)[:, None] * D + d
        q = tl.load(q_at, mask=in_heads, other=0.0)
        pages = pages_ptr + context.to(tl.int64) * num_pages
        top = tl.full((HEADS,), float("-inf"), tl.float32)
        total = tl.zeros((HEADS,), tl.float32)
        sums = tl.zeros((HEADS, DIM), tl.float32)
        for start in tl.range(first, last, TOKENS, num_stages=STAGES):
            entry = start + tl.arange(0, TOKENS)
            is_there = entry < last
            position = seen_from + entry
            slot = tl.load(pages + position // PAGE, mask=is_there, other=0) * PAGE + position % PAGE
            at = (slot.to(tl.int64) * (num_kv_heads * D) + kv_head * D)[:, None] + d
            in_tokens = is_there[:, None] & (d < D)
            keys = tl.load(keys_ptr + at, mask=in_tokens, other=0.0)
            values = tl.load(values_ptr + at, mask=in_tokens, other=0.0)
            scores = tl.dot(q, keys.T, input_precision="ieee")
            scores = tl.where(is_there[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1) * LOG2_E)
            shrink = tl.exp2(top - higher)
            weights = tl.exp2(scores * LOG2_E - higher[:, None])
            total = total * shrink + tl.sum(weights, 1)
            sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision="ieee")
            top = higher
        at = (index * PARTS + part).to(tl.int64) * num_heads + head
        tl.store(sums_ptr + at[:, None] * D + d, sums / total[:, None], mask=in_heads)
        tl.store(logs_ptr + at, top + tl.log2(total), mask=in_group < GROUP)


@triton.jit
def _merge_parts(  # type: ignore[no-untyped-def]
    sums_ptr, logs_ptr, positions_ptr, firsts_ptr, slots_ptr, list_ptr, out_ptr, halves_ptr, factors_ptr,
    num_heads, padded_rows, window,
    D: tl.constexpr, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """128 numbers of a row, whichever heads they are of."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    index, block = tl.program_id(0), tl.program_id(1)
    row = index if list_ptr is None else tl.load(list_ptr + index)
    _, length = _seen(row, positions_ptr, firsts_ptr, slots_ptr, window)
    _, _, parts = _part_of(length, 0, PARTS)
    part = tl.arange(0, PADDED_PARTS)[:, None]
    k = block * 128 + tl.arange(0, 128)[None, :]
    width = num_heads * D
    is_there = part < parts
    at = (index * PARTS + part).to(tl.int64) * num_heads
    if D % 128 == 0:
        logs = tl.load(logs_ptr + at + block // (D // 128), mask=is_there, other=float("-inf"))
    else:
        logs = tl.load(logs_ptr + at + k // D, mask=is_there & (k < width), other=float("-inf"))
    sums = tl.load(sums_ptr + at * D + k, mask=is_there & (k < width), other=0.0)
    # The largest part's weight is 1; a row that sees nothing has none, and gives zeros.
    weights = tl.exp2(logs - tl.maximum(tl.max(logs, 0), -1e30)[None, :])
    out = tl.sum(sums * weights, 0) / tl.maximum(tl.sum(weights, 0), 1.0)
    out = tl.reshape(out, (1, 128))
    tl.store(out_ptr + row.to(tl.int64) * width + k, out, mask=k < width)
    store_half_blocks(halves_ptr, factors_ptr, row, block, out, width, padded_rows, 1)


def attend_heads(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: StepRows,
    num_kv_heads: int,
    window: int | None,
) -> Activations:
    """Each row's values, weighted by the softmax of its queries' products with keys.

    Of up to 64 rows each reads what it sees and nothing else, and its bits depend on that alone; rows that
    are nobody's give zeros. Of more rows, spans of more than 16 read the positions up to their last row's.

    Args:
        q: Queries, scaled.
        keys: The layer's keys, those of the step's rows among them.
        values: Its values.
        rows: What each row sees.
        num_kv_heads: Heads of keys, and of values; the query heads are a multiple of them.
        window: Positions that a row sees at most, its own included; None for all.

    Shapes:
        q: [R, heads, D], D up to 256; keys, values: [N, num_kv_heads * D]; all of one float type, contiguous;
        result: [R, heads * D]

    Reference:
        tests/kernels/test_gpu_gqa.py, float64.
    """
    num_rows, num_heads, head_dim = q.shape
    shape = HeadShape(num_heads, num_kv_heads, head_dim, window or 1 << 30)
    out = torch.empty(num_rows, shape.width, dtype=torch.float32, device=q.device)
    half = empty_half_rows(num_rows, shape.width, q.device)
    result = Activations(out, half)
    if num_rows <= MAX_GROUPED_ROWS:
        _attend_rows(q, keys, values, rows, shape, result, None, num_rows)
        return result
    lone, spans = _sort_rows(num_rows, rows.spans)
    # A head of 128 numbers is a block of its row, with a factor of its own.
    attend_tiles(q, keys, values, rows, shape, result, spans)
    if head_dim != 128 and spans:
        result = Activations(out, to_half_rows(out))
    for first in range(0, len(lone), MAX_GROUPED_ROWS):
        some = lone[first : first + MAX_GROUPED_ROWS]
        chosen = torch.tensor(some, dtype=torch.int32, pin_memory=q.is_cuda).to(q.device, non_blocking=True)
        _attend_rows(q, keys, values, rows, shape, result, chosen, len(some))
    return result


@lru_cache(maxsize=8)
def _sort_rows(
    num_rows: int, spans: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Rows that are computed alone, and spans that fill a tile."""
    large = tuple((first, count) for first, count in spans if count > ONE_TILE_ROWS)
    in_large = {row for first, count in large for row in range(first, first + count)}
    return tuple(row for row in range(num_rows) if row not in in_large), large


@lru_cache
def most_parts(tiles: int, device: int) -> int:
    """Parts of a context at most, for so many tiles of heads.

    A long context gives each multiprocessor two programs, of the four that it has room for: two such rows
    still run at a time.
    """
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(MOST_PARTS, 2 * count // tiles))


def _attend_rows(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: StepRows,
    shape: HeadShape,
    result: Activations,
    chosen: torch.Tensor | None,
    num_rows: int,
) -> None:
    """Writes the results of the chosen rows, or of all."""
    device, heads = q.device.index or 0, shape.tile_heads(16)
    tiles, is_early = shape.num_kv_heads * triton.cdiv(shape.group, heads), can_start_early(device)
    parts = most_parts(tiles, device)
    sums = torch.empty(num_rows, parts, shape.width, dtype=torch.float32, device=q.device)
    logs = torch.empty(num_rows, parts, shape.num_heads, dtype=torch.float32, device=q.device)
    # With three stages a tile of keys and one of values are on their way, and page numbers before them. Five
    # are 10 % faster for one row of 32768 tokens and 5 to 20 % slower for more: programs have no room then.
    tokens = 64 if shape.padded_dim * q.element_size() <= 256 else 32
    _attend_part[(num_rows, tiles, parts)](
        q, keys, values, rows.pages, rows.positions, rows.contexts, rows.firsts, rows.slots, chosen,
        sums, logs, shape.num_kv_heads, rows.pages.shape[1], shape.window,
        PAGE=PAGE_TOKENS, GROUP=shape.group, HEADS=heads, D=shape.head_dim, DIM=shape.padded_dim,
        TOKENS=tokens, PARTS=parts, STAGES=3, EARLY=is_early, num_warps=4,
    )  # fmt: skip
    half = result.half
    _merge_parts[(num_rows, triton.cdiv(shape.width, 128))](
        sums, logs, rows.positions, rows.firsts, rows.slots, chosen, result.values, half.values, half.factors,
        shape.num_heads, half.values.shape[0], shape.window,
        D=shape.head_dim, PARTS=parts, PADDED_PARTS=power_of_2(parts), EARLY=is_early,
        num_warps=4, launch_pdl=is_early,
    )  # fmt: skip
