"""The indexer on a GPU: keys against float64, and selections that are exactly those of float64 scores."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytestmark = pytest.mark.gpu
indexer = pytest.importorskip("duckllm.kernels.indexer", reason="needs Triton and an NVIDIA GPU")
step_rows = pytest.importorskip("duckllm.kernels.step_rows", reason="needs Triton and an NVIDIA GPU")

DEVICE, CACHE = "cuda", torch.bfloat16
PAGE = 16
# Heads, D, rotated numbers: the published models', and those that powers of two do not divide.
PUBLISHED, ODD = (64, 128, 64), (5, 22, 6)


def some_rows(seen: list[tuple[int, int]], rope: int) -> step_rows.StepRows:
    """Rows that see [first, position] of two contexts, whose pages lie anywhere; of position -1 nobody's."""
    num_pages = max(position for _, position in seen) // PAGE + 2
    pages = torch.randperm(2 * num_pages, device=DEVICE).int().view(2, num_pages)
    contexts = torch.arange(len(seen), dtype=torch.int32, device=DEVICE) % 2
    positions = torch.tensor([max(position, 0) for _, position in seen], dtype=torch.int32, device=DEVICE)
    firsts = torch.tensor([first for first, _ in seen], dtype=torch.int32, device=DEVICE)
    at = positions.long()
    slots = pages[contexts.long(), at // PAGE] * PAGE + positions % PAGE
    slots[torch.tensor([position < 0 for _, position in seen], device=DEVICE)] = -1
    angles = torch.rand(int(positions.max()) + 1, rope // 2, device=DEVICE) * 6
    return step_rows.StepRows(
        positions, contexts, firsts, slots.int(), pages, angles.cos() * 1.2, angles.sin() * 1.2
    )


def slots_of(rows: step_rows.StepRows, row: int) -> torch.Tensor:
    """The rows of the cache that a row sees, in order."""
    at = torch.arange(int(rows.firsts[row]), int(rows.positions[row]) + 1, device=DEVICE)
    return rows.pages[rows.contexts[row]].long()[at // PAGE] * PAGE + at % PAGE


def filled_cache(rows: step_rows.StepRows, width: int) -> torch.Tensor:
    """Keys wherever a row sees one, and NaN elsewhere; behind a context's last page there is no page."""
    cache = torch.full((rows.pages.numel() * PAGE, width), float("nan"), device=DEVICE, dtype=CACHE)
    for row in range(rows.num_rows):
        if rows.slots[row] >= 0:
            slots = slots_of(rows, row)
            slots = slots[cache[slots, 0].isnan()]
            cache[slots] = torch.randn(len(slots), width, device=DEVICE).to(CACHE)
    for context in range(len(rows.pages)):
        last = int(rows.positions[rows.contexts == context].max()) if (rows.contexts == context).any() else 0
        rows.pages[context, last // PAGE + 1 :] = 2**30
    return cache


def rotated(x: torch.Tensor, rope: int, rows: step_rows.StepRows, interleaved: bool) -> torch.Tensor:
    """[R, heads, D], the first numbers rotated, results of first elements before those of second ones."""
    half = rope // 2
    cos = rows.cos.to(x.dtype)[rows.positions.long()][:, None]
    sin = rows.sin.to(x.dtype)[rows.positions.long()][:, None]
    a, b = (x[..., :rope:2], x[..., 1:rope:2]) if interleaved else (x[..., :half], x[..., half:rope])
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., rope:]], -1)


def strided(values: torch.Tensor) -> torch.Tensor:
    """The same rows as parts of longer ones, whose other numbers are NaN."""
    longer = torch.full((len(values), values.shape[1] + 24), float("nan"), device=DEVICE)
    longer[:, 8:-16] = values
    return longer[:, 8:-16]


def check(
    selection: indexer.Selection,
    scores: list[torch.Tensor],
    rows: step_rows.StepRows,
    topk: int,
    rounding: float,
) -> None:
    """A selection is the best of float64 scores, but for those within ``rounding`` of the last one's."""
    for row, of_row in enumerate(scores):
        count = min(topk, len(of_row))
        assert selection.counts[row] == count
        chosen = selection.positions[row, :count].long() - int(rows.firsts[row])
        assert (chosen.diff() > 0).all()
        assert count == 0 or (chosen[0] >= 0 and chosen[-1] < len(of_row))
        if count == topk:
            last = of_row.sort(descending=True)[0][topk - 1]
            is_chosen = torch.zeros(len(of_row), dtype=torch.bool, device=DEVICE)
            is_chosen[chosen] = True
            assert is_chosen[of_row > last + rounding].all()
            assert not is_chosen[of_row < last - rounding].any()


def scores_of(
    q: torch.Tensor, weights: torch.Tensor, rope: int, interleaved: bool, rows: step_rows.StepRows,
    cache: torch.Tensor,
) -> list[torch.Tensor]:  # fmt: skip
    """Scores in float64 of what a row sees, of operands rounded as the kernel rounds them."""
    heads = q.view(rows.num_rows, weights.shape[1], -1)
    heads = rotated(heads, rope, rows, interleaved).to(CACHE).double()
    result = []
    for row in range(rows.num_rows):
        keys = cache[slots_of(rows, row) if rows.slots[row] >= 0 else []].double()
        result.append((heads[row] @ keys.T).relu().T @ weights[row].double())
    return result


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("width", "rope"), [(128, 64), (22, 6), (16, 16)])
def test_keys_are_normed_and_rotated(width: int, rope: int, interleaved: bool) -> None:
    torch.manual_seed(width)
    rows = some_rows([(0, 5), (0, 7), (0, -1), (0, 40), (3, 9)], rope)
    k = torch.randn(5, width, device=DEVICE) * 3 + 1
    weight, bias = torch.rand(width, device=DEVICE) + 0.5, torch.randn(width, device=DEVICE)
    cache = torch.full((rows.pages.numel() * PAGE, width), float("nan"), device=DEVICE, dtype=CACHE)
    indexer.store_index_keys(strided(k), weight, bias, 1e-6, rope, interleaved, rows, cache)
    x = k.double()
    normed = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, unbiased=False) + 1e-6).sqrt()
    normed = normed * weight.double() + bias.double()
    wanted = rotated(normed[:, None], rope, rows, interleaved)[:, 0]
    owned = rows.slots >= 0
    got = cache[rows.slots[owned].long()].double()
    torch.testing.assert_close(got, wanted[owned], rtol=0.51 * torch.finfo(CACHE).eps, atol=1e-5)
    assert cache.isnan().all(1).sum() == len(cache) - 4


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    "seen",
    [
        [(0, 0), (0, 6), (0, 7), (0, 8), (0, -1), (0, 300)],
        [(5, 300), (290, 300), (293, 300), (0, 1500), (1, 5000)],
    ],
)
def test_selections_are_those_of_float64(seen: list[tuple[int, int]], interleaved: bool) -> None:
    torch.manual_seed(0)
    num_heads, width, rope = ODD
    rows = some_rows(seen, rope)
    cache = filled_cache(rows, width)
    q = strided(torch.randn(len(seen), num_heads * width, device=DEVICE))
    weights = strided(torch.randn(len(seen), num_heads, device=DEVICE))
    selection = indexer.select(q, weights, rope, interleaved, rows, cache, 8)
    check(selection, scores_of(q, weights, rope, interleaved, rows, cache), rows, 8, 1e-4)


