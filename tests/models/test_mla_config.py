"""How the families with MLA read config.json, and that their layouts read it alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from duckllm.errors import CheckpointError, UnsupportedModelError
from duckllm.models.config import ModelConfig
from duckllm.models.registry import load_config
from duckllm.weights.architectures import layout_of
from support.checkpoints import BASE_CONFIG

V3 = {name: value for name, value in BASE_CONFIG.items() if not name.startswith("index_")} | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
}
GLM = BASE_CONFIG | {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"}


def load(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return load_config(folder)


def test_deepseek_v3_keeps_no_index_keys(tmp_path: Path) -> None:
    config = load(tmp_path, V3)
    assert config.attention[0].indexer is None
    assert config.cache_elements_per_token == 4 * (32 + 16)
    assert config.is_moe_layer == (False, True, True, True)


def test_queries_without_a_latent_come_from_the_input(tmp_path: Path) -> None:
    config = V3 | {"q_lora_rank": None}
    assert load(tmp_path, config).attention[0].q_lora_rank is None
    shapes = layout_of(config, {}).host_shapes
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (4 * 48, 128)
    assert not [name for name in shapes if "q_a" in name or "q_b" in name]


@pytest.mark.parametrize("config", [V3, GLM], ids=["deepseek_v3", "glm_moe_dsa"])
def test_biases_are_listed_where_there_are_some(config: dict[str, Any]) -> None:
    names = {
        name for name in layout_of(config | {"attention_bias": True}, {}).host_shapes if "layers.1." in name
    }
    biases = {name.removeprefix("model.layers.1.self_attn.") for name in names if name.endswith(".bias")}
    assert biases - {"indexer.k_norm.bias"} == {"q_a_proj.bias", "kv_a_proj_with_mqa.bias", "o_proj.bias"}
    assert not any(name.endswith("proj.bias") for name in layout_of(config, {}).host_shapes)


@pytest.mark.parametrize(
    ("fields", "shared"),
    [
        ({}, ()),
        ({"indexer_types": ["full", "shared", "full", "shared"]}, (1, 3)),
        ({"index_topk_pattern": "FSSF"}, (1, 2)),
        ({"index_topk_pattern": ["full", "full", "shared", "full"]}, (2,)),
        ({"index_topk_freq": 2}, (2,)),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, (1, 2)),
    ],
)
def test_shared_layers_are_the_same_to_the_model_and_its_layout(
    tmp_path: Path, fields: dict[str, Any], shared: tuple[int, ...]
) -> None:
    """The layout reads config.json itself, the model what transformers makes of it."""
    shapes = load(tmp_path, GLM | fields).attention
    assert tuple(n for n, shape in enumerate(shapes) if shape.indexer.is_shared) == shared
    names = layout_of(GLM | fields, {}).host_shapes
    with_keys = tuple(n for n in range(4) if f"model.layers.{n}.self_attn.indexer.wk.weight" in names)
    assert with_keys == tuple(n for n in range(4) if n not in shared)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_types": ["shared", "full", "full", "full"]}, "full for the first layer"),
        ({"indexer_types": ["full", "full"]}, "one entry a layer"),
        ({"indexer_types": ["full", "full", "full", "some"]}, "full or shared for each layer"),
    ],
)
def test_indexer_types_that_make_no_sense_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: indexer_types: got .*, expected {message}"):
        load(tmp_path, GLM | changes)


def test_a_layout_refuses_indexer_types_that_make_no_sense() -> None:
    for kinds in (["full"], "FFXF", [1, 2, 3, 4], {}):
        with pytest.raises(CheckpointError, match=r"config\.json: indexer_types: got .* 4 times"):
            layout_of(GLM | {"indexer_types": kinds}, {})


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (V3, "scoring_func", "softmax"),
        (V3, "topk_method", "greedy"),
        (V3, "moe_layer_freq", 2),
        (BASE_CONFIG, "indexer_rope_interleave", True),
        (GLM, "indexer_rope_interleave", False),
        (GLM, "rope_interleave", False),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], field: str, value: object
) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: {field}: got {value!r}, expected "):
        load(tmp_path, config | {field: value})
