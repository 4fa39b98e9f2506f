"""Routed experts for benchmarks of a GPU host: watched, left out, or here with the weights of few layers.

Used by full_size.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from random_model import FORMAT

from duckllm import _native
from duckllm.models.causal_lm import CausalLM, MoEBlock
from duckllm.moe.device_experts import DeviceExperts
from duckllm.moe.executor import ExpertExecutor, PendingStep
from duckllm.moe.local import LocalStep
from duckllm.transport.exchange import Program
from duckllm.weights.formats import num_stripes
from duckllm.weights.layout import ModelLayout

# Threads of experts in this process spin between layers: nobody else wants the cores.
SPIN_US = 2000
MAX_TOKENS = 64


@dataclass
class Asked:
    """Passes steps on to the experts, and notes them.

    Args:
        experts: Compute them.
        steps: Layer, activations, experts and their weights.
    """

    experts: ExpertExecutor
    steps: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def submit(
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, lane: int = 0
    ) -> PendingStep:
        """As :class:`ExpertExecutor` has it."""
        self.steps.append((layer, x.cpu().clone(), topk_ids.cpu().clone(), topk_weights.cpu().clone()))
        return self.experts.submit(layer, x, topk_ids, topk_weights, lane)

    def num_experts(self, most_rows: int) -> int:
        """Experts that were read for the steps of up to so many rows."""
        return sum(len(ids.unique()) for _, _, ids, _ in self.steps if len(ids) <= most_rows)


@contextlib.contextmanager
def asked(model: CausalLM) -> Iterator[Asked]:
    """What a model asks of its experts meanwhile, in steps that are not captured."""
    blocks = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoEBlock)]
    experts, captured = blocks[0].experts, model.captured
    watched, model.captured = Asked(experts), None
    for block in blocks:
        block.experts = watched
    try:
        yield watched
    finally:
        model.captured = captured
        for block in blocks:
            block.experts = experts


class NoExperts(DeviceExperts):
    """Routed experts that add nothing and take no time: what is left is the host's part."""

    def __init__(self) -> None:
        pass

    def submit(  # type: ignore[override]
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, lane: int = 0
    ) -> Nothing:
        """Nothing to compute."""
        return Nothing(x)

    @contextlib.contextmanager
    def record(self) -> Iterator[Program]:
        """No steps."""
        yield Program()

    def run(self, program: Program, num_tokens: Sequence[int], replay: Callable[[], None]) -> None:
        """Replays the graph."""
        replay()


@dataclass
class Nothing:
    """The sum of no experts, for as many rows as ``x`` has."""

    x: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Zeros."""
        return torch.zeros_like(self.x)


class ExpertsHere:
    """Experts in this process whose layers use a few layers' units in turn.

    Args:
        layout: The model.
        layers: The units.
        num_threads: That compute.
    """

    def __init__(self, layout: ModelLayout, layers: Sequence[np.ndarray], num_threads: int) -> None:
        self.units = {layer: layers[place % len(layers)] for place, layer in enumerate(layout.moe_layers)}
        self._layout = layout
        self.native = _native.Experts(
            hidden_size=layout.hidden_size,
            intermediate_size=layout.moe_intermediate_size,
            num_experts=layout.num_experts,
            top_k=layout.num_experts_per_tok,
            first_stripe=0,
            num_stripes=num_stripes(layout.moe_intermediate_size),
            max_tokens=MAX_TOKENS,
            num_threads=num_threads,
            spin_us=SPIN_US // 10,
            format=FORMAT,
        )

    def submit(
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, lane: int = 0
    ) -> LocalStep:
        """As :class:`ExpertExecutor` has it."""
        return LocalStep(self.native, self.units[layer], x.numpy(), topk_ids.numpy(), topk_weights.numpy())

    def server(self, num_threads: int) -> _native.LaneServer:
        """The same experts for a GPU host."""
        return _native.experts_server(
            self.units,
            hidden_size=self._layout.hidden_size,
            intermediate_size=self._layout.moe_intermediate_size,
            top_k=self._layout.num_experts_per_tok,
            max_tokens=MAX_TOKENS,
            num_threads=num_threads,
            spin_us=SPIN_US,
            isa=_native.select_isa(),
            format=FORMAT,
            prefill="f32",
            scale_layout="block",
        )
