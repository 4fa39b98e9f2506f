"""DeepSeek-V3.2: MLA with DeepSeek sparse attention, group-limited sigmoid routing, dense layers first."""

from __future__ import annotations

import math
from typing import Any

from duckllm.errors import CheckpointError, UnsupportedModelError
from duckllm.layers.mla import IndexerShape, MLAShape
from duckllm.models.config import (
    ModelConfig,
    SharedExpert,
    check_rope,
    require,
    require_only,
    require_positive,
    rotary_of,
)
from duckllm.moe.router import SigmoidRouting

PARSER = "DeepseekV32Config"

_ONLY = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "mlp_bias": False,
    "rope_interleave": True,
}
# One kind of layer; older transformers (5.17) give it the second name.
_SPARSE_LAYER_TYPES = ("indexed_attention", "deepseek_sparse_attention")


def parse(parsed: Any) -> ModelConfig:
    """The configuration, from what transformers has parsed. Raises as ``read_config``."""
    _check_supported(parsed)
    _check_consistent(parsed)
    rope_dim = parsed.qk_rope_head_dim
    attention = MLAShape(
        hidden_size=parsed.hidden_size,
        num_heads=parsed.num_attention_heads,
        q_lora_rank=parsed.q_lora_rank,
        kv_lora_rank=parsed.kv_lora_rank,
        qk_nope_head_dim=parsed.qk_nope_head_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=parsed.v_head_dim,
        scaling=mla_scaling(parsed),
        attention_bias=parsed.attention_bias,
        indexer=IndexerShape(parsed.index_n_heads, parsed.index_head_dim, parsed.index_topk),
    )
    shared_size = parsed.moe_intermediate_size * (parsed.n_shared_experts or 0)
    return ModelConfig(
        vocab_size=parsed.vocab_size,
        hidden_size=parsed.hidden_size,
        intermediate_size=parsed.intermediate_size,
        moe_intermediate_size=parsed.moe_intermediate_size,
        num_experts=parsed.n_routed_experts,
        is_moe_layer=tuple(kind == "sparse" for kind in parsed.mlp_layer_types),
        routing=SigmoidRouting(
            num_groups=parsed.n_group,
            topk_group=parsed.topk_group,
            top_k=parsed.num_experts_per_tok,
            normalize=parsed.norm_topk_prob,
            scaling_factor=parsed.routed_scaling_factor,
        ),
        shared=SharedExpert("shared_experts", shared_size) if shared_size else None,
        rms_norm_eps=parsed.rms_norm_eps,
        max_position_embeddings=parsed.max_position_embeddings,
        tie_word_embeddings=parsed.tie_word_embeddings,
        attention=(attention,) * parsed.num_hidden_layers,
        rotary=rotary_of(parsed, rope_dim),
    )


def mla_scaling(parsed: Any) -> float:
    """The factor on MLA's query-key products, YaRN's ``mscale_all_dim`` included.

    Raises:
        CheckpointError: It is not finite.
    """
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


def _check_supported(parsed: Any) -> None:
    require_only(parsed, _ONLY)
    check_rope(parsed)
    if parsed.num_key_value_heads != parsed.num_attention_heads:
        raise UnsupportedModelError(
            f"config.json: num_key_value_heads: got {parsed.num_key_value_heads}, "
            f"expected num_attention_heads, {parsed.num_attention_heads}"
        )
    unknown = set(parsed.layer_types or ()) - set(_SPARSE_LAYER_TYPES)
    if unknown:
        raise UnsupportedModelError(
            f"config.json: layer_types: got {sorted(unknown)}, expected {_SPARSE_LAYER_TYPES[0]} alone"
        )


def _check_consistent(parsed: Any) -> None:
    require_positive(
        parsed,
        (
            *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"),
            *("num_hidden_layers", "num_attention_heads", "n_routed_experts", "num_experts_per_tok"),
            *("n_group", "topk_group", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"),
            *("qk_rope_head_dim", "v_head_dim", "index_topk", "index_n_heads", "index_head_dim"),
            "max_position_embeddings",
        ),
    )
    experts, groups = parsed.n_routed_experts, parsed.n_group
    candidates = parsed.topk_group * (experts // groups)
    rope_dim, kinds = parsed.qk_rope_head_dim, parsed.mlp_layer_types
    require(parsed, "n_group", experts % groups == 0, f"a divisor of n_routed_experts, {experts}")
    require(parsed, "n_group", experts // groups >= 2, f"at most half of n_routed_experts, {experts}")
    require(parsed, "topk_group", parsed.topk_group <= groups, f"at most n_group, {groups}")
    chosen = parsed.num_experts_per_tok
    require(parsed, "num_experts_per_tok", chosen <= candidates, f"at most {candidates}")
    require(parsed, "qk_rope_head_dim", rope_dim % 2 == 0, "an even number")
    require(parsed, "index_head_dim", parsed.index_head_dim >= rope_dim, "at least qk_rope_head_dim")
    require(parsed, "n_shared_experts", (parsed.n_shared_experts or 0) >= 0, "0 or more")
    require(parsed, "mlp_layer_types", len(kinds) == parsed.num_hidden_layers, "one entry a layer")
    require(parsed, "mlp_layer_types", set(kinds) <= {"dense", "sparse"}, "dense or sparse for each layer")
