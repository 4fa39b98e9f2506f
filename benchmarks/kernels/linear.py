"""Dense linear layers of real models beside the read ceiling and PyTorch's own, on this machine.

    python benchmarks/kernels/linear.py [--model Qwen3-30B-A3B] [--rows 1 8] [--format fp8] [--threads 2]

With few rows a layer reads its weight once and does little with it, so its ceiling is a plain read of as many
bytes by as many threads. The program

1. verifies every shape, format and number of rows against float64,
2. measures in turns, on weights that left the caches long ago: each format, PyTorch's linear with a bf16
   weight (and bf16 activations) and with an f32 weight, and the read ceiling; see duckllm.bench.linear,
3. prints medians, the share of the ceiling by them and by the fastest samples, and one JSON line. Where the
   fastest are well above the medians, something else is using the machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
import torch.nn.functional as F

from duckllm import _native
from duckllm.bench.ceilings import FEWEST_REPEATS, default_size_bytes
from duckllm.bench.linear import F32, FORMATS, MODELS, NUM_ROWS, LinearShape, linear_results
from duckllm.bench.machine import available_memory_bytes, commit, cpu_name, read_caches
from duckllm.config import available_cores


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--layer", nargs="+", help="layers by name; all if left out")
    parser.add_argument("--rows", type=int, nargs="+", default=list(NUM_ROWS), help="rows of x")
    parser.add_argument("--format", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--isa", default="auto", help="scalar, avx2, avx512 or auto")
    parser.add_argument("--repeats", type=int, default=FEWEST_REPEATS, help="rounds, for medians")
    return parser.parse_args()


def torch_way(
    dtype: torch.dtype,
) -> Callable[[LinearShape, int], tuple[Callable[[int, F32], object], int, int]]:
    def make(shape: LinearShape, footprint_bytes: int) -> tuple[Callable[[int, F32], object], int, int]:
        weight = torch.randn(shape.out_features, shape.in_features).to(dtype)
        num_bytes = weight.numel() * weight.element_size()
        copies = [weight.clone() for _ in range(max(3, -(-footprint_bytes // num_bytes)))]

        def run(copy: int, x: F32) -> object:
            return F.linear(torch.from_numpy(x).to(dtype), copies[copy])

        return run, len(copies), num_bytes

    return make


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    footprint_bytes = default_size_bytes(read_caches(), available_memory_bytes())
    isa = _native.select_isa() if arguments.isa == "auto" else arguments.isa
    others = {"torch bf16": torch_way(torch.bfloat16), "torch f32": torch_way(torch.float32)}
    print(
        f"{cpu_name()}, {arguments.threads} threads, {isa}; weights of {footprint_bytes / 1e6:.0f} MB in turn"
    )
    print("layer                          rows  weight      ms/product    GB/s  GFLOP/s  of ceiling (best)")
    lines = []
    for model in arguments.model:
        for shape in MODELS[model]:
            if arguments.layer and shape.name not in arguments.layer:
                continue
            for result in linear_results(
                shape,
                arguments.rows,
                threads=arguments.threads,
                footprint_bytes=footprint_bytes,
                isa=isa,
                formats=arguments.format,
                others=others,
                repeats=arguments.repeats,
            ):
                print(
                    f"{model + ' ' + shape.name:30s} {result.num_rows:4d}  {result.way:10s}"
                    f" {1e3 * result.seconds[0]:11.3f} {result.gb_per_s:7.1f} {result.gflop_per_s:8.1f}"
                    f" {result.of_ceiling:10.0%} ({result.fastest_of_ceiling:.0%})"
                )
                lines.append(
                    {
                        "model": model,
                        "layer": shape.name,
                        "in_features": shape.in_features,
                        "out_features": shape.out_features,
                        "rows": result.num_rows,
                        "weight": result.way,
                        "seconds": result.seconds[0],
                        "fastest_seconds": result.seconds[1],
                        "weight_bytes": result.weight_bytes,
                        "read_gb_per_s": round(result.read.median, 2),
                        "of_ceiling": round(result.of_ceiling, 4),
                        "fastest_of_ceiling": round(result.fastest_of_ceiling, 4),
                    }
                )
    print(
        json.dumps(
            {
                "benchmark": "kernels/linear",
                "commit": commit(),
                "machine": cpu_name(),
                "threads": arguments.threads,
                "isa": isa,
                "repeats": arguments.repeats,
                "verified": True,
                "runs": lines,
            }
        )
    )


if __name__ == "__main__":
    main()
