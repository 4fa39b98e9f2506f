"""Attention of a decode step over latents (MLA) on a GPU, against the card's memory and matrix units.

    python benchmarks/gpu/mla_decode.py

DeepSeek-V3.2's 128 heads over contexts of 1024 to 131072 tokens, all of them and 2048 selected ones, one
and two query rows. Each is verified against float64, then timed in a captured graph. Beside the time: the
bytes of the latents that it must read over a copy kernel's bandwidth of the same run, and the operations over
the rate of a large bf16 matrix product. The larger is the floor. One JSON line at the end.
"""

from __future__ import annotations

import json

import torch
from fp8_linear import copy_bytes_per_us, graph_us

from duckllm.bench.machine import commit
from duckllm.kernels.mla_decode import QueryRows, attend_latents

PAGE, HEADS, WIDTH, LATENT, TOPK, SCALE = 16, 128, 576, 512, 2048, 0.07
CONTEXTS = (1024, 8192, 32768, 131072)


def matmul_flop_per_us() -> float:
    """Operations of a bf16 matrix product on random numbers."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn_like(a)
    return 2 * 8192**3 / graph_us([lambda: a @ b])


def main() -> None:
    """Prints a line for each length, and one in JSON."""
    torch.manual_seed(0)
    bandwidth, rate = copy_bytes_per_us(), matmul_flop_per_us()
    card = torch.cuda.get_device_name()
    print(f"{card}: {bandwidth / 1e6:.2f} TB/s copied, {rate / 1e6:.0f} TFLOP/s bf16, commit {commit()}")
    result: dict[str, object] = {"benchmark": "gpu/mla_decode", "device": card, "commit": commit()}
    for length in CONTEXTS:
        num_pages = length // PAGE
        cache = torch.randn(length, WIDTH, device="cuda").bfloat16()
        pages = torch.randperm(num_pages, device="cuda").int().view(1, num_pages)
        for num_rows in (1, 2):
            q = torch.randn(num_rows, HEADS, WIDTH, device="cuda").bfloat16()
            contexts = torch.zeros(num_rows, device="cuda", dtype=torch.int32)
            for num_selected in (None, TOPK):
                if num_selected is not None and num_selected >= length:
                    continue
                seen = num_selected or length
                lengths = torch.full((num_rows,), seen, device="cuda", dtype=torch.int32)
                rows = QueryRows(pages, contexts, lengths, PAGE)
                chosen = [torch.randperm(length, device="cuda")[:seen].sort()[0] for _ in range(num_rows)]
                selection = torch.stack(chosen).int() if num_selected else None
                y = attend_latents(q, cache, rows, SCALE, selection)
                slots = pages[0].long()[chosen[0] // PAGE] * PAGE + chosen[0] % PAGE
                keys = cache[slots if num_selected else slice(None)].double()
                wanted = (q[0].double() @ keys.T * SCALE).softmax(-1) @ keys[:, :LATENT]
                assert (y[0] - wanted).norm() <= 4e-3 * wanted.norm(), "attention is wrong"
                times = graph_us([lambda: attend_latents(q, cache, rows, SCALE, selection)] * 4)  # noqa: B023
                # Rows of one context read its latents once; selections may differ.
                read_us = (num_rows if num_selected else 1) * seen * WIDTH * 2 / bandwidth
                compute_us = 2 * num_rows * HEADS * seen * (WIDTH + LATENT) / rate
                floor_us = max(read_us, compute_us)
                what = f"{length} tokens, {'all' if num_selected is None else num_selected}, {num_rows} rows"
                print(
                    f"  {what}: {times:.1f} us, bytes {read_us:.1f}, operations {compute_us:.1f}, "
                    f"{floor_us / times:.0%} of the floor",
                    flush=True,
                )
                result[what] = {"us": round(times, 2), "share": round(floor_us / times, 3)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
