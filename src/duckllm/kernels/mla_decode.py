"""Attention of a few tokens over latents (MLA, absorbed form) on a GPU, in Triton.

Measured by benchmarks/gpu/mla_decode.py; calls nothing of ours. All heads share one key a token, the latent
and its rotated part, and the latent is the value as well. Latents lie in pages, wherever those are, and a
query may see its whole context or a list of positions (sparse attention).

A query row of 64 heads fills the matrix units by itself, so each row is computed alone: rows of one context
share what they read through the L2 cache. A context is cut into parts by its own length alone, whose results
one program merges in their order, so that a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from duckllm.kernels.shared_memory import has_large_shared_memory

LATENT = 512
# A part is 128 tokens at least; 64 parts of two tiles of heads fill the largest cards.
MAX_PARTS = 64
_MERGE_WIDTH = 128


@dataclass(frozen=True)
class QueryRows:
    """Where each query row's context lies.

    Args:
        pages: Pages of each context, in order.
        contexts: The context of each row.
        lengths: Tokens that each row sees, from the context's first on; of a selection, entries that count.
        page_tokens: Tokens of a page.

    Shapes:
        pages: [contexts, P] int32; contexts, lengths: [R] int32; all cuda
    """

    pages: torch.Tensor
    contexts: torch.Tensor
    lengths: torch.Tensor
    page_tokens: int


@triton.jit
def _part_of(length, part, MAX_PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """First and last entry of a part, and how many parts there are: functions of the length alone."""
    parts = tl.minimum(tl.maximum(tl.cdiv(length, 128), 1), MAX_PARTS)
    size = tl.cdiv(tl.cdiv(length, parts), 64) * 64
    return part * size, tl.minimum((part + 1) * size, length), tl.cdiv(length, size)


@triton.jit
def _attend_part(  # type: ignore[no-untyped-def]
    q_ptr, cache_ptr, pages_ptr, contexts_ptr, lengths_ptr, selection_ptr, sums_ptr, logs_ptr,
    num_heads, num_pages, selection_stride, scale_log2,
    PAGE: tl.constexpr, SELECTED: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    first, last, _ = _part_of(length, part, PARTS)
    if first < last:
        head = group * HEADS + tl.arange(0, HEADS)
        wide, narrow = tl.arange(0, 512), tl.arange(0, 64)
        in_heads = (head < num_heads)[:, None]
        q_rows = q_ptr + (row.to(tl.int64) * num_heads + head)[:, None] * 576
        q = tl.load(q_rows + wide[None, :], mask=in_heads, other=0.0)
        q_rotated = tl.load(q_rows + 512 + narrow[None, :], mask=in_heads, other=0.0)
        pages = pages_ptr + tl.load(contexts_ptr + row).to(tl.int64) * num_pages
        top = tl.full((HEADS,), float("-inf"), tl.float32)
        total = tl.zeros((HEADS,), tl.float32)
        sums = tl.zeros((HEADS, 512), tl.float32)
        for start in tl.range(first, last, TOKENS, num_stages=STAGES):
            entry = start + tl.arange(0, TOKENS)
            is_there = entry < last
            if SELECTED:
                position = tl.load(selection_ptr + row * selection_stride + entry, mask=is_there, other=0)
            else:
                position = entry
            page = tl.load(pages + position // PAGE, mask=is_there, other=0)
            tokens = cache_ptr + (page.to(tl.int64) * PAGE + position % PAGE)[:, None] * 576
            latents = tl.load(tokens + wide[None, :], mask=is_there[:, None], other=0.0)
            rotated = tl.load(tokens + 512 + narrow[None, :], mask=is_there[:, None], other=0.0)
            scores = tl.dot(q, latents.T) + tl.dot(q_rotated, rotated.T)
            scores = tl.where(is_there[None, :], scores * scale_log2, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            shrink = tl.exp2(top - higher)
            weights = tl.exp2(scores - higher[:, None])
            total = total * shrink + tl.sum(weights, 1)
            sums = tl.dot(weights.to(latents.dtype), latents, sums * shrink[:, None])
            top = higher
        at = ((row * PARTS + part) * num_heads + head).to(tl.int64)
        tl.store(sums_ptr + at[:, None] * 512 + wide[None, :], sums / total[:, None], mask=in_heads)
        tl.store(logs_ptr + at, top + tl.log2(total), mask=head < num_heads)


@triton.jit
def _merge_parts(  # type: ignore[no-untyped-def]
    sums_ptr, logs_ptr, lengths_ptr, out_ptr, num_heads, PARTS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    row, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, _, parts = _part_of(tl.load(lengths_ptr + row), 0, PARTS)
    part, wide = tl.arange(0, PARTS), piece * WIDTH + tl.arange(0, WIDTH)
    is_there = part < parts
    at = ((row * PARTS + part) * num_heads + head).to(tl.int64)
    logs = tl.load(logs_ptr + at, mask=is_there, other=float("-inf"))
    weights = tl.exp2(logs - tl.max(logs, 0))
    sums = tl.load(sums_ptr + at[:, None] * 512 + wide[None, :], mask=is_there[:, None], other=0.0)
    out = tl.sum(sums * weights[:, None], 0) / tl.sum(weights, 0)
    at = (row * num_heads + head).to(tl.int64) * 512 + wide
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty))


def attend_latents(
    q: torch.Tensor, cache: torch.Tensor, rows: QueryRows, scale: float, selection: torch.Tensor | None = None
) -> torch.Tensor:
    """Each row's latents, weighted by the softmax of ``scale`` times their products with the query.

    Args:
        q: Queries in the absorbed form, rotated part last.
        cache: Latents and rotated keys.
        rows: Where contexts lie.
        scale: Factor on products.
        selection: The positions that each row sees; None for all below its length.

    Shapes:
        q: [R, heads, 576] bf16; cache: [pages * page_tokens, 576] bf16; selection: [R, topk] int32;
        result: [R, heads, 512] bf16

    Reference:
        tests/kernels/test_mla_decode.py, float64.
    """
    num_rows, num_heads, _ = q.shape
    out = torch.empty(num_rows, num_heads, LATENT, dtype=q.dtype, device=q.device)
    sums = torch.empty(num_rows, MAX_PARTS, num_heads, LATENT, dtype=torch.float32, device=q.device)
    logs = torch.empty(num_rows, MAX_PARTS, num_heads, dtype=torch.float32, device=q.device)
    # What fits into a multiprocessor: a tile of queries, and two of latents where there is room.
    is_large = has_large_shared_memory(q.device.index or 0)
    heads, tokens, stages, warps = (64, 64, 2, 8) if is_large else (16, 32, 1, 4)
    grid = (num_rows, triton.cdiv(num_heads, heads), MAX_PARTS)
    _attend_part[grid](
        q, cache, rows.pages, rows.contexts, rows.lengths, rows.lengths if selection is None else selection,
        sums, logs, num_heads, rows.pages.shape[1], 0 if selection is None else selection.stride(0),
        scale * 1.4426950408889634, PAGE=rows.page_tokens, SELECTED=selection is not None, HEADS=heads,
        TOKENS=tokens, PARTS=MAX_PARTS, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    _merge_parts[(num_rows, num_heads, LATENT // _MERGE_WIDTH)](
        sums, logs, rows.lengths, out, num_heads, PARTS=MAX_PARTS, WIDTH=_MERGE_WIDTH, num_warps=4
    )
    return out
