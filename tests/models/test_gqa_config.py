"""config.json of the families with grouped-query attention: as published, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from duckllm.errors import CheckpointError, UnsupportedModelError
from duckllm.layers.gqa import GQAShape
from duckllm.models.config import ModelConfig, SharedExpert
from duckllm.models.registry import load_config
from duckllm.moe.router import SigmoidRouting, SoftmaxRouting
from duckllm.weights.architectures import layout_of
from duckllm.weights.layout import ModelLayout

# As on the hub, what plays no part left out.
QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GLM_45_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "partial_rotary_factor": 0.5,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
QWEN15_A27B: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


def load(folder: Path, config: dict[str, Any], **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config | changes))
    return load_config(folder)


def shape(config: ModelConfig) -> GQAShape:
    assert isinstance(config.attention[0], GQAShape)
    return config.attention[0]


def num_weights(layout: ModelLayout) -> int:
    host = sum(int(torch.tensor(shape).prod()) for shape in layout.host_shapes.values())
    expert = 3 * layout.hidden_size * layout.moe_intermediate_size
    return host + len(layout.moe_layers) * layout.num_experts * expert


def test_qwen3(tmp_path: Path) -> None:
    config = load(tmp_path, QWEN3_30B)
    assert shape(config) == GQAShape(2048, 32, 4, 128, 128, 128**-0.5, False, False, 1e-6, None)
    assert config.num_hidden_layers == sum(config.is_moe_layer) == 48
    assert config.routing == SoftmaxRouting(8, True)
    assert config.shared is None
    assert config.cache_elements_per_token == 48 * 2 * 4 * 128
    torch.testing.assert_close(config.rotary.inv_freq[:2], torch.tensor([1.0, 1e6 ** (-1 / 64)]))
    assert num_weights(layout_of(QWEN3_30B, {})) == 30_532_122_624  # as the hub counts them


def test_glm(tmp_path: Path) -> None:
    config = load(tmp_path, GLM_45_AIR)
    assert shape(config) == GQAShape(4096, 96, 8, 128, 64, 128**-0.5, True, False, None, None)
    assert config.is_moe_layer == (False,) + (True,) * 45
    assert config.routing == SigmoidRouting(1, 1, 8, True, 1.0)
    assert config.shared == SharedExpert("shared_experts", 1408)
    assert len(config.rotary.inv_freq) == 32
    torch.testing.assert_close(config.rotary.inv_freq[1], torch.tensor(1e6 ** (-1 / 32)))


def test_the_mtp_layer_is_laid_out_where_the_checkpoint_has_it() -> None:
    without = layout_of(GLM_45_AIR, {})
    assert without.num_layers == 46
    prefix = "model.layers.46."
    layout = layout_of(GLM_45_AIR, {f"{prefix}eh_proj.weight": None})
    assert (layout.num_layers, layout.moe_layers[-1]) == (47, 46)
    own = {name.removeprefix(prefix) for name in layout.host_shapes if name.startswith(prefix)}
    usual = {name.removeprefix("model.layers.45.") for name in without.host_shapes if ".45." in name}
    assert own == usual | {"eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"}
    assert layout.host_shapes[f"{prefix}eh_proj.weight"] == (4096, 8192)


def test_qwen2(tmp_path: Path) -> None:
    config = load(tmp_path, QWEN15_A27B)
    assert shape(config) == GQAShape(2048, 16, 16, 128, 128, 128**-0.5, True, False, None, None)
    assert config.routing == SoftmaxRouting(4, False)
    assert config.shared == SharedExpert("shared_expert", 5632, "shared_expert_gate")
    assert num_weights(layout_of(QWEN15_A27B, {})) == 14_315_784_192


def test_qwen2_windows_are_of_the_layers_that_are_named(tmp_path: Path) -> None:
    config = load(tmp_path, QWEN15_A27B, use_sliding_window=True, max_window_layers=4, num_hidden_layers=6)
    assert [s.sliding_window for s in config.attention] == [32768, None, 32768, None, None, None]


def test_mixtral(tmp_path: Path) -> None:
    config = load(tmp_path, MIXTRAL_8X7B)
    assert shape(config) == GQAShape(4096, 32, 8, 128, 128, 128**-0.5, False, False, None, None)
    assert config.routing == SoftmaxRouting(2, True)
    assert config.moe_block == "block_sparse_moe"
    layout = layout_of(MIXTRAL_8X7B, {})
    assert num_weights(layout) == 46_702_792_704
    prefix = "model.layers.3.block_sparse_moe.experts.5"
    projections = ("gate_proj", "up_proj", "down_proj")
    assert [layout.expert_weight(3, 5, name) for name in projections] == [
        f"{prefix}.{name}.weight" for name in ("w1", "w3", "w2")
    ]
    assert layout.is_expert_tensor(f"{prefix}.w1.weight")
    assert not layout.is_expert_tensor("model.layers.3.block_sparse_moe.gate.weight")


@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
def test_rope_is_read_in_the_older_and_the_newer_form(tmp_path: Path, form: str) -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768}
    if form == "rope_scaling":
        changes: dict[str, Any] = {"rope_scaling": {"type": "yarn"} | yarn}
    else:
        changes = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000.0} | yarn}
        changes |= {"rope_scaling": None, "rope_theta": None}
    config = load(tmp_path, QWEN3_30B, **changes)
    assert config.rotary.attention_scaling == pytest.approx(0.1 * 1.3862944 + 1)
    assert config.rotary.inv_freq[0] == 1.0
    assert config.rotary.inv_freq[-1] == pytest.approx(1e6 ** (-126 / 128) / 4, rel=1e-5)


@pytest.mark.parametrize("factor", [2.0, 8])
def test_linear_rope_divides_every_angle(tmp_path: Path, factor: float) -> None:
    plain = load(tmp_path, QWEN3_30B).rotary.inv_freq
    config = load(tmp_path, QWEN3_30B, rope_scaling={"type": "linear", "factor": factor})
    torch.testing.assert_close(config.rotary.inv_freq, plain / factor)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN3_30B, {"hidden_act": "gelu"}, "hidden_act: got 'gelu', expected 'silu'"),
        (
            QWEN3_30B,
            {"use_sliding_window": True, "sliding_window": 4096},
            "max_window_layers: got 48, expected 0",
        ),
        (QWEN3_30B, {"layer_types": ["sliding_attention"] * 48}, "layer_types: got "),
        (QWEN3_30B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5, expected 1.0"),
        (
            QWEN3_30B,
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling type: got 'dynamic', expected one of default, linear, llama3, yarn",
        ),
        (
            QWEN3_30B,
            {"rope_scaling": {"type": "longrope", "factor": 2.0, "long_factor": [1], "short_factor": [1]}},
            "rope_scaling type: got 'longrope', expected ",
        ),
        (GLM_45_AIR, {"scoring_func": "softmax"}, "scoring_func: got 'softmax', expected 'sigmoid'"),
        (GLM_45_AIR, {"topk_method": "greedy"}, "topk_method: got 'greedy', expected 'noaux_tc'"),
        (MIXTRAL_8X7B, {"attention_bias": True}, "attention_bias: got True, expected False"),
        (QWEN15_A27B, {"hidden_act": "relu"}, "hidden_act: got 'relu', expected 'silu'"),
    ],
)
def test_a_feature_that_is_not_implemented_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        load(tmp_path, config, **changes)
    assert str(caught.value).startswith(f"config.json: {message}")


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN3_30B, {"num_experts_per_tok": 129}, "num_experts_per_tok: got 129, expected at most 128"),
        (QWEN3_30B, {"num_key_value_heads": 5}, "num_key_value_heads: got 5, expected a divisor of "),
        (QWEN3_30B, {"decoder_sparse_step": 0}, "decoder_sparse_step: got 0, expected an integer of at "),
        (QWEN3_30B, {"head_dim": 0}, "head_dim: got 0, expected an integer of at least 1"),
        (QWEN3_30B, {"head_dim": 3}, "head_dim: got 3, of which 3 are rotated, expected an even number"),
        (GLM_45_AIR, {"head_dim": 6}, "head_dim: got 6, of which 3 are rotated, expected an even number"),
        (GLM_45_AIR, {"partial_rotary_factor": 2.0}, "partial_rotary_factor: got 2.0, expected a number "),
        (GLM_45_AIR, {"n_group": 3}, "n_group: got 3, expected a divisor of n_routed_experts, 128"),
        (GLM_45_AIR, {"topk_group": 2}, "topk_group: got 2, expected at most n_group, 1"),
        (GLM_45_AIR, {"n_shared_experts": -1}, "n_shared_experts: got -1, expected 0 or more"),
        (
            QWEN15_A27B,
            {"use_sliding_window": True, "sliding_window": 0},
            "sliding_window: got 0, expected an integer of at least 1",
        ),
        (QWEN15_A27B, {"layer_types": ["chunked_attention"] * 24}, "layer_types: got ['chunked_attention'"),
        (MIXTRAL_8X7B, {"sliding_window": 0}, "sliding_window: got 0, expected an integer of at least 1"),
        (MIXTRAL_8X7B, {"num_local_experts": 1}, "num_experts_per_tok: got 2, expected at most 1"),
    ],
)
def test_a_contradiction_is_an_error_with_field_got_and_expected(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, config, **changes)
    assert f"config.json: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN3_30B, {"num_experts": None}, "num_local_experts: got None, expected a whole number"),
        (QWEN3_30B, {"num_experts_per_tok": 129}, "num_experts_per_tok: got 129, expected at most 128"),
        (QWEN3_30B, {"mlp_only_layers": 3}, "mlp_only_layers: got 3, expected a list of layers"),
        (GLM_45_AIR, {"num_key_value_heads": 0}, "num_key_value_heads: got 0, expected a whole number"),
        (MIXTRAL_8X7B, {"intermediate_size": "x"}, "intermediate_size: got 'x', expected a whole number"),
    ],
)
def test_the_converter_refuses_wrong_fields(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        layout_of(config | changes, {})
    assert f"config.json: {message}" in str(caught.value)


def test_dense_layers_among_the_sparse_ones(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert load(tmp_path, QWEN3_30B, **changes).is_moe_layer == (False, True, False, False, False, True)
    assert layout_of(QWEN3_30B | changes, {}).moe_layers == (1, 5)
