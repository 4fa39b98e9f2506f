"""The indexer of DeepSeek sparse attention (DSA): which earlier tokens a token attends to.

Called by :mod:`duckllm.layers.mla`. Each token's score for an earlier one is
``sum over heads of weight_h * relu(q_h . k / sqrt(D))``; the ``index_topk`` best are attended to. While the
context is no longer than ``index_topk`` every token is, and no score is computed.

The published model rotates queries and keys by a Hadamard matrix before it rounds them to FP8. That matrix is
orthogonal, so it leaves every product as it was; without the rounding it has no effect and is left out
(tests/layers/test_indexer.py). Scores are in float32 here. The rounding would replace about 2 % of the
selected tokens: 2.0 % with a scale for each vector, 2.3 % with scales that are powers of two, 2.1 % without
the rotation (demo model, 2000 tokens, benchmarks/offline/index_fp8.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from duckllm.layers.linear import Linear
from duckllm.layers.norm import LayerNorm
from duckllm.layers.rope import rotate_half_split, rotate_interleaved

if TYPE_CHECKING:
    from duckllm.layers.runtime import Rows, Runtime, Selection, Step
    from duckllm.weights.host_tensors import HostTensors

KEY_NORM_EPS = 1e-6


@dataclass(frozen=True)
class IndexerShape:
    """Sizes of the indexer of DeepSeek sparse attention.

    Args:
        num_heads: Heads of a query; a key has one.
        head_dim: Size of a head.
        topk: Tokens that it selects.
        rope_interleave: Whether rotated pairs are neighbours, or lie in the two halves.
        is_shared: Whether the layer has no indexer of its own, but the last selection before it.
    """

    num_heads: int
    head_dim: int
    topk: int
    rope_interleave: bool
    is_shared: bool = False


class Indexer:
    """Scores earlier tokens and selects those that a token attends to."""

    def __init__(
        self,
        tensors: HostTensors,
        prefix: str,
        *,
        hidden_size: int,
        q_lora_rank: int,
        rope_dim: int,
        shape: IndexerShape,
        runtime: Runtime,
        has_key_product: bool = True,
    ) -> None:
        self.shape, self.rope_dim, self.runtime = shape, rope_dim, runtime
        num_heads, head_dim = shape.num_heads, shape.head_dim
        self.rotate = rotate_interleaved if shape.rope_interleave else rotate_half_split
        self.query = Linear.load(
            tensors, f"{prefix}.wq_b", num_heads * head_dim, q_lora_rank, runtime=runtime
        )
        self.key: Linear | None = None  # where keys are not part of another product
        if has_key_product:
            self.key = Linear.load(tensors, f"{prefix}.wk", head_dim, hidden_size, runtime=runtime)
        self.key_norm = LayerNorm(tensors, f"{prefix}.k_norm", head_dim, KEY_NORM_EPS, runtime)
        # Both constant factors of the score are positive, so they pass through the ReLU into the weights.
        self.head_weights = Linear.load(
            tensors,
            f"{prefix}.weights_proj",
            num_heads,
            hidden_size,
            runtime=runtime,
            factor=num_heads**-0.5 * head_dim**-0.5,
        )

    def __call__(
        self, x: Rows, k: torch.Tensor | None, q_latent: Rows, step: Step, cache: torch.Tensor
    ) -> Selection | None:
        """The positions that each of these tokens attends to, whose index keys are added to the cache.

        None while no context is longer than ``topk``, so that each attends to all it has.

        Shapes:
            x: [T, H]; k: their products with ``wk`` [T, D], None where :attr:`key` computes them;
            q_latent: [T, q_lora_rank]; cache: [max_tokens, D]
        """
        norm = self.key_norm
        if k is None:
            assert self.key is not None
            k = self.key(x)
        self.runtime.store_index_keys(
            k, (norm.weight, norm.bias, norm.eps), self.rope_dim, self.rotate, step, cache
        )
        if step.longest <= self.shape.topk:
            return None
        q, head_weights = self.query(q_latent), self.head_weights(x)
        return self.runtime.select(q, head_weights, self.rope_dim, self.rotate, step, cache, self.shape.topk)
