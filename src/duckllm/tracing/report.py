"""A trace's summary and heat maps as text for people. Called by cli/trace.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from duckllm.config import count_of
from duckllm.tracing.read import F64
from duckllm.tracing.summary import HeatMaps, Summary

RAMP = " .:-=+*#%@"  # any terminal, any encoding
_LABEL_WIDTH = 10
_MOST_NAMES = 16
# So many times its share of the waits one worker must answer last to be named.
_STRAGGLES = 1.5
MEANINGS = {
    "host computes": "attention, dense layers, logits. A faster host, or a GPU for its part, shortens it.",
    "dispatch": "the router, and handing requests to the network. The host's cores are busy, its port is "
    "full, or there are many workers.",
    "combine": "adding up answers. It grows with workers and rows.",
    "wait: queue": "a worker still has an earlier step, of the other lane: faster workers, or --lanes off.",
    "wait: wire": "requests are on their way, or a worker wakes up. A faster link, or fewer processes there.",
    "wait: compute": "experts are computed: the workers' memory. More or faster workers.",
    "wait: reply": "answers are on their way. A faster link at the host, or fewer processes on its cores.",
    "wait: not known": "the trace lacks these steps' moments.",
}


# What that is of where nobody else computes.
_HOST_ALONE = (
    "attention, dense layers, logits, and the experts, which are in this process. A faster host, a GPU for "
    "its part, or workers for the experts shorten it."
)


def print_summary(summary: Summary, console: Console, num_layers: int) -> None:
    """Where the time went: by part, by lane, by worker, by layer, and what was unusual."""
    steps = f"{summary.num_steps} steps at {count_of(len(summary.workers), 'worker')}"
    tokens = f"{summary.num_engine_steps} of the engine, {summary.num_new_tokens} new tokens"
    console.print(
        f"{summary.span_ms / 1000:.3f} s, {summary.engine_ms / 1000:.3f} s of it busy: {steps}, {tokens}"
    )
    if summary.num_dropped:
        console.print(f"{summary.num_dropped} steps are missing: more came at once than there was room for.")
    if summary.num_replaced:
        console.print(f"{count_of(summary.num_replaced, 'time')} a worker came in another's place.")
    console.print(_parts(summary))
    console.print(verdict(summary))
    if summary.lanes:
        console.print(_lanes(summary))
    if not summary.workers:
        console.print("No workers: no step's parts are known, as the host computes all of it.")
        return
    console.print(_workers(summary))
    for number, worker in enumerate(summary.workers[:_MOST_NAMES]):
        console.print(f"  worker {number}: {worker.name}")
    if len(summary.workers) > _MOST_NAMES:
        console.print(f"  and {len(summary.workers) - _MOST_NAMES} more, named by --json")
    console.print(_layers(summary, num_layers))
    share = summary.imbalance_ms / summary.engine_ms if summary.engine_ms else 0.0
    console.print(
        f"Workers that all took as long as the mean one would have saved {summary.imbalance_ms:.1f} ms of "
        f"the waits, {share:.1%} of the time."
    )
    if any(worker.num_late for worker in summary.workers):
        console.print(_late(summary))


def verdict(summary: Summary) -> str:
    """The part that took most of the host's time, and what helps, in a sentence."""
    part, ms = max(summary.parts_ms.items(), key=lambda each: each[1])
    if not ms or not summary.engine_ms:
        return "No time was traced."
    meaning = _HOST_ALONE if part == "host computes" and not summary.workers else MEANINGS[part]
    words = f"Most of it, {ms / summary.engine_ms:.0%}, is {part}: {meaning}"
    last = [worker.last_share for worker in summary.workers]
    if part.startswith("wait: ") and len(last) > 1 and max(last) >= _STRAGGLES / len(last):
        slowest = last.index(max(last))
        words += f" Worker {slowest} answers last in {last[slowest]:.0%} of the waits."
    return words


def print_heat_maps(maps: HeatMaps, console: Console) -> None:
    """Both heat maps of compute time as characters: darker is more, each map on its own scale."""
    width = max(16, console.width - _LABEL_WIDTH - 2)
    if maps.workers and len(maps.layers):
        _print_map(
            "Median compute time of a step, layer x worker",
            maps.layers,
            maps.compute_us,
            "us",
            console,
            width,
        )
    if maps.expert_rows.size and maps.expert_rows.any():
        _print_map("Choices, layer x expert", maps.layers, maps.expert_rows, "choices", console, width)
        _print_map("Time, layer x expert", maps.layers, maps.expert_ms, "ms", console, width)


