"""Dense layers of real models for ``duckllm bench kernel --linear``: measured, and as a table.

Called by cli/bench.py; linear.py measures.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from duckllm import _native
from duckllm.bench.ceilings import default_size_bytes
from duckllm.bench.kernel import KernelConfig
from duckllm.bench.kernel_report import alone_notes
from duckllm.bench.linear import FORMATS, MODELS, LinearResult, LinearShape, linear_results
from duckllm.bench.machine import available_memory_bytes, commit, cpu_name, read_caches
from duckllm.config import available_cores, threads_in_words
from duckllm.worker.other_load import LoadMeter, OtherLoad

LINEAR_ROWS = (1, 8)


@dataclass(frozen=True)
class LinearRun:
    """Everything that was measured: results by the model that the layer is of."""

    threads: int
    isa: str
    repeats: int
    results: list[tuple[str, LinearResult]] = field(default_factory=list)
    other_load: OtherLoad = field(default=OtherLoad(0.0, 0.0))


def measure_linear(
    config: KernelConfig,
    progress: Callable[[str, float, float], None] = lambda name, done, total: None,
    models: dict[str, tuple[LinearShape, ...]] = MODELS,
    size_bytes: int = 0,
) -> LinearRun:
    """Verifies and measures the dense layers; ``rows``, ``format``, ``threads``, ``isa``, ``repeats`` count.

    Args:
        config: What to measure; without formats bf16 too.
        progress: Called with a name, the layers done and all of them, before each.
        models: The layers.
        size_bytes: Footprint of each format's weights; 0 means eight times the last-level cache.
    """
    size_bytes = size_bytes or default_size_bytes(read_caches(), available_memory_bytes())
    threads = config.threads or available_cores()
    isa = _native.select_isa() if config.isa == "auto" else config.isa
    layers = [(model, shape) for model, shapes in models.items() for shape in shapes]
    meter = LoadMeter()
    results = []
    for number, (model, shape) in enumerate(layers):
        progress(f"{model} {shape.name}", number, len(layers))
        for result in linear_results(
            shape,
            config.rows or LINEAR_ROWS,
            threads=threads,
            footprint_bytes=size_bytes,
            isa=isa,
            formats=config.format or FORMATS,
            repeats=config.repeats,
        ):
            results.append((model, result))
    return LinearRun(threads, isa, config.repeats, results, meter.read())


def linear_json(run: LinearRun) -> dict[str, object]:
    """Everything as plain values; rates in 10^9 per second, times in microseconds."""
    return {
        "benchmark": "kernel_linear",
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": cpu_name(),
        "cores": available_cores(),
        "kernel": platform.release(),
        "threads": run.threads,
        "isa": run.isa,
        "repeats": run.repeats,
        "verified": True,  # what is not right raises instead
        "lines": [
            {
                "model": model,
                "layer": result.shape.name,
                "in_features": result.shape.in_features,
                "out_features": result.shape.out_features,
                "rows": result.num_rows,
                "format": result.way,
                "step_us": round(1e6 * result.seconds[0], 2),
                "least_us": round(1e6 * result.seconds[1], 2),
                "gb_per_s": round(result.gb_per_s, 3),
                "read_gb_per_s": round(result.read.median, 3),
                "of_ceiling": round(result.of_ceiling, 4),
                "fastest_of_ceiling": round(result.fastest_of_ceiling, 4),
                "gflop_per_s": round(result.gflop_per_s, 3),
            }
            for model, result in run.results
        ],
        "notes": alone_notes(run.other_load),
    }


def print_linear(run: LinearRun, console: Console) -> None:
    """One table of all layers."""
    console.print(
        f"{cpu_name()}, {threads_in_words(run.threads)}, {run.isa}, cold, commit {commit()}. "
        f"Medians of {run.repeats} rounds. Every line was verified against float64."
    )
    for note in alone_notes(run.other_load):
        console.print(note)
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("model", "layer", "format"):
        table.add_column(heading, no_wrap=True)
    for heading in ("T", "us", "GB/s", "read", "share", "best", "GFLOP/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for model, result in run.results:
        table.add_row(
            model,
            result.shape.name,
            result.way,
            str(result.num_rows),
            f"{1e6 * result.seconds[0]:.0f}",
            f"{result.gb_per_s:.1f}",
            f"{result.read.median:.1f}",
            f"{result.of_ceiling:.0%}",
            f"{result.fastest_of_ceiling:.0%}",
            f"{result.gflop_per_s:.0f}",
        )
    console.print(table)
