"""``duckllm quality``: what each format of a model's experts costs in answers, beside the lossless one.

Mounted by cli/main.py. Parses its options and prints; duckllm/quality measures.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duckllm.cli.bench_common import CellProgress, append_line, check_environment, check_save, parse_words
from duckllm.cli.common import Waiting, parse_workers
from duckllm.cli.model_options import ModelArgument
from duckllm.cluster.token import read_token
from duckllm.config import LOSSLESS_FORMATS, available_cores
from duckllm.errors import ConfigError

if TYPE_CHECKING:
    from duckllm import LLM
    from duckllm.cli.plan_forecast import Forecasting
    from duckllm.models.registry import ModelFolder
    from duckllm.quality.measure import FormatQuality

EXAMPLES = """\b
Examples:
  duckllm quality --formats fp8,fp9 --suite
  duckllm quality /checkpoints/mine --formats fp8 --text book.txt
  duckllm quality /models/mine --workers 10.0.0.11:7411,10.0.0.12:7411 --nodes nodes.toml --json
"""
_MOST_TOKENS, _MOST_REPLY = 1 << 20, 1024
_LONG_CONTEXT = 1024  # of a prediction


def quality(
    model: ModelArgument = None,
    formats: Annotated[
        str, typer.Option(help="Formats of the experts to compare, with commas between.")
    ] = ",".join(LOSSLESS_FORMATS),
    reference: Annotated[
        str,
        typer.Option(
            help="The format that the others are compared with; by default the lossless one that the model "
            "is stored in.",
            show_default=False,
        ),
    ] = "",
    text: Annotated[
        Path | None,
        typer.Option(
            help="What is predicted: a text, or prompts, one a line, in a file that ends in .jsonl; by "
            "default prompts that ship, with the reference's replies, and of the demo model its own "
            "questions and answers.",
            show_default=False,
            readable=False,
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Predictions that are compared, at most.")] = 2048,
    window: Annotated[int, typer.Option(help="Tokens of a piece of a text.")] = 512,
    reply_tokens: Annotated[
        int, typer.Option(help="Tokens of a reply, by which guesses and speed are measured.")
    ] = 64,
    suite: Annotated[
        bool, typer.Option("--suite", help="Ask the demo model's 360 questions in each format, too.")
    ] = False,
    every: Annotated[int, typer.Option(help="Of the suite, ask each so-manieth question.")] = 1,
    draft: Annotated[
        str,
        typer.Option(
            help="Whether guesses are made and counted, where the model has a layer for it: on, off."
        ),
    ] = "on",
    workers: Annotated[
        str,
        typer.Option(
            help="Who computes the experts: 0 for this process, a number of workers to start, or addresses."
        ),
    ] = "0",
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the secret that workers at addresses share.", readable=False),
    ] = None,
    nodes: Annotated[
        Path | None,
        typer.Option(
            help="File of host, nodes and links (docs/planning.md): predicts tokens a second of that flock "
            "in each format, at the measured acceptance.",
            show_default=False,
            readable=False,
        ),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Append the JSON object to this file.", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Compare formats of a model's experts: how far predictions lie from the lossless run, guesses, speed.

    A checkpoint is converted into the model cache as often as its formats need. Predictions are those of a
    text's next tokens, over the whole vocabulary; the host's part is computed on the CPU.
    """
    from duckllm.bench.machine import commit, cpu_name
    from duckllm.models.inspection import inspect_model
    from duckllm.models.registry import open_model
    from duckllm.quality.measure import Measurement, Variant
    from duckllm.quality.report import table, to_json

    check_environment()
    names = parse_formats(formats)
    for field, value, most in (
        ("tokens", tokens, _MOST_TOKENS),
        ("reply_tokens", reply_tokens, _MOST_REPLY),
        ("every", every, 360),
    ):
        if not 1 <= value <= most:
            raise ConfigError(field, value, f"a number from 1 to {most}")
    if draft not in ("on", "off"):
        raise ConfigError("draft", draft, "on or off")
    if reference and reference not in LOSSLESS_FORMATS:
        raise ConfigError("reference", reference, "one of " + ", ".join(LOSSLESS_FORMATS))
    options: dict[str, Any] = {"workers": parse_workers(workers), "cluster_token": read_token(token_file)}
    asks = None if nodes is None else _forecasting(nodes, None)
    if save is not None:
        check_save(save)
    opened = open_model(model)
    is_demo = is_demo_model(opened)
    if suite and not is_demo:
        raise ConfigError("suite", "another model", "the demo model, whose questions they are")
    first = reference or (
        opened.manifest.format if opened.manifest.format in LOSSLESS_FORMATS else LOSSLESS_FORMATS[0]
    )
    names = tuple(dict.fromkeys((first, *names)))
    passages = _passages(opened, text, window, tokens, reply_tokens, is_demo=is_demo)
    found = inspect_model(opened.path)
    guesses = "on" if draft == "on" and opened.has_draft_layer else "off"

    def opener(name: str) -> Variant:
        def open_llm() -> LLM:
            from duckllm import LLM

            return LLM(opened.path, weight_format=name, device="cpu", draft=guesses, lanes="off", **options)

        return Variant(name, open_llm)

    with CellProgress() as progress:
        measurement = Measurement(passages, reply_tokens, every if suite else 0, progress)
        measured = measurement.run([opener(name) for name in names])
    predicted = None
    if asks is not None and nodes is not None:
        with Waiting("Predicting"):
            predicted = {each.name: _predict(nodes, found, each) for each in measured}
    outcome = {
        "benchmark": "quality",
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "model": model or "demo model",
        "text": "shipped prompts" if text is None else text.name,
        "workers": workers,
        "cpu": cpu_name(),
        "cores": available_cores(),
        **to_json(measured, predicted, measurement.num_questions),
    }
    if as_json:
        print(json.dumps(outcome))
    else:
        what = "prompts that ship" if text is None else str(text)
        print(
            f"{outcome['model']}: {measured[0].divergence.num_tokens} predictions of {what}; "
            f"KL divergence from {first} in nats; {cpu_name()}, {available_cores()} cores"
        )
        print("\n".join(table(measured, predicted, measurement.num_questions)))
    append_line(json.dumps(outcome), save)


