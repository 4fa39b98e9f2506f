"""``duckllm bench``: what this machine can do at best, and how near the kernels, a model and a server come.

Mounted by cli/main.py. Each verb below it parses its options and prints; duckllm/bench measures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from duckllm.cli.bench_common import (
    CellProgress,
    append_line,
    check_environment,
    check_save,
    parse_numbers,
    parse_words,
    print_line,
    writing_whole,
)
from duckllm.cli.bench_model import DECODE_EXAMPLES, PREFILL_EXAMPLES, decode, prefill
from duckllm.cli.bench_serve import SERVE_EXAMPLES, serve
from duckllm.cli.common import refuse_unused
from duckllm.cli.terminal import table_console
from duckllm.config import LOSSLESS_FORMATS, parse_size, threads_in_words

ROOFLINE_EXAMPLES = """\b
Examples:
  duckllm bench roofline
  duckllm bench roofline --plot roofline.png
  duckllm bench roofline --threads 1,2 --size 512M --huge-pages on --json
"""

KERNEL_EXAMPLES = """\b
Examples:
  duckllm bench kernel
  duckllm bench kernel --shape deepseek-32,qwen3 --format fp9 --rows 1,2 --experts 4,8,20
  duckllm bench kernel --full --json --save benchmarks/results/mine.jsonl
"""

ABLATION_EXAMPLES = """\b
Examples:
  pip install -e . -C cmake.define.DUCK_BUILD_ABLATION=ON
  duckllm bench ablation
  duckllm bench ablation --isa avx2 --channels 64 --json
"""

bench = typer.Typer(name="bench", no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@bench.callback()
def about() -> None:
    """Measure what this machine can do at best, and how near kernels, a model and a server come."""


bench.command("decode", short_help="Measure replies of a model, token by token.", epilog=DECODE_EXAMPLES)(
    decode
)
bench.command("prefill", short_help="Measure how fast prompts are read.", epilog=PREFILL_EXAMPLES)(prefill)
bench.command("serve", short_help="Load a running server and measure it.", epilog=SERVE_EXAMPLES)(serve)


@bench.command("roofline", short_help="Measure ceilings of memory and arithmetic.", epilog=ROOFLINE_EXAMPLES)
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
    save: Annotated[
        Path | None, typer.Option(help="Append the JSON object to this file.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure the ceilings of memory and arithmetic, and place the expert kernels below them.

    Read, memset and memcpy: cold, from the last-level cache and from the second level; f32 multiply-adds in
    registers, on every instruction set. Every loop is verified before it is timed. Takes ten seconds or so
    on a small machine; nothing else should run.
    """
    from duckllm.bench.machine import cpu_name
    from duckllm.bench.plot import check_plot, write_plot
    from duckllm.bench.report import print_roofline
    from duckllm.bench.roofline import RooflineConfig, measure_roofline
    from duckllm.cli.common import Waiting

    check_environment()
    config = RooflineConfig(
        threads=parse_numbers("threads", threads),
        isa=isa,
        size=parse_size("size", size),
        repeats=repeats,
        huge_pages=huge_pages,
    )
    if plot is not None:
        check_plot(plot)
        check_save(plot, "plot")
    if save is not None:
        check_save(save)
    with Waiting("Measuring", after_s=0.5):
        measured = measure_roofline(config)
    if not as_json:
        print_roofline(measured, table_console())
        append_line(json.dumps(measured.to_json()), save)
    else:
        print_line(measured.to_json(), save)
    if plot is not None:
        most = max(ceiling.threads for ceiling in measured.ceilings)
        with writing_whole("plot", plot) as part:
            write_plot(
                part,
                f"{cpu_name()}, {threads_in_words(most)}",
                measured.memory_roofs(),
                measured.compute_roofs(),
                [placed.point for placed in measured.points],
            )


