"""Kernels as points under the roofline: how much arithmetic they do with each byte, and how fast.

Called by roofline.py. A benchmark of kernels places its own by making :class:`Point` values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from duckllm.bench.ceilings import Ceiling, Spread, read_ceiling
from duckllm.bench.expert_step import ExpertStep, RandomExperts, SliceShape


@dataclass(frozen=True)
class Point:
    """A named point in a roofline plot.

    Args:
        name: What was run.
        flop_per_byte: Arithmetic intensity: floating-point operations for each byte read from memory.
        gflop_per_s: Speed, 10^9 floating-point operations a second.
    """

    name: str
    flop_per_byte: float
    gflop_per_s: float

    @property
    def gb_per_s(self) -> float:
        """The bytes read at that speed, 10^9 a second."""
        return self.gflop_per_s / self.flop_per_byte


@dataclass(frozen=True)
class Placed:
    """A kernel below the ceiling that was measured in turns with it.

    Args:
        point: By the median of its samples.
        fastest: By the fastest of them: where something else uses the machine, this says more.
        read: The cold read ceiling, GB/s.
    """

    point: Point
    fastest: Point
    read: Spread

    @property
    def of_ceiling(self) -> float:
        """The share of the read ceiling that the kernel's reading reaches, by the medians."""
        return self.point.gb_per_s / self.read.median

    @property
    def fastest_of_ceiling(self) -> float:
        """The same by the fastest sample of each."""
        return self.fastest.gb_per_s / self.read.most


DEEPSEEK_CUT_32_WAYS = SliceShape("DeepSeek-V3.2 cut 32 ways", hidden_size=7168, num_stripes=4)


def placed_step(step: ExpertStep, shape: SliceShape, ceiling: Ceiling) -> Placed:
    """What was sampled of a step, below the ceiling that was measured in turns with it."""
    return Placed(
        point=_point(step, shape, median(step.seconds)),
        fastest=_point(step, shape, min(step.seconds)),
        read=ceiling.rate,
    )


def _point(step: ExpertStep, shape: SliceShape, seconds: float) -> Point:
    flop = 2 * shape.expert_weights * step.top_k * step.num_tokens
    rows = "1 row" if step.num_tokens == 1 else f"{step.num_tokens} rows"
    return Point(
        name=f"expert step, {shape.name}, {rows}, {step.experts.isa}",
        flop_per_byte=flop / (step.top_k * shape.expert_bytes()),
        gflop_per_s=flop / seconds / 1e9,
    )


def expert_points(
    threads: int,
    *,
    size_bytes: int,
    isa: str,
    huge_pages: bool,
    repeats: int,
    num_tokens: Sequence[int] = (1, 8),
    shape: SliceShape = DEEPSEEK_CUT_32_WAYS,
) -> list[Placed]:
    """The expert step at one slice for several numbers of rows, each with the read ceiling of its own run."""
    random = RandomExperts(shape)
    num_experts = max(shape.top_k, -(-size_bytes // shape.expert_bytes()))
    units = random.fill(num_experts, "fp9", huge_pages)
    points = []
    for tokens in num_tokens:
        step = ExpertStep(random, units, num_tokens=tokens, top_k=shape.top_k, threads=threads, isa=isa)
        step.verify()
        ceiling = read_ceiling(
            threads,
            size_bytes=size_bytes,
            isa=isa,
            huge_pages=huge_pages,
            repeats=repeats,
            between=step.sample,
        )
        points.append(placed_step(step, shape, ceiling))
    return points
