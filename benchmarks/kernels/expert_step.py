"""How close one expert step comes to the memory's read speed, on this machine.

    python benchmarks/kernels/expert_step.py [--hidden 7168 --stripes 4 --experts 64 --top-k 8 --threads 2]

A decode step reads the weights of its experts once and does little with each, so its ceiling is a plain read
of the same units by the same threads. The default shape is one worker's slice of DeepSeek-V3.2 cut 32 ways.
The program

1. verifies the kernel against float64 at this shape,
2. measures the ceiling and the kernel in turns, on experts that left the caches long ago (every step takes
   other experts, and all layers together are many times the last-level cache),
3. prints the medians, their ratio and that of the fastest of each, and one JSON line. Where the fastest are
   well above the medians, something else is using the machine.

Rows beyond the first reuse decoded weights; they are shown with their arithmetic rate, whose ceiling is not
memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "kernels"))

from expert_reference import Layer, expert_sums, pack, random_step

from duckllm import _native
from duckllm.bench.machine import commit, cpu_name
from duckllm.config import available_cores


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=7168, help="hidden size H")
    parser.add_argument("--stripes", type=int, default=4, help="stripes of the slice, 16 channels each")
    parser.add_argument("--experts", type=int, default=64, help="experts of a layer")
    parser.add_argument("--layers", type=int, default=4, help="layers that the steps go through")
    parser.add_argument("--top-k", type=int, default=8, help="experts per row")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 16], help="rows of a step")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--spin-us", type=int, default=1000)
    parser.add_argument("--isa", default="auto", help="scalar, avx2, avx512 or auto")
    parser.add_argument("--repeats", type=int, default=40, help="steps measured for each line")
    arguments = parser.parse_args()
    if arguments.top_k > arguments.experts:
        parser.error(f"--top-k: got {arguments.top_k}, expected at most --experts {arguments.experts}")
    return arguments


def new_experts(arguments: argparse.Namespace, max_tokens: int) -> _native.Experts:
    return _native.Experts(
        hidden_size=arguments.hidden,
        intermediate_size=arguments.stripes * 16,
        num_experts=arguments.experts,
        top_k=arguments.top_k,
        first_stripe=0,
        num_stripes=arguments.stripes,
        max_tokens=max_tokens,
        num_threads=arguments.threads,
        spin_us=arguments.spin_us,
        isa=arguments.isa,
    )


def verify(layer: Layer, units: np.ndarray, experts: _native.Experts, top_k: int) -> float:
    """Largest error over the largest value; raises where the error leaves its bound."""
    x, topk_ids, topk_weights = random_step(layer, 2, top_k)
    exact, bound = expert_sums(layer, x, topk_ids, topk_weights)
    y = experts.run(units, x, topk_ids, topk_weights)
    if not np.all(abs(y - exact) <= bound):
        raise SystemExit("the kernel is outside its error bound: nothing measured")
    return float(abs(y - exact).max() / abs(exact).max())


def measure(
    arguments: argparse.Namespace, layers: list[np.ndarray], num_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each plain read and of each step."""
    experts = new_experts(arguments, num_tokens)
    rng = np.random.default_rng(num_tokens)
    x = rng.standard_normal((num_tokens, arguments.hidden)).astype(np.float32)
    weights = np.full((num_tokens, arguments.top_k), 1 / arguments.top_k, np.float32)
    out = np.empty_like(x)
    order = rng.permutation(arguments.experts).astype(np.int32)
    reads, steps = [], []
    position = 0
    for repeat in range(2 * arguments.repeats + 4):
        # All rows take the same experts: the units read are the same for any number of rows.
        chosen = np.take(order, range(position, position + arguments.top_k), mode="wrap")
        position += arguments.top_k
        ids = np.ascontiguousarray(np.broadcast_to(chosen, (num_tokens, arguments.top_k)))
        units = layers[repeat // 2 % len(layers)]
        start = time.perf_counter()
        if repeat % 2:
            experts.run(units, x, ids, weights, out=out)
        else:
            experts.read_units(units, ids)
        seconds = time.perf_counter() - start
        if repeat >= 4:
            (steps if repeat % 2 else reads).append(seconds)
    return np.array(reads), np.array(steps)


def main() -> None:
    arguments = parse_arguments()
    layer = Layer.random(arguments.experts, arguments.hidden, arguments.stripes * 16)
    units = pack(layer)
    experts = new_experts(arguments, 2)
    error = verify(layer, units, experts, arguments.top_k)
    print(f"{cpu_name()}, {arguments.threads} threads, {experts.isa}")
    print(f"verified against float64: largest error {error:.1e} of the largest output")
    layers = [units] + [units.copy() for _ in range(arguments.layers - 1)]
    print(f"{len(layers)} layers of {units.nbytes / 1e6:.0f} MB, {arguments.top_k} experts a step")
    print("rows  read GB/s  step GB/s  of ceiling (best: read, step)  Gparam/s  GFLOP/s   step us")
    lines = []
    for num_tokens in arguments.tokens:
        reads, steps = measure(arguments, layers, num_tokens)
        read_s, step_s = float(np.median(reads)), float(np.median(steps))
        step_bytes = arguments.top_k * units[0].nbytes
        params = arguments.top_k * arguments.stripes * 16 * 3 * arguments.hidden
        line = {
            "tokens": num_tokens,
            "read_gb_per_s": step_bytes / read_s / 1e9,
            "step_gb_per_s": step_bytes / step_s / 1e9,
            "of_ceiling": read_s / step_s,
            "best_read_gb_per_s": step_bytes / float(reads.min()) / 1e9,
            "best_step_gb_per_s": step_bytes / float(steps.min()) / 1e9,
            "best_of_ceiling": float(reads.min() / steps.min()),
            "gparam_per_s": params / step_s / 1e9,
            "gflop_per_s": 2 * params * num_tokens / step_s / 1e9,
            "step_us": step_s * 1e6,
        }
        print(
            f"{num_tokens:4d} {line['read_gb_per_s']:10.1f} {line['step_gb_per_s']:10.1f}"
            f" {line['of_ceiling']:11.0%} {line['best_of_ceiling']:6.0%}"
            f" {line['best_read_gb_per_s']:6.1f} {line['best_step_gb_per_s']:5.1f}"
            f" {line['gparam_per_s']:9.1f} {line['gflop_per_s']:8.1f} {line['step_us']:9.0f}"
        )
        lines.append({key: round(value, 4) for key, value in line.items()})
    config = {key: value for key, value in vars(arguments).items() if key != "tokens"} | {"isa": experts.isa}
    print(
        json.dumps(
            {"benchmark": "expert_step", "commit": commit(), "cpu": cpu_name(), **config, "lines": lines}
        )
    )


if __name__ == "__main__":
    main()
