"""``duckllm simulate``: a flock larger than one has, and what its host would need for a step.

Mounted by cli/main.py. Parses its options and prints; duckllm/simulate does the rest.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from duckllm.cli.bench_common import (
    CellProgress,
    append_line,
    check_save,
    parse_numbers,
    parse_words,
    writing_whole,
)
from duckllm.cli.model_options import InspectedModel
from duckllm.cli.terminal import plain_title, table_console
from duckllm.config import (
    MAX_STEP_TOKENS,
    WEIGHT_FORMATS,
    WIRE_DTYPES,
    available_cores,
    parse_decimal,
    parse_whole,
)
from duckllm.errors import ConfigError

if TYPE_CHECKING:
    from duckllm.simulate.nodes import Node

EXAMPLES = """\b
Examples:
  duckllm simulate examples/configs/DeepSeek-V3.2 --workers 8,16,32,64
  duckllm simulate /models/mine --workers 16 --node n100 --link 1 --host-link 25 --slow 5:2
  duckllm simulate /models/mine --workers 32 --rows 2,8 --layer-us 200 --json
"""
_MOST_WORKERS = 64
_LEAST_LINK = 0.001
_DEFAULT_WORKERS = (8, 16, 32, 64)


def simulate(
    model: InspectedModel = None,
    workers: Annotated[
        str | None,
        typer.Option(
            help=f"Numbers of workers, up to {_MOST_WORKERS}; by default 8,16,32,64, as far as experts have "
            "stripes.",
            show_default=False,
        ),
    ] = None,
    rows: Annotated[
        str, typer.Option(help="Rows of a step: tokens computed together, one of each request.")
    ] = "1,2,8",
    node: Annotated[str, typer.Option(help="What nodes are; duckllm plan --presets lists them.")] = "n100",
    speed: Annotated[
        float | None,
        typer.Option(help="GB/s that a node's kernels read, not the preset's.", show_default=False),
    ] = None,
    link: Annotated[
        float | None,
        typer.Option(help="A node's port, Gbit/s, not the preset's; 0: no limit.", show_default=False),
    ] = None,
    delay_us: Annotated[
        float | None,
        typer.Option(help="Delay of a message each way, microseconds; by default 25.", show_default=False),
    ] = None,
    host_link: Annotated[float, typer.Option(help="The host's port, Gbit/s; 0: no limit.")] = 10.0,
    slow: Annotated[
        str, typer.Option(help="Workers that take longer, from 0 on, and how many times: 5:2,7:1.5.")
    ] = "",
    layer_us: Annotated[
        float,
        typer.Option(help="The host's own part of a layer, microseconds; lanes are tried beside it then."),
    ] = 0.0,
    weight_format: Annotated[
        str,
        typer.Option(
            "--format",
            help=f"Format of the experts: {', '.join(WEIGHT_FORMATS)}; by default the model's, or fp9.",
        ),
    ] = "",
    wire_dtype: Annotated[str, typer.Option(help="Activations on the wire: f32 or bf16.")] = "f32",
    reply_dtype: Annotated[str, typer.Option(help="Partial sums on the wire: f32 or bf16.")] = "f32",
    steps: Annotated[int, typer.Option(help="Steps of each size that count, 10 or more.")] = 200,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the figures into this PNG file.", show_default=False)
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Append the JSON line to this file.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Run a host's dispatch against simulated workers, and say what a step costs the host.

    Real: the host's dispatch, TCP over loopback, the workers' step loops and handshakes. Simulated: experts
    and links, which take as long as the nodes' figures say. Each sum is checked. The host's time is CPU time
    of its own thread, which does not depend on how many cores the simulated workers share; wall time does.
    """
    from duckllm.bench.machine import commit, cpu_name
    from duckllm.bench.plot import check_plot
    from duckllm.cli.common import Waiting
    from duckllm.models.inspection import inspect_model
    from duckllm.simulate.measure import find_bends, measure
    from duckllm.simulate.nodes import expert_layers
    from duckllm.simulate.report import as_json as figures
    from duckllm.simulate.report import print_points, write_plot
    from duckllm.weights.resolve import find_model

    counts = _DEFAULT_WORKERS if workers is None else _numbers("workers", workers, _MOST_WORKERS)
    tokens = _numbers("rows", rows, MAX_STEP_TOKENS)
    if steps < 10:
        raise ConfigError("steps", steps, "10 or more")
    for field, value, known in (
        ("wire_dtype", wire_dtype, WIRE_DTYPES),
        ("reply_dtype", reply_dtype, WIRE_DTYPES),
        ("format", weight_format, ("", *WEIGHT_FORMATS)),
    ):
        if value not in known:
            raise ConfigError(field, value, "one of " + ", ".join(filter(None, known)))
    for field, number in (("host_link", host_link), ("layer_us", layer_us)):
        _check_number(field, number, 0.0)
    _check_link("host_link", host_link)
    slower = parse_slow(slow, max(counts))
    describe_node(node, WEIGHT_FORMATS[0], speed, link, delay_us)  # which refuses before anything is read
    if plot is not None:
        check_plot(plot)
        check_save(plot, "plot")
    if save is not None:
        check_save(save)
    with Waiting(f"Reading {model or 'the demo model'}"):
        found = inspect_model(find_model(model, whole=False).folder)
    chosen = weight_format or found.weight_format or WEIGHT_FORMATS[0]
    each = describe_node(node, chosen, speed, link, delay_us)
    experts = expert_layers(found, chosen, wire_dtype, reply_dtype)
    if workers is None:
        counts = tuple(count for count in counts if count <= experts.num_stripes) or (experts.num_stripes,)
    with CellProgress() as progress:
        points, layers = measure(
            experts,
            each,
            counts,
            tokens,
            host_gbit_per_s=host_link,
            num_steps=steps,
            layer_us=layer_us,
            slow=slower,
            progress=progress,
        )
    bends = find_bends(experts, each, points, host_link)
    name = Path(found.folder).name
    line = json.dumps(
        {
            "benchmark": "simulate",
            "commit": commit(),
            "date": time.strftime("%Y-%m-%d"),
            "model": name,
            "format": chosen,
            "node": each.__dict__,
            "host_gbit_per_s": host_link,
            "wire_dtype": wire_dtype,
            "reply_dtype": reply_dtype,
            "slow": slower,
            "layer_us": layer_us,
            "num_steps": steps,
            "cpu": cpu_name(),
            "cores": available_cores(),
            **figures(points, layers, bends),
        }
    )
    if as_json:
        print(line)
    else:
        console = table_console()
        print_points(console, points, layers, bends)
    append_line(line, save)
    if plot is not None:
        with writing_whole("plot", plot) as part:
            write_plot(part, plain_title(f"{name} on {node}, the host on {cpu_name()}"), points, bends)


