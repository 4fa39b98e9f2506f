"""Attention over latents on a GPU: values against float64, and a row's bits in any company."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytestmark = pytest.mark.gpu
mla_decode = pytest.importorskip("duckllm.kernels.mla_decode", reason="needs Triton and an NVIDIA GPU")
indexer = pytest.importorskip("duckllm.kernels.indexer", reason="needs Triton and an NVIDIA GPU")
step_rows = pytest.importorskip("duckllm.kernels.step_rows", reason="needs Triton and an NVIDIA GPU")

DEVICE, CACHE = "cuda", torch.bfloat16
PAGE, SCALE = 16, 0.07
# Latent and rotated part: the published models' and sizes that powers of two do not divide.
PUBLISHED, ODD = (512, 64), (40, 6)


def made_up(
    seen: list[tuple[int, int]], num_heads: int, dims: tuple[int, int] = PUBLISHED
) -> tuple[torch.Tensor, torch.Tensor, step_rows.StepRows]:
    """Queries of rows that see [first, position], and a cache of two contexts.

    Pages lie anywhere, numbers behind a context's last page are no pages, and in every slot that no row may
    see there is NaN. A row of position -1 is nobody's.
    """
    width, num_contexts = sum(dims), 2
    num_pages = max(position for _, position in seen) // PAGE + 2
    cache = torch.full((num_contexts * num_pages * PAGE, width), float("nan"), device=DEVICE, dtype=CACHE)
    pages = torch.randperm(num_contexts * num_pages, device=DEVICE).int().view(num_contexts, num_pages)
    contexts = torch.arange(len(seen), dtype=torch.int32, device=DEVICE) % num_contexts
    for context in range(num_contexts):
        for first, position in seen[context::num_contexts]:
            at = torch.arange(first, position + 1, device=DEVICE)
            slots = pages[context].long()[at // PAGE] * PAGE + at % PAGE
            unset = cache[slots, 0].isnan()
            cache[slots[unset]] = torch.randn(int(unset.sum()), width, device=DEVICE).to(CACHE)
        last = max((position for _, position in seen[context::num_contexts]), default=0)
        pages[context, last // PAGE + 1 :] = 2**30
    positions = torch.tensor([max(position, 0) for _, position in seen], dtype=torch.int32, device=DEVICE)
    owned = torch.tensor([0 if position >= 0 else -1 for _, position in seen], device=DEVICE)
    q = torch.randn(len(seen), num_heads, width, device=DEVICE).to(CACHE)
    q[owned < 0] = float("nan")
    nothing = torch.zeros(0, dims[1] // 2, device=DEVICE)
    rows = step_rows.StepRows(
        positions, contexts, torch.tensor([first for first, _ in seen], device=DEVICE).int(),
        owned.int(), pages, nothing, nothing,
    )  # fmt: skip
    return q, cache, rows


def part_of(rows: step_rows.StepRows, which: list[int]) -> step_rows.StepRows:
    """Some rows of a step alone."""
    names = ("positions", "contexts", "firsts", "slots")
    return dataclasses.replace(rows, **{name: getattr(rows, name)[which].contiguous() for name in names})


def check(
    y: torch.Tensor,
    q: torch.Tensor,
    cache: torch.Tensor,
    rows: step_rows.StepRows,
    latent_dim: int,
    selection: indexer.Selection | None = None,
) -> None:
    """Values are those of float64, within what bf16 weights round, and above 64 rows a bf16 result.

    Nobody's rows are zeros.
    """
    rounding = 2.0**-8 if y.dtype == torch.float32 else 2.0**-7
    assert y.shape == (*q.shape[:2], latent_dim)
    for row in range(len(q)):
        if rows.slots[row] < 0:
            assert not y[row].any()
            continue
        at = torch.arange(int(rows.firsts[row]), int(rows.positions[row]) + 1, device=DEVICE)
        if selection is not None:
            at = selection.positions[row, : int(selection.counts[row])].long()
        keys = cache[rows.pages[rows.contexts[row]].long()[at // PAGE] * PAGE + at % PAGE].double()
        wanted = ((q[row].double() @ keys.T) * SCALE).softmax(-1) @ keys[:, :latent_dim]
        assert (y[row].double() - wanted).abs().max() <= rounding * wanted.abs().max()


@pytest.mark.parametrize("num_heads", [128, 64, 20, 3])
@pytest.mark.parametrize(
    "seen",
    [
        [(0, 0)],
        [(0, 62), (0, 63), (0, -1), (0, 64)],
        [(5, 128), (127, 128), (0, 999), (999, 999)],
        [(0, 8190), (0, 1), (17, 8999)],
    ],
)
def test_values_are_those_of_float64(seen: list[tuple[int, int]], num_heads: int) -> None:
    torch.manual_seed(len(seen))
    q, cache, rows = made_up(seen, num_heads)
    check(mla_decode.attend_latents(q, cache, rows, SCALE, 512), q, cache, rows, 512)


@pytest.mark.parametrize("num_heads", [5, 33])
@pytest.mark.parametrize("dims", [ODD, (16, 4), (64, 16), (129, 34)])
def test_sizes_need_not_be_powers_of_two(dims: tuple[int, int], num_heads: int) -> None:
    torch.manual_seed(num_heads)
    q, cache, rows = made_up([(0, 300), (3, 40), (0, 0)], num_heads, dims)
    check(mla_decode.attend_latents(q, cache, rows, SCALE, dims[0]), q, cache, rows, dims[0])


@pytest.mark.parametrize("dims", [PUBLISHED, ODD])
def test_many_rows_are_computed_as_few_are(dims: tuple[int, int]) -> None:
    torch.manual_seed(2)
    seen = [(0, 3 * row) if row % 9 else (0, -1) for row in range(1, 70)]
    q, cache, rows = made_up(seen, 10, dims)
    check(mla_decode.attend_latents(q, cache, rows, SCALE, dims[0]), q, cache, rows, dims[0])


@pytest.mark.parametrize("num_rows", [4, 70])
@pytest.mark.parametrize("num_selected", [5, 64, 2048])
def test_a_selection_is_all_that_is_seen(num_selected: int, num_rows: int) -> None:
    torch.manual_seed(0)
    seen = [(0, 4500), (0, 4000), (0, 4001), (0, -1)] + [(0, 4000)] * (num_rows - 4)
    q, cache, rows = made_up(seen, 128 if num_rows == 4 else 16)
    positions = torch.stack([torch.randperm(4000, device=DEVICE)[:2048].sort()[0] for _ in seen]).int()
    counts = torch.full((num_rows,), num_selected, dtype=torch.int32, device=DEVICE)
    counts[0] = 1
    for row in range(num_rows):  # what lies behind a row's count is no position
        positions[row, int(counts[row]) :] = 2**30
    selection = indexer.Selection(positions, counts)
    for is_short in (False, True):
        y = mla_decode.attend_latents(q, cache, rows, SCALE, 512, selection, is_short)
        check(y, q, cache, rows, 512, selection)


@pytest.mark.parametrize("is_short", [False, True])
def test_a_row_has_the_same_bits_in_any_company(is_short: bool) -> None:
    torch.manual_seed(1)
    seen = [(0, 3000), (0, 70), (0, 3001), (5, 9000), (0, 3002), (0, 0), (0, -1)]
    seen += [(0, 50 * row) for row in range(57)]
    q, cache, rows = made_up(seen, 128)
    together = mla_decode.attend_latents(q, cache, rows, SCALE, 512, is_short=is_short)
    for which in ([0], [1], [2, 3, 4], [5, 3], list(range(17)), list(range(40, 57))):
        own, own_rows = q[which].contiguous(), part_of(rows, which)
        y = mla_decode.attend_latents(own, cache, own_rows, SCALE, 512, is_short=is_short)
        assert torch.equal(y, together[which])
