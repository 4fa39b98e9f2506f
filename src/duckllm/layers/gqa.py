"""Grouped-query attention (GQA): several query heads share one head of keys and values.

Called by the models. A cached token is the rotated keys and the values of its ``num_kv_heads`` heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from duckllm.layers.linear import Linear
from duckllm.layers.norm import RMSNorm
from duckllm.layers.rope import rotate_half_split
from duckllm.layers.step import LayerCache, StepContext

if TYPE_CHECKING:
    from duckllm.layers.runtime import LinearRuntime
    from duckllm.weights.host_tensors import HostTensors


@dataclass(frozen=True)
class GQAShape:
    """Sizes of one attention layer.

    Args:
        rotary_dim: Dimensions of a head that are rotated, the first ones.
        scaling: Factor on query-key products.
        qkv_bias: Whether the projections to queries, keys and values have biases.
        o_bias: Whether the output projection has one.
        qk_norm_eps: Of the norm of each query and key head; None where there is none.
        sliding_window: Tokens that a token attends to, itself included; None for all.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    scaling: float
    qkv_bias: bool
    o_bias: bool
    qk_norm_eps: float | None
    sliding_window: int | None

    @property
    def cache_widths(self) -> tuple[int, ...]:
        """Numbers a token in each tensor of the layer's cache: keys, values."""
        return (self.num_kv_heads * self.head_dim,) * 2

    @property
    def max_in_features(self) -> int:
        """Width of the widest input of the layer's matrices, the hidden state aside."""
        return self.num_heads * self.head_dim


class GQAttention:
    """One attention layer.

    Reference:
        ``Qwen3MoeAttention`` and ``Glm4MoeAttention`` of transformers; tests/parity, 2e-3 on the logits.
    """

    def __init__(
        self,
        tensors: HostTensors,
        prefix: str,
        shape: GQAShape,
        runtime: LinearRuntime,
    ) -> None:
        s, self.runtime = shape, runtime
        self.shape = shape
        query_dim, key_dim = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        self.qkv = Linear.load_joined(
            tensors,
            (f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"),
            (query_dim, key_dim, key_dim),
            s.hidden_size,
            s.qkv_bias,
            runtime=runtime,
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if s.qk_norm_eps is not None:
            self.q_norm = RMSNorm(tensors, f"{prefix}.q_norm", s.head_dim, s.qk_norm_eps)
            self.k_norm = RMSNorm(tensors, f"{prefix}.k_norm", s.head_dim, s.qk_norm_eps)
        self.o = Linear.load(tensors, f"{prefix}.o_proj", s.hidden_size, query_dim, s.o_bias, runtime=runtime)

    def __call__(self, x: torch.Tensor, step: StepContext, cache: LayerCache) -> torch.Tensor:
        """Attention's output for the step's tokens, which are added to the cache.

        Shapes:
            x, result: [T, H]; cache: keys and values, each [max_tokens, kv_heads * head_dim]
        """
        s, native, num_tokens = self.shape, self.runtime.attention, x.shape[0]
        heads = self.qkv(x).view(num_tokens, -1, s.head_dim)
        q, k = heads[:, : s.num_heads], heads[:, s.num_heads : -s.num_kv_heads]
        q = self._rotate(self.q_norm(q) if self.q_norm else q.contiguous(), step)
        k = self._rotate(self.k_norm(k) if self.k_norm else k, step)
        v = heads[:, -s.num_kv_heads :]
        keys, values = cache[0].numpy(), cache[1].numpy()
        native.store(step.native, k.flatten(1).numpy(), keys)
        native.store(step.native, v.flatten(1).numpy(), values)
        attended = native.attend(
            step.native,
            q.numpy(),
            keys,
            values,
            s.num_kv_heads,
            s.head_dim,
            s.scaling,
            s.sliding_window or 0,
            None,
        )
        return self.o(torch.from_numpy(attended).view(num_tokens, -1))

    def _rotate(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """[T, heads, D], the first ``rotary_dim`` of each head rotated in place."""
        part = x[..., : self.shape.rotary_dim]
        rotate_half_split(part, step.cos, step.sin, part)
        return x
