"""Attention of a step's tokens over latents (MLA, absorbed form) on a GPU, in Triton.

Called by the CUDA runtime; measured by benchmarks/gpu/mla_decode.py. All heads share one key a token, the
latent and its rotated part, and the latent is the value as well. Latents lie in pages, wherever those are,
and a row sees its whole context or a list of positions (sparse attention).

A query row of 64 heads fills the matrix units by itself, so each row is computed alone: rows of one context
share what they read through the L2 cache. In a decode step a context is cut into parts by its own length
alone, whose results one program merges in their order, so that a row's bits do not depend on the rows beside
it. The many rows of a prefill fill a card without that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from duckllm.kernels.card import can_start_early, has_large_shared_memory
from duckllm.kernels.half_rows import MAX_GROUPED_ROWS
from duckllm.kernels.indexer import Selection
from duckllm.kernels.step_rows import PAGE_TOKENS, StepRows

# A part is 64 tokens at least; 64 parts of two tiles of heads fill the largest cards.
MAX_PARTS = 64
# Heads and tokens of a tile, tiles of tokens on their way at a time, and warps. Where tokens are few, half
# the heads a tile give twice the programs: on an H200, 2048 selected tokens take 19.6 us instead of 23.0, and
# all of 1000 take 15.1 instead of 18.0, but all of 8192 take 36.9 instead of 25.1.
_LARGE_TILE, _SHORT_TILE, _SMALL_TILE = (64, 64, 2, 8), (32, 64, 2, 8), (16, 32, 1, 4)
_LOG2_E = 1.4426950408889634


@triton.jit
def _seen(row, positions_ptr, firsts_ptr, slots_ptr, counts_ptr, SELECTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first position that a row sees, and how many it sees; of nobody's row none."""
    first = tl.load(firsts_ptr + row)
    count = tl.load(counts_ptr + row) if SELECTED else tl.load(positions_ptr + row) + 1 - first
    return first, tl.where(tl.load(slots_ptr + row) >= 0, count, 0)


