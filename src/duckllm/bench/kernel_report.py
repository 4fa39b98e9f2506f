"""The grid of kernel.py as tables, as plain values and as points of the roofline. Called by cli/bench.py."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from duckllm.bench.kernel import SAME, SHAPES, KernelLine, KernelRun, derived
from duckllm.bench.machine import commit, cpu_name
from duckllm.bench.points import Point
from duckllm.bench.roofline import QUIET_CORES
from duckllm.config import available_cores, threads_in_words
from duckllm.worker.other_load import OtherLoad

HEADINGS = (
    "format", "K", "T", "ids", "us", "Gparam/s", "GB/s", "read", "share", "best", "GFLOP/s", "FMA",
)  # fmt: skip
KERNEL_CAVEATS = (
    "K: experts that a row chooses; T: rows of a step. A step of one expert and one row is measured beside "
    "those that are asked for: what it takes beyond its bytes, every step does.",
    "read: the higher of two plain reads in turns with the kernel, of the same units by the kernel's "
    "threads and of other memory by the best loop of duckllm bench roofline; share is GB/s over it, best the "
    "same by the fastest sample of each. FMA: GFLOP/s over the f32 multiply-add peak, which bf16 can pass; "
    "int8, int4 and mxfp4 multiply integers, of which no peak is measured.",
    "Errors are the kernel's alone, on the weights as the format has them; formats that multiply integers "
    "round activations to bytes.",
    "ids same: all rows take the same experts, so that the bytes are those of one row; own: each row "
    "takes its own, at random among a layer's, as the rows of a prompt do.",
    "A step's time is that of the native call, with threads that are awake and keep a core each; a cold "
    "step's experts are in no cache.",
)
# Most points that a picture's legend has room for.
MOST_POINTS = 12


def alone_notes(load: OtherLoad) -> list[str]:
    """Whether something else used the machine meanwhile."""
    if load.programs + load.hypervisor <= QUIET_CORES:
        return []
    return [
        f"NOT ALONE: meanwhile other programs used {load.programs:.2f} cores and other virtual machines took "
        f"{load.hypervisor:.2f}; the fastest samples say more then."
    ]


def run_json(run: KernelRun) -> dict[str, object]:
    """Everything as plain values; rates in 10^9 per second, times in microseconds."""
    config = {name: list(value) for name, value in asdict(run.config).items() if isinstance(value, tuple)}
    return {
        "benchmark": "kernel",
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": cpu_name(),
        "cores": available_cores(),
        "kernel": platform.release(),
        "caches": asdict(run.caches),
        "other_load_cores": {name: round(value, 3) for name, value in asdict(run.other_load).items()},
        **config,
        "threads": run.threads,
        "isa": run.lines[0].isa if run.lines else run.config.isa,
        "prefill": run.lines[0].prefill if run.lines else run.config.prefill,
        "integer": integer_multipliers(run.lines),
        "repeats": run.config.repeats,
        "hot": run.config.hot,
        "full": run.config.full,
        "size": run.size_bytes,
        "verified": True,  # what is not right raises instead
        "fma_gflop_per_s": round(run.fma_gflop_per_s, 2),
        "lines": [line_json(line) for line in run.lines],
        "derived": list(derived(run.lines)),
        "notes": [*run.notes, *alone_notes(run.other_load)],
    }


def integer_multipliers(lines: Sequence[KernelLine]) -> str | None:
    """Those of the run's formats that multiply integers; None where there are none among the lines."""
    return next((line.integer for line in lines if line.integer), None)


def line_json(line: KernelLine) -> dict[str, object]:
    """One line as plain values: what its row in the table shows, the range of its times, its error."""
    values = {
        "step_us": 1e6 * line.step_s,
        "least_us": 1e6 * line.least_s,
        "most_us": 1e6 * line.most_s,
        "gparam_per_s": line.gparam_per_s,
        "gb_per_s": line.gb_per_s,
        "read_gb_per_s": line.read_gb_per_s,
        "of_ceiling": line.of_ceiling,
        "fastest_of_ceiling": line.fastest_of_ceiling,
        "gflop_per_s": line.gflop_per_s,
        "of_fma": line.of_fma,
        "error": line.error,
    }
    digits = {name: None if value is None else float(f"{value:.3e}") for name, value in values.items()}
    return asdict(line.cell) | digits


