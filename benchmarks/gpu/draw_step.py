"""Draws one layer of a decode step from the trace that host_step.py writes.

    python benchmarks/gpu/host_step.py --trace step.json
    python benchmarks/gpu/draw_step.py step.json -o docs/images/gpu-host-layer.png

A layer begins where its step is handed to the host (``_publish``). Above: what the GPU runs. Below: what the
CPU calls CUDA for in the whole step, which is all that Python does in it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# A kernel's name, and what it is for.
_NAMES = {
    "_publish": "hand over",
    "_collect": "wait, take over",
    "_multiply_rows": "FP8 linear",
    "_multiply_small": "router",
    "_route": "choice",
    "_rms_norm": "norm",
    "_silu_mul": "SiLU",
    "_absorb": "queries up",
    "_raise": "values up",
    "_attend": "attention",
    "_merge_parts": "merge",
    "_store_latents": "store",
    "_store_keys": "index keys",
}


def events(path: Path, *categories: str) -> list[dict[str, Any]]:
    """A trace's events of some categories, by time."""
    found = [each for each in json.loads(path.read_text())["traceEvents"] if each.get("cat") in categories]
    return sorted(found, key=lambda each: float(each["ts"]))


def draw(path: Path, layer: int, out: Path) -> None:
    """Writes the picture."""
    kernels = events(path, "kernel", "gpu_memcpy")
    handed_over = [number for number, each in enumerate(kernels) if each["name"] == "_publish"]
    first, last = handed_over[layer], handed_over[layer + 1]
    start = kernels[first]["ts"]
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(13, 7), height_ratios=(5, 2), constrained_layout=True
    )
    shown = kernels[first : last + 1]
    free_from: list[float] = []
    for each in shown:
        begin, length = each["ts"] - start, each["dur"]
        row = next((row for row, end in enumerate(free_from) if end <= begin), len(free_from))
        free_from[row : row + 1] = [begin + length]
        name = _NAMES.get(each["name"], each["name"])
        colour = "tab:orange" if each["name"] in ("_publish", "_collect") else "tab:blue"
        above.barh(row, length, left=begin, height=0.8, color=colour, edgecolor="white")
        above.text(begin + 0.3, row, name, va="center", fontsize=7, clip_on=True)
    period = kernels[last]["ts"] - start
    above.set_title(f"One layer, {period:.0f} us: a kernel may start early and wait for the one in front")
    above.set_xlabel("microseconds since the layer's hand-over")
    above.set_yticks([])
    whole_start = kernels[0]["ts"]
    for each in events(path, "cuda_runtime", "cuda_driver"):
        if each["ts"] + each["dur"] < whole_start - 300 or "DeviceSynchronize" in each["name"]:
            continue
        begin = (each["ts"] - whole_start) / 1000
        below.barh(0, each["dur"] / 1000, left=begin, height=0.8, color="tab:green")
        if each["dur"] > 20:
            below.text(begin, 0.5, each["name"], rotation=30, fontsize=7)
    end = (kernels[-1]["ts"] + kernels[-1]["dur"] - whole_start) / 1000
    below.barh(-1, end, left=0, height=0.8, color="tab:blue")
    below.text(0.1, -1, f"GPU: {len(kernels)} kernels and copies", va="center", fontsize=8, color="white")
    below.set_yticks([-1, 0], ["GPU", "CUDA calls"])
    below.set_ylim(-1.6, 1.8)
    below.set_title("The whole step: the graphs are launched, and nothing is called until it ends")
    below.set_xlabel("milliseconds since the step's first kernel")
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--layer", type=int, default=30)
    parser.add_argument("-o", "--out", type=Path, required=True)
    arguments = parser.parse_args()
    draw(arguments.trace, arguments.layer, arguments.out)


if __name__ == "__main__":
    main()
