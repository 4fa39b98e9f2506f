"""Grouped-query attention (GQA): several query heads share one head of keys and values.

Called by the models. A cached token is the rotated keys and the values of its ``num_kv_heads`` heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from duckllm.layers.linear import Linear
from duckllm.layers.norm import RMSNorm
from duckllm.layers.step import LayerCache

if TYPE_CHECKING:
    from duckllm.layers.runtime import Rows, Runtime, Step
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
        runtime: Runtime,
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
        self.norms = None
        if s.qk_norm_eps is not None:
            q_norm, k_norm = (
                RMSNorm(tensors, f"{prefix}.{name}", s.head_dim, s.qk_norm_eps, runtime)
                for name in ("q_norm", "k_norm")
            )
            self.norms = q_norm.weight, k_norm.weight, s.qk_norm_eps
        self.o = Linear.load(tensors, f"{prefix}.o_proj", s.hidden_size, query_dim, s.o_bias, runtime=runtime)

    def __call__(self, x: Rows, step: Step, cache: LayerCache) -> torch.Tensor:
        """Attention's output for the step's tokens, which are added to the cache.

        Shapes:
            x: [T, H]; result: [T, H] f32; cache: keys and values, each [max_tokens, kv_heads * head_dim]
        """
        s, runtime = self.shape, self.runtime
        q = runtime.store_heads(
            self.qkv(x), s.num_heads, s.num_kv_heads, self.norms, s.rotary_dim, s.scaling, step, cache
        )
        attended = runtime.attend_heads(q, cache, step, s.num_kv_heads, s.scaling, s.sliding_window)
        return self.o(attended)
