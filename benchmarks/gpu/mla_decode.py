"""Attention of a decode step over latents (MLA) on a GPU, against the card's memory and matrix units.

    python benchmarks/gpu/mla_decode.py

DeepSeek-V3.2's 128 heads over contexts of 1024 to 131072 tokens, all of them and 2048 selected ones, one
and two query rows. Each is verified against float64, then timed in a captured graph. Beside the time: the
bytes of the latents that it must read over a copy kernel's bandwidth of the same run, and the operations over
the rate of a large bf16 matrix product. The larger is the floor. The products with the up-projections before
and after, in FP8, are timed over weights that are larger than the L2 cache. One JSON line at the end.
"""

from __future__ import annotations

import json

import torch
from fp8_linear import copy_bytes_per_us, graph_us

from duckllm.bench.machine import commit
from duckllm.kernels.indexer import Selection
from duckllm.kernels.mla_decode import attend_latents
from duckllm.kernels.mla_rows import HeadWeights, absorb, raise_values, store_latents
from duckllm.kernels.step_rows import PAGE_TOKENS, StepRows

HEADS, NOPE, ROPE, LATENT, TOPK, SCALE = 128, 128, 64, 512, 2048, 0.07
WIDTH = LATENT + ROPE
CONTEXTS = (1024, 8192, 32768, 131072)
NUM_WEIGHTS = 12  # of 8 MB, twice


def matmul_flop_per_us() -> float:
    """Operations of a bf16 matrix product on random numbers."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn_like(a)
    return 2 * 8192**3 / graph_us([lambda: a @ b])


def step_rows(num_rows: int, length: int) -> StepRows:
    """Rows that see all of one context, whose pages lie anywhere."""
    num_pages = length // PAGE_TOKENS
    last = torch.full((num_rows,), length - 1, device="cuda", dtype=torch.int32)
    angles = torch.rand(length, ROPE // 2, device="cuda") * 6
    zeros = torch.zeros_like(last)
    pages = torch.randperm(num_pages, device="cuda").int().view(1, num_pages)
    return StepRows(last, zeros, zeros, zeros, pages, angles.cos(), angles.sin())


def measure_attention(bandwidth: float, rate: float) -> dict[str, object]:
    """Prints a line for each length."""
    result: dict[str, object] = {}
    for length in CONTEXTS:
        cache = torch.randn(length, WIDTH, device="cuda").bfloat16()
        for num_rows in (1, 2):
            q = torch.randn(num_rows, HEADS, WIDTH, device="cuda").bfloat16()
            rows = step_rows(num_rows, length)
            for num_selected in (None, TOPK):
                if num_selected is not None and num_selected >= length:
                    continue
                seen = num_selected or length
                chosen = [torch.randperm(length, device="cuda")[:seen].sort()[0] for _ in range(num_rows)]
                counts = torch.full_like(rows.positions, seen)
                selection = Selection(torch.stack(chosen).int(), counts) if num_selected else None
                is_short = selection is not None or length <= 2048
                y = attend_latents(q, cache, rows, SCALE, LATENT, selection, is_short)
                slots = rows.pages[0].long()[chosen[0] // PAGE_TOKENS] * PAGE_TOKENS + chosen[0] % PAGE_TOKENS
                keys = cache[slots].double()
                wanted = (q[0].double() @ keys.T * SCALE).softmax(-1) @ keys[:, :LATENT]
                assert (y[0] - wanted).norm() <= 4e-3 * wanted.norm(), "attention is wrong"
                call = lambda: attend_latents(q, cache, rows, SCALE, LATENT, selection, is_short)  # noqa: B023, E731
                times = graph_us([call] * 4)
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
    return result


def measure_products(bandwidth: float) -> dict[str, object]:
    """Prints a line for each number of rows."""
    result: dict[str, object] = {}
    shape = (HEADS * 2 * NOPE, LATENT)
    both = []
    for _ in range(NUM_WEIGHTS):
        codes = torch.randint(0, 120, shape, dtype=torch.uint8, device="cuda")
        scales = torch.rand(shape[0] // 128, shape[1] // 128, device="cuda")
        both.append([HeadWeights.stored(codes, scales, HEADS, first, NOPE) for first in (0, NOPE)])
    floor_us = HEADS * NOPE * LATENT / bandwidth
    for num_rows in (1, 2, 8, 16):
        rows = step_rows(num_rows, 1024)
        heads = torch.randn(num_rows, HEADS * (NOPE + ROPE), device="cuda")
        context = torch.randn(num_rows, HEADS, LATENT, device="cuda")
        kv, norm = torch.randn(num_rows, WIDTH, device="cuda"), torch.ones(LATENT, device="cuda")
        cache = torch.zeros(1024, WIDTH, device="cuda", dtype=torch.bfloat16)
        times = {
            "absorb": graph_us([lambda w=w: absorb(heads, w[0], True, rows, torch.bfloat16) for w in both]),  # noqa: B023
            "raise": graph_us([lambda w=w: raise_values(context, w[1]) for w in both]),  # noqa: B023
            "store": graph_us([lambda: store_latents(kv, norm, 1e-6, True, rows, cache)] * 20),  # noqa: B023
        }
        print(
            f"  {num_rows} rows: "
            + ", ".join(f"{name} {us:.1f} us" for name, us in times.items())
            + f", bytes of absorb and of raise {floor_us:.1f} each",
            flush=True,
        )
        result[f"products, {num_rows} rows"] = {name: round(us, 2) for name, us in times.items()}
    return result


def main() -> None:
    """Prints all times, and one line in JSON."""
    torch.manual_seed(0)
    bandwidth, rate = copy_bytes_per_us(), matmul_flop_per_us()
    card = torch.cuda.get_device_name()
    print(f"{card}: {bandwidth / 1e6:.2f} TB/s copied, {rate / 1e6:.0f} TFLOP/s bf16, commit {commit()}")
    result: dict[str, object] = {"benchmark": "gpu/mla_decode", "device": card, "commit": commit()}
    result.update(measure_products(bandwidth))
    result.update(measure_attention(bandwidth, rate))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
