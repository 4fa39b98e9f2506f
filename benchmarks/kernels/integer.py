"""The integer multipliers of this machine side by side, on experts in int8, int4 and mxfp4.

    python benchmarks/kernels/integer.py [--shape qwen3] [--rows 16 512] [--format int4] [--threads 2]
    python benchmarks/kernels/integer.py --routing own --multipliers avx512_vnni amx_int8

All of them give the same bits, so what is left to measure is time. The program

1. verifies each shape, format, number of rows and set of multipliers against float64,
2. measures a step with each in turns, on as many experts as a layer has; with the routing "same" all rows
   choose the same experts, with "own" each its own ones, as those of a prompt do,
3. prints medians, their ratio to the first, and one JSON line. The ceiling is that of f32 multiply-adds,
   which integers exceed; where the fastest samples are well above the medians, something else is using the
   machine.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from statistics import median
from typing import Any

from duckllm import _native
from duckllm.bench.ceilings import FEWEST_REPEATS, fma_ceilings
from duckllm.bench.expert_step import ExpertStep, RandomExperts
from duckllm.bench.kernel import OWN, SAME, SHAPES
from duckllm.bench.machine import commit, cpu_name
from duckllm.config import available_cores

FORMATS = ("int8", "int4", "mxfp4")
VARIABLE = "DUCK_FORCE_INTEGER"


def parse_arguments() -> argparse.Namespace:
    known = _native.available_integer(_native.select_isa())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=["qwen3", "deepseek-32"], choices=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[512], help="rows of a step")
    parser.add_argument("--experts", type=int, default=8, help="experts that a row chooses")
    parser.add_argument("--routing", nargs="+", default=[SAME, OWN], choices=[SAME, OWN])
    parser.add_argument("--format", nargs="+", default=["int8", "int4"], choices=FORMATS)
    parser.add_argument("--multipliers", nargs="+", default=known, choices=known)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, available_cores()}))
    parser.add_argument("--repeats", type=int, default=FEWEST_REPEATS, help="rounds, for medians")
    return parser.parse_args()


def steps_of(arguments: argparse.Namespace) -> Iterator[tuple[dict[str, Any], dict[str, ExpertStep]]]:
    """Each cell of the grid, with a verified step for each set of multipliers."""
    for shape in arguments.shape:
        random = RandomExperts(SHAPES[shape])
        num_experts = SHAPES[shape].num_experts
        for weight_format in arguments.format:
            units = random.fill(num_experts, weight_format, huge_pages=True)
            for rows in arguments.rows:
                for routing in arguments.routing:
                    for threads in arguments.threads:
                        steps = {}
                        for name in arguments.multipliers:
                            os.environ[VARIABLE] = name
                            steps[name] = ExpertStep(
                                random,
                                units,
                                num_tokens=rows,
                                top_k=arguments.experts,
                                threads=threads,
                                isa="auto",
                                weight_format=weight_format,
                                layer_experts=num_experts if routing == OWN else None,
                            )
                            steps[name].verify()
                        cell = {"shape": shape, "format": weight_format, "rows": rows}
                        yield cell | {"routing": routing, "threads": threads}, steps


def main() -> None:
    arguments = parse_arguments()
    isa = _native.select_isa()
    for threads in arguments.threads:
        [ceiling] = fma_ceilings(threads, [isa], FEWEST_REPEATS)
        print(
            f"{cpu_name()}, {threads} threads: {ceiling.rate.median:.0f} GFLOP/s of f32 multiply-adds ({isa})"
        )
    print("shape        format  rows  routing  threads  multipliers      GFLOP/s (fastest)    ratio")
    lines = []
    for cell, steps in steps_of(arguments):
        for _ in range(arguments.repeats):
            for step in steps.values():
                step.sample()
        flop = 2 * SHAPES[cell["shape"]].expert_weights * arguments.experts * cell["rows"]
        rates = {name: flop / median(step.seconds) / 1e9 for name, step in steps.items()}
        for name, step in steps.items():
            fastest, ratio = flop / min(step.seconds) / 1e9, rates[name] / rates[arguments.multipliers[0]]
            print(
                f"{cell['shape']:12s} {cell['format']:6s} {cell['rows']:5d}  {cell['routing']:7s}"
                f" {cell['threads']:8d}  {name:16s} {rates[name]:7.0f} ({fastest:.0f})".ljust(81)
                + f" {ratio:7.2f}",
                flush=True,
            )
            measured = {"gflop_per_s": round(rates[name], 1), "fastest_gflop_per_s": round(fastest, 1)}
            lines.append(cell | {"multipliers": name} | measured | {"ratio": round(ratio, 3)})
    print(
        json.dumps(
            {
                "benchmark": "kernels/integer",
                "commit": commit(),
                "machine": cpu_name(),
                "experts": arguments.experts,
                "repeats": arguments.repeats,
                "verified": True,
                "runs": lines,
            }
        )
    )


if __name__ == "__main__":
    main()
