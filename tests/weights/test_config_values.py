"""Values of config.json that nothing can be computed with: refused by name before anything is converted."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from random_checkpoint import make_checkpoint

from duckllm.cli.convert import _check_usable
from duckllm.errors import CheckpointError
from duckllm.models.registry import load_config
from duckllm.weights.config_values import check_end, check_values
from duckllm.weights.convert import convert
from support.checkpoints import BASE_CONFIG

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
KIMI_K2 = {
    **YARN,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
FACTOR = "a number above 0 and below 1000000"
LENGTH = "a whole number from 1 to 1000000000"
THETA = "a number above 1 and below 1e+30"


def yarn(**changes: object) -> dict[str, Any]:
    return {"rope_scaling": YARN | changes}


def llama3(**changes: object) -> dict[str, Any]:
    return {"rope_scaling": LLAMA3 | changes}


def newer(**changes: object) -> dict[str, Any]:
    rope = YARN | {"rope_type": "yarn", "rope_theta": 1e6}
    return {"rope_scaling": None, "rope_theta": None, "rope_parameters": rope | changes}


WRONG = [
    ({"rope_theta": None}, "rope_theta: got None, expected " + THETA),
    ({"rope_theta": math.inf}, "rope_theta: got inf, expected " + THETA),
    ({"rope_theta": math.nan}, "rope_theta: got nan, expected " + THETA),
    ({"rope_theta": 1e40}, "rope_theta: got 1e+40, expected " + THETA),
    ({"rope_theta": 1}, "rope_theta: got 1, expected " + THETA),
    ({"rope_theta": -10000.0}, "rope_theta: got -10000.0, expected " + THETA),
    ({"rope_theta": "10000"}, "rope_theta: got '10000', expected " + THETA),
    ({"rope_theta": True}, "rope_theta: got True, expected " + THETA),
    (newer(rope_theta=None), "rope_parameters rope_theta: got None, expected " + THETA),
    ({"rope_scaling": "yarn"}, "rope_scaling: got 'yarn', expected an object, or null"),
    ({"rope_scaling": [1]}, "rope_scaling: got [1], expected an object, or null"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling factor: got None, expected a number from 1 to"),
    (
        {"rope_scaling": {"type": "linear", "factor": -2.0}},
        "rope_scaling factor: got -2.0, expected a number",
    ),
    (yarn(factor=0), "rope_scaling factor: got 0, expected a number from 1 to below 1000000"),
    (yarn(factor=1e39), "rope_scaling factor: got 1e+39, expected a number from 1 to below 1000000"),
    (newer(factor=math.nan), "rope_parameters factor: got nan, expected a number from 1 to below 1000000"),
    (yarn(beta_fast=1, beta_slow=32), "rope_scaling beta_fast: got 1, expected at least beta_slow, 32"),
    (yarn(beta_slow=33), "rope_scaling beta_fast: got 32, expected at least beta_slow, 33"),
    (yarn(beta_fast=0), "rope_scaling beta_fast: got 0, expected " + FACTOR),
    (yarn(beta_slow=-3), "rope_scaling beta_slow: got -3, expected " + FACTOR),
    (yarn(beta_fast="a"), "rope_scaling beta_fast: got 'a', expected " + FACTOR),
    (
        yarn(original_max_position_embeddings=0),
        f"rope_scaling original_max_position_embeddings: got 0, expected {LENGTH}",
    ),
    (
        yarn(original_max_position_embeddings=None),
        f"rope_scaling original_max_position_embeddings: got None, expected {LENGTH}",
    ),
    (
        yarn(original_max_position_embeddings=1.5),
        f"rope_scaling original_max_position_embeddings: got 1.5, expected {LENGTH}",
    ),
    (
        yarn() | {"original_max_position_embeddings": 0},
        f"original_max_position_embeddings: got 0, expected {LENGTH}",
    ),
    (yarn(mscale=-1), "rope_scaling mscale: got -1, expected a number from 0 to below 1000000"),
    (yarn(mscale_all_dim=1e39), "rope_scaling mscale_all_dim: got 1e+39, expected a number from 0"),
    (yarn(attention_factor=0), "rope_scaling attention_factor: got 0, expected " + FACTOR),
    (yarn(truncate="no"), "rope_scaling truncate: got 'no', expected true or false"),
    (llama3(low_freq_factor=0), "rope_scaling low_freq_factor: got 0, expected " + FACTOR),
    (llama3(high_freq_factor=None), "rope_scaling high_freq_factor: got None, expected " + FACTOR),
    (
        llama3(low_freq_factor=4.0),
        "rope_scaling high_freq_factor: got 4.0, expected more than low_freq_factor, 4.0",
    ),
    (
        llama3(original_max_position_embeddings=-1),
        f"rope_scaling original_max_position_embeddings: got -1, expected {LENGTH}",
    ),
    ({"rms_norm_eps": -1}, "rms_norm_eps: got -1, expected " + FACTOR),
    ({"rms_norm_eps": None}, "rms_norm_eps: got None, expected " + FACTOR),
    ({"rms_norm_eps": "x"}, "rms_norm_eps: got 'x', expected " + FACTOR),
    ({"routed_scaling_factor": 0}, "routed_scaling_factor: got 0, expected " + FACTOR),
    (
        {"eos_token_id": 320},
        "eos_token_id: got 320, expected an id, or a list of ids, from 0 to 319, as vocab_size is",
    ),
    (
        {"eos_token_id": [1, 999]},
        "eos_token_id: got [1, 999], expected an id, or a list of ids, from 0 to 319",
    ),
    ({"eos_token_id": -1}, "eos_token_id: got -1, expected an id"),
    ({"eos_token_id": "</s>"}, "eos_token_id: got '</s>', expected an id"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG)
def test_a_value_that_nothing_can_be_computed_with_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    """By the check, and by everything that reads a model's configuration."""
    config = BASE_CONFIG | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    for call in (lambda: check_values(config), lambda: load_config(tmp_path)):
        with pytest.raises(CheckpointError, match=re.escape(f"config.json: {words}")) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        yarn(),
        llama3(),
        newer(),
        {"rope_scaling": KIMI_K2},
        {"rope_scaling": None, "rope_theta": 10000},
        {"rope_scaling": {"type": "linear", "factor": 1}},
        yarn(beta_fast=None, beta_slow=None, mscale_all_dim=0.0, truncate=False),
        {"eos_token_id": None},
        {"eos_token_id": [0, 319]},
        {"eos_token_id": []},
    ],
)
def test_values_of_models_are_taken(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE_CONFIG | changes))
    assert load_config(tmp_path).vocab_size == 320


