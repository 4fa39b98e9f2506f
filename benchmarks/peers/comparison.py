"""One peer's steps beside ours, their rates and ratios, and tables of them. Called by experts.py; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

EIGHT_BIT_FORMATS = ("FP8", "Q8_0", "INT8")
FOUR_BIT_FORMATS = ("RAWINT4", "Q4_0", "Q4_K")
DECODE_HEADER = (
    f"{'peer':28s} {'format':6s} thr  Gparam/s (best)   GB/s  of ceiling  ours/theirs (best)  ours"
)
PREFILL_HEADER = f"{'peer':28s} {'format':6s} thr  rows  GFLOP/s (best)  ours/theirs (best)  ours"


@dataclass(frozen=True)
class Way:
    """One way to run one peer.

    Args:
        peer: ``"kt-kernel"`` or ``"llama.cpp"``.
        weight_format: Its format of weights.
        threads: Compute threads, ours and theirs.
    """

    peer: str
    weight_format: str
    threads: int


@dataclass(frozen=True)
class Refusal:
    """A way that gave no numbers, and why."""

    way: Way
    reason: str

    def line(self) -> str:
        """For the table."""
        start = f"{self.way.peer:28s} {self.way.weight_format:6s} {self.way.threads:3d}"
        return f"{start}  does not run: {self.reason}"

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return {**vars(self.way), "refused": self.reason}


@dataclass(frozen=True)
class Comparison:
    """A peer's steps of one number of rows, and ours that were measured in turns with them.

    Args:
        way: What ran.
        description: The peer's own name for it, with the variant that it chose.
        rows: T.
        error: Of the peer's output against float64 of its own weights, relative in the L2 norm.
        weights_per_row: Weights that a row meets: K * 3 * H * I.
        bits: Bits for a weight of the peer's format.
        seconds: Of the peer's steps.
        ours: Seconds of our steps by format.
        read_gb_per_s: The read ceiling of as many threads, in the same turns.
    """

    way: Way
    description: str
    rows: int
    error: float
    weights_per_row: int
    bits: float
    seconds: Sequence[float]
    ours: dict[str, Sequence[float]]
    read_gb_per_s: float

    def gparam_per_s(self, seconds: float) -> float:
        """10^9 weights met per second in a step of so long."""
        return self.rows * self.weights_per_row / seconds / 1e9

    @property
    def gb_per_s(self) -> float:
        """What one row's weights are in the peer's format, at its median."""
        return self.gparam_per_s(median(self.seconds)) * self.bits / 8

    @property
    def of_ceiling(self) -> float:
        """That over the read ceiling."""
        return self.gb_per_s / self.read_gb_per_s

    @property
    def ratio(self) -> float:
        """Our speed over the peer's by medians, in our faster format."""
        return median(self.seconds) / min(median(times) for times in self.ours.values())

    @property
    def fastest_ratio(self) -> float:
        """The same by the fastest samples of each."""
        return min(self.seconds) / min(min(times) for times in self.ours.values())

    def line(self) -> str:
        """For the table: weights per second with one row, arithmetic with several."""
        scale = 1 if self.rows == 1 else 2
        rate, best = (scale * self.gparam_per_s(each) for each in (median(self.seconds), min(self.seconds)))
        ours = ", ".join(
            f"{name} {scale * self.gparam_per_s(median(times)):.1f}" for name, times in self.ours.items()
        )
        start = f"{self.description:28s} {self.way.weight_format:6s} {self.way.threads:3d}"
        if self.rows == 1:
            middle = f"  {rate:7.1f} ({best:5.1f}) {self.gb_per_s:7.1f} {self.of_ceiling:10.0%}  "
        else:
            middle = f" {self.rows:5d}  {rate:6.1f} ({best:5.1f})  "
        return f"{start}{middle}{self.ratio:11.2f} ({self.fastest_ratio:.2f})  {ours}"

    def as_json(self) -> dict[str, object]:
        """For programs."""
        seconds, fastest = median(self.seconds), min(self.seconds)
        rates: dict[str, object] = {
            "gparam_per_s": round(self.gparam_per_s(seconds), 3),
            "fastest_gparam_per_s": round(self.gparam_per_s(fastest), 3),
        }
        if self.rows == 1:
            rates |= {"gb_per_s": round(self.gb_per_s, 3), "of_ceiling": round(self.of_ceiling, 4)}
        else:
            rates |= {"gflop_per_s": round(2 * self.gparam_per_s(seconds), 2)}
        ours = {
            name: {
                "gparam_per_s": round(self.gparam_per_s(median(times)), 3),
                "fastest_gparam_per_s": round(self.gparam_per_s(min(times)), 3),
            }
            for name, times in self.ours.items()
        }
        return {
            **vars(self.way),
            "description": self.description,
            "rows": self.rows,
            "error": float(f"{self.error:.2e}"),
            "samples": len(self.seconds),
            **rates,
            "ours": ours,
            "read_gb_per_s": round(self.read_gb_per_s, 2),
            "ours_over_theirs": round(self.ratio, 3),
            "fastest_ours_over_theirs": round(self.fastest_ratio, 3),
        }


def table(outcomes: Iterable[Comparison | Refusal]) -> list[str]:
    """Lines: one row first, then several, then what did not run."""
    outcomes = list(outcomes)
    compared = [each for each in outcomes if isinstance(each, Comparison)]
    lines = []
    decode = [each for each in compared if each.rows == 1]
    prefill = [each for each in compared if each.rows > 1]
    if decode:
        lines += [DECODE_HEADER, *(each.line() for each in decode)]
    if prefill:
        lines += [PREFILL_HEADER, *(each.line() for each in prefill)]
    return lines + [each.line() for each in outcomes if isinstance(each, Refusal)]


def summary(outcomes: Iterable[Comparison | Refusal]) -> dict[str, dict[str, object]]:
    """The nearest rivals: the fastest 8-bit and 4-bit paths with one row, the fastest of all with several.

    ``same_threads`` is the least of our speed over a peer's with as many compute threads; ``same_machine`` is
    ours with the most threads over the peer's fastest with any, for one whose helper thread takes a core.
    """
    compared = [each for each in outcomes if isinstance(each, Comparison)]
    rivals = {
        "decode_8_bit": [e for e in compared if e.rows == 1 and e.way.weight_format in EIGHT_BIT_FORMATS],
        "decode_4_bit": [e for e in compared if e.rows == 1 and e.way.weight_format in FOUR_BIT_FORMATS],
        **{
            f"prefill_{rows}": [each for each in compared if each.rows == rows]
            for rows in sorted({each.rows for each in compared} - {1})
        },
    }
    found = {}
    for name, group in rivals.items():
        if not group:
            continue
        least = min(group, key=lambda each: each.ratio)
        most_threads = max(each.way.threads for each in group)
        ours = max(
            each.gparam_per_s(min(median(times) for times in each.ours.values()))
            for each in group
            if each.way.threads == most_threads
        )
        fastest = max(group, key=lambda each: each.gparam_per_s(median(each.seconds)))
        found[name] = {
            "same_threads": {**vars(least.way), "ours_over_theirs": round(least.ratio, 3)},
            "same_machine": {
                **vars(fastest.way),
                "ours_over_theirs": round(ours / fastest.gparam_per_s(median(fastest.seconds)), 3),
            },
        }
    return found
