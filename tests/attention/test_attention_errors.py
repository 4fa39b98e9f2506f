"""What the bindings of attention refuse, and how they say it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from duckllm import _native


def contexts(rows: object = ((3, 2, 0, 4),), pages: object = (0, 1)) -> _native.StepContexts:
    return _native.StepContexts(np.array(rows, np.int64), np.array(pages, np.int32))


@pytest.fixture(scope="module")
def attention() -> _native.Attention:
    return _native.Attention(_native.LinearRuntime(1, 1, 1, 0))


@pytest.mark.parametrize(
    ("rows", "pages", "message"),
    [
        (((-1, 2, 0, 4),), (0, 1), "start: got -1, expected 0 to 2147483647"),
        (((0, 0, 0, 4),), (0,), "num_tokens: got 0, expected at least 1"),
        (((3, 1, 4, 4),), (0,), "first: got 4, expected at most 3, the first token's position"),
        (((3, 1, 0, 0),), (0,), "page_tokens: got 0, expected at least 1"),
        (((3, 2, 0, 4),), (0,), "pages: got 1, expected at least 2"),
        (((3, 2, 0, 4),), (0, 1, 2), "pages: got 3, expected 2"),
        (((3, 2, 0, 4),), (0, -1), "pages: got -1, expected 0 or more"),
        (((3, 2, 0),), (0, 1), r"rows: got shape \[1, 3\], expected shape \[1, 4\]"),
    ],
)
def test_contexts_that_are_none(rows: object, pages: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        contexts(rows, pages)


def call(attention: _native.Attention, **changes: Any) -> None:
    arguments: dict[str, Any] = {
        "step": contexts(),
        "q": np.zeros((2, 4, 3), np.float32),
        "keys": np.zeros((5, 6), np.float32),
        "values": np.zeros((5, 10), np.float32),
        "num_kv_heads": 2,
        "value_dim": 5,
        "scale": 1.0,
        "window": 0,
        "selection": None,
    }
    attention.attend(**(arguments | changes))


def test_the_call_that_the_others_change_is_right(attention: _native.Attention) -> None:
    call(attention)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": np.zeros((3, 4, 3), np.float32)}, r"q: got shape \[3, 4, 3\], expected shape \[2, 4, 3\]"),
        ({"q": np.zeros((2, 12), np.float32)}, r"q: got shape \[2, 12\], expected shape \[T, heads, D\]"),
        (
            {"keys": np.zeros((4, 6), np.float32)},
            r"keys: got shape \[4, 6\], expected shape \[at least 5, 6\]",
        ),
        ({"values": np.zeros((5, 9), np.float32)}, r"values: got shape \[5, 9\], expected .*5, 10\]"),
        ({"keys": np.zeros((5, 6))}, "keys: got elements of type float64, expected float32"),
        ({"keys": np.zeros((5, 12), np.float32)[:, ::2]}, "keys: got strides that skip .*"),
        ({"num_kv_heads": 3}, "num_kv_heads: got 3, expected a divisor of 4"),
        ({"window": -1}, "window: got -1, expected 0 to 2147483647"),
        (
            {"selection": np.zeros((1, 2), np.int32)},
            r"selection: got shape \[1, 2\], expected shape \[2, 2\]",
        ),
        ({"selection": np.array([[3], [5]], np.int32)}, "selection: got a position outside .*"),
    ],
)
def test_arguments_that_do_not_fit(
    attention: _native.Attention, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        call(attention, **changes)


def test_a_latent_has_one_head(attention: _native.Attention) -> None:
    keys = np.zeros((5, 6), np.float32)
    with pytest.raises(ValueError, match=r"^values: got the keys, expected one kv head"):
        call(attention, keys=keys, values=keys, value_dim=3)


def test_a_page_beyond_the_cache(attention: _native.Attention) -> None:
    with pytest.raises(ValueError, match=r"expected shape \[at least 9, 6\]$"):
        attention.store(contexts(pages=(0, 2)), np.zeros((2, 6), np.float32), np.zeros((8, 6), np.float32))
