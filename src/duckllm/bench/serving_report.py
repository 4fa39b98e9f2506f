"""What ``duckllm bench serve`` measured: tables for people, and the pictures of a report.

Called by cli/bench_serve.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table as RichTable

from duckllm.bench.html_report import COLOURS, LINE_STYLES, Picture, Section, Table, command_line, render
from duckllm.bench.machine import commit, cpu_name
from duckllm.bench.serving import LoadResult, ServingRun, summary
from duckllm.config import available_cores

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CAVEATS = (
    "Latencies are of the requests that came to their end; those that failed are counted beside them.",
    "In an open loop the first token and the end count from the moment at which a request was due, so that "
    "what waited is not left out; in a closed loop a slow server is asked less, and latencies say less.",
    "Between tokens: times between two pieces of a stream, which may hold several tokens; per token: the "
    "time from the first piece to the last over the tokens that the server counts.",
    "Requests and tokens a second are over all the time, that of the last replies included.",
    "The client's own work is on this machine's cores; how late it sent is in the table. The server's own "
    "ceiling is not seen from here: duckllm bench decode measures it.",
)
_MOST_ERRORS = 8
CAVEATS_ARE_IN = "what each figure is, and what it does not say: docs/benchmarks.md, or the report of --html"
_TIMES = {
    "first": "first token",
    "first_after_sending": "after sending",
    "between": "between tokens",
    "per_token": "per token",
    "whole": "whole reply",
}


def print_serving(run: ServingRun, console: Console) -> None:
    """The server, a table of throughput, one of times for each load, and errors."""
    console.print(headline(run))
    tables = [("", throughput_table(run))]
    tables += [(f"{result.load}, ms", times_table([result])) for result in run.results]
    for title, shown in tables:
        rich = RichTable(box=SIMPLE, title=title or None, title_justify="left", padding=(0, 0, 0, 1))
        for heading in shown.headings:
            left = heading in ("load", "time")
            rich.add_column(heading, justify="left" if left else "right", overflow="fold", no_wrap=left)
        for row in shown.rows:
            rich.add_row(*row)
        console.print(rich)
    for line in (*length_words(run), *error_words(run), *run.notes, CAVEATS_ARE_IN):
        console.print(f"- {line}")


def headline(run: ServingRun) -> str:
    """The server and the client's machine, in a sentence."""
    return (
        f"{run.model} at {run.base_url} ({run.backend}), asked from {cpu_name()}, {available_cores()} cores, "
        f"commit {commit()}; load average there {run.load_average:.1f} before it began"
    )


def throughput_table(run: ServingRun) -> Table:
    """One row for each load."""
    rows = []
    for result in run.results:
        rate, offered = len(result.answered) / result.seconds, result.offered_per_s
        share = ("", "") if offered is None else (f"{offered:.2f}", f"{rate / offered:.0%}")
        failed = len(result.outcomes) - len(result.answered)
        counts = (str(result.load), str(len(result.answered)), str(failed))
        last = (f"{result.output_tokens_per_s:.1f}", str(result.most_under_way), f"{result.seconds:.1f}")
        rows.append((*counts, share[0], f"{rate:.2f}", share[1], *last))
    headings = ("load", "answered", "failed", "offered/s", "req/s", "of it", "tok/s", "at once", "seconds")
    return Table(headings, rows)


def times_table(results: Sequence[LoadResult]) -> Table:
    """Percentiles of the times, a row for each kind and load."""
    rows = []
    for result in results:
        kinds = [(words, result.times_s(name)) for name, words in _TIMES.items()]
        for words, values in (*kinds, ("sent late", result.sent_late_s)):
            found = summary(values)
            if found is not None:
                figures = [f"{1e3 * found[name]:.2f}" for name in ("mean", "p50", "p90", "p99", "max")]
                rows.append((words, *figures) if len(results) == 1 else (words, str(result.load), *figures))
    places = ("time",) if len(results) == 1 else ("time", "load")
    return Table((*places, "mean", "p50", "p90", "p99", "most"), rows)


