"""A flock's hardware, read from a file: the host, its card, the nodes and their links.

Called by ``duckllm plan --nodes FILE``. The file is TOML or JSON; docs/planning.md describes it. Knows no
models and no time.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from duckllm.config import MAX_WORKERS
from duckllm.errors import ConfigError, InWords
from duckllm.forecast.presets import CARDS, COMPUTERS

GIB = 1 << 30
ISAS = ("scalar", "avx2", "avx512")
LEAST, MOST = 1e-3, 1e6  # of a figure, which is below the latter
MOST_CORES, MOST_CHARACTERS = 4096, 100
_MOST_BYTES = 4 << 20  # more than the most nodes need, whatever they are called
_NUMBERS = ("read_gb_per_s", "gflop_per_s", "memory_gib", "link_gbit_per_s")
_OF_COMPUTER = ("preset", "name", "cores", "isa", "round_trip_us", "machine", *_NUMBERS)
_NEEDED = ("cores", *_NUMBERS)
_MEASURED = ("cores", "read_gb_per_s", "gflop_per_s")


@dataclass(frozen=True)
class Computer:
    """The host, or a node with one worker.

    Args:
        name: For people.
        cores: Cores that compute.
        read_gb_per_s: What a plain read of these cores reaches, GB/s.
        gflop_per_s: Their f32 multiply-adds, 10^9 a second.
        memory_gib: Memory, GiB.
        link_gbit_per_s: Speed of its network port in each direction, Gbit/s.
        isa: Its instruction set.
        round_trip_us: A small message to it and back, where that was measured.
        machine: Name of a machine that it shares with others of that name; empty where it is one by itself.
        burst_bytes: What its port lets pass at once, where a token bucket stands for a slow link.
        wired: Whether a link is between it and a host of the same machine, as between network namespaces.
    """

    name: str
    cores: int
    read_gb_per_s: float
    gflop_per_s: float
    memory_gib: float
    link_gbit_per_s: float
    isa: str = "avx2"
    round_trip_us: float | None = None
    machine: str = ""
    burst_bytes: int = 0
    wired: bool = False


@dataclass(frozen=True)
class Card:
    """The host's card.

    Args:
        name: For people.
        vram_gib: VRAM, GiB.
        gb_per_s: Its memory bandwidth on paper, GB/s.
    """

    name: str
    vram_gib: float
    gb_per_s: float


@dataclass(frozen=True)
class Machine:
    """What computers of one machine share.

    Args:
        cores: Cores in all.
        read_gb_per_s: What a plain read of all of them reaches.
    """

    cores: int
    read_gb_per_s: float


@dataclass(frozen=True)
class Flock:
    """Everything that computes.

    Args:
        host: The host.
        nodes: The workers' nodes, in order.
        card: The host's card; None where its CPU computes.
        machines: Shared machines, by name.
    """

    host: Computer
    nodes: tuple[Computer, ...]
    card: Card | None = None
    machines: Mapping[str, Machine] = field(default_factory=dict)

    def with_nodes(self, nodes: tuple[Computer, ...]) -> Flock:
        """The same with other nodes."""
        return replace(self, nodes=nodes)


def read_flock(path: Path) -> Flock:
    """The flock that a file describes.

    Raises:
        ConfigError: The file cannot be read; a field is unknown, missing, of the wrong kind or out of range.
    """
    try:
        with path.open("rb") as file:  # of a device no more than that
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            "nodes", str(path), f"a file of nodes that can be read ({error.strerror})"
        ) from None
    if len(data) > _MOST_BYTES:
        raise ConfigError("nodes", str(path), f"a file of nodes of at most {_MOST_BYTES} bytes")
    try:
        text = data.decode()
        found = json.loads(text, object_pairs_hook=_once) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        expected = f"{'JSON' if path.suffix == '.json' else 'TOML, or JSON where its name ends in .json'}"
        raise ConfigError("nodes", str(path), f"{expected} ({error})") from None
    try:
        return flock_of(found)
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error.field}", error.got, error.expected, error.hint) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, each of whose names is there once, as in TOML: else one of them would go unread."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def flock_of(found: Any) -> Flock:
    """The flock of a parsed file; see :func:`read_flock`."""
    table = _table("", found, ("host", "nodes", "machines"))
    if "host" not in table:
        raise ConfigError("host", InWords("nothing"), "a table of fields, [host] in TOML: a preset is enough")
    machines = {
        name: _machine(f"machines.{name}", each)
        for name, each in _table("machines", table.get("machines", {}), None).items()
    }
    host_table = dict(_table("host", table.get("host"), (*_OF_COMPUTER, "card")))
    card = _card(host_table.pop("card", None))
    host = _computer("host", host_table, machines)
    rows = table.get("nodes")
    if not isinstance(rows, list) or not rows:
        got = InWords("nothing") if rows is None else rows
        raise ConfigError("nodes", got, "a list of nodes, [[nodes]] in TOML")
    nodes: list[Computer] = []
    for number, row in enumerate(rows):
        where = f"nodes[{number}]"
        own = dict(_table(where, row, (*_OF_COMPUTER, "count")))
        count = own.pop("count", 1)
        if type(count) is not int or not 1 <= count <= MAX_WORKERS:
            raise ConfigError(f"{where}.count", count, f"a number from 1 to {MAX_WORKERS}")
        made = _computer(where, own, machines)
        if count == 1:
            nodes.append(replace(made, name=made.name or str(own.get("preset", len(nodes)))))
        else:  # without a name of its own each is called by its number, so that tables can join equal ones
            names = [
                f"{made.name} {each + 1}" if made.name else str(len(nodes) + each) for each in range(count)
            ]
            nodes += [replace(made, name=name) for name in names]
    if len(nodes) > MAX_WORKERS:
        raise ConfigError("nodes", f"{len(nodes)} nodes", f"at most {MAX_WORKERS}")
    for name in machines.keys() - {each.machine for each in (host, *nodes)}:
        raise ConfigError(f"machines.{name}", "nothing on it", "a machine that the host or a node names")
    return Flock(replace(host, name=host.name or "host"), tuple(nodes), card, machines)


def _table(where: str, found: Any, known: tuple[str, ...] | None) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise ConfigError(where, found, "a table of fields")
    for key in found:
        if known is not None and key not in known:
            field = f"{where}.{key}" if where else key
            raise ConfigError(field, found[key], f"one of the fields {', '.join(known)}")
    return found


def _number(where: str, value: Any) -> float:
    if type(value) not in (int, float) or not LEAST <= value < MOST:
        raise ConfigError(where, _shown(value), f"a number from {LEAST} to below {MOST:.0f}")
    return float(value)


def _cores(where: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MOST_CORES:
        raise ConfigError(where, _shown(value), f"a number from 1 to {MOST_CORES}")
    return value


def _shown(value: Any) -> Any:
    return InWords("nothing") if value is None else value


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable() or len(value) > MOST_CHARACTERS:
        raise ConfigError(where, value, f"a name of at most {MOST_CHARACTERS} characters")
    return value


def _machine(where: str, found: Any) -> Machine:
    table = _table(where, found, ("cores", "read_gb_per_s"))
    return Machine(
        _cores(f"{where}.cores", table.get("cores")),
        _number(f"{where}.read_gb_per_s", table.get("read_gb_per_s")),
    )


def _computer(where: str, table: Mapping[str, Any], machines: Mapping[str, Machine]) -> Computer:
    preset = table.get("preset")
    values: dict[str, Any] = {}
    if preset is not None:
        known = COMPUTERS.get(preset) if isinstance(preset, str) else None
        if known is None:
            names = ", ".join(name for name, each in COMPUTERS.items() if not each.refused)
            hint = "for another computer its own figures: docs/planning.md"
            raise ConfigError(f"{where}.preset", preset, f"one of {names}", hint)
        if known.refused:
            raise ConfigError(f"{where}.preset", preset, "a computer that duckllm runs on", known.refused)
        values = {name: getattr(known, name) for name in (*_NEEDED, "isa")}
    for name in _NUMBERS:
        if name in table:
            values[name] = _number(f"{where}.{name}", table[name])
    if "cores" in table:
        values["cores"] = _cores(f"{where}.cores", table["cores"])
    missing = [name for name in _NEEDED if name not in values]
    if missing:
        hint = "duckllm bench roofline, there, says it" if missing[0] in _MEASURED else ""
        raise ConfigError(
            f"{where}.{missing[0]}", InWords("nothing"), "a figure, or a preset that has it", hint
        )
    isa = table.get("isa", values.get("isa", "avx2"))
    if isa not in ISAS:
        raise ConfigError(f"{where}.isa", isa, f"one of {', '.join(ISAS)}")
    machine = _text(f"{where}.machine", table.get("machine", ""))
    if machine and machine not in machines:
        raise ConfigError(
            f"{where}.machine", machine, f"one of the machines: {', '.join(machines) or 'none'}"
        )
    trip = table.get("round_trip_us")
    return Computer(
        **{name: values[name] for name in _NEEDED},
        name=_text(f"{where}.name", table.get("name", "")),
        isa=isa,
        round_trip_us=None if trip is None else _number(f"{where}.round_trip_us", trip),
        machine=machine,
    )


def _card(found: Any) -> Card | None:
    if found is None:
        return None
    if isinstance(found, str):
        if found not in CARDS:
            raise ConfigError("host.card", found, f"one of {', '.join(CARDS)}, or its vram_gib and gb_per_s")
        return Card(found, CARDS[found].vram_gib, CARDS[found].gb_per_s)
    table = _table("host.card", found, ("name", "vram_gib", "gb_per_s"))
    return Card(
        _text("host.card.name", table.get("name", "card")),
        _number("host.card.vram_gib", table.get("vram_gib")),
        _number("host.card.gb_per_s", table.get("gb_per_s")),
    )
