"""What ``duckllm bench decode`` and ``prefill`` measured: tables for people, and the pictures of a report.

Called by cli/bench_model.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table as RichTable

from duckllm.bench.grid import Setting, differing, label
from duckllm.bench.html_report import COLOURS, LINE_STYLES, Picture, Section, Table, command_line, render
from duckllm.bench.machine import commit, cpu_name
from duckllm.bench.model_runs import GridRun, Line
from duckllm.config import available_cores

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PARTS = {
    "attention_s": "attention",
    "dense_s": "dense layers",
    "dispatch_s": "router and sending",
    "wait_s": "waiting for experts",
    "combine_s": "adding up",
    "head_s": "logits",
    "sampling_s": "sampling",
    "device_s": "captured step",
    "draft_s": "guessing",
}
CAVEATS = (
    "The ceiling is what reading the host's weights and the chosen experts (of several rows the number "
    "expected at random), or the multiply-adds, where all are in f32, and then the link to the workers, take "
    "at least. The KV cache's reading and the layer that guesses are not in it.",
    "Host and workers on one machine share its cores and memory: on machines of their own they do not.",
)
_DECODE_CAVEATS = (
    "A reply goes on from a prompt that the KV cache has: its first token comes sooner than a new prompt's, "
    "which duckllm bench prefill measures.",
    "How often guesses are right is the text's doing: --text-file takes prompts from one.",
)


def caveats(run: GridRun) -> tuple[str, ...]:
    """What the figures do not say."""
    return (*CAVEATS, *(_DECODE_CAVEATS if run.config.what == "decode" else ()))


def print_run(run: GridRun, console: Console) -> None:
    """The machine, a table, and what the figures do not say."""
    console.print(headline(run))
    console.print(order(run))
    for title, shown in (("", speed_table(run)), ("Times, milliseconds", times_table(run))):
        rich = RichTable(box=SIMPLE, title=title or None, title_justify="left", padding=(0, 0, 0, 1))
        for heading in shown.headings:
            rich.add_column(heading, justify="right", overflow="fold")
        for row in shown.rows:
            rich.add_row(*row)
        console.print(rich)
    for line in (*run.notes, *wire_words(run), *caveats(run)):
        console.print(f"- {line}")


def headline(run: GridRun) -> str:
    """The machine and the model, in a sentence."""
    return (
        f"{run.model} on {cpu_name()}, {available_cores()} cores, commit {commit()}; load average "
        f"{run.load_average:.1f} before it began; read {run.read_gb_per_s:.1f} GB/s, f32 multiply-adds "
        f"{run.gflop_per_s:.0f} GFLOP/s, measured in the same rounds"
    )


def order(run: GridRun) -> str:
    """How it was measured, in a sentence."""
    turns = "settings in turns" if run.in_turns else "one setting after the other"
    replies = f"{run.config.output_len} tokens a reply; " if run.config.what == "decode" else ""
    return (
        f"{replies}median of {run.config.num_iters} rounds after {run.config.num_iters_warmup} to warm up, "
        f"slowest and fastest beside it; {turns}; replies verified"
    )


def wire_words(run: GridRun) -> list[str]:
    """What goes over the wire for each step, and over what, once for each setting."""
    words = []
    for line in {
        line.setting.names["workers"] + line.setting.names["wire_dtype"]: line for line in reversed(run.lines)
    }.values():
        if not line.info.num_workers:
            continue
        ceiling, gbit = line.ceiling, line.link.gbit_per_s
        rate = (
            "no link rate to hold it against"
            if not gbit
            else (f"{gbit:g} Gbit/s: {1e3 * (ceiling.wire_s or 0):.3f} ms at least")
        )
        count = line.info.num_workers
        words.append(
            f"{count} worker{'' if count == 1 else 's'} by {line.link.words}, {line.cell.batch_size} x "
            f"{line.cell.input_len} tokens: {ceiling.request_bytes / 1e3:.1f} kB of requests and "
            f"{ceiling.reply_bytes / 1e3:.1f} kB of replies a step ({rate})"
        )
    return words


def speed_table(run: GridRun) -> Table:
    """Tokens a second beside their ceiling, one row for each load in each setting."""
    rows = []
    for line in run.lines:
        best = line.ceiling_tokens_per_s
        figures = [f"{each:.1f}" for each in (line.tokens_per_s, min(line.rates), max(line.rates))]
        ceiling = ["?", "?"] if best is None else [f"{best:.0f}", f"{line.tokens_per_s / best:.1%}"]
        rows.append([*_place(run, line), *figures, *ceiling, line.ceiling.bound])
    return Table([*_places(run), "tok/s", "from", "to", "ceiling", "of it", "by"], rows)


def times_table(run: GridRun) -> Table:
    """Times to the first token and between tokens, one row for each load in each setting."""
    headings = [*_places(run), "first p50", "p90", "p99"]
    decode = run.config.what == "decode"
    headings += ["between p50", "p90", "p99", "guesses"] if decode else []
    rows = []
    for line in run.lines:
        row = [*_place(run, line), *_milliseconds(line.percentiles("first_s"))]
        if decode:
            row += _milliseconds(line.percentiles("gaps_s"))
            row.append("" if line.acceptance is None else f"{line.acceptance:.0%}")
        rows.append(row)
    return Table(headings, rows)


def _places(run: GridRun) -> list[str]:
    """Headings of what tells a row from the others."""
    return [*differing(_settings(run)), "context" if run.config.what == "decode" else "prompt", "batch"]


def _place(run: GridRun, line: Line) -> list[str]:
    own = [line.setting.names[name] for name in differing(_settings(run))]
    return [*own, str(line.cell.input_len), str(line.cell.batch_size)]


def _settings(run: GridRun) -> list[Setting]:
    return list({id(line.setting): line.setting for line in run.lines}.values())


def _milliseconds(values: dict[str, float] | None) -> list[str]:
    return ["", "", ""] if values is None else [f"{1e3 * value:.2f}" for value in values.values()]


def html_report(run: GridRun) -> str:
    """The report of a run."""
    what = "Replies, token by token" if run.config.what == "decode" else "Prompts"
    facts = [
        ("machine", f"{cpu_name()}, {available_cores()} cores"),
        ("load average before", f"{run.load_average:.2f}"),
        ("read, f32 multiply-adds", f"{run.read_gb_per_s:.1f} GB/s, {run.gflop_per_s:.0f} GFLOP/s"),
        ("model", run.model),
        ("commit", commit()),
        ("command", command_line()),
        ("how", order(run)),
    ]
    sections = [
        Section(what, pictures=_speed_pictures(run), table=speed_table(run)),
        Section("Times, milliseconds", table=times_table(run)),
        Section("Where a step's time goes", pictures=_part_pictures(run)),
        Section("What the figures do not say", "\n".join((*run.notes, *wire_words(run), *caveats(run)))),
    ]
    return render(f"duckllm bench {run.config.what}: {run.model}", facts, sections)


def _series(run: GridRun) -> tuple[str, list[tuple[str, list[Line]]]]:
    """What the pictures have from left to right, and the lines of each curve by its name."""
    by_length = len(run.config.input_lens) > 1 or len(run.config.batch_sizes) == 1
    settings = _settings(run)

    def name(line: Line) -> str:
        rest = f"batch {line.cell.batch_size}" if by_length else f"{line.cell.input_len} tokens"
        return f"{label(line.setting, settings)}, {rest}"

    ordered = sorted(run.lines, key=name)
    curves = [
        (key, sorted(own, key=lambda line: line.cell.input_len if by_length else line.cell.batch_size))
        for key, own in groupby(ordered, key=name)
    ]
    return ("tokens of a prompt" if by_length else "requests together"), curves


def _x(run: GridRun, lines: Sequence[Line]) -> list[int]:
    by_length = len(run.config.input_lens) > 1 or len(run.config.batch_sizes) == 1
    return [line.cell.input_len if by_length else line.cell.batch_size for line in lines]


def _speed_pictures(run: GridRun) -> list[Picture]:
    xlabel, curves = _series(run)

    def speed(axes: Axes) -> None:
        for number, (name, lines) in enumerate(curves):
            colour, xs = COLOURS[number % len(COLOURS)], _x(run, lines)
            rates = [line.tokens_per_s for line in lines]
            below = [line.tokens_per_s - min(line.rates) for line in lines]
            above = [max(line.rates) - line.tokens_per_s for line in lines]
            axes.errorbar(xs, rates, [below, above], color=colour, marker="o", capsize=3, label=name)
            best = [line.ceiling_tokens_per_s for line in lines]
            if all(each is not None for each in best):
                label_ = "ceilings" if number == 0 else None
                axes.plot(xs, [each or 0 for each in best], color=colour, linestyle=":", label=label_)
        _finish(axes, xlabel, "tokens a second", [x for _, lines in curves for x in _x(run, lines)])

    def times(axes: Axes) -> None:
        field = "gaps_s" if run.config.what == "decode" else "first_s"
        for number, (name, lines) in enumerate(curves):
            for style, percent in zip(LINE_STYLES, ("p50", "p90", "p99"), strict=False):
                values = [1e3 * (line.percentiles(field) or {percent: 0.0})[percent] for line in lines]
                axes.plot(
                    _x(run, lines),
                    values,
                    color=COLOURS[number % len(COLOURS)],
                    linestyle=style,
                    marker=".",
                    label=name if percent == "p50" else None,
                )
        _finish(axes, xlabel, "milliseconds", [x for _, lines in curves for x in _x(run, lines)])

    what = "Between two tokens of a reply" if run.config.what == "decode" else "To the first token"
    return [
        Picture("Tokens a second of all requests together: median, slowest and fastest round.", speed),
        Picture(
            f"{what}: p50 (solid), p90 (dashed) and p99 (dash-dotted) over all requests and rounds.", times
        ),
    ]


def _finish(axes: Axes, xlabel: str, ylabel: str, xs: Sequence[int]) -> None:
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if len(set(xs)) > 1:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(set(xs)), [str(x) for x in sorted(set(xs))])
        axes.minorticks_off()
    axes.set_yscale("log")


def _part_pictures(run: GridRun) -> list[Picture]:
    settings = _settings(run)

    def parts(axes: Axes) -> None:
        names = [
            f"{label(line.setting, settings)}, {line.cell.batch_size} x {line.cell.input_len}"
            for line in run.lines
        ]
        left = [0.0] * len(names)
        for number, (part, words) in enumerate(_PARTS.items()):
            widths = [1e3 * line.step_parts_s.get(part, 0.0) for line in run.lines]
            if any(widths):
                axes.barh(
                    range(len(names)), widths, left=left, label=words, color=COLOURS[number % len(COLOURS)]
                )
            left = [before + width for before, width in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(axis="y", labelsize="x-small")
        axes.invert_yaxis()
        axes.set(xlabel="milliseconds of a step, on the average")

    height = 1.5 + 0.22 * len(run.lines)
    return (
        [Picture("Each load in each setting: the engine's own clocks.", parts, height)] if run.lines else []
    )