@bench.command(
    "kernel", short_help="Measure the expert kernels beside their ceilings.", epilog=KERNEL_EXAMPLES
)
def kernel(
    shape: Annotated[
        str,
        typer.Option(help="deepseek-32, deepseek-8, deepseek, qwen3, qwen3-12, demo; empty takes all."),
    ] = "",
    experts: Annotated[
        str, typer.Option(help="Experts that a row chooses, like 4,8; empty takes 4, 8, 12, 16, 20.")
    ] = "",
    rows: Annotated[str, typer.Option(help="Rows of a step, like 1,2; empty takes 1 to 128.")] = "",
    weight_format: Annotated[
        str,
        typer.Option("--format", help="Weight formats, like fp8,int4; empty takes fp9, fp8, int8, int4."),
    ] = "",
    threads: Annotated[int, typer.Option(help="Threads; 0 takes all cores.")] = 0,
    isa: Annotated[str, typer.Option(help="Instruction set: auto, scalar, avx2 or avx512.")] = "auto",
    repeats: Annotated[int, typer.Option(help="Rounds of each line, 9 or more.")] = 9,
    hot: Annotated[bool, typer.Option("--hot", help="The same experts in every step, from a cache.")] = False,
    full: Annotated[bool, typer.Option("--full", help="The whole grid, up to 512 rows.")] = False,
    prefill: Annotated[
        str, typer.Option(help="What experts of more than 8 rows are computed with: f32 or bf16.")
    ] = "f32",
    linear: Annotated[
        bool, typer.Option("--linear", help="The dense layers of the models instead, with 1 row and 8.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the points into this PNG file.", show_default=False)
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Append the JSON line to this file.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON line only.")] = False,
) -> None:
    """Measure the expert kernels on layers of real models, each line beside its ceilings.

    Every line is verified against float64 and measured in turns with plain reads. Takes two minutes or so on
    a small machine, with --full ten times as long; nothing else should run. The last line is JSON.
    """
    from duckllm.bench.kernel import KernelConfig, measure_kernels
    from duckllm.bench.kernel_report import plot_points, print_kernels, roofs, run_json
    from duckllm.bench.machine import cpu_name
    from duckllm.bench.plot import check_plot, write_plot

    check_environment()
    config = KernelConfig(
        shape=parse_words(shape),
        experts=parse_numbers("experts", experts),
        rows=parse_numbers("rows", rows),
        format=parse_words(weight_format),
        threads=threads,
        isa=isa,
        repeats=repeats,
        hot=hot,
        full=full,
        prefill=prefill,
    )
    if linear:
        beside = {"shape": shape, "experts": experts, "hot": hot, "full": full, "plot": plot}
        what = "nothing beside --linear, which measures dense layers"
        refuse_unused(kernel, beside | {"prefill": prefill}, what)
    if rows:
        refuse_unused(kernel, {"full": full}, "nothing beside --rows, which says how many there are")
    if weight_format and not set(LOSSLESS_FORMATS) & set(config.format):
        refuse_unused(kernel, {"prefill": prefill}, "f32 with formats that multiply integers alone")
    if plot is not None:
        check_plot(plot)
        check_save(plot, "plot")
    if save is not None:
        check_save(save)
    if linear:
        from duckllm.bench.linear_report import linear_json, measure_linear, print_linear

        with CellProgress() as progress:
            layers = measure_linear(config, progress)
        if not as_json:
            print_linear(layers, table_console())
        return print_line(linear_json(layers), save)
    with CellProgress() as progress:
        measured = measure_kernels(config, progress)
    if not as_json:
        print_kernels(measured, table_console())
    print_line(run_json(measured), save)
    if plot is not None:
        title = f"{cpu_name()}, {threads_in_words(measured.threads)}"
        with writing_whole("plot", plot) as part:
            write_plot(part, title, *roofs(measured), plot_points(measured.lines))


@bench.command("ablation", short_help="Measure what was left out of the kernels.", epilog=ABLATION_EXAMPLES)
def ablation(
    channels: Annotated[str, typer.Option(help="Channels of the slices, multiples of 16.")] = "64,128",
    threads: Annotated[int, typer.Option(help="Threads; 0 takes all cores.")] = 0,
    isa: Annotated[str, typer.Option(help="Instruction set: auto, avx2 or avx512.")] = "auto",
    repeats: Annotated[int, typer.Option(help="Rounds, 9 or more.")] = 51,
    save: Annotated[
        Path | None, typer.Option(help="Append the JSON line to this file.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON line only.")] = False,
) -> None:
    """Measure what was left out of the expert kernels, each idea beside what is in them.

    Needs a module that is not part of the package; the first example builds it from a checkout. Every
    variant is verified against the kernels first, then all take turns. Takes a minute or so.
    """
    from duckllm.bench.ablation import AblationConfig, load_module, measure_ablation
    from duckllm.bench.ablation_report import ablation_json, print_ablation
    from duckllm.cli.common import Waiting

    check_environment()
    config = AblationConfig(parse_numbers("channels", channels), threads, isa, repeats)
    load_module()
    if save is not None:
        check_save(save)
    with Waiting("Measuring", after_s=0.5):
        measured = measure_ablation(config)
    if not as_json:
        print_ablation(measured, table_console())
    print_line(ablation_json(measured), save)
