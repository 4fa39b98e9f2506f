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
