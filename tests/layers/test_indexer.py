from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duckllm.layers.indexer import select_topk


def select_by_sorting(row: list[float], topk: int) -> list[bool]:
    chosen = sorted(range(len(row)), key=lambda i: (-row[i], i))[:topk]
    return [i in chosen for i in range(len(row))]


@given(
    st.lists(st.sampled_from([-1.0, -0.0, 0.0, 0.5, 2.0, float("-inf")]), min_size=2, max_size=30),
    st.integers(1, 29),
)
def test_selects_as_a_stable_sort_among_many_ties(row: list[float], topk: int) -> None:
    topk = min(topk, len(row) - 1)
    selected = select_topk(torch.tensor([row, row[::-1]]), topk)
    assert selected[0].tolist() == select_by_sorting(row, topk)
    assert selected[1].tolist() == select_by_sorting(row[::-1], topk)


@pytest.mark.parametrize("topk", [1, 7, 63])
def test_selects_the_largest_of_distinct_scores(topk: int) -> None:
    scores = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    selected = select_topk(scores, topk)
    assert selected.sum(-1).tolist() == [topk] * 5
    for row in range(5):
        assert scores[row][selected[row]].min() > scores[row][~selected[row]].max()


def hadamard(size: int) -> torch.Tensor:
    """Sylvester's matrix, made orthogonal."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix * size**-0.5


@pytest.mark.parametrize("size", [32, 128])
def test_a_hadamard_rotation_changes_neither_scores_nor_choice(size: int) -> None:
    """The published model's, which is left out here: it is there for the FP8 rounding that follows it."""
    generator = torch.Generator().manual_seed(size)
    q = torch.randn(16, 4, size, dtype=torch.float64, generator=generator)
    keys = torch.randn(200, size, dtype=torch.float64, generator=generator)
    weights = torch.randn(16, 4, dtype=torch.float64, generator=generator)

    def scores(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return torch.einsum("th,ths->ts", weights, torch.relu(q @ keys.T))

    rotation = hadamard(size)
    assert torch.allclose(rotation @ rotation.T, torch.eye(size, dtype=torch.float64), atol=1e-14)
    assert (q @ rotation - q).abs().max() > 1
    plain, rotated = scores(q, keys), scores(q @ rotation, keys @ rotation)
    assert (rotated - plain).abs().max() < 1e-12 * plain.abs().max()
    assert torch.equal(select_topk(rotated, 50), select_topk(plain, 50))
