"""Dense layers that run on the host: a linear layer and the gated MLP.

Called by the models and by the attention layers; knows tensors by name only through the loader it is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from duckllm.errors import CheckpointError

if TYPE_CHECKING:
    from duckllm.weights.host_tensors import HostTensors


def load_tensor(tensors: HostTensors, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The stored tensor in ``dtype``.

    Raises:
        CheckpointError: The tensor is missing or has another shape than the configuration implies.
    """
    return _checked(tensors.get(name), name, shape).to(dtype)


def _checked(tensor: torch.Tensor, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{name}: got shape {list(tensor.shape)}, expected {list(shape)} by config.json"
        )
    return tensor


# From this many weights on, one row goes through a matrix-vector product: with torch 2.13 on an AVX2 CPU (AMD
# Zen 3) an 8192 x 256 float32 weight takes 0.24 ms that way and 0.97 ms as a product with a one-row matrix.
MATRIX_VECTOR_ELEMENTS = 1 << 18


class Linear:
    """``y = x W^T + b`` with the weight dequantised to the model's dtype when it is loaded.

    Shapes:
        weight: [out, in]; x: [..., in]; y: [..., out]
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    @classmethod
    def load(
        cls,
        tensors: HostTensors,
        name: str,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        bias: bool = False,
    ) -> Linear:
        """Reads ``name.weight`` (any stored format) and, with ``bias``, ``name.bias``.

        Raises:
            CheckpointError: A tensor is missing, or its shape or scale is not what it should be.
        """
        weight = _checked(tensors.linear(name, dtype), f"{name}.weight", (out_features, in_features))
        return cls(weight, load_tensor(tensors, f"{name}.bias", (out_features,), dtype) if bias else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product, with the bias added."""
        if x.dim() == 2 and x.shape[0] == 1 and self.weight.numel() >= MATRIX_VECTOR_ELEMENTS:
            y = torch.mv(self.weight, x[0])[None]
            return y if self.bias is None else y + self.bias
        return F.linear(x, self.weight, self.bias)


class GatedMLP:
    """``down(silu(gate(x)) * up(x))``: a dense layer's MLP, and the shared expert.

    Shapes:
        x, y: [T, H]
    """

    def __init__(
        self, tensors: HostTensors, prefix: str, hidden_size: int, intermediate_size: int, dtype: torch.dtype
    ) -> None:
        gate, up = (
            Linear.load(tensors, f"{prefix}.{part}_proj", intermediate_size, hidden_size, dtype)
            for part in ("gate", "up")
        )
        # One product instead of two: the small ones cost more to start than to compute.
        self.gate_up = Linear(torch.cat((gate.weight, up.weight)))
        self.down = Linear.load(tensors, f"{prefix}.down_proj", hidden_size, intermediate_size, dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP's output, without the residual."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))
