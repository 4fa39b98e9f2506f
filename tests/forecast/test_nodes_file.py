"""Files of nodes: what they give, and what is refused by name."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duckllm._native import select_isa
from duckllm.bench.token_ceilings import LinkFacts
from duckllm.cli import plan_nodes
from duckllm.cluster.connect import THIS_MACHINE, WorkerInfo
from duckllm.cluster.survey import RoundTrip
from duckllm.config import available_cores, total_memory_bytes
from duckllm.device import CPU, Device
from duckllm.engine.cache_size import card_of
from duckllm.errors import ConfigError
from duckllm.forecast.flock import GIB, Computer, Machine, flock_of, read_flock
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


def worker(address: str, **said: object) -> tuple[WorkerInfo, RoundTrip]:
    values = {"isa": "avx2", "build": "", "threads": 4, "pid": 1, "memory_bytes": 16 * GIB}
    values |= {"read_gb_per_s": 30.004}
    if address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]"):
        values["reached_at"] = THIS_MACHINE
    return WorkerInfo(address, **(values | said)), RoundTrip(64, (80.0, 91.234, 120.0))  # type: ignore[arg-type]


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round numbers in place of what is measured here."""
    monkeypatch.setattr(plan_nodes, "this_machine_gb_per_s", lambda: 50.0)
    monkeypatch.setattr(plan_nodes, "_gflop_of_core", lambda isas: dict.fromkeys(isas, 100.0))


@pytest.mark.usefixtures("unmeasured")
def test_a_file_is_written_of_workers_that_run() -> None:
    """What they say and what is measured here comes back; what is a guess says so."""
    links = {"a": LinkFacts("eth0", 2.5), "b": LinkFacts("eth1"), "127.0.0.1": LinkFacts("loopback")}
    asked = [
        worker("a:1", name="attic"),
        worker("b:1", threads=2, isa="scalar+x"),
        worker("b:2", threads=2, read_gb_per_s=20.0),
        worker("127.0.0.1:1", threads=1, read_gb_per_s=11.0),
    ]
    text, missing = plan_nodes.nodes_text(asked, {"b:1": 'st"udy'}, CPU, links.__getitem__)
    assert missing == []
    cores, isa = available_cores(), select_isa()
    flock = flock_of(tomllib.loads(text))
    assert flock.nodes == (
        Computer("attic", 4, 30.0, 400.0, 16.0, 2.5, "avx2", 91.23),
        Computer('st"udy', 2, 30.0, 200.0, 8.0, 1.0, "scalar", 91.23, "b"),
        Computer("b:2", 2, 20.0, 200.0, 8.0, 1.0, "avx2", 91.23, "b"),
        Computer("127.0.0.1:1", 1, 11.0, 100.0, 8.0, 1.0, "avx2", 91.23, "this host"),
    )
    assert flock.machines == {"b": Machine(4, 30.0), "this host": Machine(cores, 50.0)}
    memory_gib = round(total_memory_bytes() / 2 / GIB, 2)
    assert flock.host == Computer(
        "host", cores, 50.0, 100.0 * cores, memory_gib, 2.5, isa, machine="this host"
    )
    assert flock.card is None
    assert text.count("# an assumption: nothing here says it") == 2
    assert text.count("# an estimate: cores of this host") == 4


@pytest.mark.usefixtures("unmeasured")
def test_what_no_worker_says_is_to_be_filled_in() -> None:
    asked = [worker("a:1", read_gb_per_s=None)]
    text, missing = plan_nodes.nodes_text(asked, {}, card_of(24 * GIB), lambda _: LinkFacts("eth0", 10.0))
    assert missing == ["host's card", "a:1's read_gb_per_s"]
    assert "# card =                     # one of duckllm plan --presets, or {vram_gib = 24, gb_per_s" in text
    with pytest.raises(ConfigError, match=r"nodes\[0\]\.read_gb_per_s: got nothing, expected a figure"):
        flock_of(tomllib.loads(text))


