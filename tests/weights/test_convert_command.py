"""``duckllm convert`` and the progress it shows."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
import typer
from random_checkpoint import FP8_CONFIG, make_checkpoint
from rich.console import Console
from typer.testing import CliRunner

from duckllm.cli import convert as command
from duckllm.demo import CHECKPOINT
from duckllm.errors import UnsupportedModelError, WeightHashError
from duckllm.weights import console as console_module
from duckllm.weights.console import ConsoleProgress
from duckllm.weights.manifest import Manifest

app = typer.Typer()
app.command()(command.convert)


def test_json_outcome(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    result = CliRunner().invoke(app, [str(tmp_path / "src"), str(tmp_path / "dst"), "--verify", "--json"])
    assert result.exit_code == 0, result.output
    outcome = json.loads(result.stdout)
    manifest = Manifest.load(tmp_path / "dst")
    assert outcome["model_hash"] == manifest.model_hash
    assert outcome["expert_bytes"] == sum(entry.bytes for entry in manifest.expert_layers.values())
    assert (outcome["moe_layers"], outcome["mtp_layers"]) == (3, 1)
    assert outcome["verified"] is True
    assert outcome["rms_relative_error"] == 0.0
    assert outcome["source_dtype"] == "F8_E4M3"
    assert "Converting" in result.stderr


def test_what_no_host_can_use_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "src", hidden_act="gelu")
    arguments = [str(tmp_path / "src"), str(tmp_path / "dst")]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UnsupportedModelError)
    assert "hidden_act: got 'gelu', expected 'silu'" in str(result.exception)
    assert not (tmp_path / "dst").exists()
    # A machine without a host's packages converts it unchecked, and says so.
    monkeypatch.setitem(sys.modules, "duckllm.models.deepseek_v32", None)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "whether a host can use this model is not checked" in " ".join(result.stderr.split())


def test_the_demo_model_is_a_checkpoint_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = []

    def stop(folder: Path, *_: object, **__: object) -> None:
        seen.append(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "convert_checkpoint", stop)
    assert CliRunner().invoke(app, ["demo", "dst"]).exit_code == 130
    assert seen == [CHECKPOINT]


@pytest.mark.parametrize(
    ("src", "dst", "name", "what"),
    [
        ("demo", "demo", "demo", "the demo model"),
        ("demo", "x/../demo", "demo", "the demo model"),
        ("org/name", "demo", "demo", "the demo model"),
        ("org/name", "org/name", "org/name", "the model on the hub"),
        ("org/name@v1", "org/name", "org/name", "the model on the hub"),
        ("org/name@v1", "org/name@v1", "org/name@v1", "the model on the hub"),
    ],
)
def test_a_new_folder_takes_no_models_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, src: str, dst: str, name: str, what: str
) -> None:
    """It would come first: the same command would not go on, and others would mean another model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "find_model", lambda *_, **__: pytest.fail("looked for the model"))
    for place in (dst, str(tmp_path / dst)):
        result = CliRunner().invoke(app, [src, place])
        hint = f"({name} would mean that folder here, and no longer {what})"
        assert str(result.exception) == f"dst: got {place!r}, expected a folder of another name {hint}"
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_checkpoint(tmp_path / "src")
    (tmp_path / "demo").mkdir()
    result = CliRunner().invoke(app, ["src", "demo"])
    assert result.exit_code == 0, result.output
    make_checkpoint(tmp_path / "other/demo")
    monkeypatch.chdir(tmp_path / "other")
    result = CliRunner().invoke(app, ["demo", "dst"])
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert "demo is the folder of that name here, not the demo model" in said


def test_rules_that_change_nothing_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    arguments = [str(tmp_path / "src"), str(tmp_path / "dst"), "--format", "fp9", "--keep", "fp9:first"]
    result = CliRunner().invoke(app, arguments)
    assert "keep: got 'fp9:first', expected a rule that changes a layer's format" in str(result.exception)
    assert not (tmp_path / "dst").exists()


