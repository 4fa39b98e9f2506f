"""Which experts a token goes to, and with what weights.

Called by the models. DeepSeek's group-limited sigmoid routing, whose correction bias takes part in the choice
and never in the weights, and softmax routing. A token's choice and weights depend on its own row alone, to
the last bit: csrc/rowwise/route.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Gate = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class SigmoidRouting:
    """Top-k experts of the best groups, by sigmoid scores.

    A group's score is the sum of its two best experts' scores; experts of the ``topk_group`` best groups
    compete.

    Args:
        num_groups: Groups that the experts are divided into, evenly.
        topk_group: Groups that a token may use.
        top_k: Experts of a token.
        normalize: Whether the chosen scores are divided by their sum.
        scaling_factor: Factor on the weights.
    """

    num_groups: int
    topk_group: int
    top_k: int
    normalize: bool
    scaling_factor: float


@dataclass(frozen=True)
class SoftmaxRouting:
    """Top-k experts by their share in a softmax over all of them.

    Args:
        top_k: Experts of a token.
        normalize: Whether the chosen shares are divided by their sum.
    """

    top_k: int
    normalize: bool


class Choosing(Protocol):
    """What chooses from logits: :class:`duckllm.layers.runtime.Runtime`."""

    def route_by_sigmoid(
        self, logits: torch.Tensor, correction_bias: Any, routing: SigmoidRouting
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts and weights."""

    def route_by_softmax(
        self, logits: torch.Tensor, routing: SoftmaxRouting
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts and weights."""


class GroupLimitedRouter:
    """Chooses as :class:`SigmoidRouting` says; among equal scores the lowest number wins.

    Args:
        gate: The product with the router's matrix, [T, H] to [T, E].
        correction_bias: Added to the scores for the choice alone.
        routing: How many, and of which groups.
        runtime: Chooses.

    Shapes:
        correction_bias: [E] f32
    """

    def __init__(self, gate: Gate, correction_bias: Any, routing: SigmoidRouting, runtime: Choosing) -> None:
        self.gate, self.correction_bias, self.routing = gate, correction_bias, routing
        self._runtime = runtime

    def __call__(self, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, best first, and their weights.

        Shapes:
            x: [T, H] f32; topk_ids: [T, K] int32; topk_weights: [T, K] f32

        Reference:
            ``DeepseekV32TopkRouter`` of transformers; tests/moe/test_router.py has a scalar twin.
        """
        return self.choose(self.gate(x))

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, of the products [T, E] with the router's matrix."""
        return self._runtime.route_by_sigmoid(logits, self.correction_bias, self.routing)


class SoftmaxRouter:
    """Chooses as :class:`SoftmaxRouting` says; among equal shares the lowest number wins.

    Args:
        gate: The product with the router's matrix, [T, H] to [T, E].
        routing: How many, and with which weights.
        runtime: Chooses.
    """

    def __init__(self, gate: Gate, routing: SoftmaxRouting, runtime: Choosing) -> None:
        self.gate, self.routing, self._runtime = gate, routing, runtime

    def __call__(self, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, best first, and their weights.

        Shapes:
            x: [T, H] f32; topk_ids: [T, K] int32; topk_weights: [T, K] f32

        Reference:
            ``Qwen3MoeTopKRouter`` of transformers; tests/moe/test_router.py has a scalar twin.
        """
        return self.choose(self.gate(x))

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, of the products [T, E] with the router's matrix."""
        return self._runtime.route_by_softmax(logits, self.routing)
