"""Multi-head latent attention (MLA) with sparse attention, in the absorbed form.

Called by the models. A cached token is one latent vector and one rotated key that all heads share. The
absorbed form multiplies queries by the key up-projection, and attention's result by the value up-projection,
so that keys and values are never expanded: attention runs over the cached latents as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from duckllm.layers.indexer import Indexer, select_topk
from duckllm.layers.linear import Linear, load_weight
from duckllm.layers.norm import RMSNorm
from duckllm.layers.rope import rotate_interleaved
from duckllm.layers.step import LayerCache, StepContext

if TYPE_CHECKING:
    from duckllm.layers.runtime import LinearRuntime
    from duckllm.weights.host_tensors import HostTensors

LATENT_NORM_EPS = 1e-6
# Most attention scores of one kind held at once, in elements.
SCORE_BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class IndexerShape:
    """Sizes of the indexer of DeepSeek sparse attention."""

    num_heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True)
class MLAShape:
    """Sizes of one attention layer; ``scaling`` is the factor on query-key products."""

    hidden_size: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scaling: float
    attention_bias: bool
    indexer: IndexerShape

    @property
    def cache_widths(self) -> tuple[int, ...]:
        """Numbers a token in each tensor of the layer's cache: latents and rotated key, index keys."""
        return (self.kv_lora_rank + self.qk_rope_head_dim, self.indexer.head_dim)

    @property
    def max_in_features(self) -> int:
        """Width of the widest input of the layer's matrices, the hidden state aside."""
        return max(self.q_lora_rank, self.num_heads * self.v_head_dim)


