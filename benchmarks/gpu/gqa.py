"""Grouped-query attention on a GPU, against the card's memory and against torch's attention.

    python benchmarks/gpu/gqa.py

Qwen3-30B-A3B's shape: 32 heads, 4 of keys, 128 numbers each, bf16. Decode steps of 1, 2 and 4 rows, each of
a context of its own of 1024, 8192 or 32768 tokens: verified against float64, then timed in a captured graph
over layers in turn, whose caches together are far larger than the L2 cache. The floor is the bytes of keys
and values over a copy kernel's bandwidth of the same run. Beside it the time to norm, rotate and store heads.

A prompt of 2048 tokens: time and error of ours, which reads pages, and of scaled_dot_product_attention on
keys and values that were gathered before, and the time to gather them. One JSON line at the end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import torch
from fp8_linear import copy_bytes_per_us, graph_us

from duckllm.bench.machine import commit
from duckllm.kernels.gqa import attend_heads, store_heads
from duckllm.kernels.step_rows import PAGE_TOKENS, StepRows

HEADS, KV_HEADS, DIM, THETA, EPS = 32, 4, 128, 1e6, 1e-6
GROUP, WIDTH = HEADS // KV_HEADS, KV_HEADS * DIM
CONTEXTS, ROWS, PROMPT = (1024, 8192, 32768), (1, 2, 4), 2048
EAGER_CALLS = 50
CACHE_TOKENS = 16 * 32768  # a GB of keys and values: several times the L2 cache, in some layers


def angles() -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of all positions."""
    frequencies = THETA ** (-torch.arange(DIM // 2, device="cuda") * 2 / DIM)
    turned = torch.arange(32768, device="cuda")[:, None] * frequencies
    return turned.cos(), turned.sin()


def step_of(pages: torch.Tensor, positions: list[int], contexts: list[int]) -> StepRows:
    """Rows at positions of contexts."""
    at, context = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (positions, contexts))
    slots = pages[context.long(), at.long() // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS
    spans = ((0, len(positions)),) if len(positions) == PROMPT else ()
    return StepRows(at, context, torch.zeros_like(at), slots, pages, *angles(), spans)


def attended(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: StepRows, row: int
) -> torch.Tensor:
    """A row's result in float64."""
    seen = torch.arange(int(rows.positions[row]) + 1, device="cuda")
    at = rows.pages[rows.contexts[row]].long()[seen // PAGE_TOKENS] * PAGE_TOKENS + seen % PAGE_TOKENS
    k, v = (x[at].double().view(-1, KV_HEADS, DIM).repeat_interleave(GROUP, 1) for x in (keys, values))
    weights = torch.einsum("hd,thd->ht", q[row].double(), k).softmax(1)
    return torch.einsum("ht,thd->hd", weights, v).flatten()


def eager_us(call: Callable[[], object]) -> float:
    """Mean time of one of many calls in a row, microseconds: a prompt's step is not captured."""
    for _ in range(3):
        call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(EAGER_CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return 1000 * start.elapsed_time(end) / EAGER_CALLS


def measure_decode(
    keys: torch.Tensor, values: torch.Tensor, length: int, num_rows: int, bandwidth: float
) -> dict[str, float]:
    """Microseconds of a step, and its share of the floor."""
    tokens = num_rows * length
    pages = torch.randperm(tokens // PAGE_TOKENS, device="cuda").int().view(num_rows, -1)
    step = step_of(pages, [length - 1] * num_rows, list(range(num_rows)))
    layers = [
        (keys[at : at + tokens], values[at : at + tokens]) for at in range(0, len(keys) - tokens + 1, tokens)
    ]
    q = (torch.randn(num_rows, HEADS, DIM, device="cuda") * 2 / math.sqrt(DIM)).bfloat16()
    y = attend_heads(q, *layers[0], step, KV_HEADS, None).values
    wanted = attended(q, *layers[0], step, num_rows - 1)
    assert (y[-1] - wanted).norm() <= 4e-3 * wanted.norm(), "attention is wrong"
    us = graph_us([lambda cache=cache: attend_heads(q, *cache, step, KV_HEADS, None) for cache in layers])
    floor_us = num_rows * length * 2 * WIDTH * keys.element_size() / bandwidth
    print(
        f"  {length} tokens, {num_rows} rows: {us:.2f} us, bytes {floor_us:.2f}, "
        f"{floor_us / us:.0%} of the floor",
        flush=True,
    )
    return {"us": round(us, 2), "share": round(floor_us / us, 3)}


def measure_store(keys: torch.Tensor, values: torch.Tensor, num_rows: int) -> float:
    """Microseconds to norm, rotate and store a step's heads."""
    pages = torch.randperm(CACHE_TOKENS // PAGE_TOKENS, device="cuda").int()[None]
    step = step_of(pages, list(range(num_rows)), [0] * num_rows)
    qkv, norm = torch.randn(num_rows, HEADS * DIM + 2 * WIDTH, device="cuda"), torch.ones(DIM, device="cuda")
    us = graph_us(
        [lambda: store_heads(qkv, HEADS, KV_HEADS, norm, norm, EPS, DIM, DIM**-0.5, step, keys, values)] * 20
    )
    print(f"  heads of {num_rows} rows normed, rotated and stored: {us:.2f} us")
    return round(us, 2)


def measure_prefill(keys: torch.Tensor, values: torch.Tensor) -> dict[str, float]:
    """Microseconds and errors of a prompt's attention: ours, and torch's on gathered keys."""
    pages = torch.randperm(CACHE_TOKENS // PAGE_TOKENS, device="cuda").int()[None]
    step = step_of(pages, list(range(PROMPT)), [0] * PROMPT)
    q = (torch.randn(PROMPT, HEADS, DIM, device="cuda") * 2 / math.sqrt(DIM)).bfloat16()
    at = step.slots.long()

    def gather() -> list[torch.Tensor]:
        return [x[at].view(PROMPT, KV_HEADS, DIM).transpose(0, 1)[None] for x in (keys, values)]

    def ours() -> torch.Tensor:
        return attend_heads(q, keys, values, step, KV_HEADS, None).values

    gathered = gather()
    queries = q.transpose(0, 1)[None]

    def sdpa() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            queries, *gathered, is_causal=True, scale=1.0, enable_gqa=True
        )

    wanted = torch.stack([attended(q, keys, values, step, row) for row in range(0, PROMPT, 37)])
    y = {"ours": ours()[::37], "sdpa": sdpa()[0].transpose(0, 1).flatten(1)[::37]}
    errors = {name: float((x - wanted).norm() / wanted.norm()) for name, x in y.items()}
    assert errors["ours"] <= 4e-3, "attention is wrong"
    times = {"ours": eager_us(ours), "sdpa": eager_us(sdpa), "gather": eager_us(gather)}
    flops = 2 * 2 * HEADS * DIM * PROMPT * (PROMPT + 1) / 2
    for name in errors:
        rate = flops / times[name] / 1e6
        print(
            f"  prompt of {PROMPT}, {name}: {times[name]:.1f} us, {rate:.0f} TFLOP/s, "
            f"error {errors[name]:.1e}"
        )
    print(f"  keys and values gathered for sdpa: {times['gather']:.1f} us")
    result = {f"{name}_us": round(us, 1) for name, us in times.items()}
    return result | {f"{name}_error": round(error, 6) for name, error in errors.items()}


def main() -> None:
    """Prints a line for each step, and one in JSON."""
    torch.manual_seed(0)
    bandwidth, card = copy_bytes_per_us(), torch.cuda.get_device_name()
    print(f"{card}: a copy kernel moves {bandwidth / 1e6:.2f} TB/s, commit {commit()}")
    keys, values = (torch.randn(CACHE_TOKENS, WIDTH, device="cuda").bfloat16() for _ in range(2))
    result: dict[str, object] = {"benchmark": "gpu/gqa", "device": card, "commit": commit()}
    result["copy_tb_per_s"] = round(bandwidth / 1e6, 3)
    for length in CONTEXTS:
        for num_rows in ROWS:
            measured = measure_decode(keys, values, length, num_rows, bandwidth)
            result[f"{length} tokens, {num_rows} rows"] = measured
    result["store_us"] = {num_rows: measure_store(keys, values, num_rows) for num_rows in (1, 4, PROMPT)}
    result["prefill"] = measure_prefill(keys, values)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