def describe_node(
    name: str, weight_format: str, speed: float | None, link: float | None, delay_us: float | None
) -> Node:
    """The node of that name, with what was said otherwise.

    Raises:
        ConfigError: There is no such node, or a figure is out of range.
    """
    from dataclasses import replace

    from duckllm.simulate.nodes import node_of

    found = node_of(name, weight_format)
    for field, value, attribute in (
        ("speed", speed, "read_gb_per_s"),
        ("link", link, "link_gbit_per_s"),
        ("delay_us", delay_us, "delay_us"),
    ):
        if value is not None:
            _check_number(field, value, 1e-3 if field == "speed" else 0.0)
            if field == "link":
                _check_link(field, value)
            found = replace(found, **{attribute: value})
    return found


def parse_slow(text: str, num_workers: int) -> dict[int, float]:
    """How many times as long workers take, from ``"5:2,7:1.5"``.

    Raises:
        ConfigError: It is something else, or names a worker that is not there.
    """
    found: dict[int, float] = {}
    for word in parse_words(text):
        worker, _, factor = word.partition(":")
        number, times = parse_whole(worker), parse_decimal(factor)
        if number is None or times is None or not (number < num_workers and 0.01 <= times <= 1e6):
            expected = f"workers from 0 to {num_workers - 1} and factors, like 5:2,7:1.5"
            raise ConfigError("slow", text, expected)
        found[number] = times
    return found


def _numbers(field: str, text: str, most: int) -> tuple[int, ...]:
    numbers = tuple(sorted(parse_numbers(field, text)))
    if not numbers or numbers[0] < 1 or numbers[-1] > most:
        raise ConfigError(field, text, f"numbers from 1 to {most} with commas between")
    return numbers


def _check_link(field: str, gbit_per_s: float) -> None:
    """Refuses a link over which a step would take longer than a host waits for it."""
    if 0 < gbit_per_s < _LEAST_LINK:
        raise ConfigError(field, gbit_per_s, f"0 for no limit, or at least {_LEAST_LINK} Gbit/s")


def _check_number(field: str, value: float, least: float) -> None:
    if not least <= value <= 1e6:
        raise ConfigError(field, value, f"a number from {least:g} to 1e+06")
