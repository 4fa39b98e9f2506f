"""The architectures whose checkpoints can be converted, by their name in ``config.json``.

Called by the converter. A row adds a family; the models themselves are in ``duckllm.models``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from duckllm.errors import UnsupportedModelError
from duckllm.weights import layout_gqa, layout_mla
from duckllm.weights.config_values import check_values
from duckllm.weights.layout import ModelLayout
from duckllm.weights.safetensors_file import TensorInfo

ARCHITECTURES: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, TensorInfo]], ModelLayout]] = {
    "DeepseekV3ForCausalLM": layout_mla.deepseek_v3,
    "DeepseekV32ForCausalLM": layout_mla.deepseek_v32,
    "Glm4MoeForCausalLM": layout_gqa.glm4_moe,
    "GlmMoeDsaForCausalLM": layout_mla.glm_moe_dsa,
    "MixtralForCausalLM": layout_gqa.mixtral,
    "Qwen2MoeForCausalLM": layout_gqa.qwen2_moe,
    "Qwen3MoeForCausalLM": layout_gqa.qwen3_moe,
}


def layout_of(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelLayout:
    """The layout of a checkpoint.

    Raises:
        UnsupportedModelError: The architecture is not supported, or no layer has routed experts.
        CheckpointError: A field of config.json is missing or wrong.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    builder = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if builder is None:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(f"config.json: architectures: got {name!r}, expected one of: {supported}")
    check_values(config)
    layout = builder(config, tensors)
    if not layout.moe_layers:
        raise UnsupportedModelError(
            f"config.json: got {layout.num_layers} layers without routed experts, expected some with them"
        )
    return layout
