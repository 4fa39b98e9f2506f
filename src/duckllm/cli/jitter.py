"""``duckllm doctor --jitter`` for people and for programs."""

from __future__ import annotations

import dataclasses
import json
import sys

from duckllm.cli.common import Waiting
from duckllm.cli.terminal import printable
from duckllm.doctor.jitter import Jitter, measure_jitter
from duckllm.doctor.jitter_advice import advise, causes


def jitter(samples: int, *, as_json: bool) -> None:
    """Measures and prints.

    Raises:
        ConfigError: Too few or too many samples.
    """
    with Waiting("Measuring how evenly each core computes"):
        found = measure_jitter(samples)
    if as_json:
        print(json.dumps({**dataclasses.asdict(found), "advice": advise(found)}))
        return
    show(found)


def show(found: Jitter) -> None:
    """A table, and below it what to change."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    for name in ("core", "p50 us", "p99 us", "p99.9 us", "longest", "lost"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what came between", overflow="fold")
    for core in found.cores:
        table.add_row(
            str(core.core),
            f"{core.p50_us:.1f}",
            f"{core.p99_us:.1f}",
            f"{core.p999_us:.1f}",
            f"{core.max_us:.0f}",
            f"{100 * core.lost:.1f} %",
            Text(printable(causes(core))),
        )
    console = Console(file=sys.stdout)
    console.print(
        f"{found.cores[0].num_samples} pieces of work of {found.piece_us:.0f} us on each core in turn, "
        f"scheduled as {found.scheduler}; load before it {found.load:.2f}",
        soft_wrap=True,
    )
    console.print(table)
    for line in advise(found):
        console.print(Text(printable(line)), soft_wrap=True)
