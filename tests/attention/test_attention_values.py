"""Attention of every instruction set against float64, within the bound of csrc/attention/attention.h."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from attention_reference import Context, Part, Shape, run

from duckllm import _native

NewAttention = Callable[..., _native.Attention]

SHAPES = {
    "one_head": Shape(1, 1, 1, 1),
    "odd": Shape(6, 2, 19, 5, window=7),
    "three_a_group": Shape(15, 5, 33, 37),
    "wide": Shape(8, 4, 128, 128),
    "latent": Shape(7, 1, 48, 33, is_latent=True),
    "many_heads": Shape(131, 1, 20, 16, is_latent=True),
    "window_over_splits": Shape(4, 2, 16, 24, window=530),
}
# Around tiles of 64 and splits of 512.
POSITIONS = (0, 1, 62, 63, 64, 65, 130, 511, 512, 513, 575, 1090)


def check(attention: _native.Attention, context: Context, part: Part) -> None:
    (got,) = run(attention, [part])
    for position in {*POSITIONS, part.stop - 1} & {*range(part.start, part.stop)}:
        expected, bound = context.expected(position)
        error = np.abs(got[position - part.start] - expected)
        assert (error <= bound).all(), (position, float((error / bound).max()))


@pytest.mark.parametrize("name", SHAPES)
def test_equals_float64(new_attention: NewAttention, name: str) -> None:
    context = Context.random(SHAPES[name], 1100, 1).paged(16, 2)
    attention = new_attention(2)
    check(attention, context, Part(context, 0, 140))
    check(attention, context, Part(context, 500, 580))
    check(attention, context, Part(context, 1090, 1091))


@pytest.mark.parametrize("first", [1, 63, 64, 200, 600, 1090])
def test_a_context_that_begins_later(new_attention: NewAttention, first: int) -> None:
    context = Context.random(SHAPES["odd"], 1100, 3, first).paged(5, 4)
    for shape in (SHAPES["odd"], replace(SHAPES["odd"], window=0)):
        own = replace(context, shape=shape)
        check(new_attention(), own, Part(own, first, min(1100, first + 70)))
        check(new_attention(), own, Part(own, 1099, 1100))


@pytest.mark.parametrize("topk", [1, 64, 77, 600])
def test_selected_positions(new_attention: NewAttention, topk: int) -> None:
    """Rows with a list, and before them rows that see all they have."""
    rng = np.random.default_rng(topk)
    context = Context.random(SHAPES["latent"], 700, 5).paged(16, 6)
    selection = np.full((700, topk), -1, np.int32)
    for position in range(topk, 700):
        selection[position] = np.sort(rng.choice(position + 1, topk, replace=False))
    context = replace(context, selection=selection)
    check(new_attention(), context, Part(context, max(0, topk - 5), min(700, topk + 20)))
    check(new_attention(2), context, Part(context, 699, 700))


def test_great_and_small_scores(new_attention: NewAttention) -> None:
    """The largest score grows from tile to tile, and most weights are zero beside it."""
    context = Context.random(SHAPES["wide"], 1100, 7)
    keys = context.keys * np.linspace(0, 4, 1100, dtype=np.float32)[:, None, None]
    context = replace(context, keys=keys)
    check(new_attention(), context, Part(context, 1080, 1100))
    falling = replace(context, keys=keys[::-1].copy())
    check(new_attention(), falling, Part(falling, 1080, 1100))


def test_equal_scores_average_and_a_great_one_wins(new_attention: NewAttention) -> None:
    shape = Shape(1, 1, 2, 3, scale=1.0)
    context = Context.random(shape, 96, 8)
    context = replace(context, keys=np.zeros_like(context.keys))
    (got,) = run(new_attention(), [Part(context, 95, 96)])
    np.testing.assert_allclose(got[0, 0], context.values[:, 0].mean(0), rtol=1e-5, atol=1e-6)
    context.keys[40] = 1e4 * context.q[95, :1]
    (got,) = run(new_attention(), [Part(context, 95, 96)])
    np.testing.assert_array_equal(got[0, 0], context.values[40, 0])


def test_products_of_heads(new_attention: NewAttention) -> None:
    rng = np.random.default_rng(9)
    for rows, heads, inputs, outputs in ((1, 3, 1, 1), (2, 2, 70, 33), (50, 4, 130, 64), (7, 1, 64, 31)):
        wide = rng.standard_normal((rows, heads, inputs + 3), np.float32)
        x, w = wide[..., 2:-1], rng.standard_normal((heads, inputs, outputs), np.float32)
        out = np.full((rows, heads, outputs + 5), 7, np.float32)
        attention = new_attention(2)
        attention.multiply_heads(x, packed(w), outputs, out[..., 1 : outputs + 1])
        exact = np.einsum("thk,hkn->thn", x.astype(np.float64), w.astype(np.float64))
        terms = np.einsum("thk,hkn->thn", np.abs(x.astype(np.float64)), np.abs(w.astype(np.float64)))
        assert (np.abs(out[..., 1 : outputs + 1] - exact) <= inputs * 2.0**-24 * terms).all()
        assert (out[..., 0] == 7).all()
        assert (out[..., outputs + 1 :] == 7).all()
        alone = np.empty((1, heads, outputs), np.float32)
        for row in range(rows):
            attention.multiply_heads(x[row : row + 1], packed(w), outputs, alone)
            np.testing.assert_array_equal(alone[0], out[row, :, 1 : outputs + 1])


def packed(w: np.ndarray) -> np.ndarray:
    heads, inputs, outputs = w.shape
    wide = np.zeros((heads, inputs, -(-outputs // 32) * 32), np.float32)
    wide[..., :outputs] = w
    return np.ascontiguousarray(wide.reshape(heads, inputs, -1, 32).transpose(0, 2, 1, 3))
