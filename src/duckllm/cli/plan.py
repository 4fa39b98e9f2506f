"""``duckllm plan``: which node would hold what, before anything is loaded.

Mounted by cli/main.py, which turns errors of ours into one line and an exit code.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duckllm.cli.common import Waiting
from duckllm.config import MAX_STEP_TOKENS, MAX_WORKERS, WEIGHT_FORMATS
from duckllm.errors import ConfigError, InWords

if TYPE_CHECKING:
    from duckllm.plan import ClusterPlan

_GIB = 1 << 30
_SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*(?:g|gb|gib)?", re.IGNORECASE)
_DEFAULT_CONTEXT = 8192


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Converted model, checkpoint folder, a folder with config.json alone, or a model on the "
            "Hugging Face hub: org/name. By default the demo model.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Number of equal nodes; without it the fewest that fit.", show_default=False),
    ] = None,
    memory: Annotated[str, typer.Option(help="Memory of a node in GiB, or of each node: 16,16,32.")] = "16",
    weight_format: Annotated[
        str,
        typer.Option("--format", help="Format of the experts: fp9 or fp8; by default the model's, or fp9."),
    ] = "",
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of the host in GiB, of which its KV cache takes as much as at a start; by default "
            "one context is counted.",
            show_default=False,
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(help=f"Tokens of a context; {_DEFAULT_CONTEXT} or the model's most", show_default=False),
    ] = None,
    draft: Annotated[
        str,
        typer.Option(help="auto counts the layer that guesses tokens ahead if there is one, off does not."),
    ] = "auto",
    max_step_tokens: Annotated[int, typer.Option(help="Most tokens in one step.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as one JSON object.")] = False,
) -> None:
    """Say which node would hold what, and what the host needs. An error where it does not fit.

    Each node's system keeps 1 GiB of its memory. Uneven nodes get shares of the weights in proportion to what
    they have.
    """
    from duckllm.models.inspection import inspect_model
    from duckllm.plan import fewest_nodes, plan_cluster
    from duckllm.weights.resolve import find_model

    sizes = _parse_memory("memory", memory)
    host_bytes = None if host_memory is None else _parse_memory("host_memory", host_memory)[0]
    if draft not in ("auto", "off"):
        raise ConfigError("draft", draft, "auto or off")
    if len(sizes) > 1 and workers not in (None, len(sizes)):
        raise ConfigError("workers", workers, f"{len(sizes)}, as memory lists as many nodes")
    for field, value, most in (
        ("workers", workers, MAX_WORKERS),
        ("max_step_tokens", max_step_tokens, MAX_STEP_TOKENS),
    ):
        if value is not None and not 1 <= value <= most:
            raise ConfigError(field, value, f"a number from 1 to {most}")
    with Waiting(f"Reading {model or 'the demo model'}"):
        found = inspect_model(find_model(model, whole=False).folder)
    chosen = _parse_format(weight_format, found.weight_format)
    longest = found.max_position_embeddings
    length = min(_DEFAULT_CONTEXT, longest) if max_model_len is None else max_model_len
    if not 1 <= length <= longest:
        raise ConfigError("max_model_len", length, f"1 to {longest}, the model's longest context")
    options: dict[str, Any] = {
        "weight_format": chosen,
        "max_model_len": length,
        "max_step_tokens": max_step_tokens,
        "drafts": draft == "auto" and found.num_mtp_layers > 0,
        "host_bytes": host_bytes,
    }
    if len(sizes) == 1 and workers is None:
        made = fewest_nodes(found, sizes[0], **options)
    else:
        made = plan_cluster(found, sizes if len(sizes) > 1 else sizes * (workers or 1), **options)
    facts = facts_of(str(found.folder), made)
    print(json.dumps(facts) if as_json else describe(facts))
    if not made.fits:
        count, short = len(made.nodes), sum(not node.fits for node in made.nodes)
        most = max(node.need_bytes for node in made.nodes)
        raise ConfigError(
            "memory",
            InWords(f"{memory} GiB"),
            f"at least {most / _GIB + 1:.1f} GiB on each of {count} nodes, or more nodes",
            f"it is too little on {short} of {count}",
        )


def _parse_memory(field: str, text: str) -> list[int]:
    parts = [_SIZE.fullmatch(part.strip()) for part in text.split(",")]
    sizes = [float(match.group(1)) for match in parts if match is not None]
    if len(sizes) != len(parts) or not all(sizes):
        raise ConfigError(field, text, "GiB of a node, or of each: 16 or 16,16,32")
    if field == "host_memory" and len(sizes) > 1:
        raise ConfigError(field, text, "GiB of one host")
    return [int(size * _GIB) for size in sizes]


def _parse_format(asked: str, held: str | None) -> str:
    """A worker may compute in the other format, on a copy; what it maps is what was converted."""
    if asked and asked not in WEIGHT_FORMATS:
        raise ConfigError("format", asked, "one of " + ", ".join(WEIGHT_FORMATS))
    return asked or held or WEIGHT_FORMATS[0]


def facts_of(path: str, plan: ClusterPlan) -> dict[str, Any]:
    """The plan as plain values."""
    host = plan.host.memory
    return {
        "model": path,
        "format": plan.weight_format,
        "max_model_len": host.max_model_len,
        "drafts": plan.drafts,
        "fits": plan.fits,
        "expert_bytes_per_token": plan.read_bytes,
        "host": {
            "weight_bytes": host.weight_bytes,
            "kv_cache_bytes": host.cache_bytes,
            "kv_cache_tokens": host.cache_tokens,
            "need_bytes": host.need_bytes,
            "have_bytes": plan.host.have_bytes,
        },
        "workers": [
            {
                "worker": node.worker,
                "stripes": node.num_stripes,
                "weight_bytes": node.weight_bytes,
                "buffer_bytes": node.buffer_bytes,
                "need_bytes": node.need_bytes,
                "have_bytes": node.have_bytes,
                "fits": node.fits,
            }
            for node in plan.nodes
        ],
    }


def describe(facts: dict[str, Any]) -> str:
    """The plan for people: equal rows are one."""
    count = len(facts["workers"])
    lines = [
        f"{facts['model']}: experts in {facts['format']}, {facts['expert_bytes_per_token'] / 1e9:.2f} GB of "
        f"them read for each token, over {count} {'node' if count == 1 else 'nodes'}; "
        "each node's system keeps 1 GiB of its memory",
        "",
        f"{'worker':<12}{'stripes':>10}{'weights':>12}{'buffers':>12}{'need':>12}{'have':>12}",
    ]
    rows: list[tuple[int, int, dict[str, Any]]] = []
    for worker in facts["workers"]:
        same = {**worker, "worker": None}
        if rows and rows[-1][2] == same:
            rows[-1] = (rows[-1][0], worker["worker"], same)
        else:
            rows.append((worker["worker"], worker["worker"], same))
    for first, last, row in rows:
        name = str(first) if first == last else f"{first} to {last}"
        cells = "".join(
            f"{row[field] / _GIB:>8.2f} GiB"
            for field in ("weight_bytes", "buffer_bytes", "need_bytes", "have_bytes")
        )
        lines.append(f"{name:<12}{row['stripes']:>10}{cells}" + ("" if row["fits"] else "  too little"))
    host = facts["host"]
    have = "" if host["have_bytes"] is None else f"; it has {host['have_bytes'] / _GIB:.2f} GiB"
    lines += [
        "",
        f"host: {host['need_bytes'] / _GIB:.2f} GiB: {host['weight_bytes'] / _GIB:.2f} GiB of weights, "
        f"{host['kv_cache_bytes'] / _GIB:.2f} GiB of KV cache for {host['kv_cache_tokens']} tokens, "
        "the process itself" + have,
    ]
    return "\n".join(lines)
