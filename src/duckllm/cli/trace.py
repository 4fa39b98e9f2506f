"""``duckllm trace``: where the time of a traced run went.

Mounted by cli/main.py. Parses its options and prints; duckllm/tracing reads, counts and draws.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from duckllm.cli.bench_common import check_save, writing_whole
from duckllm.cli.common import Waiting, refuse_unused, tell
from duckllm.cli.terminal import plain_title, table_console
from duckllm.errors import ConfigError

EXAMPLES = """\b
Examples:
  duckllm chat --prompt "What is a duck?" --trace run.json
  duckllm trace run.json
  duckllm trace run.json --plot heat.png
  duckllm trace run.earlier.json run.json --late 10 --json
"""


def trace(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Trace of a run; of a long one, its earlier part first."),
    ],
    plot: Annotated[
        Path | None, typer.Option(help="Draw the heat maps into this .png or .svg file.", show_default=False)
    ] = None,
    layers: Annotated[int, typer.Option(help="How many of the slowest layers to list.")] = 8,
    late: Annotated[int, typer.Option(help="How many of the latest answers to list.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Say where the time of a traced run went, and draw heat maps: layer by worker, and layer by expert.

    Traces are written by --trace of chat, serve, bench decode and bench prefill, and by LLM(trace=...). They
    also open in https://ui.perfetto.dev, where each worker has a track for each lane. docs/tracing.md says
    what each part and column is.
    """
    from duckllm.tracing.plot import check_plot, write_plot
    from duckllm.tracing.read import read_trace
    from duckllm.tracing.report import print_heat_maps, print_summary
    from duckllm.tracing.summary import heat_maps, summarise

    for field, number in (("layers", layers), ("late", late)):
        if number < 0:
            raise ConfigError(field, number, "at least 0")
    if as_json:
        refuse_unused(trace, {"layers": layers}, "nothing with --json, which has all of them")
    if plot is not None:
        check_plot(plot)
        check_save(plot, "plot")
    with Waiting("Reading"):
        read = read_trace(files)
        summary, maps = summarise(read, late), heat_maps(read)
    if as_json:
        print(json.dumps(summary.to_json() | {"heat_maps": maps.to_json(), "facts": read.facts}))
    else:
        console = table_console()
        print_summary(summary, console, layers)
        print_heat_maps(maps, console)
    if plot is not None:
        with writing_whole("plot", plot) as part:
            title = plain_title(f"{files[-1].name}: {read.facts.get('model', '')}")
            write_plot(part, plot.suffix[1:], title, maps)
        tell(f"heat maps: {plot}")
