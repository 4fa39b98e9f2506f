"""How far weights lie from their source in each format, and how fast they are rounded.

Of Gaussian and of heavy-tailed weights (Student's t with 4 degrees of freedom), one matrix of f32, in gate's
groups of 32 and in down's of 16. The native functions are checked against their numpy twins first.

    python benchmarks/quality/rounding.py
    python benchmarks/quality/rounding.py --rows 512 --columns 2048 --json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

from duckllm import _native
from duckllm.weights.e4m3 import F32, dequantise, expand_scales, quantise_blocks
from duckllm.weights.grouped import scale_values
from duckllm.weights.rounding import int4_groups, int8_blocks

WEIGHTS: dict[str, Callable[[np.random.Generator, tuple[int, int]], F32]] = {
    "Gaussian": lambda rng, shape: rng.standard_normal(shape, np.float32),
    "heavy tails": lambda rng, shape: rng.standard_t(4, shape).astype(np.float32),
}
FORMATS = ("fp9, fp8", "int8", "int4", "int4-bf16", "int4, down")


def rounded(weights: F32, name: str) -> F32:
    """The weights that a format makes of a matrix."""
    if name == "fp9, fp8":
        codes, scales, _ = quantise_blocks(weights)
        return dequantise(codes, scales)
    if name == "int8":
        codes, scales, _ = _native.quantise_int8_blocks(weights)
        return (codes.astype(np.float32) - 128) * expand_scales(scales, *weights.shape)
    size, scale_type = (16 if "down" in name else 32), ("bf16" if "bf16" in name else "f16")
    codes, words, _ = _native.quantise_int4_groups(weights, size, scale_type)
    scales = np.repeat(scale_values(words, scale_type), size, axis=1)[:, : weights.shape[1]]
    return (codes.astype(np.float32) - 8) * scales


def plainly_rounded(weights: F32) -> F32:
    """int4 without a search: the largest magnitude of a group at -8, to be compared with."""
    groups = weights.reshape(weights.shape[0], -1, 32)
    place = np.abs(groups).argmax(axis=2)[..., None]
    scales = (np.take_along_axis(groups, place, axis=2) / -8).astype(np.float16).astype(np.float32)
    scales[scales == 0] = 1
    result: F32 = (np.clip(np.rint(groups / scales), -8, 7) * scales).reshape(weights.shape)
    return result


def error_of(weights: F32, others: F32) -> float:
    """Root mean square of the difference, over that of the weights."""
    difference = others.astype(np.float64) - weights
    return float(np.sqrt(np.sum(difference**2) / np.sum(weights.astype(np.float64) ** 2)))


def verify(weights: F32) -> None:
    """Compares the native functions with their numpy twins on a corner of the weights."""
    corner = np.ascontiguousarray(weights[:160, :320])
    for native, twin in (
        (_native.quantise_int8_blocks(corner)[:2], int8_blocks(corner)),
        (_native.quantise_int4_groups(corner, 32)[:2], int4_groups(corner, 32)),
    ):
        if any(mine.tobytes() != its.tobytes() for mine, its in zip(native, twin, strict=True)):
            raise SystemExit("rounding differs from its numpy twin")


def main() -> None:
    """Prints the table and one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=7168, help="a multiple of 32")
    parser.add_argument("--json", action="store_true", help="the JSON line alone")
    args = parser.parse_args()
    shape = (args.rows, args.columns)
    found: dict[str, dict[str, float]] = {}
    for kind, make in WEIGHTS.items():
        weights = make(np.random.default_rng(0), shape)
        verify(weights)
        found[kind] = {name: error_of(weights, rounded(weights, name)) for name in FORMATS}
        found[kind]["int4 without a search"] = error_of(weights, plainly_rounded(weights))
    seconds = {}
    for name in ("int8", "int4"):
        start_s = time.perf_counter()
        rounded_by = _native.quantise_int8_blocks if name == "int8" else _native.quantise_int4_groups
        rounded_by(weights, *(() if name == "int8" else (32,)))
        seconds[name] = time.perf_counter() - start_s
    speeds = {name: weights.size / value / 1e6 for name, value in seconds.items()}
    if not args.json:
        print(f"| format | {' | '.join(found)} |\n|---|{'---|' * len(found)}")
        for name in next(iter(found.values())):
            print(f"| {name} | {' | '.join(f'{errors[name]:.2%}' for errors in found.values())} |")
        print(
            ", ".join(f"{name}: {speed:.0f} M weights a second, one thread" for name, speed in speeds.items())
        )
    print(json.dumps({"shape": shape, "rms_relative": found, "million_weights_per_s": speeds}))


if __name__ == "__main__":
    main()