def test_text_outcome_tells_how_far_weights_were_rounded(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src", dtype="BF16")
    result = CliRunner().invoke(app, [str(tmp_path / "src"), str(tmp_path / "dst")])
    assert result.exit_code == 0, result.output
    assert "fp9 from BF16, 3 MoE layers (one of them MTP), " in result.stdout
    assert "rounded to e4m3: rms error 2." in result.stdout
    assert "verified" not in result.stdout


def test_text_outcome_tells_why_fp8_was_rounded_again(tmp_path: Path) -> None:
    config = FP8_CONFIG | {"weight_block_size": [16, 32]}
    make_checkpoint(tmp_path / "src", quantization_config=config, scale_block=(16, 32))
    result = CliRunner().invoke(app, [str(tmp_path / "src"), str(tmp_path / "dst")])
    assert result.exit_code == 0, result.output
    assert "fp9 from F8_E4M3, 3 MoE layers" in result.stdout
    again = "rounded to e4m3 again, as the checkpoint has a scale for 16 x 32 weights: rms error "
    assert again in result.stdout


def test_the_format_is_an_option(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src", dtype="BF16")
    arguments = [str(tmp_path / "src"), str(tmp_path / "dst"), "--format"]
    result = CliRunner().invoke(app, [*arguments, "fp8", "--verify"])
    assert result.exit_code == 0, result.output
    assert "fp8 from BF16, 3 MoE layers (one of them MTP), " in result.stdout
    assert ", verified bit for bit" in result.stdout
    assert "rounded to e4m3: rms error 2." in result.stdout
    assert Manifest.load(tmp_path / "dst").format == "fp8"


# What rich would take for its markup, and for the name of an emoji.
ODD_NAME = "[/b][red]model:duck:"


def test_a_name_is_shown_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_checkpoint(tmp_path / ODD_NAME)
    result = CliRunner().invoke(app, [ODD_NAME, "dst"])
    assert result.exit_code == 0, result.output
    assert f"Converting {ODD_NAME}\n" in result.stderr


def test_the_bar_shows_a_name_as_it_is() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with ConsoleProgress(f"Converting {ODD_NAME}", console) as progress:
        progress("[/i]layer.safetensors", 1, 2)
    shown = console.file.getvalue()
    assert f"Converting {ODD_NAME}" in shown
    assert "[/i]layer" in shown


def test_ctrl_c_tells_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "convert_checkpoint", interrupted)
    result = CliRunner().invoke(app, [str(tmp_path), str(tmp_path / "dst")])
    assert result.exit_code == 130
    assert "Stopped. The same command goes on" in result.stderr


def test_verify_finds_a_flipped_weight_under_a_right_hash(tmp_path: Path) -> None:
    """The hashes are made to fit the damage: only the comparison with the source can find it."""
    import hashlib

    from duckllm.weights.convert import convert
    from duckllm.weights.manifest import content_hash

    make_checkpoint(tmp_path / "src")
    manifest = convert(tmp_path / "src", tmp_path / "dst")
    path = manifest.expert_path(2)
    data = bytearray(path.read_bytes())
    unit, expert, stripe = manifest.unit_bytes, 1, 2
    data[4096 + (expert * 3 + stripe) * unit + 64 + 3 * 576] ^= 0x08  # hidden 32, first channel of up
    path.write_bytes(data)
    units = [data[4096 + (e * 3 + stripe) * unit :][:unit] for e in range(4)]
    value = json.loads((tmp_path / "dst/duck.json").read_text())
    value["expert_layers"]["2"]["stripe_sha256"][stripe] = hashlib.sha256(b"".join(units)).hexdigest()
    value["model_hash"] = content_hash(value)
    (tmp_path / "dst/duck.json").write_text(json.dumps(value))
    with pytest.raises(WeightHashError, match="layer 2, expert 1: up differs from the source"):
        convert(tmp_path / "src", tmp_path / "dst", verify=True)


@pytest.mark.parametrize("name", ["experts-00002.safetensors", "host-00001.safetensors"])
def test_verify_finds_files_whose_hash_differs(tmp_path: Path, name: str) -> None:
    from duckllm.weights.convert import convert

    make_checkpoint(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst")
    data = bytearray((tmp_path / "dst" / name).read_bytes())
    data[-3] ^= 1
    (tmp_path / "dst" / name).write_bytes(data)
    with pytest.raises(WeightHashError, match=name):
        convert(tmp_path / "src", tmp_path / "dst", verify=True)


def test_verify_finds_a_tensor_that_the_source_has_not(tmp_path: Path) -> None:
    import hashlib

    from duckllm.weights.convert import convert
    from duckllm.weights.manifest import content_hash

    make_checkpoint(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst")
    path = tmp_path / "dst/host-other.safetensors"
    data = path.read_bytes().replace(b'"model.norm.weight"', b'"model.norm.height"')
    path.write_bytes(data)
    value = json.loads((tmp_path / "dst/duck.json").read_text())
    value["host_files"][path.name]["sha256"] = hashlib.sha256(data).hexdigest()
    value["model_hash"] = content_hash(value)
    (tmp_path / "dst/duck.json").write_text(json.dumps(value))
    with pytest.raises(WeightHashError, match=r"model\.norm\.height: got a tensor that the source has not"):
        convert(tmp_path / "src", tmp_path / "dst", verify=True)


def test_plain_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 10.0, 15.0, 20.0])
    monkeypatch.setattr(console_module.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    with ConsoleProgress("Converting x", Console(file=out)) as progress:
        for done in (1, 2, 3, 4, 5):
            progress("host", done * 10**9, 9 * 10**9)
    assert out.getvalue().splitlines() == [
        "Converting x",
        "Converting x: 3.00 of 9.00 GB, 30 s left (host)",
        "Converting x: 5.00 of 9.00 GB, 20 s left (host)",
    ]


def test_a_bar_on_a_terminal() -> None:
    out = io.StringIO()
    with ConsoleProgress("Converting x", Console(file=out, force_terminal=True, width=100)) as progress:
        progress("host-00000", 1 * 10**9, 2 * 10**9)
        progress("experts-00001", 2 * 10**9, 2 * 10**9)
    assert "Converting x" in out.getvalue()
    assert "2.0/2.0 GB" in out.getvalue()


def test_the_bar_is_one_line_of_80_columns() -> None:
    out = io.StringIO()
    title = "Converting /a/path/that/is/so/long/that/it/would/never/fit/beside/a/bar/model"
    with ConsoleProgress(title, Console(file=out, force_terminal=True, width=80)) as progress:
        for done in (1, 600 * 10**9, 999 * 10**9):
            progress("verifying experts-00060.safetensors", done, 999 * 10**9)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).replace("\r", "\n").splitlines()
    drawn = [line for line in lines if "Converting" in line]
    assert drawn
    assert all(len(line) <= 80 and " verifying experts-00060" in line and "GB" in line for line in drawn)
    assert all("Converting" in line for line in lines if line.strip())
    assert "999.0/999.0 GB" in drawn[-1]