def shade(values: F64, least: float, most: float, width: int) -> list[str]:
    """Rows of characters, at most ``width`` wide: where there are more columns, neighbours share one.

    Shapes: values: [L, C]
    """
    columns = values.shape[1]
    groups = np.array_split(np.arange(columns), min(columns, width))
    repeat = max(1, min(6, width // max(1, columns)))
    lines = []
    for row in values:
        text = ""
        for group in groups:
            known = row[group][~np.isnan(row[group])]
            level = 0.0 if not known.size or most <= least else (known.max() - least) / (most - least)
            level = min(1.0, max(0.0, level))  # moments of a damaged trace may lie in any order
            text += ("?" if not known.size else RAMP[round(level * (len(RAMP) - 1))]) * repeat
        lines.append(text)
    return lines


def _print_map(
    title: str, layers: Sequence[int], values: F64, unit: str, console: Console, width: int
) -> None:
    least, most = 0.0, float(np.nanmax(values)) if not np.isnan(values).all() else 0.0
    known = values[~np.isnan(values)]
    mean = known.mean() if known.size else 0
    console.print(f"\n{title}: 0 (blank) to {most:.4g} {unit} ({RAMP[-1]}), mean {mean:.4g}")
    for layer, line in zip(layers, shade(values, least, most, width), strict=True):
        console.print(f"  {layer:>6} |{line}|")


def _table(title: str, *names: str) -> Table:
    table = Table(title=title, box=SIMPLE, title_justify="left", padding=(0, 1, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in ("part", "worker", "phase") else "right")
    return table


def _parts(summary: Summary) -> Table:
    table = _table("Where the host's time goes", "part", "ms", "share")
    for name, ms in sorted(summary.parts_ms.items(), key=lambda each: -each[1]):
        if ms >= 0.05:
            table.add_row(name, f"{ms:.1f}", f"{ms / summary.engine_ms:.1%}")
    return table


def _lanes(summary: Summary) -> Table:
    table = _table("Bubbles", "lanes", "steps", "us a step", "host waits", "workers idle", "both compute")
    for each in summary.lanes:
        shares = (each.host_waits_share, each.workers_idle_share, each.overlap_share)
        table.add_row(
            str(each.lanes), str(each.num_steps), f"{each.step_us:.0f}", *(f"{x:.1%}" for x in shares)
        )
    return table


def _workers(summary: Summary) -> Table:
    names = ("worker", "queue", "wire", "compute", "p99", "reply", "busy", "last", "by", "late", "clock")
    table = _table("Workers, us a step", *names)
    for number, each in enumerate(summary.workers):
        moments = (each.queue_us, each.wire_us, each.compute_us, each.compute_p99_us, each.reply_us)
        table.add_row(
            str(number),
            *(_short(us) for us in moments),
            f"{each.busy_share:.1%}",
            f"{each.last_share:.0%}",
            _short(each.late_us),
            str(each.num_late),
            _short(each.clock_error_us),
        )
    return table


def _short(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def _layers(summary: Summary, most: int) -> Table:
    names = ("layer", "steps", "us", "p99", "compute", "slowest", "imbalance", "experts")
    title = "Slowest layers" if most < len(summary.layers) else "Layers, slowest first"
    table = _table(title, *names)
    for each in sorted(summary.layers, key=lambda layer: -layer.step_us)[:most]:
        table.add_row(
            str(each.layer),
            str(each.num_steps),
            _short(each.step_us),
            _short(each.step_p99_us),
            _short(each.compute_us),
            str(each.slowest_worker),
            f"{each.imbalance:.2f}",
            f"{each.expert_imbalance:.2f}",
        )
    return table


def _late(summary: Summary) -> Table:
    table = _table("Latest answers", "at ms", "layer", "worker", "us", "usual", "phase")
    for each in summary.late:
        row = (f"{each.at_ms:.1f}", str(each.layer), str(each.worker), f"{each.took_us:.0f}")
        table.add_row(*row, f"{each.usual_us:.0f}", each.phase)
    return table