def length_words(run: ServingRun) -> list[str]:
    """How long prompts and replies were, a sentence for each load."""
    words = []
    for result in run.results:
        if not result.answered:
            continue
        found = result.to_json()
        figures = [found[name] for name in ("prompt_tokens", "reply_tokens", "pieces_per_reply")]
        prompt, reply, pieces = ("?" if each is None else f"{each:g}" for each in figures)
        words.append(
            f"{result.load}: {prompt} tokens a prompt and {reply} a reply on the average, in {pieces} pieces"
        )
    return words


def error_words(run: ServingRun) -> list[str]:
    """What failed, by load; a server may say something else each time, so the most frequent alone."""
    words = []
    for result in run.results:
        errors = list(result.errors.items())
        of = len(result.outcomes)
        words += [f"{result.load}: {count} of {of} failed: {error}" for error, count in errors[:_MOST_ERRORS]]
        if rest := errors[_MOST_ERRORS:]:
            count = sum(each for _, each in rest)
            words.append(f"{result.load}: {count} of {of} failed in {len(rest)} other ways")
    return words


def serving_html(run: ServingRun) -> str:
    """The report of a run."""
    facts = [
        ("server", f"{run.model} at {run.base_url} ({run.backend})"),
        ("client", f"{cpu_name()}, {available_cores()} cores, load average before {run.load_average:.2f}"),
        ("commit", commit()),
        ("command", command_line()),
    ]
    answered = [result for result in run.results if result.answered]
    pictures = [
        Picture("Share of requests whose first token came within a time.", _shares(answered, "first"))
    ]
    pictures += [Picture("Share of gaps between pieces that were no longer.", _shares(answered, "between"))]
    pictures += [
        Picture("First token of each request, by the time at which it was due.", _by_arrival(answered))
    ]
    words = (*length_words(run), *error_words(run), *run.notes, *CAVEATS)
    sections = [
        Section(
            "Throughput",
            pictures=[_curve(answered)] if len(answered) > 1 else (),
            table=throughput_table(run),
        ),
        Section("Times, milliseconds", pictures=pictures if answered else (), table=times_table(run.results)),
        Section("What the figures do not say", "\n".join(words)),
    ]
    return render(f"duckllm bench serve: {run.model}", facts, sections)


def _shares(results: Sequence[LoadResult], name: str) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for number, result in enumerate(results):
            values = sorted(1e3 * value for value in result.times_s(name))
            if not values:
                continue
            heights = [(place + 1) / len(values) for place in range(len(values))]
            axes.step(
                values,
                heights,
                where="post",
                color=COLOURS[number % len(COLOURS)],
                linestyle=LINE_STYLES[number // len(COLOURS) % len(LINE_STYLES)],
                label=str(result.load),
            )
        axes.set(xlabel="milliseconds", ylabel="share")
        axes.set_xscale("symlog", linthresh=0.1)

    return draw


def _by_arrival(results: Sequence[LoadResult]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for number, result in enumerate(results):
            colour = COLOURS[number % len(COLOURS)]
            xs = [outcome.intended - result.start for outcome in result.answered]
            ys = [1e3 * outcome.first_s for outcome in result.answered]
            axes.plot(xs, ys, ".", color=colour, label=str(result.load))
            failed = [outcome.intended - result.start for outcome in result.outcomes if outcome.error]
            if failed:
                axes.plot(failed, [min(ys)] * len(failed), "x", color=colour, label=f"{result.load}: failed")
        axes.set(xlabel="seconds since the first moment", ylabel="milliseconds")
        axes.set_yscale("log")

    return draw


def _curve(results: Sequence[LoadResult]) -> Picture:
    """Latency against throughput, a point for each load."""

    def draw(axes: Axes) -> None:
        ordered = sorted(results, key=lambda result: result.output_tokens_per_s)
        xs = [result.output_tokens_per_s for result in ordered]
        for number, (name, words) in enumerate((("first", "first token"), ("between", "between tokens"))):
            for style, percent in zip(LINE_STYLES, ("p50", "p99"), strict=False):
                found = [summary(result.times_s(name)) for result in ordered]
                ys = [math.nan if each is None else 1e3 * each[percent] for each in found]
                axes.plot(
                    xs, ys, color=COLOURS[number], linestyle=style, marker="o", label=f"{words}, {percent}"
                )
        axes.set(xlabel="tokens a second", ylabel="milliseconds")
        axes.set_yscale("log")

    return Picture("Times against throughput, a point for each load.", draw)
