"""Routed experts on workers: each step goes to all of them, and their partial sums come back added up.

Called by the models through :class:`duckllm.moe.executor.ExpertExecutor`; calls the flock, whose transport
adds the partial sums in worker order. Knows no processes and no files.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch


class Flock(Protocol):
    """Who takes steps: :class:`duckllm.transport.flock.Flock`, or a bare transport."""

    def submit(self, layer: int, x: Any, topk_ids: Any, topk_weights: Any, *, lane: int = 0) -> int:
        """Sends a step; its ticket."""

    def wait(self, ticket: int) -> npt.NDArray[np.float32]:
        """The sum of the workers' answers."""


class RemoteExperts:
    """The expert executor of a host with workers.

    Args:
        flock: Takes steps.
    """

    def __init__(self, flock: Flock) -> None:
        self._flock = flock

    def submit(
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, lane: int = 0
    ) -> RemoteStep:
        """Sends a step to every worker. Shapes as :class:`duckllm.moe.executor.ExpertExecutor`.

        Raises:
            ClusterError: The connections are closed.
        """
        ticket = self._flock.submit(layer, x.numpy(), topk_ids.numpy(), topk_weights.numpy(), lane=lane)
        return RemoteStep(self._flock, ticket)


class RemoteStep:
    """A step that the workers are computing."""

    def __init__(self, flock: Flock, ticket: int) -> None:
        self._flock, self._ticket = flock, ticket

    def wait(self) -> torch.Tensor:
        """The weighted sum over each token's experts, [T, H] f32.

        Raises:
            WorkerLostError: A worker went away, and neither it nor another came back in time.
        """
        return torch.from_numpy(self._flock.wait(self._ticket))
