"""Multi-head latent attention (MLA), with sparse attention or without, in the absorbed form.

Called by the models. A cached token is one latent vector and one rotated key that all heads share. The
absorbed form multiplies queries by the key up-projection, and attention's result by the value up-projection,
so that keys and values are never expanded: attention runs over the cached latents as they are, natively
(csrc/attention).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from duckllm.layers.heads import HeadMatrices
from duckllm.layers.indexer import Indexer, IndexerShape
from duckllm.layers.linear import Linear, load_weight
from duckllm.layers.norm import RMSNorm
from duckllm.layers.rope import rotate_half_split, rotate_interleaved
from duckllm.layers.step import LayerCache, StepContext

if TYPE_CHECKING:
    from duckllm.layers.runtime import LinearRuntime
    from duckllm.weights.host_tensors import HostTensors

LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True)
class MLAShape:
    """Sizes of one attention layer.

    Args:
        hidden_size: H.
        num_heads: Heads of queries, keys and values.
        q_lora_rank: Width of the latent that queries are made of; None where they are made of the input.
        kv_lora_rank: Width of the latent that keys and values are made of.
        qk_nope_head_dim: Of a query or key, the part that has no position.
        qk_rope_head_dim: Of a query or key, the rotated part.
        v_head_dim: Size of a value.
        scaling: Factor on query-key products.
        attention_bias: Whether the projections of the input, and that of the output, have one.
        rope_interleave: Whether rotated pairs are neighbours, or lie in the two halves.
        indexer: Selects what is attended to; None to attend to everything.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scaling: float
    attention_bias: bool
    rope_interleave: bool
    indexer: IndexerShape | None

    @property
    def cache_widths(self) -> tuple[int, ...]:
        """Numbers a token in each tensor of the layer's cache: latents and rotated key, and index keys."""
        latent_width = self.kv_lora_rank + self.qk_rope_head_dim
        if self.indexer is None or self.indexer.is_shared:
            return (latent_width,)
        return (latent_width, self.indexer.head_dim)

    @property
    def max_in_features(self) -> int:
        """Width of the widest input of the layer's matrices, the hidden state aside."""
        return max(self.q_lora_rank or 0, self.num_heads * self.v_head_dim)


class MLAttention:
    """One attention layer.

    Reference:
        ``DeepseekV3Attention``, ``DeepseekV32Attention`` and ``GlmMoeDsaAttention`` of transformers (expanded
        keys and values, masks); tests/parity, 2e-3 on the logits.
    """

    def __init__(
        self,
        tensors: HostTensors,
        prefix: str,
        shape: MLAShape,
        runtime: LinearRuntime,
    ) -> None:
        s, self.runtime = shape, runtime
        self.shape = shape
        query_dim = s.qk_nope_head_dim + s.qk_rope_head_dim
        latent_dim = s.kv_lora_rank + s.qk_rope_head_dim
        bias = s.attention_bias
        self.rotate = rotate_interleaved if s.rope_interleave else rotate_half_split
        self.q_a: Linear | None = None
        if s.q_lora_rank is not None:
            self.q_a = Linear.load(
                tensors, f"{prefix}.q_a_proj", s.q_lora_rank, s.hidden_size, bias, runtime=runtime
            )
            self.q_a_norm = RMSNorm(tensors, f"{prefix}.q_a_layernorm", s.q_lora_rank, LATENT_NORM_EPS)
        # The factor on query-key products is linear, so the projection may have it.
        self.q_b = Linear.load(
            tensors,
            f"{prefix}.q_proj" if s.q_lora_rank is None else f"{prefix}.q_b_proj",
            s.num_heads * query_dim,
            s.q_lora_rank or s.hidden_size,
            runtime=runtime,
            factor=s.scaling,
        )
        self.kv_a = Linear.load(
            tensors, f"{prefix}.kv_a_proj_with_mqa", latent_dim, s.hidden_size, bias, runtime=runtime
        )
        self.kv_a_norm = RMSNorm(tensors, f"{prefix}.kv_a_layernorm", s.kv_lora_rank, LATENT_NORM_EPS)
        self.o = Linear.load(
            tensors,
            f"{prefix}.o_proj",
            s.hidden_size,
            s.num_heads * s.v_head_dim,
            bias,
            runtime=runtime,
        )
        kv_b = load_weight(
            tensors,
            f"{prefix}.kv_b_proj",
            s.num_heads * (s.qk_nope_head_dim + s.v_head_dim),
            s.kv_lora_rank,
        ).view(s.num_heads, s.qk_nope_head_dim + s.v_head_dim, s.kv_lora_rank)
        self.key_up = HeadMatrices(kv_b[:, : s.qk_nope_head_dim], runtime)  # [heads, nope, kv_lora]
        self.value_up = HeadMatrices(kv_b[:, s.qk_nope_head_dim :].mT, runtime)  # [heads, kv_lora, v]
        self.indexer: Indexer | None = None
        if s.indexer is not None and not s.indexer.is_shared:
            assert s.q_lora_rank is not None
            self.indexer = Indexer(
                tensors,
                f"{prefix}.indexer",
                hidden_size=s.hidden_size,
                q_lora_rank=s.q_lora_rank,
                rope_dim=s.qk_rope_head_dim,
                shape=s.indexer,
                runtime=runtime,
            )

    def __call__(self, x: torch.Tensor, step: StepContext, cache: LayerCache) -> torch.Tensor:
        """Attention's output for the step's tokens, which are added to the cache.

        Shapes:
            x, result: [T, H]; cache: latents [max_tokens, kv_lora + rope], and index keys
            [max_tokens, index_head_dim] where the layer has an indexer
        """
        s, cos, sin, native = self.shape, step.cos, step.sin, self.runtime.attention
        num_tokens = x.shape[0]
        latents = cache[0].numpy()

        kv = self.kv_a(x)
        kv[:, : s.kv_lora_rank] = self.kv_a_norm(kv[:, : s.kv_lora_rank])
        self.rotate(kv[:, s.kv_lora_rank :], cos, sin, kv[:, s.kv_lora_rank :])
        native.store(step.native, kv.numpy(), latents)

        q_latent = x if self.q_a is None else self.q_a_norm(self.q_a(x))
        heads = self.q_b(q_latent).view(num_tokens, s.num_heads, -1)
        q = torch.empty(num_tokens, s.num_heads, s.kv_lora_rank + s.qk_rope_head_dim)
        self.key_up.multiply(heads[..., : s.qk_nope_head_dim], q[..., : s.kv_lora_rank])
        self.rotate(heads[..., s.qk_nope_head_dim :], cos, sin, q[..., s.kv_lora_rank :])

        if self.indexer is not None:
            step.selection = self.indexer(x, q_latent, step, cache[1])
        selection = step.selection if s.indexer else None
        context = native.attend(
            step.native, q.numpy(), latents, latents, 1, s.kv_lora_rank, 1.0, 0, selection
        )  # [T, heads, kv_lora]
        values = torch.empty(num_tokens, s.num_heads, s.v_head_dim)
        self.value_up.multiply(torch.from_numpy(context), values)
        return self.o(values.view(num_tokens, -1))
