"""Mixtral: plain grouped-query attention, softmax routing with weights that sum to 1, experts everywhere."""

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
from duckllm.models.gqa_config import attention_of, rotary_dim_of
from duckllm.moe.router import SoftmaxRouting

PARSER = "MixtralConfig"


def parse(parsed: Any) -> ModelConfig:
    """The configuration, from what transformers has parsed. Raises as ``read_config``."""
    _check(parsed)
    return ModelConfig(
        **common_fields(parsed),
        moe_intermediate_size=parsed.intermediate_size,
        num_experts=parsed.num_local_experts,
        is_moe_layer=(True,) * parsed.num_hidden_layers,
        routing=SoftmaxRouting(parsed.num_experts_per_tok, normalize=True),
        shared=None,
        attention=attention_of(parsed, (parsed.sliding_window,) * parsed.num_hidden_layers),
        rotary=rotary_of(parsed, rotary_dim_of(parsed)),
        moe_block="block_sparse_moe",
    )


def _check(parsed: Any) -> None:
    require_only(parsed, {"hidden_act": "silu", "attention_bias": False})
    check_rope(parsed)
    require_positive(
        parsed,
        (
            *("vocab_size", "intermediate_size", "num_hidden_layers"),
            "max_position_embeddings",
        ),
    )
    if parsed.sliding_window is not None:
        require_positive(parsed, ("sliding_window",))
    check_softmax(parsed, "num_local_experts")