@triton.jit
def _size_of(count, PARTS: tl.constexpr, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Entries of a part, whole tiles of tokens, a function of their number alone."""
    return tl.maximum(tl.cdiv(tl.cdiv(count, PARTS), TOKENS), 1) * TOKENS


@triton.jit
def _slots_of(chosen, pages, origin, entry, last, PAGE: tl.constexpr, SELECTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of the cache in which the entries lie; of those from ``last`` on any."""
    position = tl.load(chosen + entry, mask=entry < last, other=0) if SELECTED else origin + entry
    page = tl.load(pages + position // PAGE, mask=entry < last, other=0)
    return page.to(tl.int64) * PAGE + position % PAGE


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q_ptr, cache_ptr, pages_ptr, contexts_ptr, positions_ptr, firsts_ptr, slots_ptr, selection_ptr,
    counts_ptr, sums_ptr, logs_ptr, num_heads, num_pages, selection_stride, latent_dim, rope_dim, scale_log2,
    PAGE: tl.constexpr, SELECTED: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    PARTS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Sums of a part for some heads, and their logarithms; where one part is all, that is the result."""
    if EARLY:
        gdc_launch_dependents()
    row, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    origin, count = _seen(row, positions_ptr, firsts_ptr, slots_ptr, counts_ptr, SELECTED)
    size = _size_of(count, PARTS, TOKENS)
    first, last = part * size, tl.minimum((part + 1) * size, count)
    if first < last or PARTS == 1:
        width = latent_dim + rope_dim
        head = group * HEADS + tl.arange(0, HEADS)
        wide, narrow = tl.arange(0, LATENT)[None, :], tl.arange(0, ROPE)[None, :]
        in_heads = (head < num_heads)[:, None]
        in_wide, in_narrow = wide < latent_dim, narrow < rope_dim
        if EVEN:
            in_wide, in_narrow = wide < LATENT, narrow < ROPE
        q_rows = q_ptr + (row.to(tl.int64) * num_heads + head)[:, None] * width
        q = tl.load(q_rows + wide, mask=in_heads & in_wide, other=0.0)
        q_rotated = tl.load(q_rows + latent_dim + narrow, mask=in_heads & in_narrow, other=0.0)
        pages = pages_ptr + tl.load(contexts_ptr + row).to(tl.int64) * num_pages
        chosen = selection_ptr + row.to(tl.int64) * selection_stride
        top = tl.full((HEADS,), float("-inf"), tl.float32)
        total = tl.zeros((HEADS,), tl.float32)
        sums = tl.zeros((HEADS, LATENT), tl.float32)
        token = tl.arange(0, TOKENS)
        # Where tokens lie is loaded a tile ahead, so that loads of latents need not wait for it.
        slot = _slots_of(chosen, pages, origin, first + token, last, PAGE, SELECTED)
        for start in tl.range(first, last, TOKENS, num_stages=STAGES):
            is_there = start + token < last
            tokens = cache_ptr + slot[:, None] * width
            slot = _slots_of(chosen, pages, origin, start + TOKENS + token, last, PAGE, SELECTED)
            latents = tl.load(tokens + wide, mask=is_there[:, None] & in_wide, other=0.0)
            rotated = tl.load(tokens + latent_dim + narrow, mask=is_there[:, None] & in_narrow, other=0.0)
            scores = tl.dot(q_rotated, rotated.T, tl.dot(q, latents.T))
            scores = tl.where(is_there[None, :], scores * scale_log2, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            shrink = tl.exp2(top - higher)
            weights = tl.exp2(scores - higher[:, None])
            total = total * shrink + tl.sum(weights, 1)
            sums = tl.dot(weights.to(latents.dtype), latents, sums * shrink[:, None])
            top = higher
        at = (row.to(tl.int64) * PARTS + part) * num_heads + head
        out = sums / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            sums_ptr + at[:, None] * latent_dim + wide,
            out.to(sums_ptr.dtype.element_ty),
            mask=in_heads & in_wide,
        )
        if PARTS > 1:
            tl.store(logs_ptr + at, top + tl.log2(total), mask=head < num_heads)


@triton.jit
def _merge_parts(  # type: ignore[no-untyped-def]
    sums_ptr, logs_ptr, positions_ptr, firsts_ptr, slots_ptr, counts_ptr, out_ptr, num_heads, latent_dim,
    SELECTED: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, count = _seen(row, positions_ptr, firsts_ptr, slots_ptr, counts_ptr, SELECTED)
    part, wide = tl.arange(0, PARTS), piece * WIDTH + tl.arange(0, WIDTH)
    is_there = part < tl.cdiv(count, _size_of(count, PARTS, TOKENS))
    at = (row.to(tl.int64) * PARTS + part) * num_heads + head
    logs = tl.load(logs_ptr + at, mask=is_there, other=float("-inf"))
    # Nobody's row has no parts; of it zeros are stored.
    weights = tl.where(is_there, tl.exp2(logs - tl.max(logs, 0)), 0.0)
    mask = is_there[:, None] & (wide < latent_dim)[None, :]
    sums = tl.load(sums_ptr + at[:, None] * latent_dim + wide[None, :], mask=mask, other=0.0)
    total = tl.sum(weights, 0)
    out = tl.sum(sums * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    at = (row.to(tl.int64) * num_heads + head) * latent_dim + wide
    tl.store(out_ptr + at, out, mask=wide < latent_dim)


def attend_latents(
    q: torch.Tensor,
    cache: torch.Tensor,
    rows: StepRows,
    scale: float,
    latent_dim: int,
    selection: Selection | None = None,
    is_short: bool = False,
) -> torch.Tensor:
    """Each row's latents, weighted by the softmax of ``scale`` times their products with the query.

    Up to 64 rows each row's bits depend on that row alone. Of nobody's row, zeros.

    Args:
        q: Queries in the absorbed form, rotated part last.
        cache: Latents and rotated keys.
        rows: Where rows and contexts lie.
        scale: Factor on products.
        latent_dim: Of a key, the numbers that are its value, too.
        selection: The positions that each row sees; None for all from its first one to its own.
        is_short: Whether these are 2048 at most, whatever the context. It changes a result's last bits, so
            it has to be the same for all steps of a layer.

    Shapes:
        q: [R, heads, latent_dim + rope] bf16; cache: [slots, latent_dim + rope] bf16;
        result: [R, heads, latent_dim], f32 up to 64 rows, and bf16 above

    Reference:
        tests/kernels/test_mla_decode.py, float64.
    """
    num_rows, num_heads, width = q.shape
    device = q.device.index or 0
    is_large, is_early = has_large_shared_memory(device), can_start_early(device)
    parts = MAX_PARTS if num_rows <= MAX_GROUPED_ROWS else 1
    f32 = torch.float32
    sums = torch.empty(
        num_rows, parts, num_heads, latent_dim, dtype=q.dtype if parts == 1 else f32, device=q.device
    )
    logs = torch.empty(num_rows, parts, num_heads, dtype=f32, device=q.device)
    latent, rope = (max(16, triton.next_power_of_2(n)) for n in (latent_dim, width - latent_dim))
    # What fits into a multiprocessor: a tile of queries, and some of latents where there is room.
    is_chosen = selection is not None
    large_tile = _SHORT_TILE if is_short and parts > 1 else _LARGE_TILE
    heads, tokens, stages, warps = large_tile if is_large else _SMALL_TILE
    heads = min(heads, max(16, triton.next_power_of_2(num_heads)))
    seen = (rows.positions, rows.firsts, rows.slots)
    chosen, counts = (
        (rows.pages, rows.positions) if selection is None else (selection.positions, selection.counts)
    )
    _attend[(num_rows, triton.cdiv(num_heads, heads), parts)](
        q, cache, rows.pages, rows.contexts, *seen, chosen, counts, sums, logs, num_heads,
        rows.pages.shape[1], chosen.stride(0), latent_dim, width - latent_dim, scale * _LOG2_E,
        PAGE=PAGE_TOKENS, SELECTED=is_chosen, HEADS=heads, TOKENS=tokens, PARTS=parts, LATENT=latent,
        ROPE=rope, EVEN=latent + rope == width and latent == latent_dim, STAGES=stages, EARLY=is_early,
        num_warps=warps,
    )  # fmt: skip
    if parts == 1:
        return sums[:, 0]
    out = torch.empty(num_rows, num_heads, latent_dim, dtype=f32, device=q.device)
    piece = min(128, latent)
    _merge_parts[(num_rows, num_heads, triton.cdiv(latent_dim, piece))](
        sums, logs, *seen, counts, out, num_heads, latent_dim, SELECTED=is_chosen, PARTS=parts,
        TOKENS=tokens, WIDTH=piece, EARLY=is_early, num_warps=4, launch_pdl=is_early,
    )  # fmt: skip
    return out
