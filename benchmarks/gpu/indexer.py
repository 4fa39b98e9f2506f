"""Selection of tokens by the indexer of sparse attention on a GPU, against the card's memory.

    python benchmarks/gpu/indexer.py

DeepSeek-V3.2's indexer (64 heads of 128 numbers, the 2048 best) over contexts of 8192 to 131072 tokens, one
and two rows. Each selection is verified against float64, then timed in a captured graph. The floor is the
bytes of the keys over a copy kernel's bandwidth of the same run; keys of a decode step's other layers would
have pushed these out of the L2 cache, so that several caches are read in turn. One JSON line at the end.
"""

from __future__ import annotations

import json

import torch
from fp8_linear import copy_bytes_per_us, graph_us
from mla_decode import step_rows

from duckllm.bench.machine import commit
from duckllm.kernels.indexer import select, store_index_keys
from duckllm.kernels.step_rows import PAGE_TOKENS

HEADS, WIDTH, ROPE, TOPK = 64, 128, 64, 2048
CONTEXTS = (2048, 8192, 32768, 131072)
CACHE_BYTES = 200_000_000


def main() -> None:
    """Prints a line for each length, and one in JSON."""
    torch.manual_seed(0)
    bandwidth, card = copy_bytes_per_us(), torch.cuda.get_device_name()
    print(f"{card}: {bandwidth / 1e6:.2f} TB/s copied, commit {commit()}")
    result: dict[str, object] = {"benchmark": "gpu/indexer", "device": card, "commit": commit()}
    norm = torch.ones(WIDTH, device="cuda")
    for length in CONTEXTS:
        num_bytes = length * WIDTH * 2
        copies = min(20, CACHE_BYTES // num_bytes)
        caches = [torch.randn(length, WIDTH, device="cuda").bfloat16() for _ in range(copies)]
        for num_rows in (1, 2):
            rows = step_rows(num_rows, length)
            q = torch.randn(num_rows, HEADS * WIDTH, device="cuda")
            weights = torch.randn(num_rows, HEADS, device="cuda")
            plain = type(rows)(
                rows.positions, rows.contexts, rows.firsts, rows.slots, rows.pages,
                torch.ones_like(rows.cos), torch.zeros_like(rows.sin),
            )  # fmt: skip
            chosen = select(q, weights, ROPE, False, plain, caches[0], TOPK)
            at = torch.arange(length, device="cuda")
            keys = caches[0][rows.pages[0].long()[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS]
            heads = q[0].view(HEADS, WIDTH).bfloat16().double()
            scores = (heads @ keys.double().T).relu().T @ weights[0].double()
            last = scores.sort(descending=True)[0][TOPK - 1]
            mine = scores[chosen.positions[0].long()]
            assert len(chosen.positions[0].unique()) == TOPK, "the selection is wrong"
            assert mine.min() >= last - 1e-2, "the selection is wrong"
            times = graph_us(
                [lambda c=c: select(q, weights, ROPE, False, rows, c, TOPK) for c in caches]  # noqa: B023
            )
            k = torch.randn(num_rows, WIDTH, device="cuda")
            store = graph_us(
                [lambda: store_index_keys(k, norm, norm, 1e-6, ROPE, False, rows, caches[0])] * 20  # noqa: B023
            )
            floor_us = num_bytes / bandwidth
            what = f"{length} tokens, {num_rows} rows"
            print(
                f"  {what}: select {times:.1f} us, bytes {floor_us:.1f} ({floor_us / times:.0%}), "
                f"store {store:.1f} us",
                flush=True,
            )
            result[what] = {"us": round(times, 2), "share": round(floor_us / times, 3)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
