"""Grouped-query attention of long runs of a context's rows on a GPU, in Triton.

Called by gqa.py for steps of more than 64 rows. A tile of queries is some consecutive rows times the query
heads of one head of keys, and passes once over what its rows see.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from duckllm.kernels.card import has_large_shared_memory
from duckllm.kernels.half_rows import Activations, halve
from duckllm.kernels.step_rows import PAGE_TOKENS, StepRows

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# A run of no more rows is computed row by row, in parts of the context that many programs share.
ONE_TILE_ROWS = 16


def power_of_2(least: int) -> int:
    """The smallest that is not below ``least``."""
    return 1 << (least - 1).bit_length()


@dataclass(frozen=True)
class HeadShape:
    """Sizes of an attention.

    Args:
        num_heads: Of queries.
        num_kv_heads: Of keys.
        head_dim: D.
        window: Positions that a row sees at most.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int

    @property
    def width(self) -> int:
        """Numbers of a row of queries."""
        return self.num_heads * self.head_dim

    @property
    def group(self) -> int:
        """Query heads of a head of keys."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        """D as tiles have it."""
        return max(16, power_of_2(self.head_dim))

    def tile_heads(self, least: int) -> int:
        """Query heads of a tile: those of a group, up to 64."""
        return min(64, max(least, power_of_2(self.group)))


@triton.jit
def _attend_tile(  # type: ignore[no-untyped-def]
    q_ptr, keys_ptr, values_ptr, pages_ptr, positions_ptr, contexts_ptr, firsts_ptr, tiles_ptr,
    out_ptr, halves_ptr, factors_ptr, num_kv_heads, num_pages, padded_rows, window,
    PAGE: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a context, HEADS query heads of each that share a head of keys."""
    tile, group = tl.program_id(1), tl.program_id(0)
    first_row, num_rows = tl.load(tiles_ptr + 2 * tile), tl.load(tiles_ptr + 2 * tile + 1)
    groups: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = group // groups
    m = tl.arange(0, ROWS * HEADS)
    in_group = group % groups * HEADS + m % HEADS
    is_row = m // HEADS < num_rows
    row = first_row + tl.minimum(m // HEADS, num_rows - 1)
    head = kv_head * GROUP + in_group
    num_heads = num_kv_heads * GROUP
    d = tl.arange(0, DIM)[None, :]
    in_heads = (is_row & (in_group < GROUP))[:, None] & (d < D)
    at = (row.to(tl.int64) * num_heads + head)[:, None] * D + d
    q = tl.load(q_ptr + at, mask=in_heads, other=0.0)
    position = tl.load(positions_ptr + row)
    seen_from = tl.maximum(tl.load(firsts_ptr + row), position - window + 1)
    pages = pages_ptr + tl.load(contexts_ptr + first_row).to(tl.int64) * num_pages

    # Some rows see, of tokens before `all_from` and behind `all_until`, none or a part.
    start, end = tl.min(seen_from, 0), tl.max(position, 0) + 1
    all_from, all_until = tl.max(seen_from, 0), tl.min(position, 0) + 1
    top = tl.full((ROWS * HEADS,), -1e30, tl.float32)  # finite: a row may see nothing of its first tokens
    total = tl.zeros((ROWS * HEADS,), tl.float32)
    sums = tl.zeros((ROWS * HEADS, DIM), tl.float32)
    for first in tl.range(start, end, TOKENS, num_stages=STAGES):
        token = first + tl.arange(0, TOKENS)
        is_there = token < end
        slot = tl.load(pages + token // PAGE, mask=is_there, other=0) * PAGE + token % PAGE
        token_at = (slot.to(tl.int64) * (num_kv_heads * D) + kv_head * D)[:, None] + d
        in_tokens = is_there[:, None] & (d < D)
        keys = tl.load(keys_ptr + token_at, mask=in_tokens, other=0.0)
        values = tl.load(values_ptr + token_at, mask=in_tokens, other=0.0)
        scores = tl.dot(q, keys.T, input_precision="ieee")
        if (first < all_from) | (first + TOKENS > all_until):
            sees = (token[None, :] >= seen_from[:, None]) & (token[None, :] <= position[:, None])
            scores = tl.where(sees, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * LOG2_E)
        shrink = tl.exp2(top - higher)
        weights = tl.exp2(scores * LOG2_E - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision="ieee")
        top = higher
    out = sums / total[:, None]
    tl.store(out_ptr + at, out, mask=in_heads)
    if D == 128:
        halves, factors = halve(out)
        tl.store(halves_ptr + at, halves, mask=in_heads)
        tl.store(factors_ptr + head * padded_rows + row, factors, mask=is_row & (in_group < GROUP))


@lru_cache(maxsize=8)
def _tiles(spans: tuple[tuple[int, int], ...], rows: int, is_pinned: bool) -> torch.Tensor:
    """First row and number of rows of each tile; those that see most come first, as they take longest.

    Shapes:
        result: [tiles, 2] int32, cpu
    """
    tiles = [
        (row, min(rows, first + count - row))
        for first, count in spans
        for row in range(first, first + count, rows)
    ]
    return torch.tensor(tiles[::-1], dtype=torch.int32, pin_memory=is_pinned)


def attend_tiles(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: StepRows,
    shape: HeadShape,
    result: Activations,
    spans: tuple[tuple[int, int], ...],
) -> None:
    """Writes the results of the spans' rows; in f16 if a head has 128 numbers."""
    if not spans:
        return
    heads, dim = shape.tile_heads(1), shape.padded_dim
    device = q.device.index or 0
    is_large = has_large_shared_memory(device)
    # Queries, and two tiles of keys and of values, have to fit into a multiprocessor. On Hopper two programs
    # do, if each takes half of the registers and spills a few: one multiplies while the other one does not.
    if q.element_size() > 2:  # no matrix units
        queries, tokens, stages, warps, registers = 16, 32, 1, 4, None
    elif not is_large:
        queries, tokens, stages, warps, registers = 64, 32, 5 if dim <= 128 else 3, 4, None
    else:
        queries, tokens, stages, warps, registers = 128, 64, 3, 8, None
        if dim <= 128 and torch.cuda.get_device_capability(device) >= (9, 0):
            registers = 128
    tiles = _tiles(spans, max(1, queries // heads), q.is_cuda).to(q.device, non_blocking=True)
    half = result.half
    _attend_tile[(shape.num_kv_heads * triton.cdiv(shape.group, heads), len(tiles))](
        q, keys, values, rows.pages, rows.positions, rows.contexts, rows.firsts, tiles,
        result.values, half.values, half.factors,
        shape.num_kv_heads, rows.pages.shape[1], half.values.shape[0], shape.window,
        PAGE=PAGE_TOKENS, GROUP=shape.group, HEADS=heads, D=shape.head_dim, DIM=dim,
        ROWS=max(1, queries // heads), TOKENS=tokens, STAGES=stages, num_warps=warps, maxnreg=registers,
    )  # fmt: skip
