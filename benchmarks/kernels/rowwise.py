"""Norms, gated activations and routers: the native ones beside the PyTorch code that they replaced.

    python benchmarks/kernels/rowwise.py [--rows 1 256] [--threads 2] [--repeats 41]

Each is called as a layer calls it, with a tensor in and a tensor out, on values that stay in the caches. The
program verifies that both ways agree, then measures them in turns, each sample a number of calls that takes
about a millisecond, and prints the medians in microseconds and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from duckllm import _native
from duckllm.bench.machine import commit, cpu_name
from duckllm.config import available_cores
from duckllm.layers.cpu_runtime import CpuRuntime
from duckllm.layers.cpu_weights import PackedWeight

SAMPLE_S = 1e-3
Way = Callable[[], object]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--repeats", type=int, default=41, help="rounds, for medians")
    return parser.parse_args()


def norm(num_rows: int, size: int) -> tuple[Way, Way]:
    x, weight = torch.randn(num_rows, size), torch.randn(size)
    floor, array = torch.tensor(1e-3 * size**0.5), (weight / size**0.5).numpy()

    def old() -> torch.Tensor:
        return x * weight / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), floor)

    return old, lambda: torch.from_numpy(_native.rms_norm(x.numpy(), array, 1e-6))


def silu_mul(num_rows: int, size: int) -> tuple[Way, Way]:
    gate_up = torch.randn(num_rows, 2 * size)

    def old() -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    return old, lambda: torch.from_numpy(_native.silu_mul(gate_up.numpy()))


def choose(scores: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    topk_ids = choice.argsort(dim=-1, descending=True, stable=True)[:, :8]
    topk_weights = scores.gather(1, topk_ids)
    topk_weights /= topk_weights.sum(dim=-1, keepdim=True)
    return topk_weights * 2.5


def sigmoid_route(num_rows: int, num_experts: int) -> tuple[Way, Way]:
    """DeepSeek-V3's routing: the best 4 of 8 groups."""
    logits, bias = torch.randn(num_rows, num_experts), torch.randn(num_experts) / 10
    array = bias.numpy()

    def old() -> torch.Tensor:
        scores = logits.sigmoid()
        choice = scores + bias
        grouped = choice.view(num_rows, 8, -1)
        group_scores = grouped.topk(2, dim=-1).values.sum(dim=-1)
        penalty = torch.full_like(group_scores, -torch.inf)
        groups = group_scores.argsort(dim=-1, descending=True, stable=True)[:, :4]
        return choose(scores, (grouped + penalty.scatter_(1, groups, 0.0)[..., None]).view_as(choice))

    def new() -> torch.Tensor:
        ids, weights = _native.route_by_sigmoid(logits.numpy(), array, 8, 8, 4, True, 2.5)
        torch.from_numpy(ids)
        return torch.from_numpy(weights)

    return old, new


def softmax_route(num_rows: int, num_experts: int) -> tuple[Way, Way]:
    logits = torch.randn(num_rows, num_experts)

    def old() -> torch.Tensor:
        shares = logits.softmax(dim=-1)
        return choose(shares, shares)

    def new() -> torch.Tensor:
        ids, weights = _native.route_by_softmax(logits.numpy(), 8, True)
        torch.from_numpy(ids)
        return torch.from_numpy(weights * np.float32(2.5))

    return old, new


def router_matrix(runtime: CpuRuntime) -> Callable[[int, int], tuple[Way, Way]]:
    def make(num_rows: int, size: int) -> tuple[Way, Way]:
        x, weight = torch.randn(num_rows, size), torch.randn(256, size)
        packed = PackedWeight.pack(weight, None, runtime.fp8_format)
        return lambda: F.linear(x, weight), lambda: torch.from_numpy(packed.multiply(runtime, x.numpy()))

    return make


def median_us(ways: tuple[Way, Way], repeats: int) -> list[float]:
    """Of each way, in turns of random order."""
    calls = []
    for way in ways:
        start = time.perf_counter()
        for _ in range(5):
            way()
        calls.append(max(1, int(5 * SAMPLE_S / (time.perf_counter() - start))))
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for which in random.sample((0, 1), 2):
            start = time.perf_counter()
            for _ in range(calls[which]):
                ways[which]()
            samples[which].append((time.perf_counter() - start) / calls[which])
    return [round(1e6 * statistics.median(each), 2) for each in samples]


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    kinds: dict[str, tuple[Callable[[int, int], tuple[Way, Way]], tuple[int, ...]]] = {
        "rms norm": (norm, (2048, 7168)),
        "silu(gate) * up": (silu_mul, (2048, 7168)),
        "route by sigmoid, 8 groups": (sigmoid_route, (128, 256)),
        "route by softmax": (softmax_route, (128, 256)),
        "router's f32 matrix, 256 outputs": (
            router_matrix(CpuRuntime.new(7168, arguments.threads)),
            (2048, 7168),
        ),
    }
    print(f"{cpu_name()}, {arguments.threads} threads, {_native.select_isa()}; medians in us")
    print("operation                          size  rows    PyTorch     native")
    lines = []
    for name, (make, sizes) in kinds.items():
        for size in sizes:
            for num_rows in arguments.rows:
                ways = make(num_rows, size)
                torch.testing.assert_close(ways[0](), ways[1](), rtol=1e-4, atol=1e-4)
                torch_us, native_us = median_us(ways, arguments.repeats)
                print(f"{name:33s} {size:5d} {num_rows:5d} {torch_us:10.2f} {native_us:10.2f}", flush=True)
                lines.append(
                    {
                        "operation": name,
                        "size": size,
                        "rows": num_rows,
                        "torch_us": torch_us,
                        "native_us": native_us,
                    }
                )
    print(
        json.dumps(
            {
                "benchmark": "kernels/rowwise",
                "commit": commit(),
                "machine": cpu_name(),
                "threads": arguments.threads,
                "isa": _native.select_isa(),
                "repeats": arguments.repeats,
                "runs": lines,
            }
        )
    )


if __name__ == "__main__":
    main()
