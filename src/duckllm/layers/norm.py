"""Root-mean-square norm. Called by the models and by the attention layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from duckllm.layers.linear import load_tensor

if TYPE_CHECKING:
    from duckllm.weights.host_tensors import HostTensors


class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in float32.

    Shapes:
        x, y: [..., size]
    """

    def __init__(self, tensors: HostTensors, name: str, size: int, eps: float) -> None:
        self.size, self.eps = size, eps
        self.weight = load_tensor(tensors, f"{name}.weight", (size,), torch.float32)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The normalised vectors, in the dtype of ``x``."""
        return F.rms_norm(x.float(), (self.size,), self.weight, self.eps).to(x.dtype)
