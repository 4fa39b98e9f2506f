"""Index scores and what is selected by them: values, ties, rows in any company."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from attention_reference import Context, Part, Shape, step_of

from duckllm import _native

NewAttention = Callable[..., _native.Attention]
I32 = np.ndarray


def select(
    attention: _native.Attention, parts: list[Part], weights: dict[int, np.ndarray], topk: int
) -> list[I32]:
    """Keys are those of each context; nothing else in the cache may be read."""
    shape = parts[0].context.shape
    slots = 1 + max(int(part.context.slots().max()) for part in parts)
    keys = np.full((slots, shape.key_dim), np.nan, np.float32)
    for part in parts:
        own = slice(part.context.first, part.stop)
        keys[part.context.slots()[own]] = part.context.keys[own, 0]
    q = np.concatenate([part.context.q[part.start : part.stop] for part in parts])
    w = np.concatenate([weights[part.context.size][part.start : part.stop] for part in parts])
    result = attention.select(step_of(parts), q, w, keys, topk)
    return np.split(result, np.cumsum([part.stop - part.start for part in parts])[:-1])


def make(heads: int, dim: int, size: int, seed: int, first: int = 0) -> tuple[Context, np.ndarray]:
    """Whole numbers, whose sums no order rounds, so that many scores are equal."""
    context = Context.random(Shape(heads, 1, dim, 1), size, seed, first)
    np.rint(context.q, out=context.q)
    np.rint(context.keys, out=context.keys)
    return context, np.rint(np.random.default_rng(seed).standard_normal((size, heads)) * 2).astype(np.float32)


def expected(context: Context, weights: np.ndarray, position: int, topk: int) -> list[int]:
    seen = np.arange(context.first, position + 1)
    if len(seen) <= topk:
        return [-1]
    products = np.maximum(context.q[position].astype(np.float64) @ context.keys[seen, 0].T, 0)
    scores = weights[position] @ products
    return sorted(seen[np.argsort(-scores, kind="stable")[:topk]].tolist())


@pytest.mark.parametrize(("heads", "dim"), [(1, 3), (4, 32), (13, 70)])
@pytest.mark.parametrize("first", [0, 70])
def test_selects_as_a_stable_sort_does(new_attention: NewAttention, heads: int, dim: int, first: int) -> None:
    context, weights = make(heads, dim, 650, 1, first)
    paged = context.paged(16, 2)
    for topk in (1, 50, 300):
        for start, stop in ((first, first + 60), (first + max(0, topk - 5), first + topk + 9), (640, 650)):
            (got,) = select(new_attention(2), [Part(paged, start, stop)], {650: weights}, topk)
            for position in range(start, stop):
                own = got[position - start].tolist()
                assert own[: 1 if own[0] < 0 else topk] == expected(context, weights, position, topk)


def test_scores_are_the_same_bits_in_any_company(new_attention: NewAttention) -> None:
    """Scores that differ in their last bits alone: another order of sums would select others."""
    size, topk = 600, 100
    context = Context.random(Shape(6, 1, 40, 1), size, 5)
    rng = np.random.default_rng(5)
    context.keys[:] = context.keys[:1] + 1e-6 * rng.standard_normal(context.keys.shape).astype(np.float32)
    weights = {size: rng.standard_normal((size, 6)).astype(np.float32)}
    other = Context.random(context.shape, 130, 6).paged(16, 7).moved(100)
    weights[130] = rng.standard_normal((130, 6)).astype(np.float32)
    one = new_attention()
    alone = np.concatenate(
        [select(one, [Part(context, p, p + 1)], weights, topk)[0] for p in range(560, size)]
    )
    for threads in (1, 2, 3):
        attention, paged = new_attention(threads), context.paged(16, threads)
        for cut in (561, 585):
            head, _ = select(attention, [Part(paged, 560, cut), Part(other, 90, 130)], weights, topk)
            _, tail = select(attention, [Part(other, 128, 130), Part(paged, cut, size)], weights, topk)
            np.testing.assert_array_equal(np.concatenate((head, tail)), alone)
    reversed_sums = context.q[-1, :, ::-1] @ context.keys[:, 0, ::-1].T
    others = np.argsort(-(weights[size][-1] @ np.maximum(reversed_sums, 0)), kind="stable")[:topk]
    assert set(others.tolist()) != set(alone[-1].tolist()), "these scores would tell no order from another"
