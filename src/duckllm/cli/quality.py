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
from duckllm.cli.common import Waiting, parse_workers, refuse_unused, tell
from duckllm.cli.model_options import ModelArgument
from duckllm.cli.plan_forecast import Forecasting
from duckllm.cluster.token import read_token
from duckllm.config import available_cores
from duckllm.errors import ConfigError, InWords

if TYPE_CHECKING:
    from duckllm import LLM
    from duckllm.models.registry import ModelFolder
    from duckllm.quality.measure import FormatQuality
    from duckllm.quality.variants import FormatFolder

EXAMPLES = """\b
Examples:
  duckllm quality --suite
  duckllm quality /checkpoints/mine --formats int4 --keep fp8:first,last,mtp --text book.txt
  duckllm quality /models/mine --workers 10.0.0.11:7411,10.0.0.12:7411 --nodes nodes.toml --json
"""
_MOST_TOKENS, _MOST_REPLY = 1 << 20, 1024
_LONG_CONTEXT = 1024  # of a prediction


def quality(
    model: ModelArgument = None,
    formats: Annotated[
        str,
        typer.Option(
            help="Formats of the experts to compare, with commas between; by default fp8,int8,int4 of a "
            "checkpoint, and of a converted model what can be had of it.",
            show_default=False,
        ),
    ] = "",
    reference: Annotated[
        str,
        typer.Option(
            help="The format that the others are compared with; by default the one that the model is stored "
            "in, fp9 of a checkpoint.",
            show_default=False,
        ),
    ] = "",
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="Layers in another format, as duckllm convert has it: fp8:first,last,mtp, or none; by "
            "default, and beside them, fp8:mtp in formats of 4 bits.",
            show_default=False,
        ),
    ] = None,
    importance: Annotated[
        Path | None,
        typer.Option(
            help="File of duckllm calibrate, which weights what is rounded to 4 bits.",
            show_default=False,
            readable=False,
        ),
    ] = None,
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
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Beside each format whose experts round activations a row without that: what its weights "
            "alone cost. In this process.",
        ),
    ] = False,
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
    from duckllm.quality.exact import with_exact_experts
    from duckllm.quality.measure import Measurement, Variant
    from duckllm.quality.report import table, to_json
    from duckllm.quality.texts import check_readable
    from duckllm.quality.variants import FormatFolders, check_formats, possible_formats
    from duckllm.weights.resolve import find_model

    check_environment()
    names, own = parse_words(formats), parse_words(reference)
    if len(own) > 1:
        raise ConfigError("reference", reference, "one format")
    possible = possible_formats(inspect_model(find_model(model, whole=False).folder))
    check_formats("formats", names, possible)
    check_formats("reference", own, possible)
    for field, value, most in (
        ("tokens", tokens, _MOST_TOKENS),
        ("reply_tokens", reply_tokens, _MOST_REPLY),
        ("every", every, 360),
    ):
        if not 1 <= value <= most:
            raise ConfigError(field, value, f"a number from 1 to {most}")
    if draft not in ("on", "off"):
        raise ConfigError("draft", draft, "on or off")
    options: dict[str, Any] = {"workers": parse_workers(workers), "cluster_token": read_token(token_file)}
    if exact and options["workers"] != 0:
        raise ConfigError("exact", InWords("workers"), "experts in this process, --workers 0")
    if not isinstance(options["workers"], tuple):
        refuse_unused(quality, {"token_file": token_file}, "nothing without workers at addresses")
    if not suite:
        refuse_unused(quality, {"every": every}, "nothing without --suite")
    if text is None or text.suffix == ".jsonl":
        refuse_unused(quality, {"window": window}, "nothing without --text of a text that is cut")
    asks = None if nodes is None else Forecasting(nodes, None, _LONG_CONTEXT, "1", "f32", False)
    if save is not None:
        check_save(save)
    if text is not None:
        check_readable("text", text)  # before a checkpoint is converted
    folders = FormatFolders(model, None if keep is None else tuple(keep), importance)
    is_demo = is_demo_model(folders.base)
    if suite and not is_demo:
        raise ConfigError("suite", "another model", "the demo model, whose questions they are")
    first = reference or folders.reference
    passages = _passages(folders.base, text, window, tokens, reply_tokens, is_demo=is_demo)
    found = folders.find(tuple(dict.fromkeys((first, *(names or folders.defaults)))))

    def opener(folder: FormatFolder, is_exact: bool) -> Variant:
        guesses = "on" if draft == "on" and folder.model.has_draft_layer else "off"

        def open_llm() -> LLM:
            from duckllm import LLM

            llm = LLM(
                folder.model.path,
                weight_format=folder.weight_format,
                device="cpu",
                draft=guesses,
                lanes="off",
                **options,
            )
            return with_exact_experts(llm, folder.model.manifest) if is_exact else llm

        name = f"{folder.name} exact" if is_exact else folder.name
        return Variant(name, open_llm, folder.layers)

    chosen = [
        (folder, is_exact)
        for folder in found
        for is_exact in (False, True)
        if not is_exact or (exact and folder.rounds_activations)
    ]

    if len(chosen) == 1:  # before it takes its time
        tell(f"nothing is compared: {found[0].name} alone is measured; {folders.others}")

    with CellProgress() as progress:
        measurement = Measurement(passages, reply_tokens, every if suite else 0, progress)
        measured = measurement.run([opener(*each) for each in chosen])
    predicted = None
    if asks is not None:
        with Waiting("Predicting"):
            predicted = {
                each.name: _predict(asks, inspect_model(folder.model.path), each, folder.weight_format)
                for each, (folder, is_exact) in zip(measured, chosen, strict=True)
                if not is_exact
            }
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
        shipped = "its own questions and answers" if is_demo else "prompts that ship"
        what = shipped if text is None else str(text)
        print(
            f"{outcome['model']}: {measured[0].divergence.num_tokens} predictions of {what}; "
            f"KL divergence from {measured[0].layers or first} in nats; {cpu_name()}, "
            f"{available_cores()} cores"
        )
        print("\n".join(table(measured, predicted, measurement.num_questions)))
    append_line(json.dumps(outcome), save)


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


def _predict(forecasting: Forecasting, found: Any, measured: FormatQuality, computed_in: str) -> float | None:
    """Tokens a second of the flock in a format; None where it does not fit.

    Args:
        forecasting: What is asked.
        found: The model's folder.
        measured: What was measured of it.
        computed_in: The format to compute in; ``"auto"`` for each layer's own.
    """
    from duckllm.plan import plan_on

    asks = forecasting.at(measured.acceptance)
    device, host_bytes, host_gb_per_s = asks.host()
    made = plan_on(
        found,
        list(asks.nodes()),
        weight_format=found.weight_format if computed_in == "auto" else computed_in,
        max_model_len=min(_LONG_CONTEXT, found.max_position_embeddings),
        max_step_tokens=256,
        drafts=measured.acceptance is not None,
        host_bytes=host_bytes,
        device=device,
        host_gb_per_s=host_gb_per_s,
    )
    predicted = asks.forecast(found, made, "auto") if made.fits else None
    return None if predicted is None else predicted.base.tokens_per_s
