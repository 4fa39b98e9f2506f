from __future__ import annotations

import contextlib
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import transformers

from duckllm.errors import CheckpointError, UnsupportedModelError
from duckllm.models import deepseek_v32
from duckllm.models.registry import load_config
from support.checkpoints import BASE_CONFIG


def load(folder: Path, **overrides: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(BASE_CONFIG | overrides))
    return load_config(folder)


def test_reads_what_the_file_says(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.is_moe_layer == (False, True, True, True)
    assert config.attention[0].scaling == pytest.approx(48**-0.5)
    assert config.attention[0].indexer.topk == 256
    assert config.rotary.attention_scaling == 1.0
    assert config.cache_elements_per_token == 4 * (32 + 16 + 32)


def test_yarn_scales_the_products_and_the_rotations(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0}
    config = load(tmp_path, rope_scaling=yarn | {"original_max_position_embeddings": 128})
    assert config.attention[0].scaling == pytest.approx(48**-0.5 * (0.1 * 1.3862944 + 1) ** 2)
    assert config.rotary.attention_scaling == pytest.approx((0.07 * 1.3862944 + 1) / (0.1 * 1.3862944 + 1))
    assert config.rotary.inv_freq[0] == 1.0
    assert config.rotary.inv_freq[-1] < 10000.0 ** (-14 / 16)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("moe_layer_freq", 2),
        ("mlp_bias", True),
        ("num_key_value_heads", 2),
    ],
)
def test_a_feature_that_is_not_implemented_is_refused_by_name(
    tmp_path: Path, field: str, value: object
) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: {field}: got {value!r}, expected "):
        load(tmp_path, **{field: value})


@pytest.mark.parametrize("name", ["indexed_attention", "deepseek_sparse_attention"])
def test_sparse_layers_are_known_by_the_name_of_every_transformers(name: str) -> None:
    parsed = transformers.DeepseekV32Config(**BASE_CONFIG)
    parsed.layer_types = [name] * parsed.num_hidden_layers
    assert deepseek_v32.parse(parsed).attention[0].indexer.topk == 256
    parsed.layer_types[1] = "full_attention"
    with pytest.raises(
        UnsupportedModelError, match=r"layer_types: got \['full_attention'\], expected indexed"
    ):
        deepseek_v32.parse(parsed)


def test_an_unknown_rope_type_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError,
        match="rope_scaling type: got 'dynamic', expected one of default, linear, llama3, yarn",
    ):
        load(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0})


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("n_group", 3, "a divisor of n_routed_experts, 16"),
        ("n_group", 16, "at most half of n_routed_experts, 16"),
        ("topk_group", 2, "at most n_group, 1"),
        ("num_experts_per_tok", 17, "at most 16"),
        ("index_head_dim", 8, "at least qk_rope_head_dim"),
        ("hidden_size", 0, "an integer of at least 1"),
        ("index_topk", 0, "an integer of at least 1"),
    ],
)
def test_a_contradiction_is_an_error_with_field_got_and_expected(
    tmp_path: Path, field: str, value: int, expected: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, **{field: value})
    assert str(caught.value) == f"config.json: {field}: got {value}, expected {expected}"


@pytest.mark.parametrize(("field", "value"), [("q_lora_rank", None), ("hidden_size", "many")])
def test_a_value_of_the_wrong_kind_is_one_sentence(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=field) as caught:
        load(tmp_path, **{field: value})
    assert "\n" not in str(caught.value)


def test_an_odd_rotary_dimension_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="even"):
        load(tmp_path, qk_rope_head_dim=15)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"architectures: got \['Other'\], expected one of DeepseekV32ForCausalLM"
    ):
        load(tmp_path, architectures=["Other"])


def test_a_missing_or_broken_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "most"),
    [
        ("num_hidden_layers", 10**9, 10_000),
        ("n_routed_experts", 10**9, 100_000),
        ("vocab_size", 10**12, 10**8),
    ],
)
def test_a_number_that_no_model_has_is_refused_at_once(
    tmp_path: Path, field: str, value: int, most: int
) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, **{field: value})
    assert str(caught.value) == f"config.json: {field}: got {value}, expected at most {most}"


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_scaling": {"type": "yarn", "factor": "four", "original_max_position_embeddings": 128}},
        {"rope_scaling": {"type": "yarn", "factor": 0, "original_max_position_embeddings": 128}},
        {"rope_scaling": {"type": "yarn", "factor": -1, "original_max_position_embeddings": 128}},
        {"rope_scaling": {"type": "yarn", "factor": 1e999, "original_max_position_embeddings": 128}},
        {"rope_scaling": {"type": "yarn"}},
        {"rope_scaling": "yarn"},
        {"rope_scaling": [1]},
        {"rope_theta": 0},
        {"rope_theta": "large"},
        {"layer_types": 7},
        {"layer_types": [[]]},
        {"mlp_layer_types": 7},
        {"n_shared_experts": "one"},
        {"quantization_config": 5, "dtype": 5},
    ],
)
def test_whatever_the_parser_trips_over_is_one_sentence(tmp_path: Path, overrides: dict) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=r"config\.json: ") as caught:
        load(tmp_path, **overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "is_usable"),
    [
        ({"model_type": "goose"}, True),
        ({"bos_token_id": -1}, True),
        ({"rope_scaling": {"type": "default", "goose": 1}}, True),
        ({"vocab_size": -1}, False),
        ({"rope_scaling": {"type": "yarn", "factor": -1, "original_max_position_embeddings": 128}}, False),
    ],
)
def test_transformers_says_nothing_of_odd_values(
    tmp_path: Path, overrides: dict[str, Any], is_usable: bool
) -> None:
    """What is wrong is said once, by the error; the verbosity is the user's own again afterwards."""
    said: list[logging.LogRecord] = []
    heard = logging.Handler()
    heard.emit = said.append  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(heard)
    before = logger.level
    try:
        with contextlib.nullcontext() if is_usable else pytest.raises(CheckpointError):
            load(tmp_path, **overrides)
    finally:
        logger.removeHandler(heard)
    assert not said
    assert logger.level == before != logging.CRITICAL


def test_a_long_value_is_shown_in_part(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: tie_word_embeddings: got 'goose") as caught:
        load(tmp_path, tie_word_embeddings="goose" * 1000)
    shown = str(caught.value).partition("got ")[2]
    assert shown.endswith("..., expected bool")
    assert len(shown) == 300 + len(", expected bool")


def test_a_deeply_nested_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match=r"config\.json: no usable JSON \(nested too deeply\)"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("rms_norm_eps", math.nan), ("rms_norm_eps", -1e-6), ("routed_scaling_factor", math.inf)],
)
def test_a_factor_that_gives_no_finite_numbers_is_refused(tmp_path: Path, field: str, value: float) -> None:
    with pytest.raises(
        CheckpointError, match=rf"config\.json: {field}: got {value!r}, expected a number above 0 and"
    ):
        load(tmp_path, **{field: value})


def test_numbers_that_would_cost_memory_are_refused_at_once(tmp_path: Path) -> None:
    for field in ("num_labels", "max_position_embeddings"):
        with pytest.raises(CheckpointError, match=rf"config\.json: {field}: got 10{{12}}, expected at most"):
            load(tmp_path, **{field: 10**12})
