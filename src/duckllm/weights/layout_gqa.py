"""Layouts of the families with grouped-query attention (GQA). Called through ``layout_of``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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


def qwen3_moe(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelLayout:
    """Qwen3-MoE. Raises as ``layout_of``."""
    read = ConfigReader(config)
    # transformers 5.24 writes the second name, published files have the first.
    field = "num_local_experts" if read.get("num_experts") is None else "num_experts"
    experts = read.positive(field)
    bias = bool(read.get("attention_bias"))
    attention = _attention(read, qkv_bias=bias, o_bias=bias, qk_norm=True)
    moe: Shapes = {"mlp.gate.weight": (experts, read.positive("hidden_size"))}
    return _layout(read, "Qwen3MoeForCausalLM", "qwen3_moe", experts, attention, moe, _qwen_moe_layers(read))


def qwen2_moe(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelLayout:
    """Qwen2-MoE. Raises as ``layout_of``."""
    read = ConfigReader(config)
    hidden, experts = read.positive("hidden_size"), read.positive("num_experts")
    attention = _attention(read, qkv_bias=read.get("qkv_bias") in (None, True))
    moe: Shapes = {
        "mlp.gate.weight": (experts, hidden),
        "mlp.shared_expert_gate.weight": (1, hidden),
        **mlp_shapes("mlp.shared_expert.", hidden, read.positive("shared_expert_intermediate_size")),
    }
    return _layout(read, "Qwen2MoeForCausalLM", "qwen2_moe", experts, attention, moe, _qwen_moe_layers(read))


def mixtral(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelLayout:
    """Mixtral. Raises as ``layout_of``."""
    read = ConfigReader(config)
    experts = read.positive("num_local_experts")
    moe: Shapes = {"block_sparse_moe.gate.weight": (experts, read.positive("hidden_size"))}
    layers = tuple(range(read.positive("num_hidden_layers")))
    return _layout(
        read,
        "MixtralForCausalLM",
        "mixtral",
        experts,
        _attention(read),
        moe,
        layers,
        moe_intermediate_size="intermediate_size",
        expert_names=("block_sparse_moe.experts", ("w1", "w3", "w2")),
    )


def glm4_moe(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelLayout:
    """GLM-4.5 and 4.6. Raises as ``layout_of``."""
    read = ConfigReader(config)
    experts, moe = read.positive("n_routed_experts"), sigmoid_moe_shapes(read)
    attention = _attention(
        read, qkv_bias=bool(read.get("attention_bias")), qk_norm=bool(read.get("use_qk_norm"))
    )
    layers = range(read.count("first_k_dense_replace", 1), read.positive("num_hidden_layers"))
    return _layout(
        read, "Glm4MoeForCausalLM", "glm4_moe", experts, attention, moe, tuple(layers), mtp_of=tensors
    )


def _layout(
    read: ConfigReader,
    architecture: str,
    model_type: str,
    num_experts: int,
    attention: Shapes,
    moe: Shapes,
    moe_layers: tuple[int, ...],
    *,
    moe_intermediate_size: str = "moe_intermediate_size",
    expert_names: tuple[str, tuple[str, str, str]] | None = None,
    mtp_of: Mapping[str, TensorInfo] | None = None,
) -> ModelLayout:
    """The layout of a model whose layers differ in being dense or not, and in nothing else."""
    hidden, layers = read.positive("hidden_size"), read.positive("num_hidden_layers")
    chosen = read.positive("num_experts_per_tok")
    if chosen > num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok: got {chosen}, expected at most {num_experts}"
        )
    shapes = vocabulary_shapes(read)
    dense: Shapes = {}
    if len(moe_layers) < layers:
        dense = mlp_shapes("mlp.", hidden, read.positive("intermediate_size"))
    mtp = mtp_layers(read, mtp_of or {})
    for layer in (*range(layers), *mtp):
        mlp = moe if layer in moe_layers or layer in mtp else dense
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in (attention | mlp).items()}
    for layer in mtp:
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in mtp_shapes(read).items()}
    layout = ModelLayout(
        architecture=architecture,
        model_type=str(read.get("model_type") or model_type),
        hidden_size=hidden,
        moe_intermediate_size=read.positive(moe_intermediate_size),
        num_experts=num_experts,
        num_experts_per_tok=chosen,
        num_layers=layers + len(mtp),
        moe_layers=(*moe_layers, *mtp),
        host_shapes=shapes,
    )
    if expert_names is None:
        return layout
    return replace(layout, experts=expert_names[0], projections=expert_names[1])


def _attention(
    read: ConfigReader, *, qkv_bias: bool = False, o_bias: bool = False, qk_norm: bool = False
) -> Shapes:
    hidden, heads = read.positive("hidden_size"), read.positive("num_attention_heads")
    given = read.get("head_dim")
    head_dim = hidden // heads if given is None else read.positive("head_dim")
    queries, keys = heads * head_dim, read.positive("num_key_value_heads") * head_dim
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
    }
    if qkv_bias:
        shapes |= {"self_attn.q_proj.bias": (queries,)}
        shapes |= {"self_attn.k_proj.bias": (keys,), "self_attn.v_proj.bias": (keys,)}
    if o_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    return shapes


def _qwen_moe_layers(read: ConfigReader) -> tuple[int, ...]:
    dense = read.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CheckpointError(f"config.json: mlp_only_layers: got {dense!r}, expected a list of layers")
    every = 1 if read.get("decoder_sparse_step") is None else read.positive("decoder_sparse_step")
    layers = range(read.positive("num_hidden_layers"))
    return tuple(layer for layer in layers if layer not in dense and (layer + 1) % every == 0)
