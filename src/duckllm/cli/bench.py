"""``duckllm bench``: what this machine can do at best, and how near the kernels come.

Mounted by cli/main.py. Each verb below it parses its options and prints; duckllm/bench measures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from duckllm.errors import ConfigError

ROOFLINE_EXAMPLES = """\b
Examples:
  duckllm bench roofline
  duckllm bench roofline --plot roofline.png
  duckllm bench roofline --threads 1,2 --size 512M --huge-pages on --json
"""

bench = typer.Typer(name="bench", no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@bench.callback()
def about() -> None:
    """Measure what this machine can do at best, and how near the kernels come."""


@bench.command("roofline", epilog=ROOFLINE_EXAMPLES)
def roofline(
    threads: Annotated[
        str, typer.Option(help="Numbers of threads, like 1,2,4; empty takes 1, 2, 4 ... all cores.")
    ] = "",
    isa: Annotated[str, typer.Option(help="Instruction set: auto, scalar, avx2 or avx512.")] = "auto",
    size: Annotated[
        str, typer.Option(help="Footprint of cold measurements, like 512M; 0 takes 8 last-level caches.")
    ] = "0",
    repeats: Annotated[int, typer.Option(help="Samples of each loop, 9 or more.")] = 11,
    huge_pages: Annotated[str, typer.Option(help="Memory in huge pages: on, off or both in turn.")] = "both",
    plot: Annotated[
        Path | None, typer.Option(help="Draw the roofline into this PNG file.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure the ceilings of memory and arithmetic, and place the expert kernels below them.

    Read, memset and memcpy: cold, from the last-level cache and from the second level; f32 multiply-adds in
    registers, on every instruction set. Every loop is verified before it is timed. Takes ten seconds or so
    on a small machine; nothing else should run.
    """
    from rich.console import Console

    from duckllm.bench.machine import cpu_name
    from duckllm.bench.plot import check_plot, write_plot
    from duckllm.bench.report import print_roofline
    from duckllm.bench.roofline import RooflineConfig, measure_roofline
    from duckllm.cli.common import Waiting

    config = RooflineConfig(
        threads=parse_threads(threads),
        isa=isa,
        size=parse_size(size),
        repeats=repeats,
        huge_pages=huge_pages,
    )
    if plot is not None:
        check_plot(plot)
    with Waiting("Measuring", after_s=0.5):
        measured = measure_roofline(config)
    if plot is not None:
        most = max(ceiling.threads for ceiling in measured.ceilings)
        write_plot(
            plot,
            f"{cpu_name()}, {most} threads",
            measured.memory_roofs(),
            measured.compute_roofs(),
            [placed.point for placed in measured.points],
        )
    if as_json:
        print(json.dumps(measured.to_json()))
    else:
        print_roofline(measured, Console(soft_wrap=False, highlight=False, markup=False))


def parse_threads(text: str) -> tuple[int, ...]:
    """Numbers of threads from ``"1,2,4"``; none from an empty text.

    Raises:
        ConfigError: It is something else.
    """
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isascii() and word.isdigit() and len(word) <= 9 for word in words):
        raise ConfigError("threads", text, "numbers with commas between, like 1,2,4")
    return tuple(int(word) for word in words)


def parse_size(text: str) -> int:
    """Bytes from ``"512M"``: a whole number with K, M or G behind it, or nothing.

    Raises:
        ConfigError: It is something else.
    """
    word = text.strip().upper()
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(word[-1:], 0)
    number = word[:-1] if unit else word
    if not (number.isascii() and number.isdigit() and len(number) <= 15):
        raise ConfigError("size", text, "a number of bytes, like 512M or 2G")
    return int(number) * (unit or 1)
