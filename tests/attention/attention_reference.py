"""Attention and index scores in float64, and contexts whose pages lie anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from duckllm import _native

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
UNIT = 2.0**-24


@dataclass(frozen=True)
class Shape:
    """Of one kind of attention; ``window`` 0 for all, ``is_latent`` where the value begins the key."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0
    is_latent: bool = False
    scale: float = 0.3


@dataclass(frozen=True)
class Context:
    """Keys and values of one context by position, and the queries of its tokens.

    ``pages`` and ``page_tokens`` say where it lies, ``first`` is the first position that it has.
    """

    shape: Shape
    q: F32  # [S, heads, key_dim]
    keys: F32  # [S, kv_heads, key_dim]
    values: F32  # [S, kv_heads, value_dim]
    pages: I32
    page_tokens: int
    first: int = 0
    selection: I32 | None = field(default=None)  # [S, topk]

    @classmethod
    def random(cls, shape: Shape, size: int, seed: int, first: int = 0) -> Context:
        rng = np.random.default_rng(seed)
        q = rng.standard_normal((size, shape.heads, shape.key_dim), np.float32)
        keys = rng.standard_normal((size, shape.kv_heads, shape.key_dim), np.float32)
        values = rng.standard_normal((size, shape.kv_heads, shape.value_dim), np.float32)
        if shape.is_latent:
            values = keys[..., : shape.value_dim].copy()
        return cls(shape, q, keys, values, np.zeros(1, np.int32), size, first)

    @property
    def size(self) -> int:
        return len(self.q)

    def paged(self, page_tokens: int, seed: int) -> Context:
        """The same context in pages of another size and in another order, every second one unused."""
        count = -(-self.size // page_tokens)
        pages = 2 * np.random.default_rng(seed).permutation(count).astype(np.int32)
        return replace(self, pages=pages, page_tokens=page_tokens)

    def moved(self, pages: int) -> Context:
        return replace(self, pages=self.pages + np.int32(pages))

    def slots(self) -> npt.NDArray[np.int64]:
        positions = np.arange(self.size)
        return self.pages[positions // self.page_tokens] * self.page_tokens + positions % self.page_tokens

    def visible(self, position: int) -> list[int]:
        """What a token sees."""
        if self.selection is not None and self.selection[position, 0] >= 0:
            return [int(each) for each in self.selection[position]]
        window = self.shape.window or self.size
        return list(range(max(self.first, position + 1 - window), position + 1))

    def expected(self, position: int) -> tuple[F64, F64]:
        """A token's result, and the bound of attention.h on its error: two [heads, value_dim]."""
        s, seen = self.shape, self.visible(position)
        group = s.heads // s.kv_heads
        result = np.zeros((s.heads, s.value_dim))
        bound = np.zeros_like(result)
        for head in range(s.heads):
            q = np.float64(np.float32(s.scale)) * self.q[position, head].astype(np.float64)
            keys = self.keys[seen, head // group].astype(np.float64)
            values = self.values[seen, head // group].astype(np.float64)
            scores = keys @ q
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            result[head] = weights @ values
            largest = float((np.abs(keys) @ np.abs(q)).max())
            terms = 4 * (s.key_dim + 8) * largest
            terms += 2 * (min(len(seen), 512) + 8 * -(-len(seen) // 64) + 16)
            bound[head] = terms * UNIT * (weights @ np.abs(values)) + 1e-30
        return result, bound


@dataclass(frozen=True)
class Part:
    """Tokens [start, stop) of a context."""

    context: Context
    start: int
    stop: int


def run(attention: _native.Attention, parts: Sequence[Part]) -> list[F32]:
    """The parts in one step, over a cache that holds NaN wherever no position up to theirs lies."""
    s = parts[0].context.shape
    slots = 1 + max(int(part.context.slots().max()) for part in parts)
    keys = np.full((slots, s.kv_heads * s.key_dim), np.nan, np.float32)
    values = np.full((slots, s.kv_heads * s.value_dim), np.nan, np.float32)
    for part in parts:
        c = part.context
        own = slice(c.first, part.stop)
        keys[c.slots()[own]] = c.keys[own].reshape(-1, keys.shape[1])
        values[c.slots()[own]] = c.values[own].reshape(-1, values.shape[1])
    step = step_of(parts)
    q = np.concatenate([part.context.q[part.start : part.stop] for part in parts])
    selection = None
    if parts[0].context.selection is not None:
        chosen = [part.context.selection for part in parts]
        selection = np.concatenate(
            [each[part.start : part.stop] for each, part in zip(chosen, parts, strict=True)]  # type: ignore[index]
        )
    result = attention.attend(
        step,
        q,
        keys,
        keys if s.is_latent else values,
        s.kv_heads,
        s.value_dim,
        s.scale,
        s.window,
        selection,
    )
    return np.split(result, np.cumsum([part.stop - part.start for part in parts])[:-1])


def step_of(parts: Sequence[Part]) -> _native.StepContexts:
    rows, pages = [], []
    for part in parts:
        c = part.context
        rows.append((part.start, part.stop - part.start, c.first, c.page_tokens))
        pages.append(c.pages[: -(-part.stop // c.page_tokens)])
    return _native.StepContexts(np.array(rows, np.int64), np.concatenate(pages))


def assert_same_bits(got: F32, expected: F32) -> None:
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
