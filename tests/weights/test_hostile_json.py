"""JSON nested too deeply, and names that the file system refuses: one sentence that names the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from random_checkpoint import make_checkpoint

from duckllm.errors import CheckpointError, ConfigError, ModelNotFoundError
from duckllm.weights.checkpoint import Checkpoint, load_json
from duckllm.weights.convert import convert
from duckllm.weights.manifest import Manifest
from duckllm.weights.progress_file import ProgressFile
from duckllm.weights.resolve import resolve_model
from duckllm.weights.safetensors_file import read_header

DEEP = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"


def test_deep_json(tmp_path: Path) -> None:
    for name in ("config.json", "duck.json", ".duck-progress.json"):
        (tmp_path / name).write_bytes(DEEP)
    with pytest.raises(CheckpointError, match=r"config\.json: no usable JSON \(nested too deeply\)"):
        load_json(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"duck\.json: .*nested too deeply"):
        Manifest.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"\.duck-progress\.json: .*nested too deeply"):
        ProgressFile.load(tmp_path)


def test_a_deep_safetensors_header(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(len(DEEP).to_bytes(8, "little") + DEEP)
    with pytest.raises(CheckpointError, match=r"x\.safetensors: the safetensors header: .*nested too deeply"):
        read_header(tmp_path / "x.safetensors")


def test_names_that_are_too_long(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    long = tmp_path / ("x" * 300)
    for call in (resolve_model, Manifest.load, Checkpoint.open):
        with pytest.raises(ModelNotFoundError, match=r"xxx: (cannot be read \(File name too long\)|no such)"):
            call(long)
    with pytest.raises(ConfigError, match=r"dst: .*File name too long"):
        convert(tmp_path / "src", long)


def test_a_destination_that_links_to_itself(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ConfigError, match=r"dst: got '.*loop', expected a folder that can be written \("):
        convert(tmp_path / "src", tmp_path / "loop")


def test_a_pipe_is_no_file_of_a_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read \(not a regular file\)"):
        Checkpoint.open(tmp_path)


def test_a_home_of_nobody() -> None:
    with pytest.raises(ModelNotFoundError, match="~nobody-of-this-name/model: no such folder"):
        resolve_model("~nobody-of-this-name/model")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: got 1000000000, expected at most 10000"),
        ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers: got 1000000000"),
        ({"n_routed_experts": 10**9}, "n_routed_experts: got 1000000000, expected at most 100000"),
        ({"vocab_size": 10**200}, "vocab_size: got a number of over 100 digits"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok: got 5, expected at most 4"),
        ({"n_group": 3}, "n_group: got 3, expected a divisor of n_routed_experts, 4"),
        ({"n_group": 2, "topk_group": 3}, "topk_group: got 3, expected at most n_group, 2"),
        ({"n_group": 4, "topk_group": 1}, "num_experts_per_tok: got 2, expected at most 1"),
    ],
)
def test_numbers_that_no_model_has(tmp_path: Path, changes: dict, words: str) -> None:
    made = make_checkpoint(tmp_path / "src")
    (made.folder / "config.json").write_text(json.dumps(made.config | changes))
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "src", tmp_path / "dst")
    assert str(caught.value).startswith(f"config.json: {words}")
