"""A model's host part with random weights made on the card, and experts that answer zeros at once."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from bench_experts import Nothing
from random_model import RandomTensors

from duckllm import _native
from duckllm.assembly_experts import experts_of_gpu
from duckllm.models.causal_lm import CausalLM
from duckllm.models.registry import load_config
from duckllm.weights.architectures import layout_of


class _Nobody:
    """Experts outside of graphs: none."""

    def submit(self, layer: int, x: torch.Tensor, *rest: object) -> Nothing:
        """Zeros."""
        return Nothing(x)


def host_model(folder: Path, max_tokens: int) -> CausalLM:
    """The host part of the model whose config.json lies in ``folder``."""
    device, config = torch.device("cuda"), json.loads((folder / "config.json").read_text())
    parsed = load_config(folder)
    experts = experts_of_gpu(
        _Nobody(), _native.echo_server(), parsed.hidden_size, parsed.routing.top_k, device
    )
    tensors = RandomTensors(config, layout_of(config, {}), "cuda")
    return CausalLM(
        parsed,
        tensors,  # type: ignore[arg-type]
        experts,
        max_tokens=max_tokens,
        device=device,
    )


def weight_bytes(model: CausalLM) -> int:
    """Bytes of the weights on the card, all of which a step reads."""
    seen: dict[int, int] = {}

    def visit(value: object, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            if value.is_cuda:
                seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, (list, tuple)):
            for each in value:
                visit(each, depth + 1)
        elif type(value).__module__.startswith("duckllm.") and depth < 8:
            names = getattr(value, "__dict__", {}).items()
            for name, each in names:
                if name not in ("runtime", "_runtime", "experts", "captured"):
                    visit(each, depth + 1)

    visit([model.layers, model.norm, model.head], 0)
    return sum(seen.values())
