"""Layouts of the families with multi-head latent attention (MLA). Called through ``layout_of``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from duckllm.errors import CheckpointError
from duckllm.weights.layout import (
    ConfigReader,
    ModelLayout,
    Shapes,
    mlp_shapes,
    mtp_layers,
    mtp_shapes,
    sigmoid_moe_shapes,
    vocabulary_shapes,
)
from duckllm.weights.safetensors_file import TensorInfo


def deepseek_v3(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelLayout:
    """DeepSeek-V3 and what has its architecture. Raises as ``layout_of``."""
    return _layout(config, tensors, "DeepseekV3ForCausalLM", lambda read, layer: {})


def deepseek_v32(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelLayout:
    """DeepSeek-V3.2: an indexer in every layer. Raises as ``layout_of``."""
    return _layout(config, tensors, "DeepseekV32ForCausalLM", lambda read, layer: _indexer(read))


def glm_moe_dsa(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelLayout:
    """GLM-5: an indexer in the layers that share no other's selection. Raises as ``layout_of``."""
    kinds = _indexer_types(ConfigReader(config))

    def indexer(read: ConfigReader, layer: int) -> Shapes:
        return {} if layer < len(kinds) and kinds[layer] == "shared" else _indexer(read)

    return _layout(config, tensors, "GlmMoeDsaForCausalLM", indexer)


def _layout(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    architecture: str,
    indexer: Callable[[ConfigReader, int], Shapes],
) -> ModelLayout:
    """The layout of a family, whose layers have these tensors besides MLA's and the MLP's."""
    read = ConfigReader(config)
    _check_routing(read)
    layers = read.positive("num_hidden_layers")
    moe = [layer for layer in range(layers) if _is_moe_layer(read, layer, layers)]
    mtp = mtp_layers(read, tensors)
    shapes = vocabulary_shapes(read)
    for layer in [*range(layers), *mtp]:
        prefix, is_moe = f"model.layers.{layer}.", layer in moe or layer in mtp
        parts = _attention(read) | indexer(read, layer) | _mlp(read, is_moe)
        shapes |= {prefix + name: shape for name, shape in parts.items()}
    for layer in mtp:
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in mtp_shapes(read).items()}
    return ModelLayout(
        architecture=architecture,
        model_type=str(config.get("model_type", "")),
        hidden_size=read.positive("hidden_size"),
        moe_intermediate_size=read.positive("moe_intermediate_size"),
        num_experts=read.positive("n_routed_experts"),
        num_experts_per_tok=read.positive("num_experts_per_tok"),
        num_layers=layers + len(mtp),
        moe_layers=(*moe, *mtp),
        host_shapes=shapes,
    )


def _check_routing(read: ConfigReader) -> None:
    experts, chosen = read.positive("n_routed_experts"), read.positive("num_experts_per_tok")
    groups, candidates = 1, experts
    if read.get("n_group") is not None:
        groups = read.positive("n_group")
        if experts % groups:
            raise CheckpointError(
                f"config.json: n_group: got {groups}, expected a divisor of n_routed_experts, {experts}"
            )
        if read.get("topk_group") is not None:
            kept = read.positive("topk_group")
            if kept > groups:
                raise CheckpointError(
                    f"config.json: topk_group: got {kept}, expected at most n_group, {groups}"
                )
            candidates = kept * (experts // groups)
    if chosen > candidates:
        raise CheckpointError(
            f"config.json: num_experts_per_tok: got {chosen}, expected at most {candidates}"
        )


def _is_moe_layer(read: ConfigReader, layer: int, layers: int) -> bool:
    kinds = read.get("mlp_layer_types")
    if kinds is None:
        frequency = max(1, read.count("moe_layer_freq", 1))
        return layer >= read.count("first_k_dense_replace", 3) and layer % frequency == 0
    if not isinstance(kinds, list) or len(kinds) < layers or not set(kinds) <= {"dense", "sparse"}:
        raise CheckpointError(
            f"config.json: mlp_layer_types: got {kinds!r}, expected {layers} times 'dense' or 'sparse'"
        )
    return bool(kinds[layer] == "sparse")


def _indexer_types(read: ConfigReader) -> list[str]:
    """Of each layer, whether it has an indexer, "full", or takes the last selection before it, "shared"."""
    layers, kinds = read.positive("num_hidden_layers"), read.get("indexer_types")
    if kinds is None:
        kinds = read.get("index_topk_pattern")
    if kinds is None:
        frequency, offset = max(read.count("index_topk_freq", 1), 1), read.count("index_skip_topk_offset", 2)
        kinds = ["shared" if max(n - offset + 1, 0) % frequency else "full" for n in range(layers)]
    elif isinstance(kinds, str):
        kinds = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in kinds]
    if not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= {"full", "shared"}:
        raise CheckpointError(
            f"config.json: indexer_types: got {kinds!r}, expected {layers} times 'full' or 'shared'"
        )
    return kinds


def _attention(read: ConfigReader) -> Shapes:
    hidden, heads, kv_rank = (
        read.positive(f) for f in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    nope, rope, value = (read.positive(f) for f in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (kv_rank,),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), kv_rank),
        "self_attn.o_proj.weight": (hidden, heads * value),
    }
    has_bias = bool(read.get("attention_bias"))
    if has_bias:
        shapes["self_attn.kv_a_proj_with_mqa.bias"] = (kv_rank + rope,)
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if read.get("q_lora_rank") is None:
        shapes["self_attn.q_proj.weight"] = (heads * (nope + rope), hidden)
        return shapes
    q_rank = read.positive("q_lora_rank")
    shapes["self_attn.q_a_proj.weight"] = (q_rank, hidden)
    shapes["self_attn.q_a_layernorm.weight"] = (q_rank,)
    shapes["self_attn.q_b_proj.weight"] = (heads * (nope + rope), q_rank)
    if has_bias:
        shapes["self_attn.q_a_proj.bias"] = (q_rank,)
    return shapes


def _indexer(read: ConfigReader) -> Shapes:
    hidden, q_rank = read.positive("hidden_size"), read.positive("q_lora_rank")
    heads, size = read.positive("index_n_heads"), read.positive("index_head_dim")
    return {
        "self_attn.indexer.wq_b.weight": (heads * size, q_rank),
        "self_attn.indexer.wk.weight": (size, hidden),
        "self_attn.indexer.k_norm.weight": (size,),
        "self_attn.indexer.k_norm.bias": (size,),
        "self_attn.indexer.weights_proj.weight": (heads, hidden),
    }


def _mlp(read: ConfigReader, is_moe: bool) -> Shapes:
    if is_moe:
        return sigmoid_moe_shapes(read)
    return mlp_shapes("mlp.", read.positive("hidden_size"), read.positive("intermediate_size"))
