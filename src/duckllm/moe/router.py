"""Which experts a token goes to, and with what weights.

Called by the models. DeepSeek's group-limited sigmoid routing, whose correction bias takes part in the choice
and never in the weights, and softmax routing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


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


class GroupLimitedRouter:
    """Chooses as :class:`SigmoidRouting` says; among equal scores the lowest number wins.

    Args:
        weight: The gate's matrix.
        correction_bias: Added to the scores for the choice alone.
        routing: How many, and of which groups.

    Shapes:
        weight: [E, H] f32; correction_bias: [E] f32
    """

    def __init__(self, weight: torch.Tensor, correction_bias: torch.Tensor, routing: SigmoidRouting) -> None:
        self.weight, self.correction_bias, self.routing = weight, correction_bias, routing

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, best first, and their weights.

        Shapes:
            x: [T, H]; topk_ids: [T, K] int32; topk_weights: [T, K] f32

        Reference:
            ``DeepseekV32TopkRouter`` of transformers; tests/moe/test_router.py has a scalar twin.
        """
        scores = F.linear(x.float(), self.weight).sigmoid_()
        choice = scores + self.correction_bias
        if self.routing.topk_group < self.routing.num_groups:
            choice = self._limit_groups(choice)
        topk_ids = _stable_topk(choice, self.routing.top_k)
        topk_weights = scores.gather(1, topk_ids)
        if self.routing.normalize:
            topk_weights /= topk_weights.sum(dim=-1, keepdim=True) + 1e-20
        topk_weights *= self.routing.scaling_factor
        return topk_ids.to(torch.int32), topk_weights

    def _limit_groups(self, choice: torch.Tensor) -> torch.Tensor:
        grouped = choice.view(choice.shape[0], self.routing.num_groups, -1)
        group_scores = grouped.topk(2, dim=-1).values.sum(dim=-1)
        penalty = torch.full_like(group_scores, -torch.inf)
        penalty.scatter_(1, _stable_topk(group_scores, self.routing.topk_group), 0.0)
        return (grouped + penalty[..., None]).view_as(choice)


class SoftmaxRouter:
    """Chooses as :class:`SoftmaxRouting` says; among equal shares the lowest number wins.

    Args:
        weight: The gate's matrix.
        routing: How many, and with which weights.

    Shapes:
        weight: [E, H] f32
    """

    def __init__(self, weight: torch.Tensor, routing: SoftmaxRouting) -> None:
        self.weight, self.routing = weight, routing

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, best first, and their weights.

        Shapes:
            x: [T, H]; topk_ids: [T, K] int32; topk_weights: [T, K] f32

        Reference:
            ``Qwen3MoeTopKRouter`` of transformers; tests/moe/test_router.py has a scalar twin.
        """
        shares = F.linear(x.float(), self.weight).softmax(dim=-1)
        topk_ids = _stable_topk(shares, self.routing.top_k)
        topk_weights = shares.gather(1, topk_ids)
        if self.routing.normalize:
            topk_weights /= topk_weights.sum(dim=-1, keepdim=True)
        return topk_ids.to(torch.int32), topk_weights


def _stable_topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :k]
