"""``duckllm simulate``: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from duckllm.cli.main import app
from duckllm.cli.simulate import describe_node, parse_slow, simulate
from duckllm.errors import ConfigError
from duckllm.simulate.nodes import Node


def test_the_demo_model_on_two_sizes_of_flock(tmp_path: Path) -> None:
    picture, lines = tmp_path / "simulated.png", tmp_path / "lines.jsonl"
    sizes = ["--workers", "4,2", "--rows", "1,2", "--steps", "10", "--layer-us", "100"]
    done = CliRunner().invoke(
        app, ["simulate", *sizes, "--json", "--plot", str(picture), "--save", str(lines)]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert json.loads(lines.read_text()) == found
    assert (found["benchmark"], found["host_gbit_per_s"], found["num_steps"]) == ("simulate", 10.0, 10)
    assert [(point["num_workers"], point["num_tokens"]) for point in found["points"]] == [
        (2, 1), (2, 2), (4, 1), (4, 2),
    ]  # fmt: skip
    assert set(found["points"][0]["cpu_us"]) == {"pack", "send", "sleep", "receive", "combine"}
    assert [bend["num_tokens"] for bend in found["bends"]] == [1, 2]
    assert len(found["layers"]) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_tables_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    simulate(workers="3", rows="2", steps=10, slow="1:2", link=0, layer_us=50.0)
    words = " ".join(capsys.readouterr().out.split())
    assert "2 rows a step, microseconds" in words
    assert "2 rows: fastest with " in words
    assert "3 workers: a layer in " in words


def test_without_numbers_there_are_no_more_workers_than_stripes(capsys: pytest.CaptureFixture[str]) -> None:
    simulate(rows="1", steps=10, as_json=True)
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["num_workers"] for point in points] == [8]  # the demo model's experts have eight


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": "65"}, "workers: got '65', expected numbers from 1 to 64"),
        ({"host_link": 1e-9}, "host_link: got 1e-09, expected 0 for no limit, or at least 0.001 Gbit/s"),
        ({"link": 1e-9}, "link: got 1e-09, expected 0 for no limit, or at least 0.001 Gbit/s"),
        ({"workers": "some"}, "workers: got 'some', expected numbers"),
        ({"rows": "0"}, "rows: got '0', expected numbers from 1"),
        ({"node": "pi"}, "node: got 'pi', expected one of n100, "),
        (
            {"node": "raspberry-pi-5"},
            "ryzen-desktop, epyc, epyc-2-vcpu (its CPU is an ARM",
        ),
        ({"steps": 9}, "steps: got 9, expected 10 or more"),
        ({"wire_dtype": "f16"}, "wire_dtype: got 'f16', expected one of f32, bf16"),
        ({"weight_format": "q4"}, "format: got 'q4', expected one of fp9, fp8"),
        ({"slow": "64:2"}, "slow: got '64:2', expected workers from 0 to 63"),
        ({"host_link": -1.0}, "host_link: got -1.0, expected a number from 0"),
        ({"layer_us": float("nan")}, "layer_us: got nan, expected a number from 0"),
        ({"plot": Path("a.gif")}, "plot: got 'a.gif', expected a file name that ends in .png"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        simulate(**options)


def test_a_node_is_its_preset_with_what_was_said_otherwise() -> None:
    preset = describe_node("n100", "fp9", None, None, None)
    assert preset.read_gb_per_s > 10
    changed = describe_node("n100", "fp9", 7.0, 0.0, 3.0)
    assert changed == Node(7.0, preset.gflop_per_s, preset.fixed_us, 0.0, 3.0)
    with pytest.raises(ConfigError, match="speed: got 0"):
        describe_node("n100", "fp9", 0.0, None, None)


def test_slow_workers_have_numbers_and_factors() -> None:
    assert parse_slow("", 4) == {}
    assert parse_slow("0:2, 3:1.5", 4) == {0: 2.0, 3: 1.5}
    for text in ("4:2", "-1:2", "1", "1:nan", "1:0", "a:b"):
        with pytest.raises(ConfigError, match="slow"):
            parse_slow(text, 4)
