"""From what a user calls a model to a converted folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from random_checkpoint import make_checkpoint

from duckllm.demo import CHECKPOINT
from duckllm.errors import CheckpointError, ConfigError, ModelNotFoundError, UnsupportedModelError
from duckllm.models.registry import open_model, usable_folder
from duckllm.weights.cache_folder import cache_folder, shard_folder
from duckllm.weights.convert import convert
from duckllm.weights.manifest import Manifest
from duckllm.weights.resolve import ModelPlace, find_model, resolve_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DUCKLLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_demo_model_is_converted_once(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = resolve_model(None)
    assert folder.parent == cache
    assert folder.name.startswith("duck-demo-")
    assert Manifest.load(folder).num_experts == 32
    assert (folder / "LICENSE.wordnet").read_text().count("WordNet 3.0 Copyright 2006 by Princeton") == 1
    assert f"Converting duck-demo into {folder}" in capsys.readouterr().err
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert resolve_model(None) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_the_demo_model_has_a_name_for_where_one_must_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_model("demo") == find_model(None) == ModelPlace(CHECKPOINT, "duck-demo", {})
    (tmp_path / "demo").mkdir()
    assert find_model("demo") == ModelPlace(Path("demo"), "demo", {})


def test_what_cannot_be_used_is_refused_before_it_is_converted(tmp_path: Path, cache: Path) -> None:
    make_checkpoint(tmp_path / "src", hidden_act="gelu", vocab_size=40)
    with pytest.raises(UnsupportedModelError, match="hidden_act: got 'gelu', expected 'silu'"):
        open_model(tmp_path / "src")
    assert list(cache.glob("*/*")) == []
    converted = resolve_model(tmp_path / "src")
    assert usable_folder(tmp_path / "src") == converted  # an earlier program's, which loading refuses


def test_a_checkpoint_is_converted_into_the_cache(tmp_path: Path, cache: Path) -> None:
    make_checkpoint(tmp_path / "my-model")
    stages: list[str] = []
    folder = resolve_model(str(tmp_path / "my-model"), lambda stage, done, total: stages.append(stage))
    assert folder.parent == cache
    assert folder.name.startswith("my-model-")
    assert "experts-00002.safetensors" in stages
    assert resolve_model(tmp_path / "my-model") == folder
    make_checkpoint(tmp_path / "my-model", seed=1)
    changed = resolve_model(tmp_path / "my-model")
    assert changed != folder
    assert Manifest.load(changed).model_hash != Manifest.load(folder).model_hash


def test_a_conversion_of_an_older_version_is_left_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that changes the format converts again, beside what the old one made."""
    with monkeypatch.context() as older:
        older.setattr("duckllm.weights.resolve.FORMAT_VERSION", 1)
        old = resolve_model(None)
    new = resolve_model(None)
    assert new != old
    assert {old, new} == set(cache.iterdir())


def test_a_converted_folder_is_used_as_it_is(tmp_path: Path, cache: Path) -> None:
    make_checkpoint(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst")
    assert resolve_model(tmp_path / "dst") == tmp_path / "dst"
    assert not cache.exists()
    (tmp_path / "dst/experts-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"experts-00001\.safetensors: missing"):
        resolve_model(tmp_path / "dst")


@pytest.mark.parametrize("damage", ["missing", "shorter", "emptied"])
def test_a_damaged_conversion_in_the_cache_is_mended(tmp_path: Path, damage: str) -> None:
    make_checkpoint(tmp_path / "src")
    folder = resolve_model(tmp_path / "src")
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    victim = folder / "host-00001.safetensors"
    if damage == "missing":
        victim.unlink()
    elif damage == "shorter":
        victim.write_bytes(victim.read_bytes()[:-8])
    else:
        for path in list(folder.iterdir()):
            path.unlink()
    assert resolve_model(tmp_path / "src") == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="absent: no such folder"):
        resolve_model(tmp_path / "absent")
    for name, hint in (
        ("What is a duck?", r"folder \(a question to a model is asked with --prompt\)"),
        ("GiB", r"folder \(a size is one word: 2GiB\)"),
        (__file__, r"test_resolve_model\.py: is a file, expected a model's folder$"),
    ):
        with pytest.raises(ModelNotFoundError, match=hint):
            resolve_model(name)
    with pytest.raises(ModelNotFoundError, match="empty name"):
        resolve_model("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve_model(tmp_path / "empty")
    (tmp_path / "part").mkdir()
    (tmp_path / "part/.duck-progress.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="unfinished conversion"):
        resolve_model(tmp_path / "part")


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == tmp_path / "cache"
    assert shard_folder() == tmp_path / "cache/shards"
    monkeypatch.delenv("DUCKLLM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg/duckllm/models"
    assert shard_folder() == tmp_path / "xdg/duckllm/shards"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home/.cache/duckllm/models"

    def no_home() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigError) as caught:
        cache_folder()
    assert str(caught.value) == "DUCKLLM_CACHE_DIR: got None, expected a folder, as this user has no home"


def test_processes_that_start_together_share_one_conversion(cache: Path) -> None:
    code = "from duckllm.weights.resolve import resolve_model; print(resolve_model(None))"
    starters = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    outputs = {starter.communicate(timeout=120)[0] for starter in starters}
    assert [starter.returncode for starter in starters] == [0, 0, 0]
    assert len(outputs) == 1
    assert len(list(cache.iterdir())) == 1
    Manifest.load(outputs.pop().strip()).check_files()


def test_a_format_that_rounds_has_a_folder_of_its_own(cache: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "my-model")
    plain = resolve_model(tmp_path / "my-model")
    rounded = resolve_model(tmp_path / "my-model", weight_format="int4")
    assert rounded.name == plain.name + "-int4"
    assert (Manifest.load(plain).format, Manifest.load(rounded).format) == ("fp9", "int4")
    # Formats that the stored one is copied into, or that only checkpoints have, convert as ever.
    for weight_format in ("auto", "fp8", "mxfp4"):
        assert resolve_model(tmp_path / "my-model", weight_format=weight_format) == plain
    # A converted model is what it is: no format makes another of it.
    assert resolve_model(plain, weight_format="int4") == plain


def test_a_chat_in_4_bits_converts_into_them_and_a_converted_model_is_refused(cache: Path) -> None:
    from duckllm import LLM, SamplingParams
    from duckllm.errors import ConfigError

    with LLM(workers=0, weight_format="int4") as llm:
        assert llm.cluster_info().weight_format == "fp8+int4"
        output = llm.generate([[1, 20, 21]], SamplingParams(temperature=0, max_tokens=2))[0]
        assert len(output.outputs[0].token_ids) == 2
    assert [path.name[-5:] for path in cache.iterdir() if path.name.startswith("duck-demo")] == ["-int4"]
    folder = resolve_model(None)
    with pytest.raises(
        ConfigError, match="weight_format: got 'int4', expected fp9 or fp8, as the model is in"
    ):
        LLM(folder, workers=0, weight_format="int4")
    # Its layer of multi-token prediction is in fp8.
    in_4_bits = next(path for path in cache.iterdir() if path.name.endswith("-int4"))
    with pytest.raises(ConfigError, match="weight_format: got 'fp8', expected int4, as the model is in int4"):
        LLM(in_4_bits, workers=0, weight_format="fp8")
