"""Qwen3-MoE: grouped-query attention with normalised queries and keys, softmax routing, no shared expert."""

from __future__ import annotations

from typing import Any

from duckllm.models.config import (
    ModelConfig,
    check_rope,
    check_softmax,
    common_fields,
    require_only,
    require_positive,
    rotary_of,
)
from duckllm.models.gqa_config import attention_of, rotary_dim_of, sparse_layers
from duckllm.moe.router import SoftmaxRouting

PARSER = "Qwen3MoeConfig"


def parse(parsed: Any) -> ModelConfig:
    """The configuration, from what transformers has parsed. Raises as ``read_config``."""
    _check(parsed)
    return ModelConfig(
        **common_fields(parsed),
        moe_intermediate_size=parsed.moe_intermediate_size,
        num_experts=parsed.num_experts,
        is_moe_layer=sparse_layers(parsed),
        routing=SoftmaxRouting(parsed.num_experts_per_tok, parsed.norm_topk_prob),
        shared=None,
        attention=attention_of(
            parsed,
            (parsed.sliding_window,) * parsed.num_hidden_layers,
            qkv_bias=parsed.attention_bias,
            o_bias=parsed.attention_bias,
            qk_norm=True,
        ),
        rotary=rotary_of(parsed, rotary_dim_of(parsed)),
    )


def _check(parsed: Any) -> None:
    kind = "full_attention"
    if parsed.sliding_window is not None:
        require_positive(parsed, ("sliding_window",))
        # transformers gives every layer the window, whatever this field says; older ones did not.
        require_only(parsed, {"max_window_layers": 0})
        kind = "sliding_attention"
    require_only(parsed, {"hidden_act": "silu", "layer_types": [kind] * parsed.num_hidden_layers})
    check_rope(parsed)
    require_positive(
        parsed,
        (
            *("vocab_size", "intermediate_size", "moe_intermediate_size"),
            "max_position_embeddings",
        ),
    )
    check_softmax(parsed, "num_experts")
