"""Kernels as points under the roofline: how much arithmetic they do with each byte, and how fast.

Called by roofline.py. A benchmark of kernels places its own by making :class:`Point` values.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from duckllm import _native
from duckllm.bench.ceilings import Ceiling, Spread, read_ceiling
from duckllm.bench.memory import U8, new_memory
from duckllm.weights.e4m3 import dequantise
from duckllm.weights.units import unpack_expert_units

# How long the kernel's idle threads spin: longer than Python takes from one step to the next.
SPIN_US = 1000
# Steps timed in a row, after one that wakes the threads.
STEPS_PER_SAMPLE = 5
# Different experts; the memory is filled with copies of them, which a cache cannot know.
DISTINCT_EXPERTS = 8
# Largest error of a kernel over its largest output; an f32 sum of 7168 terms is far below it.
TOLERANCE = 1e-4


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


@dataclass(frozen=True)
class SliceShape:
    """One worker's slice of a layer's experts, and how many of them a token chooses."""

    name: str
    hidden_size: int
    num_stripes: int
    top_k: int

    @property
    def channels(self) -> int:
        """Intermediate channels of the slice."""
        return self.num_stripes * 16

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's slice."""
        return self.num_stripes * _native.unit_bytes(self.hidden_size)

    def flop(self, num_tokens: int) -> int:
        """Operations of a step: three matrices, a multiplication and an addition for each weight."""
        return 6 * self.hidden_size * self.channels * self.top_k * num_tokens


DEEPSEEK_CUT_32_WAYS = SliceShape("DeepSeek-V3.2 cut 32 ways", hidden_size=7168, num_stripes=4, top_k=8)


