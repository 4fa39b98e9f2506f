from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duckllm import _native


def select_topk(scores: torch.Tensor, topk: int) -> list[list[int]]:
    return _native.select_topk(scores.float().numpy(), topk).tolist()


def select_by_sorting(row: list[float], topk: int) -> list[int]:
    return sorted(sorted(range(len(row)), key=lambda i: (-row[i], i))[:topk])


@given(
    st.lists(st.sampled_from([-1.0, -0.0, 0.0, 0.5, 2.0, float("-inf")]), min_size=2, max_size=30),
    st.integers(1, 29),
)
def test_selects_as_a_stable_sort_among_many_ties(row: list[float], topk: int) -> None:
    topk = min(topk, len(row) - 1)
    selected = select_topk(torch.tensor([row, row[::-1]]), topk)
    assert selected == [select_by_sorting(row, topk), select_by_sorting(row[::-1], topk)]


@pytest.mark.parametrize("topk", [1, 7, 63, 64, 2999])
def test_selects_as_a_stable_sort_among_many_scores(topk: int) -> None:
    """Of every magnitude, some of them equal."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(5, 3000, generator=generator) * 2.0 ** torch.randint(
        -126, 100, (5, 3000), generator=generator
    )
    scores[:, 1::7] = scores[:, ::7][:, : scores[:, 1::7].shape[1]]
    order = np.argsort(-scores.numpy(), axis=1, kind="stable")[:, :topk]
    assert select_topk(scores, topk) == np.sort(order, axis=1).tolist()


@pytest.mark.parametrize("topk", [0, 5])
def test_a_number_that_cannot_be_selected_is_named(topk: int) -> None:
    with pytest.raises(ValueError, match=f"^topk: got {topk}, expected 1 to 4$"):
        select_topk(torch.zeros(2, 4), topk)


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
    assert select_topk(rotated, 50) == select_topk(plain, 50)
