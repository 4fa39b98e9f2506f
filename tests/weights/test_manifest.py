"""duck.json: what is checked when it is read."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from random_checkpoint import make_checkpoint

from duckllm.errors import CheckpointError, DuckError, ModelNotFoundError, WeightFormatError, WeightHashError
from duckllm.weights.convert import convert
from duckllm.weights.e4m3 import QuantisationError
from duckllm.weights.manifest import Manifest, content_hash, rounding_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manifest")
    make_checkpoint(folder / "src")
    convert(folder / "src", folder / "dst")
    return folder / "dst"


def changed(model: Path, folder: Path, change: Callable[[dict], object], rehash: bool = True) -> Path:
    value = json.loads((model / "duck.json").read_text())
    change(value)
    if rehash:
        value["model_hash"] = content_hash(value)
    (folder / "duck.json").write_text(json.dumps(value))
    return folder


def test_fields(model: Path) -> None:
    manifest = Manifest.load(str(model))
    assert manifest.folder == model
    assert (manifest.hidden_size, manifest.moe_intermediate_size) == (72, 40)
    assert (manifest.num_experts, manifest.num_experts_per_tok) == (4, 2)
    assert (manifest.num_stripes, manifest.unit_bytes) == (3, 64 + 9 * 576)
    assert (manifest.scale_layout, manifest.block_size) == ("block", [128, 128])
    assert "scale_layout" not in manifest.to_json()
    assert (manifest.format, manifest.format_version) == ("fp9", 2)
    assert manifest.architecture == "DeepseekV32ForCausalLM"
    assert manifest.model_type == "deepseek_v32"
    assert manifest.created_by.startswith("duckllm ")
    assert len(manifest.expert_layers[2].stripe_sha256) == 3
    assert manifest.expert_path(2) == model / "experts-00002.safetensors"
    with pytest.raises(CheckpointError, match="layer 0 has no experts, expected one of 1, 2, 3"):
        manifest.expert_path(0)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (
            lambda v: v.update(format_version=1),
            WeightFormatError,
            "format_version: got 1, expected 2; convert the checkpoint again",
        ),
        (lambda v: v.update(format="fp7"), WeightFormatError, "format: got 'fp7', expected one of fp9, fp8"),
        (lambda v: v.pop("hidden_size"), CheckpointError, "hidden_size"),
        (lambda v: v.update(extra=1), CheckpointError, "extra"),
        (lambda v: v.update(host_files=[]), CheckpointError, "malformed"),
        (lambda v: v.update(expert_layers={"x": {}}), CheckpointError, "malformed"),
        (lambda v: v.update(num_experts="4"), CheckpointError, "num_experts: got '4'"),
        (lambda v: v.update(num_experts=True), CheckpointError, "num_experts: got True"),
        (lambda v: v.update(num_stripes=4), CheckpointError, "num_stripes: got 4, expected 3"),
        (lambda v: v.update(unit_bytes=64), CheckpointError, "unit_bytes: got 64, expected 5248"),
        (lambda v: v.update(block_size=[64, 64]), CheckpointError, "block_size: got [64, 64], expected [128"),
        (lambda v: v.pop("block_size"), CheckpointError, "block_size"),
        (lambda v: v.update(num_experts_per_tok=5), CheckpointError, "num_experts_per_tok: got 5"),
        (lambda v: v["expert_layers"]["1"].update(file="../x"), CheckpointError, "got '../x'"),
        (lambda v: v["host_files"].update({"/etc/x": {"sha256": "", "bytes": 1}}), CheckpointError, "/etc/x"),
        (
            lambda v: v["expert_layers"]["1"]["stripe_sha256"].pop(),
            CheckpointError,
            "expert_layers.1.stripe_sha256: got 2 hashes, expected 3",
        ),
        (lambda v: v.update(format_version=True), WeightFormatError, "format_version: got True, expected 2"),
        (lambda v: v.update(format_version=1.0), WeightFormatError, "format_version: got 1.0, expected 2"),
        (lambda v: v.update(format=["fp9"]), WeightFormatError, "format: got ['fp9'], expected one of fp9"),
        (lambda v: v.update(format="fp8"), CheckpointError, "unit_bytes: got 5248, expected 4672"),
        (lambda v: v.update(block_size="128"), CheckpointError, "block_size: got '128', expected [128, 128]"),
        (
            lambda v: v.update(scale_layout="block"),
            WeightFormatError,
            "scale_layout: got 'block', expected 'channel', or no such key",
        ),
        (lambda v: v.update(scale_layout=None), WeightFormatError, "scale_layout: got None"),
        (
            lambda v: v.update(scale_layout="channel"),
            CheckpointError,
            "unit_bytes: got 5248, expected 5696; block_size: got [128, 128], expected null",
        ),
        (lambda v: v.update(config_sha256="A" * 64), CheckpointError, "config_sha256: got 'AAA"),
        (lambda v: v["expert_layers"]["1"].update(file=".."), CheckpointError, "files: got '..'"),
        (lambda v: v["expert_layers"]["1"].update(file=""), CheckpointError, "files: got ''"),
        (lambda v: v["expert_layers"]["1"].update(file="a\0"), CheckpointError, "files: got 'a\\x00'"),
        (lambda v: v["expert_layers"]["1"].update(file=["x"]), CheckpointError, "files: got ['x']"),
        (
            lambda v: v["expert_layers"]["1"].update(file="experts-00002.safetensors"),
            CheckpointError,
            "files: got one of them twice, expected each once",
        ),
        (
            lambda v: v["expert_layers"]["1"].update(bytes=-1),
            CheckpointError,
            "'experts-00001.safetensors': bytes: got -1, expected a whole number from 0",
        ),
        (
            lambda v: v["expert_layers"]["1"].update(stripe_sha256="abc"),
            CheckpointError,
            "'experts-00001.safetensors': got 'b', expected a SHA-256 in hex",
        ),
        (
            lambda v: v["host_files"]["host-00001.safetensors"].update(sha256=7),
            CheckpointError,
            "'host-00001.safetensors': got 7, expected a SHA-256 in hex",
        ),
        (
            lambda v: v["expert_layers"].update({"01": v["expert_layers"].pop("1")}),
            CheckpointError,
            "expert_layers: got '01', expected the number of a layer",
        ),
        (
            lambda v: v["expert_layers"].update({"\N{SUPERSCRIPT TWO}": v["expert_layers"].pop("2")}),
            CheckpointError,
            "expert_layers: got '\N{SUPERSCRIPT TWO}', expected the number of a layer",
        ),
    ],
)
def test_wrong_manifests(
    model: Path, tmp_path: Path, change: Callable[[dict], object], kind: type[DuckError], words: str
) -> None:
    with pytest.raises(kind) as caught:
        Manifest.load(changed(model, tmp_path, change))
    assert type(caught.value) is kind
    assert words in str(caught.value)
    assert "duck.json" in str(caught.value)


def test_a_model_with_a_scale_for_each_channel(model: Path, tmp_path: Path) -> None:
    def change(value: dict) -> None:
        value.update(scale_layout="channel", unit_bytes=4 * (32 + 96) + 9 * 576, block_size=None)

    manifest = Manifest.load(changed(model, tmp_path, change))
    assert (manifest.scale_layout, manifest.block_size) == ("channel", None)
    assert manifest.to_json() == json.loads((tmp_path / "duck.json").read_text())
    assert manifest.model_hash != Manifest.load(model).model_hash


def test_content_and_hash_must_agree(model: Path, tmp_path: Path) -> None:
    def change(value: dict) -> None:
        value["expert_layers"]["1"]["stripe_sha256"][0] = "0" * 64

    with pytest.raises(WeightHashError, match=r"model_hash: got [0-9a-f]{64}, expected [0-9a-f]{64}"):
        Manifest.load(changed(model, tmp_path, change, rehash=False))
    assert Manifest.load(changed(model, tmp_path, change)).model_hash != Manifest.load(model).model_hash


def test_the_hash_does_not_depend_on_who_wrote_it_and_from_where(model: Path, tmp_path: Path) -> None:
    def change(value: dict) -> None:
        value["created_by"], value["source"] = "another program", {}

    assert Manifest.load(changed(model, tmp_path, change)).model_hash == Manifest.load(model).model_hash


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_no_json_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "duck.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"duck\.json"):
        Manifest.load(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="absent: no such folder"):
        Manifest.load(tmp_path / "absent")
    with pytest.raises(ModelNotFoundError, match=r"got no duck\.json"):
        Manifest.load(tmp_path)


def test_missing_and_shortened_files_are_all_named(model: Path, tmp_path: Path) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    manifest = Manifest.load(tmp_path)
    manifest.check_files()
    (tmp_path / "experts-00001.safetensors").unlink()
    (tmp_path / "config.json").unlink()
    file = tmp_path / "host-00002.safetensors"
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(CheckpointError) as caught:
        manifest.check_files()
    length = manifest.host_files["host-00002.safetensors"].bytes
    for words in (
        "experts-00001.safetensors: missing",
        "config.json: missing",
        f"host-00002.safetensors: got {length + 1} bytes, expected {length}",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize("field", ["model_hash", "source", "config_sha256", "architecture"])
@pytest.mark.parametrize("value", [None, 7, []])
def test_a_field_of_the_wrong_kind_is_named(model: Path, tmp_path: Path, field: str, value: object) -> None:
    folder = changed(model, tmp_path, lambda manifest: manifest.update({field: value}), rehash=False)
    with pytest.raises(
        CheckpointError, match=rf"duck\.json: {field}: got {re.escape(repr(value))}, expected"
    ):
        Manifest.load(folder)


def rounded(**changes: object) -> dict:
    sums = {"squared_error": 1.0, "squared_source": 4, "max_relative": 0.05, "flushed": 1, "weights": 9}
    total = {"rms_relative": 0.5, "max_relative": 0.05, "flushed": 1, "weights": 9, "files": {"a": sums}}
    return total | changes


def test_how_far_weights_were_rounded(model: Path, tmp_path: Path) -> None:
    for total, expected in (
        (None, {}),
        (rounded(), {"a": QuantisationError(1.0, 4, 0.05, 1, 9)}),
        (rounded(files={}), {}),
    ):
        folder = changed(model, tmp_path, lambda v, total=total: v["source"].update(quantisation_error=total))
        assert rounding_of(Manifest.load(folder).source) == expected


SUMS = rounded()["files"]["a"]
ROUNDED = "source.quantisation_error"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"fingerprint": 3}, "source.fingerprint: got 3, expected a string"),
        ({"dtype": None}, "source.dtype: got None, expected a string"),
        ({"quantisation_error": []}, f"{ROUNDED}: got [], expected null, or an object with files"),
        ({"quantisation_error": {}}, f"{ROUNDED}: got {{}}, expected null, or an object with files"),
        ({"quantisation_error": rounded(files=[])}, "expected null, or an object with files"),
        ({"quantisation_error": rounded(flushed="1")}, f"{ROUNDED}.flushed: got '1', expected a number"),
        ({"quantisation_error": rounded(files={"a": 1})}, f"{ROUNDED}.files.a: expected an object with ['fl"),
        (
            {"quantisation_error": rounded(files={"a": {}})},
            f"{ROUNDED}.files.a: expected an object with ['fl",
        ),
        (
            {"quantisation_error": rounded(files={"a": SUMS | {"weights": 9.0}})},
            f"{ROUNDED}.files.a: weights: expected a whole number",
        ),
        (
            {"quantisation_error": rounded(files={"a": SUMS | {"max_relative": True}})},
            f"{ROUNDED}.files.a: max_relative: expected a number",
        ),
    ],
)
def test_a_wrong_source_is_named(model: Path, tmp_path: Path, source: dict, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Manifest.load(changed(model, tmp_path, lambda value: value["source"].update(source)))
    assert words in str(caught.value)
    assert "duck.json" in str(caught.value)


def test_a_manifest_without_its_hash_is_refused(model: Path, tmp_path: Path) -> None:
    folder = changed(model, tmp_path, lambda manifest: manifest.pop("model_hash"), rehash=False)
    with pytest.raises(CheckpointError, match=r"model_hash: got None, expected a SHA-256"):
        Manifest.load(folder)


def test_another_config_is_noticed(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    manifest = Manifest.load(tmp_path / "copy")
    manifest.check_config()
    (tmp_path / "copy/config.json").write_bytes((model / "config.json").read_bytes() + b" ")
    with pytest.raises(
        WeightHashError, match=rf"config\.json: got SHA-256 .*, expected {manifest.config_sha256}"
    ):
        manifest.check_config()
    (tmp_path / "copy/config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read \(No such file"):
        manifest.check_config()
