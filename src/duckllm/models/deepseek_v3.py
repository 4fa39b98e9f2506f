"""DeepSeek-V3, and with its architecture R1, V3.1, Kimi K2 and Moonlight.

MLA, dense layers first, group-limited sigmoid routing, YaRN. What the families derived from it share is here
too: MLA's shape and factor, the routing, the checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from duckllm.errors import CheckpointError, UnsupportedModelError
from duckllm.layers.indexer import IndexerShape
from duckllm.layers.mla import MLAShape
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

PARSER = "DeepseekV3Config"

_ONLY = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "mlp_bias": False,
}


def parse(parsed: Any) -> ModelConfig:
    """The configuration, from what transformers has parsed. Raises as ``read_config``."""
    check(parsed)
    require(parsed, "first_k_dense_replace", (parsed.first_k_dense_replace or 0) >= 0, "0 or more")
    layers = range(parsed.num_hidden_layers)
    return model_config(
        parsed,
        attention=(mla_shape(parsed, None, rope_interleave=bool(parsed.rope_interleave)),) * len(layers),
        is_moe_layer=[layer >= (parsed.first_k_dense_replace or 0) for layer in layers],
    )


def check(parsed: Any, positive: Iterable[str] = ()) -> None:
    """Refuses what this family and those derived from it do not have.

    Args:
        parsed: What transformers has parsed.
        positive: Fields of the family that must be whole numbers of at least 1.

    Raises:
        UnsupportedModelError: A feature that is not implemented, by name.
        CheckpointError: A value contradicts another.
    """
    require_only(parsed, _ONLY)
    check_rope(parsed)
    if parsed.num_key_value_heads != parsed.num_attention_heads:
        raise UnsupportedModelError(
            f"config.json: num_key_value_heads: got {parsed.num_key_value_heads}, "
            f"expected num_attention_heads, {parsed.num_attention_heads}"
        )
    require_positive(
        parsed,
        (
            *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"),
            *("num_hidden_layers", "num_attention_heads", "kv_lora_rank"),
            *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
            *(() if parsed.q_lora_rank is None else ("q_lora_rank",)),
            *("max_position_embeddings", *positive),
        ),
    )
    check_groups(parsed)
    require(parsed, "qk_rope_head_dim", parsed.qk_rope_head_dim % 2 == 0, "an even number")
    require(parsed, "n_shared_experts", (parsed.n_shared_experts or 0) >= 0, "0 or more")


def mla_shape(parsed: Any, indexer: IndexerShape | None, *, rope_interleave: bool = True) -> MLAShape:
    """The shape of an attention layer.

    Raises:
        CheckpointError: YaRN's numbers give a factor that is not finite.
    """
    return MLAShape(
        hidden_size=parsed.hidden_size,
        num_heads=parsed.num_attention_heads,
        q_lora_rank=parsed.q_lora_rank,
        kv_lora_rank=parsed.kv_lora_rank,
        qk_nope_head_dim=parsed.qk_nope_head_dim,
        qk_rope_head_dim=parsed.qk_rope_head_dim,
        v_head_dim=parsed.v_head_dim,
        scaling=_scaling(parsed),
        attention_bias=parsed.attention_bias,
        rope_interleave=rope_interleave,
        indexer=indexer,
    )


def model_config(parsed: Any, attention: Sequence[MLAShape], is_moe_layer: Sequence[bool]) -> ModelConfig:
    """The configuration, of layers with these shapes."""
    return ModelConfig(
        **common_fields(parsed),
        moe_intermediate_size=parsed.moe_intermediate_size,
        num_experts=parsed.n_routed_experts,
        is_moe_layer=tuple(is_moe_layer),
        routing=sigmoid_routing(parsed),
        shared=shared_experts(parsed),
        attention=tuple(attention),
        rotary=rotary_of(parsed, parsed.qk_rope_head_dim),
    )


def _scaling(parsed: Any) -> float:
    """The factor on MLA's query-key products, YaRN's ``mscale_all_dim`` included."""
    scaling: float = (parsed.qk_nope_head_dim + parsed.qk_rope_head_dim) ** -0.5
    rope = parsed.rope_parameters
    if rope["rope_type"] == "yarn":
        scaling *= _yarn_mscale(rope["factor"], rope.get("mscale_all_dim") or 0) ** 2
    if not math.isfinite(scaling):
        raise CheckpointError(
            f"config.json: rope_scaling: got {dict(rope)!r}, expected values that give a finite scale"
        )
    return scaling


def _yarn_mscale(factor: float, mscale_all_dim: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale_all_dim * math.log(factor) + 1.0
