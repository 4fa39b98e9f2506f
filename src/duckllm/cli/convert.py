"""``duckllm convert``: a Hugging Face checkpoint into a duck-llm model folder.

Mounted by cli/main.py, which turns errors of ours into one line and an exit code.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from duckllm.cli.common import tell
from duckllm.cli.terminal import keys_unseen
from duckllm.config import show_size
from duckllm.weights.checkpoint import load_json
from duckllm.weights.console import ConsoleProgress
from duckllm.weights.convert import convert as convert_checkpoint
from duckllm.weights.layer_formats import QUANTISED_FORMATS, in_words
from duckllm.weights.manifest import Manifest
from duckllm.weights.resolve import DEMO_MODEL, check_new_folder, find_model, is_demo_name


# readable=False everywhere: what may not be read is an error of ours, as in every other place, and no usage.
def convert(
    src: Annotated[
        str,
        typer.Argument(
            help="Hugging Face checkpoint folder, a model on the hub (org/name, org/name@revision), or demo.",
            show_default=False,
        ),
    ],
    dst: Annotated[
        Path, typer.Argument(help="Folder to write; made if absent.", show_default=False, readable=False)
    ],
    weight_format: Annotated[
        str,
        typer.Option(
            "--format",
            help="Format of the expert weights: fp9 or fp8, which hold the same; int8, int4 or int4-bf16, "
            "which round them; auto keeps what a checkpoint has in 4 bits, and makes fp9 of others. "
            "duckllm plan says what each takes, duckllm quality what it costs in answers.",
        ),
    ] = "auto",
    keep: Annotated[
        list[str] | None,
        typer.Option(
            "--keep",
            help="Layers in another format: FORMAT:LAYERS, the layers first, last, mtp, or numbers: "
            "fp8:first,last or int8:3-7,12. Given twice, both count. In int4 mtp (the layers that guess "
            "tokens ahead) stays in fp8, too, unless it is named in another format, or none is given.",
            show_default=False,
        ),
    ] = None,
    importance: Annotated[
        Path | None,
        typer.Option(
            "--importance",
            help="A file of duckllm calibrate: which errors of rounding to 4 bits matter.",
            show_default=False,
            readable=False,
        ),
    ] = None,
    requantise: Annotated[
        bool,
        typer.Option(
            "--requantise",
            help="Round experts that the checkpoint has in 4 bits again, to the --format: loses more.",
        ),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read everything again and compare it with the source, bit for bit."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as one JSON object.")] = False,
) -> None:
    """Convert a checkpoint into a model folder that workers can map.

    An interrupted conversion goes on where it stopped when the same command is given again; one that is
    finished stays as it is.
    """
    start_s = time.monotonic()
    was_there = True

    def check(folder: Path) -> None:  # called where there is something to convert
        nonlocal was_there
        was_there = False
        _check_usable(folder)

    try:
        with keys_unseen(), ConsoleProgress(f"Converting {src}") as progress:
            check_new_folder(src, dst)
            place = find_model(src, check=_check_early)
            if src == DEMO_MODEL and not is_demo_name(src):
                tell(f"{src} is the folder of that name here, not the demo model")
            manifest = convert_checkpoint(
                place.folder,
                dst,
                weight_format=weight_format,
                keep=keep or None,
                importance=importance,
                requantise=requantise,
                verify=verify,
                progress=progress,
                origin=place.origin,
                check=check,
            )
    except KeyboardInterrupt:
        print(f"Stopped. The same command goes on where {dst} is now.", file=sys.stderr)
        raise typer.Exit(130) from None
    outcome = summary(manifest, verify, time.monotonic() - start_s, was_there)
    print(json.dumps(outcome) if as_json else describe(outcome))


def _check_early(folder: Path) -> None:
    """As :func:`_check_usable`, which speaks of what is not installed, later."""
    from duckllm.models.registry import load_config

    with contextlib.suppress(ModuleNotFoundError):
        load_config(folder)


def _check_usable(folder: Path) -> None:
    """Refuses a model that no host could load, before anything is written.

    Raises:
        ModelError: Its config.json asks for something that is not implemented, or is malformed.
    """
    from duckllm.models.registry import load_config

    try:
        load_config(folder)
    except ModuleNotFoundError as error:  # a machine that is to convert and nothing else
        tell(f"{error.name} is not installed: whether a host can use this model is not checked")


def summary(manifest: Manifest, verified: bool, seconds: float, was_there: bool = False) -> dict[str, object]:
    """What was converted, or had been before, as plain values."""
    error = manifest.source.get("quantisation_error")
    num_hidden_layers = load_json(manifest.folder / "config.json")["num_hidden_layers"]
    return {
        "folder": str(manifest.folder),
        "architecture": manifest.architecture,
        "format": manifest.format,
        "layer_formats": in_words(manifest.layer_formats()),
        "source_dtype": manifest.source.get("dtype"),
        "hub_id": manifest.source.get("hub_id"),
        "revision": manifest.source.get("revision"),
        "moe_layers": len(manifest.expert_layers),
        "mtp_layers": sum(layer >= num_hidden_layers for layer in manifest.expert_layers),
        "expert_bytes": sum(entry.bytes for entry in manifest.expert_layers.values()),
        "host_bytes": sum(entry.bytes for entry in manifest.host_files.values()),
        "host_dequantised": manifest.source.get("host_dequantised"),
        "importance": manifest.source.get("importance"),
        "requantised": manifest.source.get("requantised", "") if error else "",
        "rounded_to": _rounded_to(manifest) if error else "",
        "rms_relative_error": error["rms_relative"] if error else 0.0,
        "max_relative_error": error["max_relative"] if error else 0.0,
        "flushed_to_zero": error["flushed"] if error else 0,
        "rounded_weights": error.get("weights", 0) if error else 0,
        "was_there": was_there,
        "verified": verified,
        "model_hash": manifest.model_hash,
        "seconds": round(seconds, 3),
    }


def _rounded_to(manifest: Manifest) -> str:
    """What the weights were rounded to: formats, or ``"e4m3"``."""
    formats = dict.fromkeys(manifest.layer_formats().values())
    rounded = [name for name in formats if name in QUANTISED_FORMATS]
    return " and ".join(rounded) or "e4m3"


def describe(outcome: dict[str, object]) -> str:
    """The outcome in two or three lines."""
    expert_bytes, host_bytes = outcome["expert_bytes"], outcome["host_bytes"]
    assert isinstance(expert_bytes, int)
    assert isinstance(host_bytes, int)
    # Multi-token prediction: layers behind those that a token passes.
    num_mtp = outcome["mtp_layers"]
    mtp = f" ({'one' if num_mtp == 1 else num_mtp} of them MTP)" if num_mtp else ""
    checked = ", verified bit for bit" if outcome["verified"] else ""
    took = "there already: nothing was converted" if outcome["was_there"] else f"{outcome['seconds']} s"
    origin = f" of {outcome['hub_id']} at {outcome['revision']}" if outcome["hub_id"] else ""
    lines = [
        f"{outcome['folder']}: {outcome['architecture']}, "
        f"{outcome['layer_formats']} from {outcome['source_dtype']}{origin}, "
        f"{outcome['moe_layers']} MoE {'layer' if outcome['moe_layers'] == 1 else 'layers'}{mtp}, "
        f"{show_size(expert_bytes)} of experts, "
        f"{show_size(host_bytes)} for the host, {took}{checked}",
    ]
    host = outcome["host_dequantised"]
    if isinstance(host, dict):
        lines.append(
            f"the host's {host['matrices']} matrices of {host['form']} are BF16 now, each value rounded "
            f"once: {show_size(host['bytes'])}, {show_size(host['stored_bytes'])} before"
        )
    if outcome["rms_relative_error"]:
        requantised = outcome["requantised"]
        why = f" again, as the checkpoint has {requantised}" if requantised else ""
        rounded_to, zeros, weights = (
            outcome[name] for name in ("rounded_to", "flushed_to_zero", "rounded_weights")
        )
        assert isinstance(rounded_to, str)
        assert isinstance(zeros, int)
        assert isinstance(weights, int)
        calibrated = ", the columns that --importance names with less error" if outcome["importance"] else ""
        lines.append(
            f"rounded to {rounded_to}{calibrated}: rms error {outcome['rms_relative_error']:.3%} of the "
            f"weights' rms; {zeros / max(1, weights):.1%} of them, smaller than half a step, became zero "
            "(duckllm quality measures what it costs in answers)"
            if rounded_to != "e4m3"
            else f"rounded to e4m3{why}: rms error {outcome['rms_relative_error']:.3%} of the weights' rms, "
            f"at most {outcome['max_relative_error']:.1%} of a weight in the normal range, "
            f"{outcome['flushed_to_zero']} weights became zero"
        )
    lines.append(f"model hash {outcome['model_hash']}")
    return "\n".join(lines)