def random_expert(shape: SliceShape, seed: int) -> U8:
    """Units of one expert with random e4m3 weights and scales, [S, unit_bytes(H)]."""
    rng = np.random.default_rng(seed)
    hidden_blocks, channel_blocks = -(-shape.hidden_size // 128), -(-shape.channels // 128)

    def codes(*size: int) -> U8:
        values = rng.integers(0, 254, size, dtype=np.uint8)
        return np.where(values >= 0x7F, values + 1, values).astype(np.uint8)  # 0x7f and 0xff are NaN

    def scales(*size: int) -> npt.NDArray[np.float32]:
        return (rng.uniform(0.5, 2.0, size) * 2.0**-9).astype(np.float32)

    return _native.pack_expert_units(
        gate=codes(shape.channels, shape.hidden_size),
        up=codes(shape.channels, shape.hidden_size),
        down=codes(shape.hidden_size, shape.channels),
        gate_scale=scales(channel_blocks, hidden_blocks),
        up_scale=scales(channel_blocks, hidden_blocks),
        down_scale=scales(hidden_blocks, channel_blocks),
    )


class ExpertStep:
    """One expert step after another, on experts that are in no cache.

    Args:
        shape: The slice.
        num_tokens: Rows of a step; all of them choose the same experts, so that the bytes of a step do not
            depend on their number.
        units: [E, S, unit_bytes(H)], several times the last-level cache.
        threads: Compute threads.
        isa: Instruction set, or ``"auto"``.
    """

    def __init__(self, shape: SliceShape, num_tokens: int, units: U8, threads: int, isa: str) -> None:
        self._shape, self._units = shape, units
        self._experts = _native.Experts(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.channels,
            num_experts=len(units),
            top_k=shape.top_k,
            first_stripe=0,
            num_stripes=shape.num_stripes,
            max_tokens=num_tokens,
            num_threads=threads,
            spin_us=SPIN_US,
            isa=isa,
        )
        rng = np.random.default_rng(num_tokens)
        self._x = rng.standard_normal((num_tokens, shape.hidden_size)).astype(np.float32)
        self._weights = rng.uniform(0.1, 1.0, (num_tokens, shape.top_k)).astype(np.float32)
        self._y = np.empty_like(self._x)
        self._next = 0
        self.seconds: list[float] = []

    def _step(self) -> npt.NDArray[np.int32]:
        """Computes with the next experts; which they were."""
        num_tokens, top_k = self._weights.shape
        chosen = np.arange(self._next, self._next + top_k, dtype=np.int32) % len(self._units)
        self._next = (self._next + top_k) % len(self._units)
        ids = np.tile(chosen, (num_tokens, 1))
        self._experts.run(self._units, self._x, ids, self._weights, out=self._y)
        return chosen

    def verify(self) -> None:
        """Compares a step with float64.

        Raises:
            RuntimeError: It is further off than rounding can be.
        """
        chosen = self._step()
        x, weights = self._x.astype(np.float64), self._weights.astype(np.float64)
        exact = np.zeros_like(x)
        for k, expert in enumerate(chosen):
            codes = unpack_expert_units(
                self._units[expert], self._shape.channels, self._shape.hidden_size, "fp9"
            )
            gate = dequantise(codes.gate, codes.gate_scales).astype(np.float64)
            up = dequantise(codes.up, codes.up_scales).astype(np.float64)
            down = dequantise(codes.down, codes.down_scales).astype(np.float64)
            g = x @ gate.T
            with np.errstate(over="ignore"):  # exp of a large -g is infinite, and silu rightly zero
                activations = g / (1 + np.exp(-g)) * (x @ up.T)
            exact += weights[:, k : k + 1] * (activations @ down.T)
        error = float(abs(self._y - exact).max() / abs(exact).max())
        if not error <= TOLERANCE:
            raise RuntimeError(f"the expert step is {error:.1e} of its largest output off: nothing measured")

    def sample(self) -> None:
        """Times a few steps; an untimed one before them wakes the threads."""
        self._step()
        for _ in range(STEPS_PER_SAMPLE):
            start = time.perf_counter()
            self._step()
            self.seconds.append(time.perf_counter() - start)
        time.sleep(2e-6 * SPIN_US)  # the threads go to sleep, and the cores are free for what is next

    def placed(self, ceiling: Ceiling) -> Placed:
        """What was sampled, below the ceiling that was measured in turns with it."""
        return Placed(self._point(median(self.seconds)), self._point(min(self.seconds)), ceiling.rate)

    def _point(self, seconds: float) -> Point:
        num_tokens = len(self._x)
        flop = self._shape.flop(num_tokens)
        num_bytes = self._shape.top_k * self._shape.expert_bytes
        rows = "1 row" if num_tokens == 1 else f"{num_tokens} rows"
        return Point(
            name=f"expert step, {self._shape.name}, {rows}, {self._experts.isa}",
            flop_per_byte=flop / num_bytes,
            gflop_per_s=flop / seconds / 1e9,
        )


def new_units(shape: SliceShape, size_bytes: int, huge_pages: bool) -> U8:
    """Experts that fill ``size_bytes``, at least as many as a token chooses: [E, S, unit_bytes(H)]."""
    num_experts = max(shape.top_k, -(-size_bytes // shape.expert_bytes))
    units = new_memory(num_experts * shape.expert_bytes, huge_pages).reshape(
        num_experts, shape.num_stripes, -1
    )
    distinct = [random_expert(shape, seed) for seed in range(min(DISTINCT_EXPERTS, num_experts))]
    for expert in range(num_experts):
        units[expert] = distinct[expert % len(distinct)]
    return units


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
    units = new_units(shape, size_bytes, huge_pages)
    points = []
    for tokens in num_tokens:
        step = ExpertStep(shape, tokens, units, threads, isa)
        step.verify()
        ceiling = read_ceiling(
            threads,
            size_bytes=size_bytes,
            isa=isa,
            huge_pages=huge_pages,
            repeats=repeats,
            between=step.sample,
        )
        points.append(step.placed(ceiling))
    return points
