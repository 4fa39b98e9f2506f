"""Dense layers that run on the host: a linear layer and the gated MLP.

Called by the models and by the attention layers; knows tensors by name only through the loader it is given.

Weights stay in the form that they are stored in where that is FP8, with scales of blocks or rows, or BF16;
all others become float32. A weight is read at the speed of memory, and a row's result is the same bits in any
company (:class:`duckllm.layers.runtime.Runtime`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from duckllm.errors import CheckpointError

if TYPE_CHECKING:
    from duckllm.layers.runtime import Packed, Rows, Runtime, Vector
    from duckllm.weights.host_tensors import HostTensors

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


def load_weight(tensors: HostTensors, name: str, out_features: int, in_features: int) -> torch.Tensor:
    """The weight of layer ``name``, dequantised: for what computes with it itself.

    Shapes:
        result: [out, in] f32

    Raises:
        CheckpointError: The tensor is missing, or its shape or scale is not what it should be.
    """
    return _checked(tensors.linear(name, torch.float32), f"{name}.weight", (out_features, in_features))


def _checked(tensor: torch.Tensor, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{name}: got shape {list(tensor.shape)}, expected {list(shape)} by config.json"
        )
    return tensor


class Linear:
    """``y = factor * x W^T + b``.

    Args:
        weights: W, in parts whose outputs lie side by side.
        runtime: Computes.
        bias: b, or None.
        factor: A constant that the product is multiplied with.

    Shapes:
        bias: [out] f32; x: [T, in]; y: [T, out] f32
    """

    def __init__(
        self,
        weights: Sequence[Packed],
        runtime: Runtime,
        bias: Vector | None = None,
        factor: float = 1.0,
    ) -> None:
        self.weights, self.bias = tuple(weights), bias
        self._runtime, self._factor = runtime, factor

    @classmethod
    def load(
        cls,
        tensors: HostTensors,
        name: str,
        out_features: int,
        in_features: int,
        bias: bool = False,
        *,
        runtime: Runtime,
        factor: float = 1.0,
    ) -> Linear:
        """Reads ``name.weight`` (any stored format) and, with ``bias``, ``name.bias``.

        Args:
            tensors: Where they are.
            name: The layer, without ``.weight``.
            out_features: Rows of the weight.
            in_features: Columns of the weight.
            bias: Whether there is one.
            runtime: Computes.
            factor: A constant that the product is multiplied with.

        Raises:
            CheckpointError: A tensor is missing, or its shape, type or scale is not what it should be.
        """
        return cls.load_joined(
            tensors, (name,), (out_features,), in_features, bias, runtime=runtime, factor=factor
        )

    @classmethod
    def load_joined(
        cls,
        tensors: HostTensors,
        names: Sequence[str],
        out_features: Sequence[int],
        in_features: int,
        bias: bool = False,
        *,
        runtime: Runtime,
        factor: float = 1.0,
    ) -> Linear:
        """Layers of one input as one, whose outputs lie side by side; arguments as :meth:`load` has them."""
        stored = [_stored(tensors, name) for name in names]
        for name, size, (weight, _) in zip(names, out_features, stored, strict=True):
            _checked(weight, f"{name}.weight", (size, in_features))
        # A power of two changes no scale's mantissa; any other factor rounds all of them.
        is_exact = math.frexp(factor)[0] == 0.5
        fold = (is_exact or runtime.rounds_scales) and all(scales is not None for _, scales in stored)
        if fold:
            stored = [(weight, scales * factor) for weight, scales in stored if scales is not None]
        weight_names = names
        if len(stored) > 1 and _joinable(stored, out_features):
            # One product instead of several: the small ones cost more to start than to compute.
            stored = [_join(stored)]
            weight_names = (" and ".join(names),)
        packed = [
            _packed(name, weight, scales, runtime)
            for name, (weight, scales) in zip(weight_names, stored, strict=True)
        ]
        biases = [
            load_tensor(tensors, f"{name}.bias", (size,), torch.float32)
            for name, size in zip(names, out_features, strict=True)
            if bias
        ]
        return cls(
            packed, runtime, runtime.vector(torch.cat(biases)) if bias else None, 1.0 if fold else factor
        )

    def __call__(self, x: Rows) -> torch.Tensor:
        """The product, with the factor and the bias."""
        return self._runtime.linear(x, self.weights, self.bias, self._factor)


def _stored(tensors: HostTensors, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """FP8 with its scales and BF16 as they are; everything else in float32, which holds F16 exactly."""
    weight, scales = tensors.stored_linear(name)
    if not weight.is_floating_point():
        raise CheckpointError(f"{name}.weight: got {weight.dtype}, expected a floating type")
    return weight if scales is not None or weight.dtype == torch.bfloat16 else weight.float(), scales


def _joinable(
    stored: Sequence[tuple[torch.Tensor, torch.Tensor | None]], out_features: Sequence[int]
) -> bool:
    """Whether weights, one above the other, are one weight of one type with scales of one kind."""
    if len({weight.dtype for weight, _ in stored}) > 1:
        return False
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


def _packed(name: str, weight: torch.Tensor, scales: torch.Tensor | None, runtime: Runtime) -> Packed:
    try:
        return runtime.pack(weight, scales)
    except ValueError as error:
        raise CheckpointError(f"{name}.{error}") from error


class GatedMLP:
    """``down(silu(gate(x)) * up(x))``: a dense layer's MLP, and the shared expert.

    Args:
        tensors: Where the weights are.
        prefix: The layer's name.
        hidden_size: H.
        intermediate_size: Rows of gate and up.
        runtime: Computes.
        output_gate: The layer, of one output, whose sigmoid the result is multiplied with, or None.

    Shapes:
        x: [T, H]; y: [T, H] f32
    """

    def __init__(
        self,
        tensors: HostTensors,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        runtime: Runtime,
        output_gate: str | None = None,
    ) -> None:
        self._runtime = runtime
        self.gate_up = Linear.load_joined(
            tensors,
            (f"{prefix}.gate_proj", f"{prefix}.up_proj"),
            (intermediate_size, intermediate_size),
            hidden_size,
            runtime=runtime,
        )
        self.down = Linear.load(
            tensors, f"{prefix}.down_proj", hidden_size, intermediate_size, runtime=runtime
        )
        self.output_gate = (
            Linear.load(tensors, output_gate, 1, hidden_size, runtime=runtime) if output_gate else None
        )

    def __call__(self, x: Rows) -> torch.Tensor:
        """The MLP's output, without the residual."""
        y = self.down(self._runtime.silu_mul(self.gate_up(x)))
        if self.output_gate is not None:
            self._runtime.scale_by_sigmoid(y, self.output_gate(x))
        return y
