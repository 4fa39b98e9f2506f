"""A row's bits do not depend on other rows or contexts, on pages or on threads; nothing unused gets in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from attention_reference import F32, Context, Part, Shape, assert_same_bits, run

from duckllm import _native

NewAttention = Callable[..., _native.Attention]

SHAPES = {
    "grouped": Shape(6, 2, 19, 21),
    "window": Shape(4, 2, 16, 16, window=100),
    "latent": Shape(5, 1, 24, 17, is_latent=True),
}
SIZE = 700


def alone(attention: _native.Attention, context: Context, first: int) -> F32:
    """One row a step."""
    rows = [run(attention, [Part(context, p, p + 1)])[0] for p in range(first, context.size)]
    return np.concatenate(rows)


def with_selection(context: Context, topk: int) -> Context:
    rng = np.random.default_rng(1)
    selection = np.full((context.size, topk), -1, np.int32)
    for position in range(topk, context.size):
        selection[position] = np.sort(rng.choice(position + 1, topk, replace=False))
    return replace(context, selection=selection)


@pytest.fixture(params=[*SHAPES, "selected"])
def context(request: pytest.FixtureRequest) -> Context:
    name = "latent" if request.param == "selected" else request.param
    context = Context.random(SHAPES[name], SIZE, 11)
    return with_selection(context, 600) if request.param == "selected" else context


def test_chunks_pages_threads_and_company_change_no_bit(
    new_attention: NewAttention, context: Context
) -> None:
    first = 480
    expected = alone(new_attention(), context, first)
    others = [Context.random(context.shape, size, size).paged(16, size).moved(200) for size in (1, 90, 600)]
    if context.selection is not None:
        others = [replace(each, selection=context.selection[: each.size]) for each in others]
        others = [
            replace(each, selection=np.where(each.selection < each.size, each.selection, 0))
            for each in others
            if each.size < 600
        ]
    for threads in (1, 2, 3):
        attention = new_attention(threads)
        for page_tokens, sizes in ((16, [SIZE - first]), (7, [1, 33, 64, 122]), (64, [100, 120])):
            paged = context.paged(page_tokens, threads)
            start, got = first, []
            for size in sizes:
                parts = [Part(paged, start, start + size)]
                if size != 33:  # in company, in another place of the step each time
                    company = [
                        Part(each.moved(page * each.size), 0, each.size) for page, each in enumerate(others)
                    ]
                    parts = [*company[: size % 3], *parts, *company[size % 3 :]]
                got.append(
                    next(g for g, p in zip(run(attention, parts), parts, strict=True) if p.context is paged)
                )
                start += size
            assert_same_bits(np.concatenate(got), expected)


def test_a_row_never_meets_what_it_does_not_see(new_attention: NewAttention) -> None:
    """Later tokens, and earlier ones outside a window, are NaN."""
    for shape in (SHAPES["grouped"], SHAPES["window"]):
        context = Context.random(shape, 300, 12)
        expected = run(new_attention(), [Part(context, 0, 250)])[0]
        broken = replace(context, keys=context.keys.copy(), values=context.values.copy())
        broken.keys[200:] = np.nan
        broken.values[200:] = np.nan
        got = run(new_attention(), [Part(broken, 0, 250)])[0]
        assert_same_bits(got[:200], expected[:200])
        assert np.isnan(got[200:]).all()
        if shape.window:
            broken = replace(context, keys=context.keys.copy(), values=context.values.copy())
            broken.keys[100] = np.nan
            got = run(new_attention(), [Part(broken, 0, 250)])[0]
            assert np.isnan(got[100:200]).all()
            assert_same_bits(got[200:], expected[200:])


def test_the_first_position_and_a_window_are_the_same_cut(new_attention: NewAttention) -> None:
    context = Context.random(SHAPES["grouped"], 700, 13, first=600)
    window = replace(context, first=0, shape=replace(context.shape, window=100))
    assert_same_bits(
        run(new_attention(), [Part(context, 699, 700)])[0], run(new_attention(), [Part(window, 699, 700)])[0]
    )


def test_rows_are_stored_where_their_positions_lie(new_attention: NewAttention) -> None:
    pages = np.array([3, 0, 2, 1], np.int32)
    step = _native.StepContexts(
        np.array([[3, 4, 0, 2], [0, 1, 0, 5]], np.int64), np.append(pages, 3).astype(np.int32)
    )
    wide = np.arange(5 * 6, dtype=np.float32).reshape(5, 6)
    cache = np.full((16, 3), -1, np.float32)
    new_attention().store(step, wide[:, 1:4], cache)
    expected = np.full((16, 3), -1, np.float32)
    for row, slot in enumerate((1, 4, 5, 2, 15)):
        expected[slot] = wide[row, 1:4]
    np.testing.assert_array_equal(cache, expected)
