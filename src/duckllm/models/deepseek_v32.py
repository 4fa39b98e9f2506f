"""DeepSeek-V3.2: DeepSeek-V3 with DeepSeek sparse attention (DSA)."""

from __future__ import annotations

from typing import Any

from duckllm.errors import UnsupportedModelError
from duckllm.layers.indexer import IndexerShape
from duckllm.models.config import ModelConfig, require, require_only
from duckllm.models.deepseek_v3 import check, mla_shape, model_config

PARSER = "DeepseekV32Config"

# One kind of layer; older transformers (5.17) give it the second name.
_SPARSE_LAYER_TYPES = ("indexed_attention", "deepseek_sparse_attention")
_ONLY = {"rope_interleave": True, "indexer_rope_interleave": False}


def parse(parsed: Any) -> ModelConfig:
    """The configuration, from what transformers has parsed. Raises as ``read_config``."""
    require_only(parsed, _ONLY)
    check_sparse(parsed)
    shape = mla_shape(parsed, indexer_shape(parsed, rope_interleave=False))
    return model_config(
        parsed,
        attention=(shape,) * parsed.num_hidden_layers,
        is_moe_layer=[kind == "sparse" for kind in parsed.mlp_layer_types],
    )


def check_sparse(parsed: Any) -> None:
    """Refuses what families with an indexer do not have; raises as ``deepseek_v3.check``."""
    check(parsed, ("q_lora_rank", "index_topk", "index_n_heads", "index_head_dim"))
    unknown = set(parsed.layer_types or ()) - set(_SPARSE_LAYER_TYPES)
    if unknown:
        raise UnsupportedModelError(
            f"config.json: layer_types: got {sorted(unknown)}, expected {_SPARSE_LAYER_TYPES[0]} alone"
        )
    kinds, wide_enough = parsed.mlp_layer_types, parsed.index_head_dim >= parsed.qk_rope_head_dim
    require(parsed, "index_head_dim", wide_enough, "at least qk_rope_head_dim")
    require(parsed, "mlp_layer_types", len(kinds) == parsed.num_hidden_layers, "one entry a layer")
    require(parsed, "mlp_layer_types", set(kinds) <= {"dense", "sparse"}, "dense or sparse for each layer")


def indexer_shape(parsed: Any, *, rope_interleave: bool, is_shared: bool = False) -> IndexerShape:
    """The shape of a layer's indexer."""
    return IndexerShape(
        num_heads=parsed.index_n_heads,
        head_dim=parsed.index_head_dim,
        topk=parsed.index_topk,
        rope_interleave=rope_interleave,
        is_shared=is_shared,
    )