@pytest.mark.usefixtures("unmeasured")
def test_a_machine_called_host_is_not_the_host() -> None:
    links = {"host": LinkFacts("eth0", 1.0), "localhost": LinkFacts("loopback")}
    asked = [worker("host:1", threads=2), worker("localhost:1"), worker("host:2", threads=2)]
    text, missing = plan_nodes.nodes_text(asked, {}, CPU, links.__getitem__)
    assert missing == []
    flock = flock_of(tomllib.loads(text))
    assert [node.machine for node in flock.nodes] == ["host", "this host", "host"]
    assert [node.memory_gib for node in flock.nodes] == [8.0, 8.0, 8.0]
    assert flock.host.machine == "this host"
    assert flock.machines == {"host": Machine(4, 30.0), "this host": Machine(available_cores(), 50.0)}


@pytest.mark.usefixtures("unmeasured")
def test_figures_that_no_file_holds_are_the_nearest_and_say_so() -> None:
    asked = [worker("a:1", read_gb_per_s=1e-5, memory_bytes=1), worker("b:1", threads=5000)]
    text, missing = plan_nodes.nodes_text(asked, {}, CPU, lambda _: LinkFacts("eth0", 1.0))
    assert missing == []
    flock = flock_of(tomllib.loads(text))
    assert [(node.read_gb_per_s, node.memory_gib) for node in flock.nodes] == [(0.001, 0.001), (30.0, 16.0)]
    assert [node.cores for node in flock.nodes] == [4, 4096]
    assert "read_gb_per_s = 0.001        # not 1e-05, which no file of nodes holds\n" in text


WORDS = st.text(st.characters(exclude_categories=("C", "Z")) | st.just(" "), max_size=100)
# What hello takes, and names of machines that parse_address does.
SAID = st.fixed_dictionaries(
    {
        "isa": st.sampled_from(("avx2", "avx512+amx", "scalar")) | WORDS,
        "threads": st.integers(0, 2**63 - 1) | st.integers(0, 99),
        "memory_bytes": st.integers(0, 2**63 - 1),
        "read_gb_per_s": st.none() | st.floats(0, 1e6, exclude_min=True),
        "name": WORDS,
    }
)
PLACES = st.sampled_from(
    ("host", "this-host", "a", "[::1]", "127.0.0.1", "b" * 120, "b" * 119 + "c", "\u540d")
)
RATES = st.none() | st.floats(0, 1e7, exclude_min=True)


@pytest.mark.usefixtures("unmeasured")
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said=st.lists(st.tuples(PLACES, SAID, st.floats(0, 1e7)), min_size=1, max_size=5),
    rate=RATES,
    device=st.sampled_from((CPU, card_of(24 * GIB))),
)
def test_whatever_workers_say_the_file_is_read_once_it_is_filled_in(
    said: list[tuple[str, dict[str, Any], float]], rate: float | None, device: Device
) -> None:
    """And it lacks what it says that it lacks, no more."""
    asked = [
        (worker(f"{place}:{number}", **facts)[0], RoundTrip(64, (trip_us,)))
        for number, (place, facts, trip_us) in enumerate(said, 1)
    ]
    links = {place: LinkFacts("loopback") for place in ("127.0.0.1", "::1")}
    text, missing = plan_nodes.nodes_text(
        asked, {}, device, lambda place: links.get(place, LinkFacts("eth0", rate))
    )
    filled, count = re.subn(
        r"^# (isa|card|read_gb_per_s) = .*$",
        lambda found: f"{found[1]} = " + {"isa": '"avx2"', "card": '"rtx-5090"'}.get(found[1], "9"),
        text,
        flags=re.MULTILINE,
    )
    assert count == len(missing)
    flock = flock_of(tomllib.loads(filled))
    here = [place in ("[::1]", "127.0.0.1") for place, _, _ in said]
    assert [node.machine == "this host" for node in flock.nodes] == here
    assert (flock.host.machine == "this host") is any(here)
