"""``duckllm bench decode`` and ``duckllm bench prefill``: a whole model, beside its ceilings.

Mounted by cli/bench.py. Parses options into settings and loads; duckllm/bench measures and reports.
"""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from duckllm.cli.common import Waiting
from duckllm.cli.model_options import ModelArgument, ModelOptions, takes_model_options
from duckllm.cli.terminal import table_console
from duckllm.config import parse_whole
from duckllm.errors import ConfigError

if TYPE_CHECKING:
    from duckllm.bench.grid import GridConfig, Setting
    from duckllm.bench.token_ceilings import LinkFacts

DECODE_EXAMPLES = """\b
Examples:
  duckllm bench decode
  duckllm bench decode --workers 1,2 --draft off,on --input-len 128,1024,max --batch-size 1,4
  duckllm bench decode /models/mine --workers 10.0.0.11:7411,10.0.0.12:7411 --html decode.html
  duckllm bench decode --format fp9,fp8 --lanes off,on --output-len 128 --json
"""

PREFILL_EXAMPLES = """\b
Examples:
  duckllm bench prefill
  duckllm bench prefill /models/mine --workers 2 --input-len 128,max --batch-size 1,8
  duckllm bench prefill --wire-dtype f32,bf16 --prefill bf16 --html prefill.html
"""

# Options of a model that may list several values, which are measured in turns.
_LISTED = {
    "workers": "workers",
    "weight_format": "format",
    "draft": "draft",
    "lanes": "lanes",
    "wire_dtype": "wire_dtype",
}

