"""What a model is said to weigh, against its files, its converted form and its own KV cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from duckllm.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from duckllm.models.inspection import MTP, Inspection, inspect_model
from duckllm.weights.manifest import Manifest
from support.checkpoints import BASE_CONFIG
from support.families import deepseek_v32, write_model
from support.models import build_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def converted(demo_folder: Path) -> Inspection:
    return inspect_model(demo_folder)


@pytest.fixture(scope="module")
def checkpoint(demo_checkpoint: Path) -> Inspection:
    return inspect_model(demo_checkpoint)


def test_a_checkpoint_and_its_conversion_are_the_same_model(
    converted: Inspection, checkpoint: Inspection
) -> None:
    assert (converted.kind, checkpoint.kind) == ("converted", "checkpoint")
    assert converted.parts == checkpoint.parts
    assert converted.layout == checkpoint.layout
    assert converted.dtype == checkpoint.dtype == "F8_E4M3"
    assert (converted.weight_format, checkpoint.weight_format) == ("fp9", None)


def test_the_demo_model_is_what_its_page_says(converted: Inspection) -> None:
    assert (converted.num_hidden_layers, converted.num_mtp_layers, converted.num_moe_layers) == (6, 1, 5)
    assert converted.num_stripes == 8
    assert converted.expert_weights == 3 * 128 * converted.layout.hidden_size
    total = converted.num_weights + next(part.num_weights for part in converted.parts if part.name == MTP)
    total += converted.layout.num_experts * converted.expert_weights  # the experts of the MTP layer
    assert 25.5e6 < total < 26.5e6
    chosen = converted.layout.num_experts_per_tok / converted.layout.num_experts
    experts = converted.num_moe_layers * converted.layout.num_experts * converted.expert_weights
    embedding = next(part.num_weights for part in converted.parts if part.name == "embedding")
    assert converted.active_weights == converted.num_weights - embedding - experts * (1 - chosen)


def test_bytes_are_those_of_the_files(converted: Inspection, demo_folder: Path) -> None:
    manifest = Manifest.load(demo_folder)
    headers = 64 << 10
    stored = sum(part.stored_bytes for part in converted.parts)
    files = sum(entry.bytes for entry in manifest.host_files.values())
    assert files - headers < stored < files
    experts = sum(entry.bytes for layer, entry in manifest.expert_layers.items() if layer < 6)
    assert experts - 5 * 2 * 4096 < converted.expert_bytes("fp9") < experts
    # 5 layers, 32 experts, 8 stripes; 256 wide: scales of 64 bytes and 24 records of 576 or 512 bytes.
    assert converted.expert_bytes("fp9") == 5 * 32 * 8 * (64 + 24 * 576)
    assert converted.expert_bytes("fp8") == 5 * 32 * 8 * (64 + 24 * 512)
    assert converted.expert_read_bytes("fp8") == 5 * 4 * 8 * (64 + 24 * 512)


def test_the_cache_is_as_large_as_the_models(converted: Inspection, demo_folder: Path) -> None:
    cache = build_model(demo_folder).new_kv_cache(10)
    assert 10 * converted.cache_elements_per_token == sum(t.numel() for layer in cache for t in layer)


def test_memory_of_each_part_by_hand(tmp_path: Path) -> None:
    write_model(tmp_path, deepseek_v32("small", num_hidden_layers=2, first_k_dense_replace=1), seed=1)
    parts = {part.name: part for part in inspect_model(tmp_path).parts}
    hidden, vocabulary, heads = 128, 320, 4
    assert parts["embedding"].num_weights == hidden * vocabulary
    assert parts["embedding"].loaded_bytes == 2 * hidden * vocabulary
    assert (parts["embedding"].read_bytes, parts["head"].read_bytes) == (0, 2 * hidden * vocabulary)
    # Matrices keep FP8 and a scale a block, the router BF16 beside biases in f32.
    dense = 3 * hidden * 192
    assert parts["dense MLP"].num_weights == dense
    assert parts["dense MLP"].loaded_bytes == parts["dense MLP"].stored_bytes == dense + 3 * 2 * 4
    assert parts["router"].loaded_bytes == 2 * 16 * hidden + 4 * 16
    # The up-projection of keys and values is widened to f32, four bytes where one is stored.
    kv_b = heads * (32 + 24) * 32
    assert parts["attention"].loaded_bytes - parts["attention"].stored_bytes > 2 * 2 * kv_b


def test_a_configuration_alone_tells_as_much_as_its_checkpoint(tmp_path: Path) -> None:
    write_model(tmp_path / "whole", deepseek_v32("whole"), seed=1)
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    whole, alone = inspect_model(tmp_path / "whole"), inspect_model(tmp_path / "alone")
    assert alone.kind == "configuration"
    assert (alone.layout, alone.dtype) == (whole.layout, whole.dtype)
    assert alone.num_weights == whole.num_weights
    for guessed, real in zip(alone.parts, whole.parts, strict=True):
        assert (guessed.name, guessed.num_weights) == (real.name, real.num_weights)
        # Norms of the indexer and correction biases are f32 in this checkpoint.
        assert guessed.stored_bytes == pytest.approx(real.stored_bytes, rel=0.02)


def test_layers_of_multi_token_prediction_are_assumed_where_config_names_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE_CONFIG, "num_nextn_predict_layers": 1}))
    model = inspect_model(tmp_path)
    assert model.num_mtp_layers == 1
    assert model.num_moe_layers == 3
    assert next(part for part in model.parts if part.name == MTP).loaded_bytes == 0


def test_what_cannot_be_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        inspect_model(tmp_path / "none")
    with pytest.raises(ModelNotFoundError, match=r"got no config\.json, expected a model folder"):
        inspect_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**BASE_CONFIG, "scoring_func": "softmax"}))
    with pytest.raises(UnsupportedModelError, match=r"scoring_func: got 'softmax', expected 'sigmoid'"):
        inspect_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**BASE_CONFIG, "num_nextn_predict_layers": "one"}))
    with pytest.raises(CheckpointError, match=r"num_nextn_predict_layers: got 'one'"):
        inspect_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**BASE_CONFIG, "num_nextn_predict_layers": 10**9}))
    with pytest.raises(CheckpointError, match=r"num_nextn_predict_layers: got 1000000000, expected at most"):
        inspect_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "billions", "active_billions"),
    [
        ("DeepSeek-V3.1", 671, 37),
        ("Kimi-K2-Instruct", 1000, 32),
        ("Qwen3-30B-A3B", 30.5, 3.3),
        ("Qwen3-235B-A22B", 235, 22),
        ("GLM-4.5-Air", 106, 12),
        ("GLM-4.6", 355, 32),
        ("GLM-5", 744, 40),
    ],
)
def test_real_models_weigh_what_their_makers_say(name: str, billions: float, active_billions: float) -> None:
    """Makers round, and count the embedding among the active weights or not."""
    model = inspect_model(ROOT / "examples" / "configs" / name)
    embedding = next(part.num_weights for part in model.parts if part.name == "embedding")
    assert model.num_weights == pytest.approx(billions * 1e9, rel=0.03)
    assert model.active_weights < 1.07 * active_billions * 1e9 < 1.1 * (model.active_weights + embedding)
