"""What a change of hardware, format or option would give.

Called by ``duckllm plan``. Each change is predicted like the flock itself
(:mod:`duckllm.forecast.step`), with slices shared out anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from duckllm.forecast.coefficients import ON_CARD, Coefficients
from duckllm.forecast.flock import Card, Flock
from duckllm.forecast.load import ModelLoad
from duckllm.forecast.step import Prediction, Setting, is_away, predict

_LINKS_GBIT_PER_S = (1.0, 2.5, 10.0, 25.0, 100.0)
# Stripes of each node, or None where its memory does not do.
Place = Callable[[Flock, str], Sequence[int] | None]


@dataclass(frozen=True)
class WhatIf:
    """A change.

    Args:
        change: In words.
        prediction: What it gives; None where the nodes' memory does not hold it.
        times: Tokens a second over those without it.
    """

    change: str
    prediction: Prediction | None
    times: float | None


def what_ifs(
    load: ModelLoad,
    flock: Flock,
    coefficients: Coefficients,
    base: Prediction,
    place: Place,
    on_card: tuple[Card, ModelLoad] | None = None,
) -> tuple[WhatIf, ...]:
    """Every change that makes a difference to this flock, in a fixed order.

    Args:
        load: The model.
        flock: The hardware.
        coefficients: The software.
        base: What it is held against.
        place: Shares slices out.
        on_card: A card that would hold the host's part, which a CPU computes, and the model's load there.
    """
    setting = base.setting
    changes: list[tuple[str, Flock, Setting]] = []
    changes.append(("one more node", flock.with_nodes((*flock.nodes, flock.nodes[-1])), setting))
    double = flock.with_nodes(tuple(each for each in flock.nodes for _ in range(2)))
    changes.append(("twice the nodes", double, setting))
    changes += _links(flock, setting)
    others = {"fp9": ("fp8", "int4"), "fp8": ("fp9", "int4")}.get(setting.weight_format, ("fp8",))
    for other in others:
        changes.append((f"experts in {other}", flock, replace(setting, weight_format=other)))
    has_wire = any(is_away(flock, node) for node in flock.nodes)
    if setting.x_bytes == 4 and has_wire:
        changes.append(("bf16 on the wire, both ways", flock, replace(setting, x_bytes=2, reply_bytes=2)))
    if not setting.multicast and len(flock.nodes) > 1 and has_wire:
        changes.append(("requests by multicast", flock, replace(setting, multicast=True)))
    changes += _host(flock, setting)
    nodes = tuple(replace(each, read_gb_per_s=1.25 * each.read_gb_per_s) for each in flock.nodes)
    changes.append(("nodes that read a quarter faster", flock.with_nodes(nodes), setting))
    words = "without lanes" if setting.lanes else "with lanes"
    if setting.rows > 1:
        changes.append((words, flock, replace(setting, lanes=not setting.lanes)))
    if setting.drafts:
        changes.append(("without guesses", flock, replace(setting, drafts=0)))
    found = []
    for words, changed, asked in changes:
        stripes = place(changed, asked.weight_format)
        if stripes is None:
            found.append(WhatIf(words, None, None))
            continue
        made = predict(load, changed, stripes, coefficients, asked)
        found.append(WhatIf(words, made, made.tokens_per_s / base.tokens_per_s))
    if on_card is not None:
        card, its_load = on_card
        stripes = place(flock, setting.weight_format)
        if stripes is not None:
            made = predict(its_load, replace(flock, card=card), stripes, ON_CARD, setting)
            words = f"a card in the host: {card.name}"
            found.append(WhatIf(words, made, made.tokens_per_s / base.tokens_per_s))
    return tuple(found)


def _links(flock: Flock, setting: Setting) -> list[tuple[str, Flock, Setting]]:
    """Faster ports: every node's that is slowest, and the host's."""
    found = []
    elsewhere = [each for each in flock.nodes if is_away(flock, each)]
    if not elsewhere:
        return []
    slowest = min(each.link_gbit_per_s for each in elsewhere)
    faster = _next_link(slowest)
    if faster is not None:
        nodes = tuple(
            replace(each, link_gbit_per_s=max(faster, each.link_gbit_per_s)) for each in flock.nodes
        )
        found.append((f"nodes' links of {faster:g} Gbit/s", flock.with_nodes(nodes), setting))
    faster = _next_link(flock.host.link_gbit_per_s)
    if faster is not None:
        host = replace(flock.host, link_gbit_per_s=faster)
        found.append((f"host's link of {faster:g} Gbit/s", replace(flock, host=host), setting))
    return found


def _host(flock: Flock, setting: Setting) -> list[tuple[str, Flock, Setting]]:
    card = flock.card
    if card is None:
        host = replace(flock.host, read_gb_per_s=1.5 * flock.host.read_gb_per_s)
        return [("a host that reads 1.5 times as fast", replace(flock, host=host), setting)]
    faster = Card(card.name, card.vram_gib, 1.5 * card.gb_per_s)
    return [("a card that reads 1.5 times as fast", replace(flock, card=faster), setting)]


def _next_link(gbit_per_s: float) -> float | None:
    return next((each for each in _LINKS_GBIT_PER_S if each > gbit_per_s), None)
