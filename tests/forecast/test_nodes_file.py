"""Files of nodes: what they give, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from duckllm.errors import ConfigError
from duckllm.forecast.flock import flock_of, read_flock
from duckllm.forecast.presets import CARDS, COMPUTERS

ROOT = Path(__file__).resolve().parents[2]
OWN = {"cores": 2, "read_gb_per_s": 20, "gflop_per_s": 100.5, "memory_gib": 8, "link_gbit_per_s": 1}


def test_presets_are_filled_in_and_figures_of_ones_own_go_before_them(tmp_path: Path) -> None:
    path = tmp_path / "flock.toml"
    path.write_text(
        '[host]\npreset = "epyc"\ncard = "rtx-5090"\n[[nodes]]\npreset = "n100"\ncount = 3\n'
        'link_gbit_per_s = 1\n[[nodes]]\nname = "old"\ncores = 2\nread_gb_per_s = 9\ngflop_per_s = 50\n'
        'memory_gib = 8\nlink_gbit_per_s = 1\nisa = "scalar"\nround_trip_us = 80\n'
    )
    flock = read_flock(path)
    assert (flock.host.name, flock.host.read_gb_per_s, flock.host.isa) == ("host", 490.0, "avx512")
    assert flock.card is not None
    assert (flock.card.vram_gib, flock.card.gb_per_s) == (32, 1792.0)
    assert [node.name for node in flock.nodes] == ["0", "1", "2", "old"]
    assert [node.link_gbit_per_s for node in flock.nodes] == [1.0] * 4
    assert [node.read_gb_per_s for node in flock.nodes] == [35.0, 35.0, 35.0, 9.0]
    assert flock.nodes[0].memory_gib == 16
    assert flock.nodes[3].isa == "scalar"
    assert [node.round_trip_us for node in flock.nodes] == [None, None, None, 80]


def test_json_says_the_same_as_toml(tmp_path: Path) -> None:
    table = {
        "machines": {"box": {"cores": 4, "read_gb_per_s": 30}},
        "host": {**OWN, "machine": "box", "card": {"vram_gib": 12, "gb_per_s": 360}},
        "nodes": [{**OWN, "machine": "box", "count": 2, "name": "box"}],
    }
    path = tmp_path / "flock.json"
    path.write_text(json.dumps(table))
    flock = read_flock(path)
    assert flock == flock_of(table)
    assert flock.card is not None
    assert (flock.card.name, flock.card.vram_gib) == ("card", 12)
    assert flock.machines["box"].cores == 4
    assert [(node.name, node.machine) for node in flock.nodes] == [("box 1", "box"), ("box 2", "box")]


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples/flocks").iterdir()))
def test_examples_are_flocks(name: str) -> None:
    assert read_flock(ROOT / "examples/flocks" / name).nodes


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"host": None}, "host"),
        ({"nodes": []}, "nodes"),
        ({"nodes": [{"preset": "n101"}]}, "nodes[0].preset"),
        ({"nodes": [{"preset": ["n100"]}]}, "nodes[0].preset"),
        ({"nodes": [{"preset": "n100", "count": 0}]}, "nodes[0].count"),
        ({"nodes": [{"preset": "n100", "count": 10**6}]}, "nodes[0].count"),
        ({"nodes": [{"preset": "n100", "count": True}]}, "nodes[0].count"),
        ({"nodes": [{"preset": "n100", "read_gb_per_s": "35"}]}, "nodes[0].read_gb_per_s"),
        ({"nodes": [{"preset": "n100", "memory_gib": -1}]}, "nodes[0].memory_gib"),
        ({"nodes": [{"preset": "n100", "memory_gib": float("nan")}]}, "nodes[0].memory_gib"),
        ({"nodes": [{"preset": "n100", "read_gb_per_s": 1e-300}]}, "nodes[0].read_gb_per_s"),
        ({"nodes": [{"preset": "n100", "cores": 2.5}]}, "nodes[0].cores"),
        ({"nodes": [{"preset": "n100", "isa": "neon"}]}, "nodes[0].isa"),
        ({"nodes": [{"preset": "n100", "ram": 8}]}, "nodes[0].ram"),
        ({"nodes": [{"preset": "n100", "machine": "x"}]}, "nodes[0].machine"),
        ({"nodes": [{"preset": "n100", "round_trip_us": 0}]}, "nodes[0].round_trip_us"),
        ({"nodes": [{"preset": "n100", "name": "a\nb"}]}, "nodes[0].name"),
        ({"nodes": [{"cores": 4}]}, "nodes[0].read_gb_per_s"),
        ({"nodes": ["n100"]}, "nodes[0]"),
        ({"host": {**OWN, "card": "voodoo"}}, "host.card"),
        ({"host": {**OWN, "card": {"vram_gib": 8}}}, "host.card.gb_per_s"),
        ({"host": {**OWN, "count": 2}}, "host.count"),
        ({"machines": {"x": {"cores": 1}}}, "machines.x.read_gb_per_s"),
        ({"machines": {"x": {"cores": 1, "read_gb_per_s": 9}}}, "machines.x"),
        ({"cards": {}}, "cards"),
        ({"node": [OWN]}, "node"),
    ],
)
def test_what_is_no_flock_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        flock_of({"host": OWN, "nodes": [OWN], **change})
    assert caught.value.field == field


def test_the_file_and_what_would_do_are_named(tmp_path: Path) -> None:
    def refusal(text: str) -> str:
        (tmp_path / "mine.toml").write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_flock(tmp_path / "mine.toml")
        return str(caught.value)

    host, node = '[host]\npreset = "n100"\n', '[[nodes]]\npreset = "n100"\n'
    assert refusal(node) == (
        "mine.toml: host: got nothing, expected a table of fields, [host] in TOML: a preset is enough"
    )
    assert refusal(host) == "mine.toml: nodes: got nothing, expected a list of nodes, [[nodes]] in TOML"
    names = [name for name, each in COMPUTERS.items() if not each.refused]
    assert refusal(host + '[[nodes]]\npreset = "n150"\n') == (
        f"mine.toml: nodes[0].preset: got 'n150', expected one of {', '.join(names)} "
        "(for another computer its own figures: docs/planning.md)"
    )
    assert "raspberry-pi-5" not in names
    assert refusal(host + "[[nodes]]\ncores = 4\n") == (
        "mine.toml: nodes[0].read_gb_per_s: got nothing, expected a figure, or a preset that has it "
        "(duckllm bench roofline, there, says it)"
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.toml", "[host"),
        ("a.json", "{"),
        ("a.json", "[" * 100_000),
        ("a.toml", "\xff"),
        ("a.json", '{"host": {}, "host": {}}'),
    ],
)
def test_files_that_are_nothing_are_refused(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode("latin-1"))
    for each in (path, tmp_path / "none.toml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"^nodes: got"):
            read_flock(each)


def test_every_figure_of_a_preset_has_a_source() -> None:
    for name, preset in COMPUTERS.items():
        fields = {"read_gb_per_s", "gflop_per_s", "memory_gib", "link_gbit_per_s"}
        assert fields <= {*preset.sources}, name
        assert all(preset.sources.values()), name
    assert {"n100", "n305", "ryzen-desktop", "epyc", "raspberry-pi-5"} <= {*COMPUTERS}
    assert all(card.source for card in CARDS.values())


def test_a_computer_without_kernels_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="ARM"):
        flock_of({"host": OWN, "nodes": [{"preset": "raspberry-pi-5"}]})
