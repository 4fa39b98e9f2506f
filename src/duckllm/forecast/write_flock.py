"""A flock as text: the file that :mod:`duckllm.forecast.flock` reads, with where each figure is from.

Called by ``duckllm plan --write-nodes``. It knows figures and what is to be said of them, and no workers.
Whatever the figures are, the file can be read once the fields that it lacks are filled in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from duckllm.forecast.flock import LEAST, MOST, MOST_CHARACTERS, MOST_CORES

_FIELDS = (
    *("name", "machine", "cores", "isa", "read_gb_per_s", "gflop_per_s"),
    *("memory_gib", "link_gbit_per_s", "round_trip_us", "card"),
)
_ROUNDING = 0.5  # by how much of itself rounding changes the least figure


@dataclass(frozen=True)
class WrittenComputer:
    """The host, a node or a shared machine, as far as it is known: fields of docs/planning.md.

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
            if isinstance(value, str):
                value = shortened(value)
            elif value is not None:
                said, value = value, _held(name, value)
                if abs(value - said) > _ROUNDING * said:
                    note = f"not {said:g}, which no file of nodes holds" + (f"; {note}" if note else "")
            line = f"# {name} =" if value is None else f"{name} = {_toml(value)}"
            lines.append(f"{line:<28} # {note}" if note else line)
        return lines


def flock_text(
    title: str,
    host: WrittenComputer,
    nodes: Sequence[WrittenComputer],
    machines: Mapping[str, WrittenComputer],
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
    parts += [[f"[machines.{_toml(name)}]", *machine.lines()] for name, machine in machines.items()]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def shortened(name: str) -> str:
    """A name with its middle left out where a file of nodes would not hold it."""
    half = (MOST_CHARACTERS - 3) // 2
    return name if len(name) <= MOST_CHARACTERS else f"{name[:half]}...{name[-half:]}"


def _held(field: str, value: float) -> float:
    """The nearest figure that a file of nodes may hold."""
    if field == "cores":
        return int(min(max(value, 1), MOST_CORES))
    return min(max(round(value, 2 if value >= 1 else 3), LEAST), MOST - 0.01)


def _toml(value: str | float) -> str:
    """A value in TOML, whose basic strings JSON's are."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
