"""Rates of a whole model in two engines, and what a token's bytes allow. Called by whole_model.py; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from duckllm.weights.formats import layout_in, num_stripes, unit_bytes

Q8_0_BYTES = 34 / 32  # of a weight, with its block's scale
FP8_BYTES = 1 + 4 / 128**2


@dataclass(frozen=True)
class Bytes:
    """Bytes of weights that one token reads; the embedding, of which it reads a row, is not counted.

    Args:
        ours: Experts in our format, the host's matrices in FP8, head and routers in BF16.
        theirs: All in Q8_0, routers in float32.
    """

    ours: int
    theirs: int

    @classmethod
    def of(cls, config: Mapping[str, Any], weight_format: str = "fp8") -> Bytes:
        """Of a Qwen3-MoE model whose experts we have in ``weight_format``."""
        hidden, layers, chosen = (
            config[name] for name in ("hidden_size", "num_hidden_layers", "num_experts_per_tok")
        )
        width, heads = config["moe_intermediate_size"], config["num_attention_heads"]
        attention = 2 * hidden * config["head_dim"] * (heads + config["num_key_value_heads"])
        head, router = config["vocab_size"] * hidden, config["num_experts"] * hidden
        layout = layout_in(weight_format, "block")
        our_expert = num_stripes(width) * unit_bytes(hidden, weight_format, layout)
        ours = layers * (chosen * our_expert + FP8_BYTES * attention + 2 * router) + 2 * head
        theirs = layers * (Q8_0_BYTES * (3 * chosen * hidden * width + attention) + 4 * router)
        return cls(round(ours), round(theirs + Q8_0_BYTES * head))


@dataclass
class Setting:
    """One kind of work in one arrangement, measured in turns.

    Args:
        name: The arrangement.
        at_workers: Whether it is one of workers and RPC servers, of one thread each.
        what: ``"decode"`` or ``"prefill"``.
        description: The peer's own.
        our_error: Largest error of our log probabilities.
        their_error: Of the peer's logits, in the L2 norm over the exact ones.
        ours: Seconds for a token in each round.
        theirs: Likewise.
    """

    name: str
    at_workers: bool
    what: str
    description: str
    our_error: float
    their_error: float
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Our speed over the peer's by medians."""
        return median(self.theirs) / median(self.ours)

    @property
    def fastest_ratio(self) -> float:
        """The same by the fastest rounds of each."""
        return min(self.theirs) / min(self.ours)


@dataclass(frozen=True)
class Allowed:
    """What reading the weights of a token allows in decode, tokens per second.

    Args:
        ours: With all threads.
        theirs: With as many threads as compute at a time.
    """

    ours: float
    theirs: float

    @classmethod
    def of(cls, size: Bytes, our_gb_per_s: float, their_gb_per_s: float) -> Allowed:
        """By the rates of reading."""
        return cls(our_gb_per_s * 1e9 / size.ours, their_gb_per_s * 1e9 / size.theirs)


def line_of(setting: Setting, allowed: Allowed) -> dict[str, object]:
    """For programs."""
    rates = {"ours": setting.ours, "theirs": setting.theirs}
    line: dict[str, object] = {"name": setting.name, "what": setting.what, "peer": setting.description}
    line |= {
        "our_error": float(f"{setting.our_error:.2e}"),
        "their_error": float(f"{setting.their_error:.2e}"),
    }
    for who, seconds in rates.items():
        line[who] = {
            "tokens_per_s": round(1 / median(seconds), 2),
            "slowest_tokens_per_s": round(1 / max(seconds), 2),
            "fastest_tokens_per_s": round(1 / min(seconds), 2),
        }
        if setting.what == "decode":
            ceiling = getattr(allowed, who)
            line[who] |= {  # type: ignore[operator]
                "allowed_tokens_per_s": round(ceiling, 1),
                "of_ceiling": round(1 / median(seconds) / ceiling, 3),
            }
    return {
        **line,
        "ours_over_theirs": round(setting.ratio, 3),
        "fastest_ours_over_theirs": round(setting.fastest_ratio, 3),
    }


def table(settings: Iterable[Setting], allowed: Sequence[Allowed]) -> list[str]:
    """Lines: a setting each, in tokens per second."""
    lines = [
        "tok/s by medians (fastest round), of the ceiling that reading sets to decode",
        f"{'':24s} {'':8s} {'ours':>20s} {'llama.cpp Q8_0':>22s}   ours/theirs (fastest)",
    ]
    for setting, ceiling in zip(settings, allowed, strict=True):
        cells = []
        for who, seconds in (("ours", setting.ours), ("theirs", setting.theirs)):
            cell = f"{1 / median(seconds):7.1f} ({1 / min(seconds):6.1f})"
            if setting.what == "decode":
                cell += f" {1 / median(seconds) / getattr(ceiling, who):4.0%}"
            cells.append(f"{cell:21s}")
        ratios = f"{setting.ratio:6.2f} ({setting.fastest_ratio:.2f})"
        lines.append(f"{setting.name:24s} {setting.what:8s} {cells[0]} {cells[1]} {ratios}")
    for setting in settings:
        if setting.what == "decode":
            lines.append(
                f"{setting.name}: verified, our log probabilities to {setting.our_error:.1e}; "
                f"{setting.description}, logits to {setting.their_error:.1e}"
            )
    return lines
