"""Mixtral: plain grouped-query attention, softmax routing with weights that sum to 1, experts everywhere."""

from __future__ import annotations

from typing import Any

from duckllm.models.config import (
    ModelConfig,
    check_rope,
    require,
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
        vocab_size=parsed.vocab_size,
        hidden_size=parsed.hidden_size,
        intermediate_size=parsed.intermediate_size,
        moe_intermediate_size=parsed.intermediate_size,
        num_experts=parsed.num_local_experts,
        is_moe_layer=(True,) * parsed.num_hidden_layers,
        routing=SoftmaxRouting(parsed.num_experts_per_tok, normalize=True),
        shared=None,
        rms_norm_eps=parsed.rms_norm_eps,
        max_position_embeddings=parsed.max_position_embeddings,
        tie_word_embeddings=parsed.tie_word_embeddings,
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
            *("vocab_size", "intermediate_size", "num_hidden_layers", "num_local_experts"),
            *("num_experts_per_tok", "max_position_embeddings"),
        ),
    )
    if parsed.sliding_window is not None:
        require_positive(parsed, ("sliding_window",))
    chosen, experts = parsed.num_experts_per_tok, parsed.num_local_experts
    require(parsed, "num_experts_per_tok", chosen <= experts, f"at most {experts}")
