"""One model's choices of experts and of tokens, recorded, and followed by another model.

A choice between near equals may fall either way where numbers are rounded, and what follows from it is as
large as any number. With the same choices, what two models differ by is their arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from duckllm.layers.cpu_runtime import CpuRuntime
from duckllm.moe.router import SigmoidRouting, SoftmaxRouting

_OPERATIONS = ("route_by_sigmoid", "route_by_softmax", "select")


@dataclass
class Choices:
    """What a run chose, call by call, and how much of it a second run would have chosen, too.

    Args:
        of: Experts, or positions, as the operation's name says.
        agreement: Of each call that was followed, the share of its choices.
    """

    of: dict[str, list[torch.Tensor]] = field(default_factory=lambda: {name: [] for name in _OPERATIONS})
    agreement: list[float] = field(default_factory=list)

    def next(self, operation: str, own: torch.Tensor) -> torch.Tensor:
        """The next choice of an operation, whose own would have been another."""
        chosen = self.of[operation].pop(0)
        assert chosen.shape == own.shape
        self.agreement += [
            len(set(own_row) & set(row)) / len(set(row))
            for own_row, row in zip(own.tolist(), chosen.tolist(), strict=True)
        ]
        return chosen


@contextmanager
def recorded() -> Iterator[Choices]:
    """What models on a GPU choose, as long as their steps are not captured."""
    from duckllm.layers.cuda_runtime import CudaRuntime  # needs Triton

    choices = Choices()
    route_by_sigmoid, route_by_softmax = CudaRuntime.route_by_sigmoid, CudaRuntime.route_by_softmax
    select = CudaRuntime.select

    def routed(name: str, route: Any) -> Any:
        def record(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            ids, weights = route(*arguments)
            choices.of[name].append(ids.cpu())
            return ids, weights

        return record

    def selected(*arguments: Any) -> Any:
        selection = select(*arguments)
        positions, counts = selection.positions.cpu(), selection.counts.cpu()
        positions[counts < positions.shape[1]] = -1  # all that the row has
        choices.of["select"].append(positions)
        return selection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaRuntime, "route_by_sigmoid", routed("route_by_sigmoid", route_by_sigmoid))
        patch.setattr(CudaRuntime, "route_by_softmax", routed("route_by_softmax", route_by_softmax))
        patch.setattr(CudaRuntime, "select", selected)
        yield choices


@contextmanager
def followed(choices: Choices) -> Iterator[None]:
    """Models on the CPU choose what was recorded; weights and everything else are their own."""
    route_by_sigmoid, route_by_softmax = CpuRuntime.route_by_sigmoid, CpuRuntime.route_by_softmax
    select = CpuRuntime.select

    def by_sigmoid(
        runtime: CpuRuntime, logits: torch.Tensor, bias: Any, routing: SigmoidRouting
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids = choices.next("route_by_sigmoid", route_by_sigmoid(runtime, logits, bias, routing)[0])
        weights = logits.sigmoid().gather(1, ids.long())
        if routing.normalize:
            weights /= weights.sum(1, keepdim=True)
        return ids, weights * routing.scaling_factor

    def by_softmax(
        runtime: CpuRuntime, logits: torch.Tensor, routing: SoftmaxRouting
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids = choices.next("route_by_softmax", route_by_softmax(runtime, logits, routing)[0])
        weights = logits.softmax(1).gather(1, ids.long())
        if routing.normalize:
            weights /= weights.sum(1, keepdim=True)
        return ids, weights

    def selected(*arguments: Any) -> Any:
        own = torch.from_numpy(select(*arguments))
        own[own[:, 0] < 0] = -1
        return choices.next("select", own).numpy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuRuntime, "route_by_sigmoid", by_sigmoid)
        patch.setattr(CpuRuntime, "route_by_softmax", by_softmax)
        patch.setattr(CpuRuntime, "select", selected)
        yield
    assert not any(choices.of.values()), "not every choice was followed"
