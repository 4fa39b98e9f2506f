"""Grouped-query attention on a GPU: values against float64, and a row's bits in any company."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

pytestmark = pytest.mark.gpu
gqa = pytest.importorskip("duckllm.kernels.gqa", reason="needs Triton and an NVIDIA GPU")
step_rows = pytest.importorskip("duckllm.kernels.step_rows")

DEVICE, BF16 = "cuda", torch.bfloat16
PAGE, NAN = 16, float("nan")
# What an output may be off by, of its values' absolute sum: weights are rounded to the cache's type.
UNITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-18}


@dataclass(frozen=True)
class Shape:
    """Of an attention."""

    heads: int = 8
    kv_heads: int = 2
    dim: int = 128
    window: int | None = None
    dtype: torch.dtype = BF16


def ints(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


@dataclass
class Step:
    """Rows, each (context, position), over a cache of which nothing is finite but what its contexts hold."""

    shape: Shape
    rows: step_rows.StepRows
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def attend(self) -> torch.Tensor:
        """What the kernels give; both forms of it are the same."""
        s = self.shape
        y = gqa.attend_heads(self.q, self.keys, self.values, self.rows, s.kv_heads, s.window)
        num_rows, width = y.values.shape
        assert (num_rows, width) == (len(self.q), s.heads * s.dim)
        assert y.values.isfinite().all()
        half, wide = y.half, -(-width // 128) * 128
        assert half.num_rows == num_rows
        factors = half.factors[:, :num_rows].T
        mantissas, _ = factors.frexp()
        assert (mantissas == 0.5).all()
        values = half.values[:num_rows].float() * factors.repeat_interleave(128, 1)[:, :width]
        blocks = torch.nn.functional.pad(y.values, (0, wide - width)).view(num_rows, -1, 128)
        largest = blocks.abs().amax(2).repeat_interleave(128, 1)[:, :width]
        assert half.values[:num_rows].abs().max() <= 256
        assert ((values - y.values).abs() <= 2.0**-11 * y.values.abs() + 2.0**-32 * largest).all()
        return y.values

    def check(self) -> None:
        """Each row against float64, within what the weights' rounding explains."""
        y, s, r = self.attend(), self.shape, self.rows
        for row in range(len(self.q)):
            position, first = int(r.positions[row]), int(r.firsts[row])
            if int(r.slots[row]) < 0:
                assert (y[row] == 0).all()
                continue
            first = max(first, position - s.window + 1) if s.window else first
            seen = torch.arange(first, position + 1, device=DEVICE)
            at = r.pages[r.contexts[row]].long()[seen // PAGE] * PAGE + seen % PAGE
            keys, values = (
                x[at].double().view(len(seen), s.kv_heads, s.dim).repeat_interleave(s.heads // s.kv_heads, 1)
                for x in (self.keys, self.values)
            )
            weights = torch.einsum("hd,thd->ht", self.q[row].double(), keys).softmax(1)
            wanted, sizes = (torch.einsum("ht,thd->hd", weights, x).flatten() for x in (values, values.abs()))
            assert ((y[row].double() - wanted).abs() <= UNITS[s.dtype] * sizes).all()

    def of(self, chosen: Sequence[int]) -> Step:
        """Some of the rows, as a step of their own."""
        r, at = self.rows, torch.tensor(chosen, device=DEVICE)
        some = {name: getattr(r, name)[at] for name in ("positions", "contexts", "firsts", "slots")}
        return replace(self, q=self.q[at], rows=replace(r, **some, spans=()))


def made_up(
    shape: Shape,
    rows: Sequence[tuple[int, int]],
    firsts: Sequence[int] = (0, 0, 0, 0),
    spans: tuple[tuple[int, int], ...] = (),
) -> Step:
    """Contexts up to the last position that a row has, in pages that lie anywhere."""
    torch.manual_seed(len(rows))
    num_contexts, width = len(firsts), shape.kv_heads * shape.dim
    num_pages = max(position for _, position in rows) // PAGE + 1
    pages = torch.randperm(num_contexts * num_pages).int().view(num_contexts, num_pages).to(DEVICE)
    keys, values = (
        torch.full((num_contexts * num_pages * PAGE, width), NAN, dtype=shape.dtype) for _ in "kv"
    )
    keys, values = keys.to(DEVICE), values.to(DEVICE)
    for context, first in enumerate(firsts):
        longest = max((position + 1 for c, position in rows if c == context), default=0)
        there = torch.arange(first, longest, device=DEVICE)
        at = pages[context].long()[there // PAGE] * PAGE + there % PAGE
        for x in (keys, values):
            x[at] = torch.randn(len(there), width, device=DEVICE).to(shape.dtype)
    of_row, position = ints([context for context, _ in rows]), ints([position for _, position in rows])
    slots = pages[of_row.long(), position.long() // PAGE] * PAGE + position % PAGE
    angles = torch.rand(16, 2, device=DEVICE)
    step = step_rows.StepRows(
        position, of_row, ints(firsts)[of_row.long()], slots, pages, angles.cos(), angles.sin(), spans
    )
    q = torch.randn(len(rows), shape.heads, shape.dim, device=DEVICE) * 2 / math.sqrt(shape.dim)
    return Step(shape, step, q.to(shape.dtype), keys, values)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(32, 4),
        Shape(3, 3, 64),
        Shape(10, 2, 80),
        Shape(17, 1, 16),
        Shape(4, 2, 256),
        Shape(96, 1, 8),
        Shape(6, 2, 40, dtype=torch.float16),
        Shape(6, 2, 200, dtype=torch.float32),
    ],
)
@pytest.mark.parametrize(
    "lengths", [[1], [15, 16, 17], [65, 64, 63], [129, 127, 128], [4097, 4096, 900], [2049, 2048, 8193]]
)
def test_rows_are_those_of_float64(shape: Shape, lengths: list[int]) -> None:
    made_up(shape, [(context, length - 1) for context, length in enumerate(lengths)]).check()


@pytest.mark.parametrize("window", [None, 1, 16, 70])
def test_windows_and_first_positions(window: int | None) -> None:
    rows = [(0, 100), (0, 5), (1, 37), (1, 170), (2, 64), (2, 200)]
    made_up(Shape(window=window), rows, firsts=(3, 37, 64)).check()


def test_a_row_sees_nothing_of_later_ones() -> None:
    """Rows of one context in one step: what is behind a row's position may be anything."""
    step = made_up(Shape(), [(0, position) for position in (40, 41, 42)])
    before = step.attend()
    for x in (step.keys, step.values):
        x[step.rows.slots[1:].long()] = NAN
    assert torch.equal(step.of([0]).attend()[0], before[0])


def test_rows_that_are_nobodys_give_zeros() -> None:
    step = made_up(Shape(), [(0, 40), (1, 3), (0, 41)])
    wanted = step.attend()
    step.rows.slots[1] = -1
    step.q[1] = NAN
    y = step.attend()
    assert (y[1] == 0).all()
    assert torch.equal(y[[0, 2]], wanted[[0, 2]])


def test_a_row_has_the_same_bits_in_any_company() -> None:
    rows = [(row % 4, 37 * row % 600) for row in range(64)]
    step = made_up(Shape(), rows, firsts=(0, 0, 2, 0))
    together = step.attend()
    for chosen in ([63], [5, 6, 9], list(range(20, 37))):
        assert torch.equal(step.of(chosen).attend(), together[chosen])


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(32, 4),
        Shape(3, 3, 64),
        Shape(10, 2, 80),
        Shape(96, 1, 16),
        Shape(4, 2, 256),
        Shape(8, 2, window=20),
        Shape(8, 2, window=150),
        Shape(6, 2, 40, dtype=torch.float16),
        Shape(6, 2, 200, dtype=torch.float32),
    ],
)
def test_runs_of_rows_are_those_of_float64(shape: Shape) -> None:
    """A prompt's beginning, one's middle, a few rows, a single one, and rows that no span has."""
    runs = [(0, 0, 130), (1, 200, 75), (2, 90, 9), (3, 333, 1)]
    rows = [(context, first + i) for context, first, count in runs for i in range(count)]
    spans = tuple((sum(run[2] for run in runs[:i]), runs[i][2]) for i in range(len(runs)))
    step = made_up(shape, [*rows, (0, 7), (0, 7)], firsts=(0, 70, 0, 5), spans=spans)
    step.rows.slots[-1] = -1
    step.check()


