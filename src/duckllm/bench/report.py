"""Ceilings and kernels as tables for people. Called by cli/bench.py."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from duckllm.bench.ceilings import Ceiling
from duckllm.bench.machine import commit, cpu_name
from duckllm.bench.points import Placed
from duckllm.bench.roofline import CAVEATS, Roofline

# Instruction sets, the best last.
ISAS = ("scalar", "avx2", "avx512")
TEXT_COLUMNS = ("what", "where", "best loop", "instruction set", "kernel")


def print_roofline(roofline: Roofline, console: Console) -> None:
    """The machine, its ceilings, the kernels, and what the figures do not say."""
    caches = roofline.caches
    console.print(
        f"{cpu_name()}, {roofline.cores} cores, L2 {_size(caches.l2_bytes)} a core, "
        f"last-level cache {_size(caches.llc_bytes)}, commit {commit()}"
    )
    console.print(
        f"Cold footprint {_size(roofline.size_bytes)}, {roofline.size_per_llc:.1f} times the last-level "
        f"cache. Median of {roofline.config.repeats} samples, slowest and fastest beside it. Every loop was "
        "verified."
    )
    for note in roofline.notes:
        console.print(note)
    console.print(memory_table(roofline.ceilings))
    console.print(compute_table(roofline.ceilings))
    console.print(points_table(roofline.points))
    figures = nodes_file_figures(roofline.ceilings)
    if figures:
        console.print("For a file of nodes (duckllm plan --nodes, docs/planning.md):")
        console.print(figures + "\n")
    for caveat in CAVEATS:
        console.print(f"- {caveat}")


def nodes_file_figures(ceilings: Sequence[Ceiling]) -> str:
    """What a file of nodes says of this machine, of all threads that were measured; empty if not enough was.

    The read is that from memory, with huge pages or without, whichever is faster, as weights are.
    """
    threads = max((each.threads for each in ceilings), default=0)
    mine = [each for each in ceilings if each.threads == threads]
    reads = [each for each in mine if (each.operation, each.state) == ("read", "cold")]
    fmas = [each for each in mine if each.operation == "fma"]
    if not reads or not fmas:
        return ""
    best = max(fmas, key=lambda each: ISAS.index(each.isa))  # what a worker computes with
    return (
        f'    cores = {threads}\n    isa = "{best.isa}"\n'
        f"    read_gb_per_s = {max(each.rate.median for each in reads):.1f}\n"
        f"    gflop_per_s = {best.rate.median:.0f}"
    )


def memory_table(ceilings: Sequence[Ceiling]) -> Table:
    """One row for each ceiling of memory."""
    table = _table("Memory, GB/s", "threads", "what", "where", "huge", "best loop", "median", "from", "to")
    rows = [ceiling for ceiling in ceilings if ceiling.unit == "GB/s"]
    for ceiling, after in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(
            str(ceiling.threads),
            ceiling.operation,
            ceiling.state,
            f"{ceiling.huge_page_share:.0%}",
            ceiling.best,
            *_numbers(ceiling),
            end_section=after is not None and after.threads != ceiling.threads,
        )
    return table


def compute_table(ceilings: Sequence[Ceiling]) -> Table:
    """One row for each ceiling of arithmetic."""
    table = _table("f32 multiply-adds, GFLOP/s", "threads", "instruction set", "median", "from", "to")
    for ceiling in ceilings:
        if ceiling.unit == "GFLOP/s":
            table.add_row(str(ceiling.threads), ceiling.isa, *_numbers(ceiling))
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE)
    texts = ("what", "where", "best loop", "instruction set", "kernel")
    for heading in headings:
        table.add_column(
            heading, justify="left" if heading in texts else "right", no_wrap=heading != "kernel"
        )
    return table


def _numbers(ceiling: Ceiling) -> tuple[str, str, str]:
    rate = ceiling.rate
    return f"{rate.median:.1f}", f"{rate.least:.1f}", f"{rate.most:.1f}"


def points_table(points: Sequence[Placed]) -> Table:
    """Two rows for each kernel: the medians, and the fastest sample of kernel and ceiling."""
    table = _table("Kernels", "kernel", "FLOP/byte", "GFLOP/s", "GB/s", "read GB/s", "of it")
    for placed in points:
        for name, point, read, share in (
            (placed.point.name, placed.point, placed.read.median, placed.of_ceiling),
            ("  fastest of each", placed.fastest, placed.read.most, placed.fastest_of_ceiling),
        ):
            table.add_row(
                name,
                f"{point.flop_per_byte:.2f}",
                f"{point.gflop_per_s:.1f}",
                f"{point.gb_per_s:.1f}",
                f"{read:.1f}",
                f"{share:.0%}",
            )
    return table


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes / 1024:.4g} KiB"
