"""The forecast of a flock as a table for people and as plain values.

Called by ``duckllm plan``; puts :mod:`duckllm.forecast.step` and :mod:`duckllm.forecast.what_if` together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from duckllm.errors import ConfigError
from duckllm.forecast.coefficients import Coefficients
from duckllm.forecast.flock import GIB, Card, Computer, Flock
from duckllm.forecast.load import ModelLoad
from duckllm.forecast.step import PARTS, Prediction, Setting, predict
from duckllm.forecast.what_if import WhatIf, what_ifs
from duckllm.moe.fit import ExpertSizes, Node, place_slices

BATCHES = (1, 2, 8)
# Of a node's memory, what its system keeps.
_SYSTEM_BYTES = GIB


@dataclass(frozen=True)
class Forecast:
    """What a flock would do.

    Args:
        coefficients: The software.
        rows: Tokens a second by way of computing, each for every batch.
        base: The fastest way of answering the first batch, of which parts and changes are told.
        changes: What would change it.
    """

    coefficients: Coefficients
    rows: tuple[tuple[str, tuple[Prediction, ...]], ...]
    base: Prediction
    changes: tuple[WhatIf, ...]

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "software": self.coefficients.name,
            "sources": dict(self.coefficients.sources),
            "coefficients": {
                name: value
                for name, value in asdict(self.coefficients).items()
                if name not in ("name", "sources")
            },
            "predictions": [
                {
                    "way": way,
                    **asdict(each.setting),
                    "step_us": each.step_us,
                    "tokens_per_s": each.tokens_per_s,
                }
                for way, predictions in self.rows
                for each in predictions
            ],
            "base": {
                **asdict(self.base.setting),
                "parts_us": dict(self.base.parts_us),
                "step_us": self.base.step_us,
                "tokens_per_s": self.base.tokens_per_s,
                "bottleneck": self.base.bottleneck,
            },
            "what_if": [
                {
                    "change": each.change,
                    "tokens_per_s": each.prediction and each.prediction.tokens_per_s,
                    "times": each.times,
                }
                for each in self.changes
            ],
        }


def nodes_for(flock: Flock) -> tuple[Node, ...]:
    """The flock's nodes as slices are shared out among them.

    Each has the memory that the file says; those of one machine read no more together than it does.
    """

    def gb_per_s(node: Computer) -> float:
        machine = flock.machines.get(node.machine)
        if machine is None:
            return node.read_gb_per_s
        together = sum(each.read_gb_per_s for each in flock.nodes if each.machine == node.machine)
        return node.read_gb_per_s / max(1.0, together / machine.read_gb_per_s)

    return tuple(
        Node(
            node.name,
            max(1, int(node.memory_gib * GIB) - _SYSTEM_BYTES),
            gb_per_s(node),
            node.isa,
            node.round_trip_us,
        )
        for node in flock.nodes
    )


def forecast(
    load: ModelLoad,
    flock: Flock,
    sizes: ExpertSizes,
    coefficients: Coefficients,
    setting: Setting,
    *,
    batches: Sequence[int] = BATCHES,
    shares: str | Sequence[float] = "auto",
    on_card: tuple[Card, ModelLoad] | None = None,
) -> Forecast:
    """What the flock would do with this model.

    Args:
        load: The model.
        flock: The hardware.
        sizes: The experts as they are shared out.
        coefficients: The software.
        setting: What is asked, for one request; with guesses where they are to be counted.
        batches: Requests together.
        shares: How slices are shared out, as in :class:`duckllm.config.ClusterConfig`.
        on_card: A card that would hold the part of a host that has none, and the model's load there.

    Raises:
        ConfigError: Slices cannot be shared out so.
    """

    def place(changed: Flock, weight_format: str) -> Sequence[int] | None:
        own = sizes.in_format(weight_format)
        # Given shares are one for each node, of which a change may have more.
        asked = shares if len(changed.nodes) == len(flock.nodes) else "auto"
        nodes = nodes_for(changed)
        try:
            slices = place_slices(own, nodes, asked)
        except ConfigError:
            return None
        stripes = [part.num_stripes for part in slices]
        room = [own.most_stripes(node.have_bytes) for node in nodes]
        return stripes if all(map(int.__le__, stripes, room)) else None

    slices = place_slices(sizes, nodes_for(flock), shares)
    stripes = [part.num_stripes for part in slices]
    rows = []
    for way, asked in _ways(setting):
        made = (predict(load, flock, stripes, coefficients, replace(asked, batch=each)) for each in batches)
        rows.append((way, tuple(made)))
    base = max((predictions[0] for _, predictions in rows), key=lambda each: each.tokens_per_s)
    changes = what_ifs(load, flock, coefficients, base, place, on_card)
    return Forecast(coefficients, tuple(rows), base, changes)


def _ways(setting: Setting) -> list[tuple[str, Setting]]:
    plain = replace(setting, drafts=0, lanes=False)
    ways = [("plain", plain), ("lanes", replace(plain, lanes=True))]
    if setting.drafts:
        guessing = replace(setting, lanes=False)
        ways += [("guesses", guessing), ("guesses, lanes", replace(guessing, lanes=True))]
    return ways


def describe_forecast(made: Forecast) -> str:
    """The forecast for people."""
    setting = made.base.setting
    width = max(len(change.change) for change in made.changes) + 2
    batches = [each.setting.batch for each in made.rows[0][1]]
    lines = [
        f"predicted tokens a second, all requests together, contexts of {setting.context} tokens, experts in "
        f"{setting.weight_format} ({made.coefficients.name})",
        f"{'requests':<{width}}" + "".join(f"{batch:>9}" for batch in batches),
    ]
    for way, predictions in made.rows:
        lines.append(f"{way:<{width}}" + "".join(f"{each.tokens_per_s:>9.1f}" for each in predictions))
    lines.append("lanes: the host computes one half of a step while the nodes compute the other; a run takes")
    lines.append("what it measures to be faster")
    lines += ["", f"a step of {_words(made)}", f"{'part':<{width}}{'ms':>9}{'share':>9}"]
    for name in PARTS:
        part_us = made.base.parts_us[name]
        if abs(part_us) >= 0.5:
            lines.append(f"{name:<{width}}{part_us / 1e3:>9.2f}{100 * part_us / made.base.step_us:>7.0f} %")
    lines += [
        f"{'together':<{width}}{made.base.step_us / 1e3:>9.2f}",
        f"the bottleneck: {made.base.bottleneck} (docs/planning.md says what each part is)",
        "",
        f"{'what if':<{width}}{'tok/s':>9}{'times':>9}",
    ]
    for each in made.changes:
        if each.prediction is None or each.times is None:
            lines.append(f"{each.change:<{width}}  does not fit")
        else:
            lines.append(f"{each.change:<{width}}{each.prediction.tokens_per_s:>9.1f}{each.times:>9.2f}")
    return "\n".join(lines)


def _words(made: Forecast) -> str:
    setting = made.base.setting
    words = [f"{setting.batch} {'request' if setting.batch == 1 else 'requests'}"]
    if setting.drafts:
        words.append(f"{setting.drafts} guessed ahead, {100 * setting.acceptance:g} % right")
    if setting.lanes and setting.rows > 1:
        words.append("in lanes")
    return ", ".join(words)


def describe_presets() -> str:
    """The computers and cards that a file of nodes may name, with the source of each figure."""
    from duckllm.forecast.presets import CARDS, COMPUTERS

    lines = []
    for name, each in COMPUTERS.items():
        lines.append(f"{name}: {each.title}" + (f"; not supported: {each.refused}" if each.refused else ""))
        lines.append(f"    {each.cores} cores, {each.isa}")
        units = {"read_gb_per_s": "GB/s read", "gflop_per_s": "GFLOP/s", "memory_gib": "GiB of memory"}
        for field, unit in {**units, "link_gbit_per_s": "Gbit/s link"}.items():
            lines.append(f"    {getattr(each, field):g} {unit}: {each.sources[field]}")
    for name, card in CARDS.items():
        lines.append(f"{name}: {card.vram_gib:g} GiB of VRAM, {card.gb_per_s:g} GB/s: {card.source}")
    return "\n".join(lines)
