"""The trials of ablation.py as tables and as plain values. Called by cli/bench.py."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from dataclasses import asdict

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from duckllm.bench.ablation import EXPERTS, HIDDEN_SIZE, TILE_EXPERTS, TILE_ROWS, AblationRun, Trial
from duckllm.bench.kernel_report import alone_notes
from duckllm.bench.machine import commit, cpu_name
from duckllm.config import available_cores, threads_in_words

ABLATION_CAVEATS = (
    "faster: production's time over the variant's in the same round, minus 1; below 0 is slower. Its "
    "quartiles beside it; best compares the fastest step of each. The variants of chains, scale, "
    "pre-scaled x and prefetch are held against production's choices again, which is compiled from their "
    "source.",
    "N100: the change of speed on the reference system, an Intel N100 with AVX2.",
    "Every variant gave production's result first: the same bits, or where it sums in another order the same "
    "within 1e-5 of the largest output. Every step takes experts that are in no cache.",
)


def ablation_json(run: AblationRun) -> dict[str, object]:
    """Everything as plain values; times in microseconds."""
    return {
        "benchmark": "ablation",
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": cpu_name(),
        "cores": available_cores(),
        "kernel": platform.release(),
        "other_load_cores": {name: round(value, 3) for name, value in asdict(run.other_load).items()},
        "hidden_size": HIDDEN_SIZE,
        "channels": list(run.config.channels),
        "threads": run.threads,
        "isa": run.isa,
        "repeats": run.config.repeats,
        "verified": True,  # what is not right raises instead
        "decode": [trial_json(trial) for trial in run.decode],
        "tiles": [trial_json(trial) for trial in run.tiles],
        "notes": alone_notes(run.other_load),
    }


def trial_json(trial: Trial) -> dict[str, object]:
    """One trial as plain values."""
    values = asdict(trial)
    values["step_us"] = 1e6 * values.pop("step_s")
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}


def print_ablation(run: AblationRun, console: Console) -> None:
    """A table for each slice, one for the tile kernels, and what the figures do not say."""
    console.print(
        f"{cpu_name()}, {threads_in_words(run.threads)}, {run.isa}, commit {commit()}. Medians of "
        f"{run.config.repeats} rounds. Every variant was verified against production."
    )
    for note in alone_notes(run.other_load):
        console.print(note)
    for channels in run.config.channels:
        title = f"One row, {EXPERTS} experts, H {HIDDEN_SIZE}, {channels} channels"
        console.print(trials_table(title, [each for each in run.decode if each.channels == channels]))
    title = f"{TILE_ROWS} rows, {TILE_EXPERTS} expert, H {HIDDEN_SIZE}, {run.config.channels[0]} channels"
    console.print(trials_table(title, run.tiles))
    for caveat in ABLATION_CAVEATS:
        console.print(f"- {caveat}")


def trials_table(title: str, trials: Sequence[Trial]) -> Table:
    """One row for each trial."""
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("variant", no_wrap=True)
    for heading in ("us", "faster", "quartiles", "best", "N100"):
        table.add_column(heading, justify="right", no_wrap=True)
    for trial in trials:
        reference = trial.reference
        table.add_row(
            trial.name,
            f"{1e6 * trial.step_s:.1f}",
            percent(trial.speed),
            f"{percent(trial.low)} {percent(trial.high)}",
            percent(trial.best),
            percent(reference) if isinstance(reference, float) else reference or "",
        )
    return table


def percent(share: float) -> str:
    """A change in per cent, with its sign."""
    return f"{share:+.1%}"
