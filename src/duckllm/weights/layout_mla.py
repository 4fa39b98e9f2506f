"""Layouts of the families with multi-head latent attention (MLA). Called through ``layout_of``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from duckllm.errors import CheckpointError
from duckllm.weights.layout import ConfigReader, ModelLayout, Shapes, mlp_shapes
from duckllm.weights.safetensors_file import TensorInfo


def deepseek_v32(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelLayout:
    """DeepSeek-V3.2. Raises as ``layout_of``."""
    read = ConfigReader(config)
    _check_routing(read)
    layers = read.positive("num_hidden_layers")
    moe = [layer for layer in range(layers) if _is_moe_layer(read, layer, layers)]
    present = {layer for layer in map(ModelLayout.layer_of, tensors) if layer is not None}
    mtp = [n for n in range(layers, layers + read.count("num_nextn_predict_layers", 0)) if n in present]
    shapes: Shapes = {
        "model.embed_tokens.weight": (read.positive("vocab_size"), read.positive("hidden_size")),
        "model.norm.weight": (read.positive("hidden_size"),),
    }
    if not read.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    for layer in [*range(layers), *mtp]:
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _deepseek_attention(read).items()}
        is_moe = layer in moe or layer in mtp
        shapes |= {prefix + name: shape for name, shape in _deepseek_mlp(read, is_moe).items()}
    for layer in mtp:
        hidden = read.positive("hidden_size")
        prefix = f"model.layers.{layer}."
        shapes[prefix + "eh_proj.weight"] = (hidden, 2 * hidden)
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            shapes[f"{prefix}{norm}.weight"] = (hidden,)
    return ModelLayout(
        architecture="DeepseekV32ForCausalLM",
        model_type=str(config.get("model_type", "deepseek_v32")),
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
        return layer >= read.count("first_k_dense_replace", 0) and layer % frequency == 0
    if not isinstance(kinds, list) or len(kinds) < layers or not set(kinds) <= {"dense", "sparse"}:
        raise CheckpointError(
            f"config.json: mlp_layer_types: got {kinds!r}, expected {layers} times 'dense' or 'sparse'"
        )
    return bool(kinds[layer] == "sparse")


def _deepseek_attention(read: ConfigReader) -> Shapes:
    hidden, heads = read.positive("hidden_size"), read.positive("num_attention_heads")
    q_rank, kv_rank = read.positive("q_lora_rank"), read.positive("kv_lora_rank")
    nope, rope, value = (read.positive(f) for f in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    index_heads, index_dim = read.positive("index_n_heads"), read.positive("index_head_dim")
    biases: Shapes = {
        "self_attn.q_a_proj.bias": (q_rank,),
        "self_attn.kv_a_proj_with_mqa.bias": (kv_rank + rope,),
        "self_attn.o_proj.bias": (hidden,),
    }
    return (biases if read.get("attention_bias") else {}) | {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_a_proj.weight": (q_rank, hidden),
        "self_attn.q_a_layernorm.weight": (q_rank,),
        "self_attn.q_b_proj.weight": (heads * (nope + rope), q_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (kv_rank,),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), kv_rank),
        "self_attn.o_proj.weight": (hidden, heads * value),
        "self_attn.indexer.wq_b.weight": (index_heads * index_dim, q_rank),
        "self_attn.indexer.wk.weight": (index_dim, hidden),
        "self_attn.indexer.k_norm.weight": (index_dim,),
        "self_attn.indexer.k_norm.bias": (index_dim,),
        "self_attn.indexer.weights_proj.weight": (index_heads, hidden),
    }


def _deepseek_mlp(read: ConfigReader, is_moe: bool) -> Shapes:
    hidden = read.positive("hidden_size")
    if not is_moe:
        return mlp_shapes("mlp.", hidden, read.positive("intermediate_size"))
    experts = read.positive("n_routed_experts")
    shapes: Shapes = {
        "mlp.gate.weight": (experts, hidden),
        "mlp.gate.e_score_correction_bias": (experts,),
    }
    shared = read.count("n_shared_experts", 0) * read.positive("moe_intermediate_size")
    return shapes | (mlp_shapes("mlp.shared_experts.", hidden, shared) if shared else {})
