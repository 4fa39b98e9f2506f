"""Grouped-query attention (GQA): several query heads share one head of keys and values.

Called by the models. A cached token is the rotated keys and the values of its ``num_kv_heads`` heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from duckllm.layers.linear import Linear
from duckllm.layers.norm import RMSNorm
from duckllm.layers.rope import rotate_half_split
from duckllm.layers.step import LayerCache, StepContext

if TYPE_CHECKING:
    from duckllm.layers.runtime import LinearRuntime
    from duckllm.weights.host_tensors import HostTensors

# Most elements of an attention mask held at once, one for each query row and key.
MASK_BLOCK_ELEMENTS = 1 << 22


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

    The query heads of a group are rows of one product with their common keys, through PyTorch's fused
    ``scaled_dot_product_attention``, which holds no scores. With Qwen3's 32 query and 4 key heads of 128 and
    4096 cached tokens, one row takes 6.2 ms of CPU time so, 6.9 ms by plain products and 24 ms with
    ``enable_gqa``; 256 rows take 0.42, 0.63 and 0.52 s (torch 2.13, one thread of an AMD EPYC, Zen 3).

    Reference:
        ``Qwen3MoeAttention`` and ``Glm4MoeAttention`` of transformers; tests/parity, 2e-3 on the logits.
    """

    def __init__(
        self,
        tensors: HostTensors,
        prefix: str,
        shape: GQAShape,
        dtype: torch.dtype,
        runtime: LinearRuntime | None = None,
    ) -> None:
        s = self.shape = shape
        query_dim, key_dim = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        self.qkv = Linear.load_joined(
            tensors,
            (f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"),
            (query_dim, key_dim, key_dim),
            s.hidden_size,
            dtype,
            s.qkv_bias,
            runtime=runtime,
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if s.qk_norm_eps is not None:
            self.q_norm = RMSNorm(tensors, f"{prefix}.q_norm", s.head_dim, s.qk_norm_eps)
            self.k_norm = RMSNorm(tensors, f"{prefix}.k_norm", s.head_dim, s.qk_norm_eps)
        self.o = Linear.load(
            tensors, f"{prefix}.o_proj", s.hidden_size, query_dim, dtype, s.o_bias, runtime=runtime
        )

    def __call__(self, x: torch.Tensor, step: StepContext, cache: LayerCache) -> torch.Tensor:
        """Attention's output for the step's tokens, which are added to the cache.

        Shapes:
            x, result: [T, H]; cache: keys and values, each [max_tokens, kv_heads * head_dim]
        """
        s, num_tokens = self.shape, x.shape[0]
        heads = self.qkv(x).view(num_tokens, -1, s.head_dim)
        q, k = heads[:, : s.num_heads], heads[:, s.num_heads : -s.num_kv_heads]
        q = self._rotate(self.q_norm(q) if self.q_norm else q, step)
        k = self._rotate(self.k_norm(k) if self.k_norm else k, step)
        attended: list[torch.Tensor] = []
        for sequence in step.sequences:
            rows = sequence.rows
            sequence.write(cache[0], k[rows].flatten(1))
            sequence.write(cache[1], heads[rows, -s.num_kv_heads :].flatten(1))
            window = s.sliding_window or sequence.stop
            first = max(0, sequence.start + 1 - window)
            keys, values = (sequence.read(each, first).view(-1, s.num_kv_heads, s.head_dim) for each in cache)
            attended += self._attend_in_blocks(q[rows], keys, values)
        return self.o(attended[0] if len(attended) == 1 else torch.cat(attended))

    def _attend_in_blocks(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Rows of a long prompt are taken in blocks, so that the mask in memory is bounded.

        The last query belongs to the last key; keys that no query sees may be left out in front.
        """
        s, num_tokens = self.shape, q.shape[0]
        start = keys.shape[0] - num_tokens
        block = max(1, MASK_BLOCK_ELEMENTS // (s.num_heads // s.num_kv_heads * keys.shape[0]))
        for first in range(0, num_tokens, block):
            rows = q[first : first + block]
            stop = start + first + rows.shape[0]
            begin = 0 if s.sliding_window is None else max(0, start + first + 1 - s.sliding_window)
            yield self._attend(rows, keys[begin:stop], values[begin:stop])

    def _rotate(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """[T, heads, D] with the first ``rotary_dim`` of each head rotated."""
        rotary_dim = self.shape.rotary_dim
        rotated = rotate_half_split(x[..., :rotary_dim], step.cos[:, None], step.sin[:, None]).to(x.dtype)
        if rotary_dim == x.shape[-1]:
            return rotated
        return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Softmax attention of consecutive queries, of which the last one belongs to the last key.

        Shapes:
            q: [T, heads, D]; keys, values: [S, kv_heads, D]; result: [T, heads * D]
        """
        s, num_tokens, num_keys = self.shape, q.shape[0], keys.shape[0]
        group = s.num_heads // s.num_kv_heads
        mask = None
        if num_tokens > 1:
            own = torch.arange(num_keys - num_tokens, num_keys)[:, None]
            seen = torch.arange(num_keys)
            mask = seen <= own
            if s.sliding_window is not None:
                mask &= seen > own - s.sliding_window
            mask = mask.repeat_interleave(group, 0)  # [T * group, S]
        grouped = q.view(num_tokens, s.num_kv_heads, group, s.head_dim).transpose(0, 1)
        attended = F.scaled_dot_product_attention(
            grouped.reshape(1, s.num_kv_heads, num_tokens * group, s.head_dim),
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=mask,
            scale=s.scaling,
        )
        by_token = attended.view(s.num_kv_heads, num_tokens, group, s.head_dim).transpose(0, 1)
        return by_token.reshape(num_tokens, s.num_heads * s.head_dim)
