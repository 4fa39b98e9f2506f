"""``duckllm inspect``: what a model is and what it weighs.

Mounted by cli/main.py, which turns errors of ours into one line and an exit code.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duckllm.cli.common import Waiting
from duckllm.cli.model_options import InspectedModel
from duckllm.config import show_size
from duckllm.weights.layer_formats import in_words, main_format

if TYPE_CHECKING:
    from duckllm.models.inspection import Inspection

_NODES = (1, 2, 4, 8, 16, 32)
_COLUMNS = ("stored_bytes", "loaded_bytes", "bytes_per_token", "gpu_bytes")
_KINDS = {
    "converted": "converted model",
    "checkpoint": "checkpoint",
    "configuration": "configuration alone",
}


def inspect(
    model: InspectedModel = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Say what a model is: family, layers, sizes, formats, bytes by part and what nodes need for it.

    Nothing is loaded or converted. A family or a feature that cannot be run is refused by name.
    """
    from duckllm.models.inspection import inspect_model
    from duckllm.weights.resolve import find_model

    with Waiting(f"Reading {model or 'the demo model'}"):
        facts = facts_of(inspect_model(find_model(model, whole=False).folder))
    print(json.dumps(facts) if as_json else describe(facts))


def facts_of(model: Inspection) -> dict[str, Any]:
    """Everything that is shown, as plain values."""
    from duckllm.plan import plan_cluster

    layout = model.layout
    formats = (model.weight_format,) if model.weight_format else _possible_formats(model)
    drafts = model.num_mtp_layers > 0
    nodes = [count for count in _NODES if count <= model.num_stripes]

    def need(count: int, weight_format: str) -> int:
        plan = plan_cluster(
            model,
            [1] * count,
            weight_format=weight_format,
            max_model_len=1,
            max_step_tokens=256,
            drafts=drafts,
        )
        return max(node.need_bytes for node in plan.nodes)

    stored = model.formats_in(model.weight_format) if model.weight_format else {}
    return {
        "folder": str(model.folder),
        "kind": model.kind,
        "architecture": layout.architecture,
        "model_type": layout.model_type,
        "stored": model.dtype,
        "format": model.weight_format,
        "formats": sorted(set(stored.values())),
        "layer_formats": in_words(stored) if model.weight_format else None,
        "scale_layout": model.scale_layout,
        "num_weights": model.num_weights,
        "active_weights": model.active_weights,
        "layers": model.num_hidden_layers,
        "moe_layers": model.num_moe_layers,
        "mtp_layers": model.num_mtp_layers,
        "hidden_size": layout.hidden_size,
        "experts": layout.num_experts,
        "experts_per_token": layout.num_experts_per_tok,
        "moe_intermediate_size": layout.moe_intermediate_size,
        "stripes": model.num_stripes,
        "max_position_embeddings": model.max_position_embeddings,
        "kv_cache_bytes_per_token": 4 * model.cache_elements_per_token,
        "gpu_kv_cache_bytes_per_token": 2 * model.cache_elements_per_token,
        "host": {
            part.name: {
                "weights": part.num_weights,
                "stored_bytes": part.stored_bytes,
                "loaded_bytes": part.loaded_bytes,
                "bytes_per_token": part.read_bytes,
                "gpu_bytes": part.gpu_bytes,
            }
            for part in model.parts
        },
        "experts_by_format": {
            name: {
                "layers": model.formats_in_words(name, drafts=drafts),
                "bytes": model.expert_bytes(name, drafts=drafts),
                "bytes_per_token": model.expert_read_bytes(name),
                "bytes_by_nodes": {str(count): need(count, name) for count in nodes},
            }
            for name in formats
        },
    }


def _possible_formats(model: Inspection) -> tuple[str, ...]:
    """What the experts of a checkpoint may be converted into, first what they are by default."""
    return tuple(dict.fromkeys((main_format(model.formats_in("auto")), *model.comparable_formats)))


def describe(facts: dict[str, Any]) -> str:
    """The facts for people."""
    mtp = f" and {facts['mtp_layers']} of multi-token prediction" if facts["mtp_layers"] else ""
    held = f"experts in {facts['layer_formats'] or facts['stored']}"
    lines = [
        f"{facts['folder']}: {facts['architecture']} ({facts['model_type']}), "
        f"{_KINDS[facts['kind']]}, {held}",
        f"{facts['num_weights'] / 1e9:.2f} billion weights, {facts['active_weights'] / 1e9:.2f} billion "
        "of them for each token",
        f"{facts['layers']} layers{mtp}, {facts['moe_layers']} with {facts['experts']} experts, "
        f"{facts['experts_per_token']} for each token",
        f"hidden size {facts['hidden_size']}, experts {facts['moe_intermediate_size']} wide, "
        f"{facts['stripes']} stripes",
        f"context {facts['max_position_embeddings']} tokens, KV cache "
        f"{show_size(facts['kv_cache_bytes_per_token'])} a token, on a GPU "
        f"{show_size(facts['gpu_kv_cache_bytes_per_token'])}",
        "",
        f"{'host':<24}{'weights':>12}{'stored':>12}{'in memory':>12}{'a token':>12}{'on a GPU':>12}",
    ]
    total = dict.fromkeys(("weights", *_COLUMNS), 0)
    for name, part in facts["host"].items():
        lines.append(_row(name, part))
        total = {field: total[field] + part[field] for field in total}
    lines += [_row("together", total), ""]
    nodes = list(next(iter(facts["experts_by_format"].values()))["bytes_by_nodes"])
    lines.append(
        f"{'experts':<15}{'together':>12}{'a token':>12}   each of"
        + "".join(f"{n:>12}" for n in nodes)
        + " nodes"
    )
    for name, sizes in facts["experts_by_format"].items():
        # Formats to choose from go by the word that asks for them; a converted model is what it holds.
        label = "+".join(facts["formats"]) or name
        each = "".join(f"{show_size(size):>12}" for size in sizes["bytes_by_nodes"].values())
        together, a_token = show_size(sizes["bytes"]), show_size(sizes["bytes_per_token"])
        lines.append(f"{label:<15}{together:>12}{a_token:>12}{'':>10}{each}")
    mixed = [sizes["layers"] for sizes in facts["experts_by_format"].values()]
    lines += [words for name, words in zip(facts["experts_by_format"], mixed, strict=True) if words != name]
    if facts["mtp_layers"]:
        lines.append("Experts of multi-token prediction are counted, but for what a token reads.")
    lines.append("What a node needs includes buffers and the process; duckllm plan holds it against nodes.")
    return "\n".join(lines)


def _row(name: str, part: dict[str, int]) -> str:
    sizes = "".join(f"{show_size(part[column]):>12}" for column in _COLUMNS)
    return f"{name:<24}{part['weights'] / 1e6:>10.1f} M{sizes}"
