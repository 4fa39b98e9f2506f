"""A flock as text: the file that :mod:`duckllm.forecast.flock` reads, with where each figure is from.

Called by ``duckllm plan --write-nodes``. It knows figures and what is to be said of them, and no workers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from duckllm.forecast.flock import Machine

_FIELDS = (
    *("name", "machine", "cores", "isa", "read_gb_per_s", "gflop_per_s"),
    *("memory_gib", "link_gbit_per_s", "round_trip_us", "card"),
)


@dataclass(frozen=True)
class WrittenComputer:
    """The host or a node, as far as it is known: fields of docs/planning.md.

    Args:
        values: Figures and names by field; None for one that has to be filled in by hand.
        notes: What is to be said of some, by field.
    """

    values: Mapping[str, str | float | None]
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> list[str]:
        """Fields that have to be filled in."""
        return [name for name in _FIELDS if name in self.values and self.values[name] is None]

    def lines(self) -> list[str]:
        """Its fields in TOML; one that is missing is a comment."""
        lines = []
        for name in _FIELDS:
            if name not in self.values:
                continue
            value, note = self.values[name], self.notes.get(name, "")
            line = f"# {name} =" if value is None else f"{name} = {_toml(value)}"
            lines.append(f"{line:<28} # {note}" if note else line)
        return lines


def flock_text(
    title: str,
    host: WrittenComputer,
    nodes: Sequence[WrittenComputer],
    machines: Mapping[str, Machine],
) -> str:
    """The file of a flock, in TOML.

    Args:
        title: Said first, in one line.
        host: The host.
        nodes: The nodes, in order.
        machines: What several of these share, by name.
    """
    parts = [[f"# {title}"], ["[host]", *host.lines()]]
    parts += [["[[nodes]]", *node.lines()] for node in nodes]
    parts += [
        [
            f"[machines.{_toml(name)}]",
            f"cores = {machine.cores}",
            f"read_gb_per_s = {_toml(machine.read_gb_per_s)}",
        ]
        for name, machine in machines.items()
    ]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _toml(value: str | float) -> str:
    """A value in TOML, whose basic strings JSON's are."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
