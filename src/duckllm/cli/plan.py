"""``duckllm plan``: which node would hold what, before anything is loaded.

Mounted by cli/main.py, which turns errors of ours into one line and an exit code.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duckllm.cli.common import Waiting, parse_shares, parse_workers, refuse_unused
from duckllm.cli.discover import DiscoverOption, check_undiscovered, discover
from duckllm.cli.model_options import DiscoverWait, InspectedModel, MinWorkers
from duckllm.cli.plan_forecast import DEFAULTS, Forecasting
from duckllm.cli.plan_formats import compare, describe_formats
from duckllm.cli.plan_nodes import ask_workers, check_new_file, this_machine_gb_per_s
from duckllm.cli.plan_nodes import write_nodes as write_nodes_file
from duckllm.cli.plan_text import describe, facts_of
from duckllm.cli.terminal import printable
from duckllm.config import MAX_STEP_TOKENS, MAX_WORKERS, WEIGHT_FORMATS
from duckllm.device import check_device
from duckllm.errors import ConfigError, PlacementError
from duckllm.weights.layer_formats import main_format

if TYPE_CHECKING:
    from duckllm.device import Device
    from duckllm.models.inspection import Inspection
    from duckllm.moe.fit import Node
    from duckllm.plan import ClusterPlan

_GIB = 1 << 30
_SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*(?:g|gb|gib)?", re.IGNORECASE | re.ASCII)
_NUMBER = re.compile(r"\d{1,6}(?:\.\d{1,3})?", re.ASCII)
_ISAS = ("scalar", "avx2", "avx512")
_DEFAULT_CONTEXT = 8192
# Options that describe nodes and host, which a file of nodes does, and which a measurement finds out.
_DESCRIBED = ("memory", "speed", "isa", "round_trip_us", "host_memory", "host_speed", "vram")


def plan(
    model: InspectedModel = None,
    workers: Annotated[
        str | None,
        typer.Option(
            help="Number of nodes; without it the fewest that fit. Or addresses of running workers, "
            "a:port,b:port, which say what their nodes are, this machine being the host.",
            show_default=False,
        ),
    ] = None,
    cluster: DiscoverOption = None,
    min_workers: MinWorkers = 1,
    discover_wait_s: DiscoverWait = 30.0,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of a node in GiB, or of each node: 16,16,32. By default 16.", show_default=False
        ),
    ] = None,
    speed: Annotated[
        str | None,
        typer.Option(
            help="GB/s that a node reads from memory, or each node: 35,35,70; shares follow it.",
            show_default=False,
        ),
    ] = None,
    isa: Annotated[
        str | None,
        typer.Option(help="Instruction set of the nodes, or of each: avx512,avx2.", show_default=False),
    ] = None,
    round_trip_us: Annotated[
        str | None,
        typer.Option(help="Microseconds of a message to a node and back, or to each.", show_default=False),
    ] = None,
    shares: Annotated[
        str,
        typer.Option(help="How the experts are shared out: auto, even, or a number for each node, 1,2,4."),
    ] = "auto",
    weight_format: Annotated[
        str,
        typer.Option(
            "--format",
            help=f"Format of the experts: {', '.join(WEIGHT_FORMATS)}; by default the model's, or fp9, with "
            "a table of the others.",
        ),
    ] = "",
    keep: Annotated[
        list[str] | None,
        typer.Option(
            "--keep",
            help="Layers in another format, as duckllm convert takes them: fp8:first,last.",
            show_default=False,
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of the host in GiB, of which its KV cache takes as much as at a start; by default "
            "one context is counted.",
            show_default=False,
        ),
    ] = None,
    host_speed: Annotated[
        float | None,
        typer.Option(help="GB/s that the host reads from memory, or its GPU from VRAM.", show_default=False),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="What computes the host's part: cpu, cuda (cuda:1 for another card), or auto: the GPU of "
            "--vram, or one of this machine that holds it."
        ),
    ] = "auto",
    vram: Annotated[
        str | None,
        typer.Option(
            help="VRAM of the host's GPU in GiB, of one that is not here; by default of the one that is.",
            show_default=False,
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens of a context; by default the model's most, {_DEFAULT_CONTEXT} at most.",
            show_default=False,
        ),
    ] = None,
    draft: Annotated[
        str,
        typer.Option(help="auto counts the layer that guesses tokens ahead if there is one, off does not."),
    ] = "auto",
    max_step_tokens: Annotated[int, typer.Option(help="Most tokens in one step.")] = 256,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the secret that workers at addresses share.", readable=False),
    ] = None,
    nodes: Annotated[
        Path | None,
        typer.Option(
            help="File of host, card, nodes and links, TOML or JSON (docs/planning.md), in place of the "
            "options that say these: predicts tokens a second, a step's time by part, and what changes "
            "would give.",
            show_default=False,
            readable=False,
        ),
    ] = None,
    write_nodes: Annotated[
        Path | None,
        typer.Option(
            help="Write such a file of the workers at --workers or found by --cluster discover, and of this "
            "host: what they say, what is measured here, and comments where that is a guess.",
            show_default=False,
            readable=False,
        ),
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(
            help="Share of guessed tokens that are right, 0 to 1, for the prediction of --nodes; without it "
            "none is guessed.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of each request in the prediction.")] = DEFAULTS[
        "context"
    ],
    batch: Annotated[str, typer.Option(help="Requests together in the prediction.")] = DEFAULTS["batch"],
    wire_dtype: Annotated[
        str, typer.Option(help="Numbers on the wire in the prediction, both ways: f32 or bf16.")
    ] = DEFAULTS["wire_dtype"],
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure here what the prediction takes of software, a minute's work; the model has to run "
            "here. Without --nodes this machine is predicted, with --workers of one thread each (2).",
        ),
    ] = False,
    presets: Annotated[
        bool,
        typer.Option("--presets", help="Print the computers and cards that --nodes knows, with sources."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as one JSON object.")] = False,
) -> None:
    """Say which node would hold what, how long its steps take at best, and what the host needs.

    An error where it does not fit. Each node's system keeps 1 GiB of its memory. Nodes get shares of the
    weights in proportion to their speeds, where these are given and differ by more than 15 %, and no more
    than their memory holds; else even ones. With a GPU the host's weights and KV cache, as much as at a
    start, are counted against its VRAM. With --nodes it says what this would give, by a model of a step.
    """
    given: dict[str, Any] = dict(locals())
    if presets:
        del given["presets"]
        refuse_unused(plan, given, "nothing with --presets, which prints them alone")
        from duckllm.forecast.report import describe_presets

        print(describe_presets())
        return
    from duckllm.assembly import choose_device
    from duckllm.cli.bench_model import interface_to
    from duckllm.models.inspection import inspect_model
    from duckllm.moe.fit import nodes_of
    from duckllm.plan import plan_host_part, plan_on
    from duckllm.weights.resolve import find_model

    facts: dict[str, list[Any]] = {
        "memory": _parse_memory("memory", "16" if memory is None else memory),
        "speed": _parse_numbers("speed", speed, "GB/s of a node, or of each: 35 or 35,35,70"),
        "isa": _parse_isas(isa),
        "round_trip_us": _parse_numbers("round_trip_us", round_trip_us, "microseconds, or each node's"),
    }
    host_bytes = None if host_memory is None else _parse_memory("host_memory", host_memory)[0]
    card = _parse_card(device, vram)
    if write_nodes is not None:
        check_new_file(write_nodes)
    check_undiscovered(cluster, min_workers, discover_wait_s)
    if cluster is not None:
        found_nodes, others = discover(cluster, workers, token_file, min_workers, discover_wait_s)
        for node in others:
            print(f"duckllm: node {printable(f'{node.title}: {node.problem}')}", file=sys.stderr)
        names = {str(node.address): node.title for node in found_nodes}
        asked: int | tuple[str, ...] | None = tuple(names)
    else:
        names, asked = {}, None if workers is None else parse_workers(workers)
    if isinstance(asked, tuple):
        for field, value in (
            ("memory", memory),
            ("speed", speed),
            ("isa", isa),
            ("round_trip_us", round_trip_us),
        ):
            if value is not None:
                raise ConfigError(field, value, "nothing with workers at addresses, which say it themselves")
    count = None if isinstance(asked, tuple) else _count_nodes(asked, facts)
    _check_numbers(draft, max_step_tokens, host_speed)
    if not isinstance(asked, tuple):
        what = "nothing without workers at addresses, or --cluster discover"
        refuse_unused(plan, {"token_file": token_file, "write_nodes": write_nodes}, what)
        if speed is None and nodes is None and not measure:
            what = "nothing without --speed, of which a step's time is made"
            refuse_unused(plan, {"round_trip_us": round_trip_us}, what)
    asks = Forecasting(nodes, acceptance, context, batch, wire_dtype, measure)
    asks.keep(keep or None)
    if asks.flock is not None:
        asks.refuse({name: given[name] for name in ("workers", "cluster", *_DESCRIBED)}, device)
        card, host_bytes, host_speed = asks.host()
    elif measure:
        described = {name: given[name] for name in _DESCRIBED}
        described["device"] = "auto" if device == "cpu" else device
        refuse_unused(plan, described, "nothing with --measure, which measures this machine and its CPU")
    if acceptance is not None and draft == "off":
        raise ConfigError("acceptance", acceptance, "nothing with draft off, which guesses none")
    with Waiting(f"Reading {model or 'the demo model'}"):
        found = inspect_model(find_model(model, whole=False).folder)
    chosen = _parse_format(weight_format, found)
    if weight_format:  # else the formats that are compared share the rules
        found.check_rules(chosen, keep)
    longest = found.max_position_embeddings
    length = min(_DEFAULT_CONTEXT, longest) if max_model_len is None else max_model_len
    if not 1 <= length <= longest:
        raise ConfigError("max_model_len", length, f"1 to {longest}, the model's longest context")
    options: dict[str, Any] = {
        "weight_format": chosen,
        "keep": keep or None,
        "max_model_len": length,
        "max_step_tokens": max_step_tokens,
        "drafts": draft == "auto" and found.num_mtp_layers > 0,
        "host_bytes": host_bytes,
    }
    host_options = {name: value for name, value in options.items() if name not in ("weight_format", "keep")}
    options["device"] = card or choose_device(
        device, lambda on: plan_host_part(found, **host_options, device=on).memory
    )

    def holds(card: Device) -> bool:
        try:
            plan_host_part(found, **host_options, device=card)
        except ConfigError:
            return False
        return True

    if measure:
        asks.measure(model, found, chosen, asked)
        if nodes is None:
            options["device"], _, host_speed = asks.host()
    if asks.flock is not None:
        placed = list(asks.nodes())
    elif isinstance(asked, tuple):
        with Waiting("Asking the workers"):
            answers = ask_workers(found, asked, token_file)
            placed = [
                replace(node, name=names.get(node.name, node.name))
                for node in nodes_of([info for info, _ in answers], [trip.median_us for _, trip in answers])
            ]
            if host_speed is None and not options["device"].is_cuda:
                host_speed = this_machine_gb_per_s()
        if write_nodes is not None:
            write_nodes_file(write_nodes, answers, names, options["device"], interface_to)
    else:
        placed = []

    def made_in(name: str) -> ClusterPlan:
        own = options | {"weight_format": name}
        on = placed or _make_nodes(found, count, facts, own)
        return plan_on(found, on, **own, host_gb_per_s=host_speed, shares=parse_shares(shares))

    def predicted_in(made: ClusterPlan) -> float | None:
        forecast = asks.forecast(found, made, parse_shares(shares))
        return made.ceiling_tokens_per_s if forecast is None else forecast.base.tokens_per_s

    try:
        made = made_in(chosen)
    except ConfigError as error:
        if error.field == "memory" and len(found.comparable_formats) > 1 and not as_json:
            rows = compare(found.comparable_formats, made_in, predicted_in)
            print(describe_formats(rows, is_predicted=asks.flock is not None) + "\n")
        raise
    shown = facts_of(str(found.folder), made)
    shown["layers"] = found.formats_in_words(chosen, drafts=made.drafts, keep=keep or None)
    predicted = asks.forecast(found, made, parse_shares(shares), holds) if made.fits else None
    if predicted is not None:
        shown["forecast"] = predicted.to_json()
    # Which format to take is the question where none was said, or where that one does not fit.
    compared = found.comparable_formats if not weight_format or not made.fits else ()
    if len(compared) > 1 and not measure:
        shown["formats"] = compare(compared, made_in, predicted_in)
    titled = shown | {"model": model or "the demo model"}
    print(json.dumps(shown) if as_json else printable(describe(titled, made)))
    if predicted is not None and not as_json:
        from duckllm.forecast.report import describe_forecast

        print("\n" + describe_forecast(predicted))
    if "formats" in shown and not as_json:
        print("\n" + describe_formats(shown["formats"], is_predicted=asks.flock is not None))
    _check_fits(made)


def _check_numbers(draft: str, max_step_tokens: int, host_speed: float | None) -> None:
    if draft not in ("auto", "off"):
        raise ConfigError("draft", draft, "auto or off")
    if not 1 <= max_step_tokens <= MAX_STEP_TOKENS:
        raise ConfigError("max_step_tokens", max_step_tokens, f"a number from 1 to {MAX_STEP_TOKENS}")
    if host_speed is not None and not 1e-3 <= host_speed < 1e6:
        raise ConfigError("host_speed", host_speed, "GB/s of the host, from 0.001 to below 1000000")


def _count_nodes(asked: int | None, facts: dict[str, list[Any]]) -> int | None:
    """How many nodes were asked for; None for the fewest that fit."""
    if asked is not None and not 1 <= asked <= MAX_WORKERS:
        raise ConfigError("workers", asked, f"a number from 1 to {MAX_WORKERS}, or addresses")
    for field, values in facts.items():
        if len(values) > 1:
            if asked not in (None, len(values)):
                raise ConfigError("workers", asked, f"{len(values)}, as {field} lists as many nodes")
            asked = len(values)
    return asked


def _make_nodes(
    model: Inspection, count: int | None, facts: dict[str, list[Any]], options: dict[str, Any]
) -> list[Node]:
    """The nodes that the options describe."""
    from duckllm.moe.fit import Node
    from duckllm.plan import SYSTEM_BYTES, fewest_nodes

    if count is None:
        count = len(fewest_nodes(model, facts["memory"][0], **options).nodes)
    each = {field: values * count if len(values) == 1 else values for field, values in facts.items()}
    return [
        Node(
            str(number),
            max(1, each["memory"][number] - SYSTEM_BYTES),
            each["speed"][number] if each["speed"] else None,
            each["isa"][number] if each["isa"] else "",
            each["round_trip_us"][number] if each["round_trip_us"] else None,
        )
        for number in range(count)
    ]


def _check_fits(made: ClusterPlan) -> None:
    from duckllm.moe.fit import check_fits

    try:
        check_fits(made.sizes, made.nodes)
    except PlacementError as error:  # its table was printed
        raise ConfigError(error.field, error.got, error.expected, error.hint) from None


def _parse_memory(field: str, text: str) -> list[int]:
    parts = [_SIZE.fullmatch(part.strip()) for part in text.split(",")]
    sizes = [float(match.group(1)) for match in parts if match is not None]
    one = {"host_memory": "GiB of one host: 64", "vram": "GiB of one card: 24"}.get(field)
    if len(sizes) != len(parts) or not all(sizes) or (one and len(sizes) > 1):
        raise ConfigError(field, text, one or "GiB of a node, or of each: 16 or 16,16,32")
    return [int(size * _GIB) for size in sizes]


def _parse_card(device: str, vram: str | None) -> Device | None:
    """A card that is described; None for one that is to be looked for."""
    from duckllm.engine.cache_size import card_of

    check_device(device)
    if vram is None:
        return None
    if device == "cpu":
        raise ConfigError("vram", vram, "nothing with device cpu")
    return card_of(_parse_memory("vram", vram)[0])


def _parse_numbers(field: str, text: str | None, expected: str) -> list[float]:
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(_NUMBER.fullmatch(part) and float(part) for part in parts):
        raise ConfigError(field, text, expected)
    return [float(part) for part in parts]


def _parse_isas(text: str | None) -> list[str]:
    isas = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(isa in _ISAS for isa in isas):
        raise ConfigError("isa", text, "of a node, or of each: " + ", ".join(_ISAS))
    return isas


def _parse_format(asked: str, found: Inspection) -> str:
    """The format asked for; else the model's own, or what a conversion would make of it."""
    if asked and asked not in WEIGHT_FORMATS:
        raise ConfigError("format", asked, "one of " + ", ".join(WEIGHT_FORMATS))
    return asked or found.weight_format or main_format(found.formats_in("auto"))
