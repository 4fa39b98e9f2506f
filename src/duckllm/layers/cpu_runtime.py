"""The runtime of a host without a GPU: layers by native code (csrc/kernels, csrc/attention, csrc/rowwise).

Everything is float32. Rows are plain tensors, and a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from duckllm import _native
from duckllm.errors import ConfigError
from duckllm.layers.cpu_weights import F32, TRIAL_SHAPE, PackedWeight, faster_format
from duckllm.layers.heads import HeadMatrices
from duckllm.layers.linear import load_weight
from duckllm.layers.rope import RotaryTable, rotate_half_split
from duckllm.layers.runtime import Rotate
from duckllm.layers.step import LayerCache, SequenceStep, StepContext, new_layer_cache
from duckllm.moe.router import SigmoidRouting, SoftmaxRouting
from duckllm.weights.host_tensors import HostTensors

# Rows that the scratch memory holds; a longer step is taken by turns.
PANEL_ROWS = 256
# How long idle threads wait for the next layer before they sleep. Between two layers of a decode step lie
# some tens of microseconds; PyTorch's threads, which may want the same cores, have to wait no longer.
SPIN_US = 50


@dataclass(frozen=True)
class CpuRuntime:
    """Threads and scratch memory of a model's native layers. One layer computes at a time.

    Args:
        native: Computes.
        fp8_format: Format that FP8 weights are packed in, ``"fp8"`` or ``"fp9"``; both give the same bits.
    """

    native: _native.LinearRuntime
    fp8_format: str
    device = torch.device("cpu")
    rounds_scales = False

    @classmethod
    def new(cls, max_in_features: int, num_threads: int) -> CpuRuntime:
        """A runtime for weights [any, up to ``max_in_features``].

        Raises:
            ConfigError: DUCK_FORCE_ISA names no instruction set, or one that this machine lacks.
        """
        try:
            isa = _native.select_isa()
        except ValueError as error:
            known = "one of " + ", ".join(_native.available_isas())
            raise ConfigError("DUCK_FORCE_ISA", os.environ.get("DUCK_FORCE_ISA"), known) from error
        native = _native.LinearRuntime(
            PANEL_ROWS,
            max(max_in_features, TRIAL_SHAPE[1]),
            num_threads,
            SPIN_US if num_threads > 1 else 0,
            isa,
        )
        return cls(native, faster_format(native))

    @cached_property
    def attention(self) -> _native.Attention:
        """Attention on the same threads."""
        return _native.Attention(self.native)

    def pack(self, weight: torch.Tensor, scales: torch.Tensor | None) -> PackedWeight:
        """As :class:`duckllm.layers.runtime.Runtime` has it, and so are all that follow."""
        return PackedWeight.pack(weight, scales, self.fp8_format)

    def vector(self, values: torch.Tensor) -> F32:
        return values.float().numpy()

    def linear(
        self, x: torch.Tensor, weights: Sequence[PackedWeight], bias: F32 | None, factor: float
    ) -> torch.Tensor:
        rows = x.contiguous().numpy()
        products = [weight.multiply(self.native, rows) for weight in weights]
        y = products[0] if len(products) == 1 else np.concatenate(products, axis=1)
        if factor != 1.0:
            y *= np.float32(factor)
        if bias is not None:
            y += bias
        return torch.from_numpy(y)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def rms_norm(self, x: torch.Tensor, weight: F32, eps: float) -> torch.Tensor:
        return torch.from_numpy(_native.rms_norm(x.numpy(), weight, eps))

    def add_rms_norm(
        self, hidden: torch.Tensor, deltas: Sequence[torch.Tensor], weight: F32, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden + (deltas[0] if len(deltas) == 1 else deltas[0] + deltas[1])
        return hidden, self.rms_norm(hidden, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(_native.silu_mul(gate_up.numpy()))

    def scale_by_sigmoid(self, y: torch.Tensor, gate: torch.Tensor) -> None:
        _native.scale_by_sigmoid(y.numpy(), gate.numpy())

    def route_by_sigmoid(
        self, logits: torch.Tensor, correction_bias: F32, routing: SigmoidRouting
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = _native.route_by_sigmoid(
            logits.numpy(),
            correction_bias,
            routing.top_k,
            routing.num_groups,
            routing.topk_group,
            routing.normalize,
            routing.scaling_factor,
        )
        return torch.from_numpy(ids), torch.from_numpy(weights)

    def route_by_softmax(
        self, logits: torch.Tensor, routing: SoftmaxRouting
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = _native.route_by_softmax(logits.numpy(), routing.top_k, routing.normalize)
        return torch.from_numpy(ids), torch.from_numpy(weights)

    def new_layer_cache(self, widths: Sequence[int], max_tokens: int) -> LayerCache:
        return new_layer_cache(widths, max_tokens)

    def new_step(self, sequences: Sequence[SequenceStep], rotary: RotaryTable) -> StepContext:
        positions = torch.cat([torch.arange(each.start, each.stop) for each in sequences])
        return StepContext(sequences, *rotary.rows(positions))

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    def lane(self, number: int) -> AbstractContextManager[None]:
        return nullcontext()

    def fork(self) -> None:
        return None

    def beside(self, fork: None) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None:
        pass

    def gather(self, lanes: Sequence[torch.Tensor]) -> torch.Tensor:
        return lanes[0] if len(lanes) == 1 else torch.cat(tuple(lanes))

    def to_cpu(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def key_value_up(
        self, tensors: HostTensors, name: str, num_heads: int, nope_dim: int, v_dim: int, lora_rank: int
    ) -> tuple[HeadMatrices, HeadMatrices]:
        weight = load_weight(tensors, name, num_heads * (nope_dim + v_dim), lora_rank)
        heads = weight.view(num_heads, nope_dim + v_dim, lora_rank)
        key_up = HeadMatrices(heads[:, :nope_dim], self.attention)  # [heads, nope, lora]
        value_up = HeadMatrices(heads[:, nope_dim:].mT, self.attention)  # [heads, lora, v]
        return key_up, value_up

    def store_latents(
        self,
        kv: torch.Tensor,
        norm_weight: F32,
        eps: float,
        rotate: Rotate,
        step: StepContext,
        cache: torch.Tensor,
    ) -> None:
        lora_rank = len(norm_weight)
        stored = torch.empty(kv.shape)
        stored[:, :lora_rank] = self.rms_norm(kv[:, :lora_rank], norm_weight, eps)
        rotate(kv[:, lora_rank:], step.cos, step.sin, stored[:, lora_rank:])
        self.attention.store(step.native, stored.numpy(), cache.numpy())

    def absorb(
        self,
        heads: torch.Tensor,
        key_up: HeadMatrices,
        rotate: Rotate,
        step: StepContext,
        cache: torch.Tensor,
    ) -> torch.Tensor:
        num_rows, lora_rank = len(heads), key_up.num_outputs
        heads = heads.view(num_rows, key_up.num_heads, -1)
        q = torch.empty(num_rows, key_up.num_heads, cache.shape[1])
        key_up.multiply(heads[..., : key_up.num_inputs], q[..., :lora_rank])
        rotate(heads[..., key_up.num_inputs :], step.cos, step.sin, q[..., lora_rank:])
        return q

    def attend_latents(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        step: StepContext,
        scale: float,
        lora_rank: int,
        selection: npt.NDArray[np.int32] | None,
        most: int | None,
    ) -> torch.Tensor:
        latents = cache.numpy()
        attended = self.attention.attend(
            step.native, q.numpy(), latents, latents, 1, lora_rank, scale, 0, selection
        )
        return torch.from_numpy(attended)  # [T, heads, lora]

    def raise_values(self, context: torch.Tensor, value_up: HeadMatrices) -> torch.Tensor:
        values = torch.empty(len(context), value_up.num_heads, value_up.num_outputs)
        value_up.multiply(context, values)
        return values.view(len(context), -1)

    def store_index_keys(
        self,
        k: torch.Tensor,
        norm: tuple[F32, F32, float],
        rope_dim: int,
        rotate: Rotate,
        step: StepContext,
        cache: torch.Tensor,
    ) -> None:
        weight, bias, eps = norm
        k = torch.from_numpy(_native.layer_norm(k.contiguous().numpy(), weight, bias, eps))
        rotate(k[:, :rope_dim], step.cos, step.sin, k[:, :rope_dim])
        self.attention.store(step.native, k.numpy(), cache.numpy())

    def select(
        self,
        q: torch.Tensor,
        head_weights: torch.Tensor,
        rope_dim: int,
        rotate: Rotate,
        step: StepContext,
        cache: torch.Tensor,
        topk: int,
    ) -> npt.NDArray[np.int32]:
        """The positions, ascending: [T, topk]; -1 first where a row attends to all it has."""
        q = q.view(len(q), -1, cache.shape[1])
        rotate(q[..., :rope_dim], step.cos, step.sin, q[..., :rope_dim])
        return self.attention.select(step.native, q.numpy(), head_weights.numpy(), cache.numpy(), topk)

    def store_heads(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        norms: tuple[F32, F32, float] | None,
        rotary_dim: int,
        scaling: float,
        step: StepContext,
        cache: LayerCache,
    ) -> torch.Tensor:
        """Queries [T, heads, D], which attention multiplies with ``scaling``."""
        heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, -1)
        q, k, v = heads.tensor_split((num_heads, num_heads + num_kv_heads), dim=1)
        if norms is None:
            q = q.contiguous()
        else:
            q, k = self.rms_norm(q, norms[0], norms[2]), self.rms_norm(k, norms[1], norms[2])
        for each in (q, k):
            part = each[..., :rotary_dim]
            rotate_half_split(part, step.cos, step.sin, part)
        for tensor, stored in zip(cache, (k, v), strict=True):
            self.attention.store(step.native, stored.flatten(1).numpy(), tensor.numpy())
        return q

    def attend_heads(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        step: StepContext,
        num_kv_heads: int,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        keys, values = cache[0].numpy(), cache[1].numpy()
        head_dim = q.shape[-1]
        attended = self.attention.attend(
            step.native, q.numpy(), keys, values, num_kv_heads, head_dim, scaling, window or 0, None
        )
        return torch.from_numpy(attended).view(len(q), -1)
