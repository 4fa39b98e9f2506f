"""Dense layers that run on the host: a linear layer and the gated MLP.

Called by the models and by the attention layers; knows tensors by name only through the loader it is given.

A weight that is stored as FP8, with scales of blocks or rows, or as BF16 goes through the native kernels in
the form that it is stored in, where the model has a :class:`duckllm.layers.runtime.LinearRuntime`: it is read
at the speed of memory, and a row's result is the same bits in any company. Every other weight is PyTorch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from duckllm.errors import CheckpointError
from duckllm.layers.runtime import LinearRuntime, PackedWeight

if TYPE_CHECKING:
    from duckllm.weights.host_tensors import HostTensors

_NATIVE_TYPES = (torch.float8_e4m3fn, torch.bfloat16)
_SCALE_BLOCK = 128


def load_tensor(
    tensors: HostTensors, name: str, shape: tuple[int, ...], dtype: torch.dtype | None
) -> torch.Tensor:
    """The stored tensor in ``dtype``, or as it is but for FP8, which is dequantised.

    Raises:
        CheckpointError: The tensor is missing or has another shape than the configuration implies.
    """
    tensor = _checked(tensors.get(name), name, shape)
    if tensor.dtype == torch.float8_e4m3fn:  # an embedding or a router that a checkpoint has in FP8, too
        tensor = tensors.linear(name.removesuffix(".weight"), torch.float32)
    return tensor if dtype is None else tensor.to(dtype)


def load_weight(
    tensors: HostTensors, name: str, out_features: int, in_features: int, dtype: torch.dtype
) -> torch.Tensor:
    """The weight of layer ``name``, dequantised: for what computes with it itself.

    Shapes:
        result: [out, in]

    Raises:
        CheckpointError: The tensor is missing, or its shape or scale is not what it should be.
    """
    return _checked(tensors.linear(name, dtype), f"{name}.weight", (out_features, in_features))


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
    """``y = factor * x W^T + b``.

    Shapes:
        weight: [out, in]; x: [T, in]; y: [T, out]
    """

    def __init__(
        self,
        weight: torch.Tensor | Sequence[PackedWeight],
        bias: torch.Tensor | None = None,
        runtime: LinearRuntime | None = None,
        factor: float = 1.0,
    ) -> None:
        self.weight = weight if isinstance(weight, torch.Tensor) else None
        self._parts = () if isinstance(weight, torch.Tensor) else tuple(weight)
        self._runtime, self._factor, self.bias = runtime, factor, bias

    @classmethod
    def load(
        cls,
        tensors: HostTensors,
        name: str,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        bias: bool = False,
        *,
        runtime: LinearRuntime | None = None,
        factor: float = 1.0,
    ) -> Linear:
        """Reads ``name.weight`` (any stored format) and, with ``bias``, ``name.bias``.

        Args:
            tensors: Where they are.
            name: The layer, without ``.weight``.
            out_features: Rows of the weight.
            in_features: Columns of the weight.
            dtype: Type of the activations.
            bias: Whether there is one.
            runtime: For the native kernels; None leaves everything to PyTorch.
            factor: A constant that the product is multiplied with.

        Raises:
            CheckpointError: A tensor is missing, or its shape, type or scale is not what it should be.
        """
        return cls.load_joined(
            tensors, (name,), (out_features,), in_features, dtype, bias, runtime=runtime, factor=factor
        )

    @classmethod
    def load_joined(
        cls,
        tensors: HostTensors,
        names: Sequence[str],
        out_features: Sequence[int],
        in_features: int,
        dtype: torch.dtype,
        bias: bool = False,
        *,
        runtime: LinearRuntime | None = None,
        factor: float = 1.0,
    ) -> Linear:
        """Layers of one input as one, whose outputs lie side by side; arguments as :meth:`load` has them."""
        linear = cls._load_weights(tensors, names, out_features, in_features, dtype, runtime, factor)
        if bias:
            parts = zip(names, out_features, strict=True)
            biases = [load_tensor(tensors, f"{name}.bias", (size,), dtype) for name, size in parts]
            linear.bias = biases[0] if len(biases) == 1 else torch.cat(biases)
        return linear

    @classmethod
    def _load_weights(
        cls,
        tensors: HostTensors,
        names: Sequence[str],
        out_features: Sequence[int],
        in_features: int,
        dtype: torch.dtype,
        runtime: LinearRuntime | None,
        factor: float,
    ) -> Linear:
        stored = [tensors.stored_linear(name) for name in names]
        types = {weight.dtype for weight, _ in stored}
        if runtime is None or dtype != torch.float32 or len(types) > 1 or not types <= {*_NATIVE_TYPES}:
            parts = zip(names, out_features, strict=True)
            weights = [load_weight(tensors, name, size, in_features, dtype) for name, size in parts]
            joined = weights[0] if len(weights) == 1 else torch.cat(weights)
            return cls(joined if factor == 1.0 else joined * factor)
        for name, size, (weight, _) in zip(names, out_features, stored, strict=True):
            _checked(weight, f"{name}.weight", (size, in_features))
        # A power of two changes no scale's mantissa; any other factor would round all of them.
        fold = math.frexp(factor)[0] == 0.5 and stored[0][1] is not None
        if fold:
            stored = [(weight, scales * factor) for weight, scales in stored if scales is not None]
        if len(stored) > 1 and _joinable(stored, out_features):
            # One product instead of several: the small ones cost more to start than to compute.
            stored = [_join(stored)]
            names = (" and ".join(names),)
        packed = [
            _packed(name, weight, scales, runtime)
            for name, (weight, scales) in zip(names, stored, strict=True)
        ]
        return cls(packed, None, runtime, 1.0 if fold else factor)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product, with the factor and the bias."""
        if self.weight is None:
            y = self._multiply(x)
            return y if self.bias is None else y.add_(self.bias)
        if x.dim() == 2 and x.shape[0] == 1 and self.weight.numel() >= MATRIX_VECTOR_ELEMENTS:
            y = torch.mv(self.weight, x[0])[None]
            return y if self.bias is None else y + self.bias
        return F.linear(x, self.weight, self.bias)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        assert self._runtime is not None
        rows = x.contiguous().numpy()
        products = [torch.from_numpy(part.multiply(self._runtime, rows)) for part in self._parts]
        y = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
        return y if self._factor == 1.0 else y.mul_(self._factor)


