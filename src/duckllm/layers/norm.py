"""Norms of vectors: by the root mean square, and by mean and variance.

Called by the models and by the attention layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from duckllm.layers.linear import load_tensor

if TYPE_CHECKING:
    from duckllm.layers.runtime import Rows, Runtime
    from duckllm.weights.host_tensors import HostTensors


class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

    Shapes:
        x: [T, size] f32, whose rows are contiguous; y: [T, size]

    Reference:
        ``torch.nn.functional.rms_norm``, to float32 rounding.
    """

    def __init__(self, tensors: HostTensors, name: str, size: int, eps: float, runtime: Runtime) -> None:
        self.weight = runtime.vector(load_tensor(tensors, f"{name}.weight", (size,), torch.float32))
        self.eps, self._runtime = eps, runtime

    def __call__(self, x: torch.Tensor) -> Rows:
        """The normalised vectors."""
        return self._runtime.rms_norm(x, self.weight, self.eps)

    def add(self, hidden: torch.Tensor, deltas: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Rows]:
        """``hidden`` plus the sum of ``deltas``, none, one or two of them; and that normalised."""
        if not deltas:
            return hidden, self(hidden)
        return self._runtime.add_rms_norm(hidden, deltas, self.weight, self.eps)


class LayerNorm:
    """What ``(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`` takes.

    Reference:
        ``torch.nn.functional.layer_norm``, to float32 rounding.
    """

    def __init__(self, tensors: HostTensors, name: str, size: int, eps: float, runtime: Runtime) -> None:
        self.weight = runtime.vector(load_tensor(tensors, f"{name}.weight", (size,), torch.float32))
        self.bias = runtime.vector(load_tensor(tensors, f"{name}.bias", (size,), torch.float32))
        self.eps = eps