def test_a_prompt_in_chunks_is_the_whole_one() -> None:
    rows = [(0, position) for position in range(400)]
    whole = made_up(Shape(), rows, spans=((0, 400),))
    y, unit = whole.attend().double(), UNITS[BF16] * whole.values.nan_to_num().abs().max()
    for first, last in ((0, 100), (100, 170), (170, 400)):
        chunk = whole.of(range(first, last))
        for x in (chunk.keys, chunk.values):  # later tokens are not there yet
            x = x.clone()
            x[whole.rows.slots[last:].long()] = NAN
        chunk = replace(chunk, rows=replace(chunk.rows, spans=((0, last - first),)))
        assert ((chunk.attend() - y[first:last]).abs() <= unit).all()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The first numbers of each head, the first half against the second."""
    half = cos.shape[1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


@pytest.mark.parametrize("num_rows", [1, 5, 70])
@pytest.mark.parametrize("norms", ["none", "both", "queries", "keys"])
@pytest.mark.parametrize(
    ("shape", "rotary_dim"),
    [
        (Shape(32, 4), 128),
        (Shape(6, 2, 80), 40),
        (Shape(3, 1, 200, dtype=torch.float32), 2),
        (Shape(5, 5, 24, dtype=torch.float16), 0),
        (Shape(16, 1, 256, dtype=torch.float32), 256),
    ],
)
def test_heads_are_normed_rotated_and_stored(
    shape: Shape, rotary_dim: int, norms: str, num_rows: int
) -> None:
    torch.manual_seed(num_rows)
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.dim
    qkv = torch.randn(num_rows, (heads + 2 * kv_heads) * dim, device=DEVICE) * 3
    q_norm, k_norm = torch.rand(2, dim, device=DEVICE)
    of_queries, of_keys = norms in ("both", "queries"), norms in ("both", "keys")
    angles = torch.rand(90, rotary_dim // 2, device=DEVICE) * 6
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(0, 90, (num_rows,), device=DEVICE).int()
    slots = torch.randperm(100, device=DEVICE)[:num_rows].int()
    slots[num_rows // 2 :: 3] = -1
    none = ints([0])
    rows = step_rows.StepRows(positions, none, none, slots, none, cos, sin)
    keys, values = (torch.full((100, kv_heads * dim), NAN, device=DEVICE).to(shape.dtype) for _ in "kv")
    q = gqa.store_heads(
        qkv, heads, kv_heads, q_norm if of_queries else None, k_norm if of_keys else None, 1e-5, rotary_dim,
        0.3, rows, keys, values,
    )  # fmt: skip

    x = qkv.double().view(num_rows, -1, dim)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    parts = [normed * q_norm if of_queries else x, normed * k_norm if of_keys else x]
    at = positions.long()
    wanted_q, wanted_k = (rotated(part, cos[at].double(), sin[at].double()) for part in parts)
    wanted_q, wanted_k = wanted_q[:, :heads] * 0.3, wanted_k[:, heads : heads + kv_heads]
    unit = {BF16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-21}[shape.dtype]
    is_stored, stored = slots >= 0, slots[slots >= 0].long()
    close = {"rtol": unit, "atol": 1e-6 * float(x.abs().max())}
    torch.testing.assert_close(q.double(), wanted_q, **close)
    torch.testing.assert_close(keys[stored].double(), wanted_k[is_stored].flatten(1), **close)
    torch.testing.assert_close(values[stored], qkv[is_stored][:, -kv_heads * dim :].to(shape.dtype))
    elsewhere = torch.ones(100, dtype=torch.bool, device=DEVICE)
    elsewhere[stored] = False
    assert keys[elsewhere].isnan().all()
    assert values[elsewhere].isnan().all()


def test_heads_of_a_row_have_the_same_bits_in_any_company() -> None:
    torch.manual_seed(0)
    qkv, norm = torch.randn(64, 40 * 128, device=DEVICE), torch.rand(128, device=DEVICE)
    angles = torch.rand(64, 64, device=DEVICE)
    numbers = torch.arange(64, device=DEVICE, dtype=torch.int32)

    def store(chosen: list[int]) -> list[torch.Tensor]:
        at = numbers[chosen]
        rows = step_rows.StepRows(at, at, at, at, at, angles.cos(), angles.sin())
        keys, values = (torch.zeros(64, 512, device=DEVICE).to(BF16) for _ in "kv")
        q = gqa.store_heads(qkv[chosen], 32, 4, norm, norm, 1e-6, 128, 0.1, rows, keys, values)
        return [q, keys[chosen], values[chosen]]

    together = store(list(range(64)))
    for chosen in ([63], [5, 6, 9], list(range(20, 37))):
        for alone, wanted in zip(store(chosen), together, strict=True):
            assert torch.equal(alone, wanted[chosen])
