"""What the converter must know of an architecture: which layers hold experts, and every tensor it must find.

Called by the converter. A row in ``ARCHITECTURES`` adds a family; the models themselves are in
``duckllm.models``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from duckllm.errors import CheckpointError, UnsupportedModelError
from duckllm.weights.safetensors_file import TensorInfo

# Far above what any model has: a larger number is a damaged file, and would cost memory before that shows.
MOST = {
    **dict.fromkeys(("num_hidden_layers", "num_nextn_predict_layers"), 10_000),
    **dict.fromkeys(("n_routed_experts", "n_shared_experts", "num_experts_per_tok"), 100_000),
    **dict.fromkeys(("n_group", "topk_group", "num_attention_heads", "index_n_heads"), 100_000),
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"), 10**8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim"), 10**8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 10**8),
}
Shapes = dict[str, tuple[int, ...]]
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ModelLayout:
    """The shape of a mixture-of-experts model.

    Args:
        architecture: Hugging Face's class name.
        model_type: config.json's model_type.
        hidden_size: H.
        moe_intermediate_size: I.
        num_experts: E, routed experts of a layer.
        num_experts_per_tok: K.
        num_layers: Layers, the MTP layers included.
        moe_layers: Layers with routed experts, the MTP layers included.
        host_shapes: Shape of every tensor that the host needs, by name.
    """

    architecture: str
    model_type: str
    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    num_layers: int
    moe_layers: tuple[int, ...]
    host_shapes: Shapes

    def expert_weight(self, layer: int, expert: int, projection: str) -> str:
        """Name of one expert's matrix."""
        return f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"

    def expert_shape(self, projection: str) -> tuple[int, int]:
        """Shape of one expert's matrix: [I, H] for gate and up, [H, I] for down."""
        wide = (self.moe_intermediate_size, self.hidden_size)
        return wide[::-1] if projection == "down_proj" else wide

    @staticmethod
    def layer_of(name: str) -> int | None:
        """The layer that a tensor belongs to; None for embeddings, the last norm and the head."""
        parts = name.split(".")
        if len(parts) > 3 and parts[:2] == ["model", "layers"] and parts[2].isdecimal():
            return int(parts[2])
        return None

    def is_expert_tensor(self, name: str) -> bool:
        """Whether a tensor belongs to a routed expert."""
        return self.layer_of(name) is not None and name.split(".")[3:5] == ["mlp", "experts"]


class ConfigReader:
    """Typed access to config.json whose errors name the field."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def positive(self, field: str) -> int:
        """A whole number of at least 1."""
        value = self._config.get(field)
        if type(value) is not int or value < 1:
            raise CheckpointError(
                f"config.json: {field}: got {value!r}, expected a whole number of at least 1"
            )
        return value

    def count(self, field: str, default: int) -> int:
        """A whole number of at least 0; ``default`` where the field is absent or null."""
        value = self._config.get(field)
        if value is None:
            return default
        if type(value) is not int or value < 0:
            raise CheckpointError(
                f"config.json: {field}: got {value!r}, expected a whole number of at least 0"
            )
        return value

    def get(self, field: str) -> Any:
        """The value as it is; None where the field is absent."""
        return self._config.get(field)


def check_bounds(config: Mapping[str, Any]) -> None:
    """Refuses numbers in config.json that no model has.

    Raises:
        CheckpointError: Names the field.
    """
    for field, most in MOST.items():
        value = config.get(field)
        if isinstance(value, (int, float)) and value > most:
            got = str(value) if value < 10**100 else "a number of over 100 digits"
            raise CheckpointError(f"config.json: {field}: got {got}, expected at most {most}")


def layout_of(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelLayout:
    """The layout of a checkpoint.

    Raises:
        UnsupportedModelError: The architecture is not supported.
        CheckpointError: A field of config.json is missing or wrong.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    builder = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if builder is None:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(f"config.json: architectures: got {name!r}, expected one of: {supported}")
    check_bounds(config)
    return builder(config, tensors)


def _deepseek_v32(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelLayout:
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
    return {
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
        return _mlp("mlp.", hidden, read.positive("intermediate_size"))
    experts = read.positive("n_routed_experts")
    shapes: Shapes = {
        "mlp.gate.weight": (experts, hidden),
        "mlp.gate.e_score_correction_bias": (experts,),
    }
    shared = read.count("n_shared_experts", 0) * read.positive("moe_intermediate_size")
    return shapes | (_mlp("mlp.shared_experts.", hidden, shared) if shared else {})


def _mlp(prefix: str, hidden: int, intermediate: int) -> Shapes:
    wide = (intermediate, hidden)
    return {
        f"{prefix}gate_proj.weight": wide,
        f"{prefix}up_proj.weight": wide,
        f"{prefix}down_proj.weight": wide[::-1],
    }


ARCHITECTURES: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, TensorInfo]], ModelLayout]] = {
    "DeepseekV32ForCausalLM": _deepseek_v32,
}
