"""What a model asks of its routed experts, whoever computes them.

Implemented by :mod:`duckllm.moe.dispatch` (workers) and :mod:`duckllm.moe.local` (this process).
"""

from __future__ import annotations

from typing import Protocol

import torch


class PendingStep(Protocol):
    """A step that has been submitted and not yet collected."""

    def wait(self) -> torch.Tensor:
        """The weighted sum over each token's experts, [T, H] f32. The shared expert's is for others to add.

        Raises:
            WorkerLostError: A worker went away, or did not answer in time.
        """


class ExpertExecutor(Protocol):
    """Computes the routed experts of one layer for a batch of tokens."""

    def submit(
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, lane: int = 0
    ) -> PendingStep:
        """Starts a step of a lane. One that is never waited for does no harm: its result is dropped.

        Several may have been started. The tensors must stay unchanged until the step has been waited for.

        Shapes:
            x: [T, H] f32, contiguous; topk_ids: [T, K] int32; topk_weights: [T, K] f32
        """