class MLAttention:
    """One attention layer.

    Reference:
        ``DeepseekV32Attention`` of transformers (expanded keys and values, masks); tests/parity, 2e-3 on the
        logits.
    """

    def __init__(
        self,
        tensors: HostTensors,
        prefix: str,
        shape: MLAShape,
        dtype: torch.dtype,
        runtime: LinearRuntime | None = None,
    ) -> None:
        s = self.shape = shape
        query_dim = s.qk_nope_head_dim + s.qk_rope_head_dim
        latent_dim = s.kv_lora_rank + s.qk_rope_head_dim
        bias = s.attention_bias
        self.q_a = Linear.load(
            tensors, f"{prefix}.q_a_proj", s.q_lora_rank, s.hidden_size, dtype, bias, runtime=runtime
        )
        self.q_a_norm = RMSNorm(tensors, f"{prefix}.q_a_layernorm", s.q_lora_rank, LATENT_NORM_EPS)
        # The factor on query-key products is linear, so the projection may have it.
        self.q_b = Linear.load(
            tensors,
            f"{prefix}.q_b_proj",
            s.num_heads * query_dim,
            s.q_lora_rank,
            dtype,
            runtime=runtime,
            factor=s.scaling,
        )
        self.kv_a = Linear.load(
            tensors, f"{prefix}.kv_a_proj_with_mqa", latent_dim, s.hidden_size, dtype, bias, runtime=runtime
        )
        self.kv_a_norm = RMSNorm(tensors, f"{prefix}.kv_a_layernorm", s.kv_lora_rank, LATENT_NORM_EPS)
        self.o = Linear.load(
            tensors,
            f"{prefix}.o_proj",
            s.hidden_size,
            s.num_heads * s.v_head_dim,
            dtype,
            bias,
            runtime=runtime,
        )
        kv_b = load_weight(
            tensors,
            f"{prefix}.kv_b_proj",
            s.num_heads * (s.qk_nope_head_dim + s.v_head_dim),
            s.kv_lora_rank,
            dtype,
        ).view(s.num_heads, s.qk_nope_head_dim + s.v_head_dim, s.kv_lora_rank)
        self.key_up = kv_b[:, : s.qk_nope_head_dim].contiguous()  # [heads, nope, kv_lora]
        self.value_up = kv_b[:, s.qk_nope_head_dim :].transpose(1, 2).contiguous()  # [heads, kv_lora, v]
        self.indexer = Indexer(
            tensors,
            f"{prefix}.indexer",
            hidden_size=s.hidden_size,
            q_lora_rank=s.q_lora_rank,
            num_heads=s.indexer.num_heads,
            head_dim=s.indexer.head_dim,
            rope_dim=s.qk_rope_head_dim,
            topk=s.indexer.topk,
            dtype=dtype,
            runtime=runtime,
        )

    def __call__(self, x: torch.Tensor, step: StepContext, cache: LayerCache) -> torch.Tensor:
        """Attention's output for the step's tokens, which are added to the cache.

        Shapes:
            x, result: [T, H]; cache: latents [max_tokens, kv_lora + rope] and index keys
            [max_tokens, index_head_dim]
        """
        s, start, cos, sin = self.shape, step.start, step.cos, step.sin
        latents, index_keys = cache
        num_tokens = x.shape[0]
        end = start + num_tokens

        kv = self.kv_a(x)
        latents[start:end, : s.kv_lora_rank] = self.kv_a_norm(kv[:, : s.kv_lora_rank])
        latents[start:end, s.kv_lora_rank :] = rotate_interleaved(kv[:, s.kv_lora_rank :], cos, sin)
        index_keys[start:end] = self.indexer.keys(x, cos, sin)

        q_latent = self.q_a_norm(self.q_a(x))
        q = self.q_b(q_latent).view(num_tokens, s.num_heads, -1)
        q_nope, q_rope = q[..., : s.qk_nope_head_dim], q[..., s.qk_nope_head_dim :]
        absorbed = torch.bmm(q_nope.transpose(0, 1), self.key_up).transpose(0, 1)
        rotated = rotate_interleaved(q_rope, cos[:, None], sin[:, None])
        q = torch.cat((absorbed, rotated), dim=-1)  # [T, heads, kv_lora + rope]

        # Rows of a long prompt are taken in blocks, so that the scores in memory are bounded.
        block = max(1, SCORE_BLOCK_ELEMENTS // (max(s.num_heads, s.indexer.num_heads) * end))
        attended = []
        for first in range(0, num_tokens, block):
            rows = slice(first, min(first + block, num_tokens))
            visible = start + rows.stop
            index_scores = None
            if visible > s.indexer.topk:
                index_scores = self.indexer.scores(
                    x[rows], q_latent[rows], cos[rows], sin[rows], index_keys[:visible]
                )
            attended.append(self._attend(q[rows], latents[:visible], index_scores))
        context = attended[0] if len(attended) == 1 else torch.cat(attended)  # [T, heads, kv_lora]
        values = torch.bmm(context.transpose(0, 1), self.value_up).transpose(0, 1)
        return self.o(values.reshape(num_tokens, s.num_heads * s.v_head_dim))

    def _attend(
        self, q: torch.Tensor, latents: torch.Tensor, index_scores: torch.Tensor | None
    ) -> torch.Tensor:
        """Softmax attention of consecutive queries, of which the last one belongs to the last latent.

        Shapes:
            q: [T, heads, D]; latents: [S, D]; index_scores: [T, S], None to attend to all;
            result: [T, heads, kv_lora]
        """
        num_tokens, num_heads, dim = q.shape
        mask = None
        if num_tokens > 1:
            num_visible = latents.shape[0]
            positions = torch.arange(num_visible - num_tokens, num_visible)[:, None]
            mask = torch.arange(num_visible) <= positions
            if index_scores is not None:
                mask &= select_topk(index_scores.masked_fill(~mask, -torch.inf), self.shape.indexer.topk)
        elif index_scores is not None:
            selected = select_topk(index_scores, self.shape.indexer.topk)[0].nonzero()[:, 0]
            latents = latents.index_select(0, selected)
        scores = (q.reshape(-1, dim) @ latents.T).view(num_tokens, num_heads, -1)
        if mask is not None:
            scores.masked_fill_(~mask[:, None, :], -torch.inf)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        attended = weights.view(num_tokens * num_heads, -1) @ latents[:, : self.shape.kv_lora_rank]
        return attended.view(num_tokens, num_heads, -1)
