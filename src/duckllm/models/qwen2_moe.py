"""Qwen2-MoE: grouped-query attention with biases, softmax routing, and a shared expert behind a gate."""

from __future__ import annotations

from typing import Any

from duckllm.models.config import (
    ModelConfig,
    SharedExpert,
    check_rope,
    check_softmax,
    common_fields,
    require,
    require_only,
    require_positive,
    rotary_of,
)
from duckllm.models.gqa_config import attention_of, rotary_dim_of, sparse_layers
from duckllm.moe.router import SoftmaxRouting

PARSER = "Qwen2MoeConfig"


def parse(parsed: Any) -> ModelConfig:
    """The configuration, from what transformers has parsed. Raises as ``read_config``."""
    _check(parsed)
    return ModelConfig(
        **common_fields(parsed),
        moe_intermediate_size=parsed.moe_intermediate_size,
        num_experts=parsed.num_experts,
        is_moe_layer=sparse_layers(parsed),
        routing=SoftmaxRouting(parsed.num_experts_per_tok, parsed.norm_topk_prob),
        shared=SharedExpert(
            "shared_expert", parsed.shared_expert_intermediate_size, gate="shared_expert_gate"
        ),
        attention=attention_of(
            parsed,
            [parsed.sliding_window if kind == "sliding_attention" else None for kind in parsed.layer_types],
            qkv_bias=parsed.qkv_bias,
        ),
        rotary=rotary_of(parsed, rotary_dim_of(parsed)),
    )


def _check(parsed: Any) -> None:
    require_only(parsed, {"hidden_act": "silu"})
    check_rope(parsed)
    require_positive(
        parsed,
        (
            *("vocab_size", "intermediate_size", "moe_intermediate_size"),
            *("max_position_embeddings", "shared_expert_intermediate_size"),
        ),
    )
    kinds = parsed.layer_types
    check_softmax(parsed, "num_experts")
    known = {"full_attention", "sliding_attention"}
    require(parsed, "layer_types", set(kinds) <= known, "full_attention or sliding_attention for each layer")
    if "sliding_attention" in kinds:
        require_positive(parsed, ("sliding_window",))