InputLen = Annotated[
    str,
    typer.Option(
        help="Tokens of a prompt, like 128,1024,max; empty takes 128, 512, 2048 and so on to the longest."
    ),
]
BatchSize = Annotated[str, typer.Option(help="Requests that are computed together, like 1,4.")]
NumIters = Annotated[int, typer.Option(help="Rounds that are measured.")]
NumItersWarmup = Annotated[
    int, typer.Option(help="Rounds before them, which verify and are not measured; 1 at least.")
]
TextFile = Annotated[
    Path | None,
    typer.Option(
        help="Take prompts from this text instead of random tokens; guesses depend on it.",
        show_default=False,
        readable=False,
    ),
]
Seed = Annotated[int, typer.Option(help="Of the prompts; another one gives others.")]
Html = Annotated[
    Path | None,
    typer.Option(help="Write a report with pictures into this HTML file.", show_default=False),
]
Save = Annotated[Path | None, typer.Option(help="Append the JSON object to this file.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@takes_model_options
def decode(
    *,
    model: ModelArgument = None,
    input_len: InputLen = "",
    output_len: Annotated[int, typer.Option(help="Tokens of a reply.")] = 64,
    batch_size: BatchSize = "1",
    num_iters: NumIters = 5,
    num_iters_warmup: NumItersWarmup = 1,
    text_file: TextFile = None,
    seed: Seed = 0,
    model_options: ModelOptions,
    html: Html = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Measure how fast a model replies: tokens a second, and the times between them, beside the ceilings.

    --workers, --format, --draft, --lanes and --wire-dtype may list several values, like --workers 1,2: every
    combination is measured, in turns where memory holds all of them. Replies are verified. Nothing else
    should run.
    """
    from duckllm.bench.grid import GridConfig

    def config(lengths: tuple[int, ...]) -> GridConfig:
        sizes = parse_numbers("batch_size", batch_size)
        return GridConfig("decode", lengths, output_len, sizes, num_iters, num_iters_warmup, seed)

    _measure(model, config, input_len, output_len, model_options, text_file, html, save, as_json)


@takes_model_options
def prefill(
    *,
    model: ModelArgument = None,
    input_len: InputLen = "",
    batch_size: BatchSize = "1",
    num_iters: NumIters = 5,
    num_iters_warmup: NumItersWarmup = 1,
    text_file: TextFile = None,
    seed: Seed = 0,
    model_options: ModelOptions,
    html: Html = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Measure how fast a model reads prompts: tokens a second, and the time to the first token of a reply.

    --workers, --format, --draft, --lanes and --wire-dtype may list several values, like --workers 1,2: every
    combination is measured, in turns where memory holds all of them. Every prompt is another one, so that the
    KV cache has nothing of it. Nothing else should run.
    """
    from duckllm.bench.grid import GridConfig

    def config(lengths: tuple[int, ...]) -> GridConfig:
        sizes = parse_numbers("batch_size", batch_size)
        return GridConfig("prefill", lengths, 1, sizes, num_iters, num_iters_warmup, seed)

    _measure(model, config, input_len, 1, model_options, text_file, html, save, as_json)


def _measure(
    model: str | None,
    make_config: Any,
    input_len: str,
    output_len: int,
    options: ModelOptions,
    text_file: Path | None,
    html: Path | None,
    save: Path | None,
    as_json: bool,
) -> None:
    """What both verbs do with what they were given."""
    from duckllm.bench.grid import parse_input_lens
    from duckllm.bench.html_report import check_html
    from duckllm.bench.model_report import html_report, print_run

    check_environment()
    make_config((1,))  # refused, if it is, before anything is loaded
    settings = expand_settings(options)
    text = None if text_file is None else _read_text(text_file)
    if html is not None:
        check_html(html)
        check_save(html, "html")
    if save is not None:
        check_save(save)
    with Waiting(f"Reading {model or 'the demo model'}"):
        from duckllm.models.inspection import inspect_model
        from duckllm.models.registry import check_format, usable_folder
        from duckllm.weights.manifest import Manifest

        # int8 and int4 are converted into, all before anything is measured.
        formats = dict.fromkeys(setting.arguments["weight_format"] for setting in settings)
        folders = {each: usable_folder(model, each) for each in formats}
        for each, folder in folders.items():
            check_format(Manifest.load(folder).format, each)
        found = inspect_model(next(iter(folders.values())))
    longest = min(options.max_model_len or found.max_position_embeddings, found.max_position_embeddings)
    if longest <= output_len:
        raise ConfigError("output_len", output_len, f"less than {longest}, what a context holds")
    config = make_config(parse_input_lens(input_len, longest - output_len))

    from duckllm import LLM
    from duckllm.bench.model_runs import GridMeasurement

    def open_llm(**arguments: Any) -> LLM:
        most = max(64, *config.batch_sizes)
        folder = folders[arguments["weight_format"]]
        return LLM(folder, max_model_len=options.max_model_len, max_num_seqs=most, **arguments)

    measurement = GridMeasurement(
        config,
        settings,
        found,
        model or "demo model",
        open_llm=open_llm,
        interface_of=interface_to,
        worker_speeds=_worker_speeds,
        text=text,
    )
    with CellProgress() as progress:
        run = measurement.measure(progress)
    if as_json:
        print_line(run.to_json(), save)
    else:
        print_run(run, table_console())
        append_line(json.dumps(run.to_json()), save)
    if html is not None:
        with writing_whole("html", html) as part:
            part.write_text(html_report(run), encoding="utf-8", errors="replace")
    if not run.lines:
        raise typer.Exit(1)


def expand_settings(options: ModelOptions) -> list[Setting]:
    """Every combination of the values that options list; each known to be valid.

    Raises:
        ConfigError: A value is of the wrong kind or out of range.
        MissingPackageError: Ray is asked for and not installed.
    """
    from duckllm.bench.grid import Setting
    from duckllm.config import StepConfig

    listed: dict[str, tuple[str | None, ...]] = {}
    for name in _LISTED:
        text = getattr(options, name)
        is_addresses = name == "workers" and text is not None and ":" in text
        listed[name] = (text,) if text is None or is_addresses else parse_words(text)
        if not listed[name]:
            raise ConfigError(name, text, "a value, or several with commas between")
    listed["workers"] = tuple(dict.fromkeys(_one_spelling(each) for each in listed["workers"]))
    if listed["workers"] == ("0",):
        replace(options, workers="0").refuse_unused()
    settings = []
    for values in itertools.product(*listed.values()):
        chosen: dict[str, Any] = dict(zip(listed, values, strict=True))
        arguments = replace(options, **chosen).arguments()
        StepConfig(chosen["draft"], options.draft_tokens, chosen["lanes"])  # refuses what they may not be
        if chosen["workers"] is None:
            chosen["workers"] = "2" if options.cluster in (None, "local") else str(options.cluster)
        settings.append(Setting({_LISTED[name]: value for name, value in chosen.items()}, arguments))
    if options.trace is not None and len(settings) > 1:
        raise ConfigError(
            "trace", str(options.trace), f"one setting, not {len(settings)}: a trace is of one run"
        )
    return settings


def interface_to(name: str) -> LinkFacts:
    """What the system says of the interface that leads to a machine; sends nothing."""
    from duckllm.bench.token_ceilings import LinkFacts
    from duckllm.cluster.address import is_loopback
    from duckllm.doctor.link_facts import find_interface, read_interface

    try:
        family, kind, _, _, address = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own, peer = str(probe.getsockname()[0]), str(probe.getpeername()[0])
        if is_loopback(peer) or own == peer:
            return LinkFacts("loopback")
        interface = read_interface(find_interface(own))
    except OSError as error:
        return LinkFacts(f"an unknown interface ({error.strerror or error})")
    rate = interface.mbit_per_s
    return LinkFacts(interface.name, rate / 1e3 if isinstance(rate, int) else None)


def _one_spelling(workers: str | None) -> str | None:
    """A number of workers as it is shown: ``"2"`` for ``"02"``; addresses as they are."""
    number = None if workers is None else parse_whole(workers)
    return workers if number is None else str(number)


def _worker_speeds(setting: Setting) -> Sequence[float | None] | None:
    """What the nodes of workers at addresses say that they read; None for workers that are started here."""
    if not setting.uses_addresses:
        return None if setting.arguments["cluster"] in (None, "local") else ()
    from duckllm.cluster.address import parse_address
    from duckllm.cluster.survey import survey

    addresses = [parse_address(text, "workers") for text in setting.arguments["workers"]]
    spares = setting.arguments["spares"]
    first = addresses[: len(addresses) - spares]
    found = survey(first, setting.arguments["cluster_token"], num_bytes=64, count=1)
    return [info.read_gb_per_s for info, _ in found]


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError("text_file", str(path), f"a file of UTF-8 text ({reason})") from error
    if not text.strip():  # a tokenizer may put a token before it, of which a prompt would consist
        raise ConfigError("text_file", str(path), "a file with a text in it")
    return text
