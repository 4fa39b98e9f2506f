"""Norms of vectors: by the root mean square, and by mean and variance.

Called by the models and by the attention layers. Both are native: PyTorch computes the last numbers of a
tensor by other instructions than the rest, so that a row's bits depend on the rows beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from duckllm import _native
from duckllm.layers.linear import load_tensor

if TYPE_CHECKING:
    from duckllm.weights.host_tensors import HostTensors


class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

    Shapes:
        x: [T, size] or [T, heads, size] f32, whose rows of ``size`` are contiguous; y: as x, contiguous

    Reference:
        ``torch.nn.functional.rms_norm``, to float32 rounding.
    """

    def __init__(self, tensors: HostTensors, name: str, size: int, eps: float) -> None:
        self.weight = load_tensor(tensors, f"{name}.weight", (size,), torch.float32).numpy()
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The normalised vectors."""
        return torch.from_numpy(_native.rms_norm(x.numpy(), self.weight, self.eps))


class LayerNorm:
    """``(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`` over the last dimension.

    Shapes:
        x: [T, size] or [T, heads, size] f32, whose rows of ``size`` are contiguous; y: as x, contiguous

    Reference:
        ``torch.nn.functional.layer_norm``, to float32 rounding.
    """

    def __init__(self, tensors: HostTensors, name: str, size: int, eps: float) -> None:
        self.weight = load_tensor(tensors, f"{name}.weight", (size,), torch.float32).numpy()
        self.bias = load_tensor(tensors, f"{name}.bias", (size,), torch.float32).numpy()
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The normalised vectors."""
        return torch.from_numpy(_native.layer_norm(x.numpy(), self.weight, self.bias, self.eps))