def test_fields_that_are_absent_are_not_checked() -> None:
    check_values({})
    check_values({"eos_token_id": 10**6})  # of what has no vocabulary, another check speaks
    with pytest.raises(
        CheckpointError, match="eos_token_id: got -1, expected an id, or a list of ids, from 0 b"
    ):
        check_end({"eos_token_id": -1}, "config.json", None)


@pytest.mark.parametrize(
    ("changes", "words"), [WRONG[0], WRONG[13], ({"eos_token_id": 40}, "eos_token_id: got 40")]
)
def test_nothing_is_converted_of_it(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    """Where no host's half of the package is installed either: nothing is given as a check."""
    made = make_checkpoint(tmp_path / "src")
    (tmp_path / "src/config.json").write_text(json.dumps(made.config | changes))
    with pytest.raises(CheckpointError, match=re.escape(f"config.json: {words}")):
        convert(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("value", [320, [1, 320], -1])
def test_the_end_of_replies_is_looked_for_in_its_other_file_too(tmp_path: Path, value: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE_CONFIG))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    words = (
        f"generation_config.json: eos_token_id: got {value}, expected an id, or a list of ids, from 0 to 319"
    )
    with pytest.raises(CheckpointError, match=f"^{re.escape(words)}"):
        _check_usable(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("tie_word_embeddings", "x", "got 'x', expected bool"),
        ("max_position_embeddings", None, "got None, expected int"),
        ("pad_token_id", "x", "got 'x', expected int or null"),
    ],
)
def test_a_value_of_another_type_names_field_got_and_expected(
    tmp_path: Path, field: str, value: object, expected: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE_CONFIG | {field: value}))
    with pytest.raises(CheckpointError) as caught:
        load_config(tmp_path)
    assert str(caught.value) == f"{tmp_path}/config.json: {field}: {expected}"