@pytest.mark.parametrize("length", [2049, 8193, 20000, 70000])
def test_long_contexts(length: int) -> None:
    torch.manual_seed(length)
    num_heads, width, rope = PUBLISHED
    rows = some_rows([(0, length - 1), (0, length // 2), (0, 2047)], rope)
    cache = filled_cache(rows, width)
    q = torch.randn(3, num_heads * width, device=DEVICE)
    weights = torch.randn(3, num_heads, device=DEVICE)
    selection = indexer.select(q, weights, rope, False, rows, cache, 2048)
    check(selection, scores_of(q, weights, rope, False, rows, cache), rows, 2048, 1e-2)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("length", [50, 1100, 6000])
@pytest.mark.parametrize("values", [1, 2, 7, 1000])
def test_of_equal_scores_the_first_are_selected(values: int, length: int, sign: float) -> None:
    """One head, keys of one number: scores are small integers, exact in every type, many of them equal."""
    torch.manual_seed(values)
    rows = some_rows([(0, length - 1), (3, length - 1)], 2)
    cache = filled_cache(rows, 16)
    keys = torch.zeros_like(cache)
    keys[:, 3] = torch.randint(-values // 2, values - values // 2, (len(cache),), device=DEVICE).to(CACHE)
    cache = torch.where(cache.isnan(), cache, keys)
    q = torch.zeros(2, 16, device=DEVICE)
    q[:, 3] = 1
    weights = torch.full((2, 1), sign, device=DEVICE)
    topk = 20
    selection = indexer.select(q, weights, 2, True, rows, cache, topk)
    scores = scores_of(q, weights, 2, True, rows, cache)
    for row in range(2):
        best = (-scores[row]).sort(stable=True)[1][:topk].sort()[0] + int(rows.firsts[row])
        assert selection.positions[row].tolist() == best.tolist()


def test_clustered_scores() -> None:
    """The best tokens are neighbours, and all others are equal."""
    rows = some_rows([(0, 5999), (0, 5999)], 2)
    cache = filled_cache(rows, 16) * 0
    slots = slots_of(rows, 0)
    cache[slots[3001:3030], 3] = torch.arange(29, device=DEVICE).flip(0).to(CACHE) + 1
    q = torch.zeros(1, 16, device=DEVICE)
    q[:, 3] = 1
    one = dataclasses.replace(
        rows, **{name: getattr(rows, name)[:1] for name in ("positions", "contexts", "firsts", "slots")}
    )
    weights = torch.ones(1, 1, device=DEVICE)
    assert indexer.select(q, weights, 2, True, one, cache, 20).positions[0].tolist() == [*range(3001, 3021)]
    wanted = [*range(11), *range(3001, 3030)]
    assert indexer.select(q, weights, 2, True, one, cache, 40).positions[0].tolist() == wanted


def test_a_row_selects_the_same_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    num_heads, width, rope = ODD
    seen = [(0, -1) if row % 7 == 3 else (row % 3, 90 * row) for row in range(64)]
    rows = some_rows(seen, rope)
    cache = filled_cache(rows, width)
    q = torch.randn(64, num_heads * width, device=DEVICE)
    weights = torch.randn(64, num_heads, device=DEVICE)
    together = indexer.select(q, weights, rope, True, rows, cache, 50)
    names = ("positions", "contexts", "firsts", "slots")
    for start, stop in ((0, 1), (5, 8), (20, 37), (63, 64)):
        alone = dataclasses.replace(rows, **{name: getattr(rows, name)[start:stop] for name in names})
        selection = indexer.select(q[start:stop], weights[start:stop], rope, True, alone, cache, 50)
        assert torch.equal(selection.counts, together.counts[start:stop])
        for row in range(start, stop):
            count = int(together.counts[row])
            mine = selection.positions[row - start, :count]
            assert torch.equal(mine, together.positions[row, :count])
    # Rows whose scores do not fit at once go in groups.
    monkeypatch.setattr(indexer, "_WORKSPACE_BYTES", 200_000)
    grouped = indexer.select(q, weights, rope, True, rows, cache, 50)
    for row in range(64):
        count = int(together.counts[row])
        assert torch.equal(grouped.positions[row, :count], together.positions[row, :count])
    assert torch.equal(grouped.counts, together.counts)
