"""GLM-4.5 and 4.6: grouped-query attention, partly rotated, with DeepSeek's routing and shared experts."""

from __future__ import annotations

from typing import Any

from duckllm.models.config import (
    ModelConfig,
    check_groups,
    check_rope,
    common_fields,
    require,
    require_only,
    require_positive,
    rotary_of,
    shared_experts,
    sigmoid_routing,
)
from duckllm.models.gqa_config import attention_of, rotary_dim_of

PARSER = "Glm4MoeConfig"

_ONLY = {"hidden_act": "silu", "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def parse(parsed: Any) -> ModelConfig:
    """The configuration, from what transformers has parsed. Raises as ``read_config``."""
    _check(parsed)
    layers = range(parsed.num_hidden_layers)
    return ModelConfig(
        **common_fields(parsed),
        moe_intermediate_size=parsed.moe_intermediate_size,
        num_experts=parsed.n_routed_experts,
        is_moe_layer=tuple(layer >= parsed.first_k_dense_replace for layer in layers),
        routing=sigmoid_routing(parsed),
        shared=shared_experts(parsed),
        attention=attention_of(
            parsed,
            (None,) * parsed.num_hidden_layers,
            qkv_bias=parsed.attention_bias,
            qk_norm=parsed.use_qk_norm,
        ),
        rotary=rotary_of(parsed, rotary_dim_of(parsed)),
    )


def _check(parsed: Any) -> None:
    require_only(parsed, _ONLY)
    check_rope(parsed, partial=True)
    require_positive(
        parsed,
        (
            *("vocab_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
            "max_position_embeddings",
        ),
    )
    check_groups(parsed)
    require(parsed, "n_shared_experts", parsed.n_shared_experts >= 0, "0 or more")
    require(parsed, "first_k_dense_replace", parsed.first_k_dense_replace >= 0, "0 or more")