def parse_formats(text: str) -> tuple[str, ...]:
    """The formats of ``"fp8,fp9"``.

    Raises:
        ConfigError: There is no such format, or none is named.
    """
    names = parse_words(text)
    unknown = [name for name in names if name not in LOSSLESS_FORMATS]
    if unknown or not names:
        raise ConfigError("formats", text, "some of " + ", ".join(LOSSLESS_FORMATS) + ", with commas between")
    return names


def is_demo_model(model: ModelFolder) -> bool:
    """Whether a model is the demo model, whatever folder it is in."""
    from duckllm.demo import CHECKPOINT
    from duckllm.weights.checkpoint import Checkpoint

    return model.manifest.source.get("fingerprint") == Checkpoint.open(CHECKPOINT).fingerprint()


def _passages(
    model: ModelFolder, text: Path | None, window: int, tokens: int, reply_tokens: int, *, is_demo: bool
) -> Sequence[Any]:
    from duckllm.quality.texts import MIN_WINDOW, read_passages, shipped_passages, spread
    from duckllm.text import Tokenizer
    from duckllm.weights.checkpoint import load_json

    longest = load_json(model.path / "config.json").get("max_position_embeddings")
    most = longest if type(longest) is int else _MOST_TOKENS
    if not MIN_WINDOW <= window <= most:
        raise ConfigError("window", window, f"{MIN_WINDOW} to {most}, the model's longest context")
    with Waiting("Reading what is predicted"):
        tokenizer = Tokenizer(model.path)
        found = (
            shipped_passages(tokenizer, is_demo=is_demo)
            if text is None
            else read_passages(text, tokenizer, window=window)
        )
    return spread(found, tokens, reply_tokens)


def _forecasting(nodes: Path, acceptance: float | None) -> Forecasting:
    from duckllm.cli.plan_forecast import Forecasting

    return Forecasting(nodes, acceptance, _LONG_CONTEXT, "1", "f32", False)


def _predict(nodes: Path, found: Any, measured: FormatQuality) -> float | None:
    """Tokens a second of the flock in a format; None where it does not fit."""
    from duckllm.plan import plan_on

    asks = _forecasting(nodes, measured.acceptance)
    device, host_bytes, host_gb_per_s = asks.host()
    made = plan_on(
        found,
        list(asks.nodes()),
        weight_format=measured.name,
        max_model_len=min(_LONG_CONTEXT, found.max_position_embeddings),
        max_step_tokens=256,
        drafts=measured.acceptance is not None,
        host_bytes=host_bytes,
        device=device,
        host_gb_per_s=host_gb_per_s,
    )
    predicted = asks.forecast(found, made, "auto") if made.fits else None
    return None if predicted is None else predicted.base.tokens_per_s
