"""GLM-5: DeepSeek-V3.2 whose indexer turns neighbouring pairs, and whose layers may share a selection."""

from __future__ import annotations

from typing import Any

from duckllm.models.config import ModelConfig, require, require_only
from duckllm.models.deepseek_v3 import mla_shape, model_config
from duckllm.models.deepseek_v32 import check_sparse, indexer_shape

PARSER = "GlmMoeDsaConfig"

_ONLY = {"rope_interleave": True, "indexer_rope_interleave": True}


def parse(parsed: Any) -> ModelConfig:
    """The configuration, from what transformers has parsed. Raises as ``read_config``."""
    require_only(parsed, _ONLY)
    check_sparse(parsed)
    kinds = parsed.indexer_types
    require(parsed, "indexer_types", len(kinds) == parsed.num_hidden_layers, "one entry a layer")
    require(parsed, "indexer_types", set(kinds) <= {"full", "shared"}, "full or shared for each layer")
    require(parsed, "indexer_types", kinds[0] == "full", "full for the first layer")
    shapes = {
        kind: mla_shape(parsed, indexer_shape(parsed, rope_interleave=True, is_shared=kind == "shared"))
        for kind in set(kinds)
    }
    return model_config(
        parsed,
        attention=[shapes[kind] for kind in kinds],
        is_moe_layer=[kind == "sparse" for kind in parsed.mlp_layer_types],
    )
