"""A converted model whose files do not belong together is refused before it computes anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from duckllm import LLM
from duckllm.errors import CheckpointError, WeightHashError
from duckllm.weights.convert import convert
from duckllm.weights.manifest import content_hash


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path) -> Path:
    folder = tmp_path_factory.mktemp("wrong") / "whole"
    convert(demo_checkpoint, folder)
    return folder


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def edit(model: Path, change: Callable[[dict], object]) -> None:
    value = json.loads((model / "duck.json").read_text())
    change(value)
    value["model_hash"] = content_hash(value)
    (model / "duck.json").write_text(json.dumps(value))


def test_a_changed_config(model: Path) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.5}))
    with pytest.raises(WeightHashError, match=r"config\.json: got SHA-256 "):
        LLM(model, workers=0)


def test_a_changed_byte_of_an_expert(model: Path) -> None:
    path = sorted(model.glob("experts-*.safetensors"))[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightHashError, match=rf"{path.name}: layer \d+, stripe \d+: got SHA-256 "):
        LLM(model, workers=0)


def test_a_layer_without_its_experts(model: Path) -> None:
    layers = json.loads((model / "duck.json").read_text())["expert_layers"]
    lost = sorted(layers, key=int)[0]
    edit(model, lambda value: value["expert_layers"].pop(lost))
    with pytest.raises(CheckpointError, match=rf"expert_layers: got no layer {lost}, expected it"):
        LLM(model, workers=0)


def test_a_size_that_config_json_contradicts(model: Path) -> None:
    edit(model, lambda value: value.update(num_experts_per_tok=1))
    with pytest.raises(CheckpointError, match=r"num_experts_per_tok: got 1, expected \d+ as in config\.json"):
        LLM(model, workers=0)


def test_a_tokenizer_with_more_tokens_than_the_model(model: Path) -> None:
    path = model / "tokenizer.json"
    value = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    value["added_tokens"].append({"id": 8192, "content": "<one too many>"} | flags)
    path.write_text(json.dumps(value))
    message = r"tokenizer: got token id 8192 in .*, expected ids below vocab_size, 8192, of its config\.json"
    with pytest.raises(CheckpointError, match=message):
        LLM(model, workers=0)


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"do_sample": True, "top_k": "many"}, "top_k: got 'many', expected an integer from 0"),
        ({"do_sample": True, "temperature": -1}, "temperature: got -1, expected a number from 0"),
        ([], "got a JSON list, expected an object"),
    ],
)
def test_defaults_of_the_model_that_cannot_be(model: Path, defaults: object, message: str) -> None:
    (model / "generation_config.json").write_text(json.dumps(defaults))
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {message}"):
        LLM(model, workers=0)
