"""Routed experts on workers: each step goes to all of them, and their partial sums come back added up.

Called by the models through :class:`duckllm.moe.executor.ExpertExecutor`; calls the transport, which adds the
partial sums in worker order. Knows no processes and no files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from duckllm.transport.transport import Transport


class RemoteExperts:
    """The expert executor of a host with workers."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def submit(
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, lane: int = 0
    ) -> RemoteStep:
        """Sends a step to every worker. Shapes as :class:`duckllm.moe.executor.ExpertExecutor`.

        Raises:
            WorkerLostError: A worker went away, now or in an earlier step.
        """
        ticket = self._transport.submit(layer, x.numpy(), topk_ids.numpy(), topk_weights.numpy(), lane=lane)
        return RemoteStep(self._transport, ticket)


class RemoteStep:
    """A step that the workers are computing."""

    def __init__(self, transport: Transport, ticket: int) -> None:
        self._transport, self._ticket = transport, ticket

    def wait(self) -> torch.Tensor:
        """The weighted sum over each token's experts, [T, H] f32.

        Raises:
            WorkerLostError: A worker went away, or did not answer in time.
        """
        return torch.from_numpy(self._transport.wait(self._ticket))