def print_kernels(run: KernelRun, console: Console) -> None:
    """A table for each shape, what follows from it, and what the figures do not say."""
    isa = run.lines[0].isa if run.lines else run.config.isa
    if run.config.prefill == "bf16" and run.lines:
        isa += f", more than 8 rows of an expert with {run.lines[0].prefill}"
    if integer := integer_multipliers(run.lines):
        isa += f", integers with {integer}"
        if integer == "amx_int8":  # which takes many rows alone
            isa += ", of few rows with avx512_vnni"
    console.print(
        f"{cpu_name()}, {threads_in_words(run.threads)}, {isa}, {'hot' if run.config.hot else 'cold'}, "
        f"commit {commit()}. Peak of f32 multiply-adds {run.fma_gflop_per_s:.0f} GFLOP/s. "
        f"Medians of {run.config.repeats} rounds. Every line was verified against float64."
    )
    for note in [*run.notes, *alone_notes(run.other_load)]:
        console.print(note)
    facts = list(derived(run.lines))
    for name in dict.fromkeys(line.cell.shape for line in run.lines):
        console.print(shape_table(name, [line for line in run.lines if line.cell.shape == name]))
        for values in facts:
            if values["shape"] == name:
                console.print(derived_text(values))
    console.print()
    for caveat in KERNEL_CAVEATS:
        console.print(f"- {caveat}")


def shape_table(name: str, lines: Sequence[KernelLine]) -> Table:
    """One row for each line of a shape."""
    shape = SHAPES[name]
    title = f"{name}: {shape.name}, H {shape.hidden_size}, {shape.channels} channels"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in HEADINGS:
        justify: Literal["left", "right"] = "left" if heading in ("format", "ids") else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for line in lines:
        table.add_row(
            line.cell.format,
            str(line.cell.experts),
            str(line.cell.rows),
            line.cell.routing,
            f"{1e6 * line.step_s:.4g}" if line.step_s < 0.01 else f"{1e6 * line.step_s:.0f}",
            f"{line.gparam_per_s:.1f}",
            f"{line.gb_per_s:.1f}",
            f"{line.read_gb_per_s:.1f}",
            f"{line.of_ceiling:.0%}",
            f"{line.fastest_of_ceiling:.0%}",
            f"{line.gflop_per_s:.0f}",
            "-" if line.of_fma is None else f"{line.of_fma:.0%}",
        )
    return table


def derived_text(values: dict[str, object]) -> str:
    """One line of what follows from a shape and format."""
    parts = []
    if isinstance(pairs := values.get("t2_over_t1"), dict):
        each = ", ".join(f"{ratio:.2f} with {experts} experts" for experts, ratio in pairs.items())
        parts.append(f"2 rows cost {each} of 1 row's time")
    if "few_over_many" in values:
        parts.append(
            f"4 experts reach {values['gparam_per_s_4']:.1f} Gparam/s, 20 reach "
            f"{values['gparam_per_s_20']:.1f} ({values['few_over_many']:.0%})"
        )
    if "fixed_us" in values:
        parts.append(
            f"one expert's step takes {values['fixed_us']:.1f} us more than its bytes at the ceiling"
        )
    parts.append(f"the largest error against float64 is {values['error']:.1e} of the largest output")
    return f"{values['format']}: " + "; ".join(parts) + "."


def plot_points(lines: Sequence[KernelLine]) -> list[Point]:
    """Points for a picture: where all rows choose the same experts, fewest and most rows of each shape."""
    groups: dict[tuple[str, str], list[KernelLine]] = {}
    for line in lines:
        if line.cell.routing == SAME:
            groups.setdefault((line.cell.shape, line.cell.format), []).append(line)
    chosen = []
    for mine in groups.values():
        experts = max(mine, key=lambda line: (line.cell.rows, line.cell.experts)).cell.experts
        rows = sorted(
            (line for line in mine if line.cell.experts == experts), key=lambda line: line.cell.rows
        )
        chosen.extend(rows[:: max(1, len(rows) - 1)])
    return [
        Point(
            f"{line.cell.shape}, {line.cell.format}, {line.cell.experts} experts, {line.cell.rows} rows",
            line.cell.flop / line.step_bytes,
            line.gflop_per_s,
        )
        for line in chosen[:MOST_POINTS]
    ]


def roofs(run: KernelRun) -> tuple[dict[str, float], dict[str, float]]:
    """The roofs of a picture: the highest read ceiling of the run in GB/s, the peak in GFLOP/s."""
    state = "hot" if run.config.hot else "cold"
    isa = run.lines[0].isa
    return (
        {f"{state} read": max(line.read_gb_per_s for line in run.lines)},
        {f"{isa} f32 multiply-add": run.fma_gflop_per_s},
    )