def _joinable(
    stored: Sequence[tuple[torch.Tensor, torch.Tensor | None]], out_features: Sequence[int]
) -> bool:
    """Whether weights of one type, one above the other, are one weight with scales of one kind."""
    sizes = zip(stored, out_features, strict=True)
    by_row = [scales is None or tuple(scales.shape) == (size, 1) for (_, scales), size in sizes]
    # Blocks have to end where a weight does, but for the last one.
    return all(by_row) or (not any(by_row) and all(size % _SCALE_BLOCK == 0 for size in out_features[:-1]))


def _join(
    stored: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    weights = [weight.view(torch.uint8) for weight, _ in stored]  # torch cannot join FP8 tensors
    scales = [each for _, each in stored if each is not None]
    return torch.cat(weights).view(stored[0][0].dtype), torch.cat(scales) if scales else None


def _packed(
    name: str, weight: torch.Tensor, scales: torch.Tensor | None, runtime: LinearRuntime
) -> PackedWeight:
    try:
        return PackedWeight.pack(weight, scales, runtime.fp8_format)
    except ValueError as error:
        raise CheckpointError(f"{name}.{error}") from error


class GatedMLP:
    """``down(silu(gate(x)) * up(x))``: a dense layer's MLP, and the shared expert.

    Shapes:
        x, y: [T, H]
    """

    def __init__(
        self,
        tensors: HostTensors,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        runtime: LinearRuntime | None = None,
    ) -> None:
        self.gate_up = Linear.load_joined(
            tensors,
            (f"{prefix}.gate_proj", f"{prefix}.up_proj"),
            (intermediate_size, intermediate_size),
            hidden_size,
            dtype,
            runtime=runtime,
        )
        self.down = Linear.load(
            tensors, f"{prefix}.down_proj", hidden_size, intermediate_size, dtype, runtime=runtime
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP's output, without the residual."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))
