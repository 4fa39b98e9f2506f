"""Grouped-query attention against a scalar twin, and what it reads of the cache."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from duckllm.layers.cpu_runtime import CpuRuntime
from duckllm.layers.gqa import GQAShape, GQAttention
from duckllm.layers.rope import RotaryTable
from duckllm.layers.step import SequenceStep, StepContext
from support.experts import DictTensors

SHAPE = GQAShape(
    hidden_size=12,
    num_heads=6,
    num_kv_heads=2,
    head_dim=6,
    rotary_dim=4,
    scaling=0.4,
    qkv_bias=True,
    o_bias=True,
    qk_norm_eps=1e-6,
    sliding_window=None,
)
NUM_TOKENS = 11
INV_FREQ = torch.tensor([1.0, 0.3])


def make_tensors(shape: GQAShape) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": shape.hidden_size}
    tensors = {}
    for name, size in sizes.items():
        inputs = queries if name == "o_proj" else shape.hidden_size
        tensors[f"a.{name}.weight"] = torch.randn(size, inputs, generator=generator)
        tensors[f"a.{name}.bias"] = torch.randn(size, generator=generator)
    for name in ("q_norm", "k_norm"):
        tensors[f"a.{name}.weight"] = 1 + 0.3 * torch.randn(shape.head_dim, generator=generator)
    return tensors


def make_layer(shape: GQAShape) -> GQAttention:
    runtime = CpuRuntime.new(shape.max_in_features, 1)
    return GQAttention(DictTensors(make_tensors(shape)), "a", shape, runtime)


def inputs() -> torch.Tensor:
    return torch.randn(NUM_TOKENS, SHAPE.hidden_size, generator=torch.Generator().manual_seed(1))


def run(layer: GQAttention, x: torch.Tensor, step_tokens: int) -> torch.Tensor:
    cache = tuple(torch.full((NUM_TOKENS, width), torch.nan) for width in layer.shape.cache_widths)
    table = RotaryTable(INV_FREQ, 1.0, NUM_TOKENS)
    outputs = []
    for start in range(0, len(x), step_tokens):
        rows = x[start : start + step_tokens]
        sequences = [SequenceStep.of(0, start, len(rows))]
        step = StepContext(sequences, *table.rows(torch.arange(start, start + len(rows))))
        outputs.append(layer(rows, step, cache))
    return torch.cat(outputs)


def scalar_twin(shape: GQAShape, x: torch.Tensor) -> torch.Tensor:
    """One query head of one token at a time, in float64."""
    tensors = {name: tensor.double() for name, tensor in make_tensors(shape).items()}

    def heads(name: str, norm: str | None) -> torch.Tensor:
        y = x.double() @ tensors[f"a.{name}.weight"].T + tensors[f"a.{name}.bias"]
        y = y.view(len(x), -1, shape.head_dim)
        if norm is None:
            return y
        y = y / (y.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * tensors[f"a.{norm}.weight"]
        for t in range(len(x)):
            for pair, frequency in enumerate(INV_FREQ.tolist()):
                a, b = y[t, :, pair].clone(), y[t, :, pair + 2].clone()
                cos, sin = math.cos(t * frequency), math.sin(t * frequency)
                y[t, :, pair], y[t, :, pair + 2] = a * cos - b * sin, b * cos + a * sin
        return y

    q, k, v = heads("q_proj", "q_norm"), heads("k_proj", "k_norm"), heads("v_proj", None)
    group = shape.num_heads // shape.num_kv_heads
    window = shape.sliding_window or len(x)
    result = torch.zeros(len(x), shape.num_heads, shape.head_dim, dtype=torch.float64)
    for t in range(len(x)):
        for head in range(shape.num_heads):
            seen = range(max(0, t - window + 1), t + 1)
            scores = [math.exp(shape.scaling * float(q[t, head] @ k[s, head // group])) for s in seen]
            for s, score in zip(seen, scores, strict=True):
                result[t, head] += score / sum(scores) * v[s, head // group]
    return result.flatten(1) @ tensors["a.o_proj.weight"].T + tensors["a.o_proj.bias"]


@pytest.mark.parametrize("window", [None, 1, 4, 20])
@pytest.mark.parametrize("step_tokens", [NUM_TOKENS, 3, 1])
def test_equals_the_scalar_twin(window: int | None, step_tokens: int) -> None:
    shape = replace(SHAPE, sliding_window=window)
    got = run(make_layer(shape), inputs(), step_tokens)
    torch.testing.assert_close(got, scalar_twin(shape, inputs()).float(), rtol=1e-4, atol=1e-5)


def test_a_window_leaves_older_keys_unread() -> None:
    layer = make_layer(replace(SHAPE, sliding_window=4))
    cache = tuple(torch.full((NUM_TOKENS, width), torch.nan) for width in layer.shape.cache_widths)
    for tensor in cache:
        tensor[7:10] = 0.5
    step = StepContext(
        [SequenceStep.of(0, 10, 1)], *RotaryTable(INV_FREQ, 1.0, NUM_TOKENS).rows(torch.tensor([10]))
    )
    assert torch.isfinite(layer(inputs()[:1], step, cache)).all()
    for tensor in cache:
        tensor[7] = torch.nan
    assert torch.isnan(layer(inputs()[:1], step, cache)).all()


@pytest.mark.parametrize("window", [None, 4])
def test_contexts_of_one_step_lie_anywhere_in_the_cache(window: int | None) -> None:
    """Two contexts, of which one's pages lie backwards, and the step's last tokens come together."""
    shape = replace(SHAPE, sliding_window=window)
    layer, x, table = make_layer(shape), inputs(), RotaryTable(INV_FREQ, 1.0, NUM_TOKENS)
    cache = tuple(torch.full((2 * NUM_TOKENS + 2, width), torch.nan) for width in shape.cache_widths)
    pages = np.array([7, 6, 5, 4], np.int32)
    for start, count in ((0, 6), (6, 5)):
        rows = x[start : start + count]
        sequences = [
            SequenceStep.of(0, start, count),
            SequenceStep.of(count, start, count, pages[: -(-(start + count) // 3)], 3),
        ]
        positions = torch.arange(start, start + count).repeat(2)
        got = layer(torch.cat((rows, 2 * rows)), StepContext(sequences, *table.rows(positions)), cache)
        for context, output in zip((x, 2 * x), got.chunk(2), strict=True):
            expected = scalar_twin(shape, context)[start : start + count].float()
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_the_cache_holds_keys_and_values() -> None:
    assert SHAPE.cache_widths == (12, 12)
    assert SHAPE.max_in_features == 36
