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

from duckllm.layers.indexer import Indexer, IndexerShape
from duckllm.layers.linear import Linear
from duckllm.layers.norm import RMSNorm
from duckllm.layers.rope import rotate_half_split, rotate_interleaved
from duckllm.layers.step import LayerCache

if TYPE_CHECKING:
    from duckllm.layers.runtime import Rows, Runtime, Step
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
        runtime: Runtime,
    ) -> None:
        s, self.runtime = shape, runtime
        self.shape = shape
        query_dim = s.qk_nope_head_dim + s.qk_rope_head_dim
        latent_dim = s.kv_lora_rank + s.qk_rope_head_dim
        bias = s.attention_bias
        self.rotate = rotate_interleaved if s.rope_interleave else rotate_half_split
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
                # Biases are those of the projections that it would be computed with.
                has_key_product=bias,
            )
        # One product for all that is made of the input: small ones cost more to start than to compute. The
        # part whose size no block of scales divides is the last.
        parts = {"kv_a_proj_with_mqa": latent_dim}
        if self.indexer is not None and self.indexer.key is None:
            parts = {"indexer.wk": self.indexer.shape.head_dim} | parts
        if s.q_lora_rank is not None:
            parts = {"q_a_proj": s.q_lora_rank} | parts
        self.inputs = Linear.load_joined(
            tensors,
            [f"{prefix}.{name}" for name in parts],
            tuple(parts.values()),
            s.hidden_size,
            bias,
            runtime=runtime,
        )
        self.q_a_norm: RMSNorm | None = None
        if s.q_lora_rank is not None:
            self.q_a_norm = RMSNorm(
                tensors, f"{prefix}.q_a_layernorm", s.q_lora_rank, LATENT_NORM_EPS, runtime
            )
        # The factor on query-key products is linear, so the projection may have it.
        self.q_b = Linear.load(
            tensors,
            f"{prefix}.q_proj" if s.q_lora_rank is None else f"{prefix}.q_b_proj",
            s.num_heads * query_dim,
            s.q_lora_rank or s.hidden_size,
            runtime=runtime,
            factor=s.scaling,
        )
        self.kv_a_norm = RMSNorm(
            tensors, f"{prefix}.kv_a_layernorm", s.kv_lora_rank, LATENT_NORM_EPS, runtime
        )
        self.o = Linear.load(
            tensors,
            f"{prefix}.o_proj",
            s.hidden_size,
            s.num_heads * s.v_head_dim,
            bias,
            runtime=runtime,
        )
        self.key_up, self.value_up = runtime.key_value_up(
            tensors, f"{prefix}.kv_b_proj", s.num_heads, s.qk_nope_head_dim, s.v_head_dim, s.kv_lora_rank
        )

    def __call__(self, x: Rows, step: Step, cache: LayerCache) -> torch.Tensor:
        """Attention's output for the step's tokens, which are added to the cache.

        Shapes:
            x: [T, H]; result: [T, H] f32; cache: latents and rotated keys [max_tokens, kv_lora + rope], and
            index keys where the layer has an indexer of its own
        """
        s, runtime = self.shape, self.runtime
        made = self.inputs(x)
        latent_dim = s.kv_lora_rank + s.qk_rope_head_dim
        kv = made[:, made.shape[1] - latent_dim :]
        q_latent = x if self.q_a_norm is None else self.q_a_norm(made[:, : s.q_lora_rank])
        with runtime.beside(runtime.fork()):
            runtime.store_latents(kv, self.kv_a_norm.weight, self.kv_a_norm.eps, self.rotate, step, cache[0])
            if self.indexer is not None:
                k = None if self.indexer.key is not None else made[:, s.q_lora_rank : -latent_dim]
                step.selection = self.indexer(x, k, q_latent, step, cache[1])
        q = runtime.absorb(self.q_b(q_latent), self.key_up, self.rotate, step, cache[0])
        runtime.join()
        selection = step.selection if s.indexer else None
        most = None if s.indexer is None else s.indexer.topk
        context = runtime.attend_latents(q, cache[0], step, 1.0, s.kv_lora_rank, selection, most)
        return self.o(runtime.raise_values(context, self.value_up))
