"""One expert step after another on random experts: made, verified against float64, timed.

Called by points.py (two points under the roofline) and kernel.py (the grid of ``duckllm bench kernel``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from duckllm import _native
from duckllm.bench.integer_experts import random_integer_expert
from duckllm.bench.memory import U8, new_memory
from duckllm.config import LOSSLESS_FORMATS
from duckllm.weights.e4m3 import dequantise
from duckllm.weights.units import ExpertWeights

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]

# How long the kernel's idle threads spin between a call's steps; after the call they sleep soon.
SPIN_US = 200
# Different experts; the memory is filled with copies of them, which a cache cannot know.
DISTINCT_EXPERTS, DISTINCT_LARGE_EXPERTS = 8, 4
LARGE_EXPERT_WEIGHTS = 16 << 20
# Largest error of a kernel over its largest output; an f32 sum of 7168 terms is far below it.
TOLERANCE = 1e-4
BF16_TOLERANCE = 1e-2
INTEGER_TOLERANCE = 4e-2  # x and activations rounded to bytes
# A sample is made of steps until it is as long as this, of MOST_STEPS at most.
SAMPLE_S = 2e-3
MOST_STEPS = 5
# Rows of a step that are compared with float64, of those that it has.
VERIFIED_ROWS = (*range(17), 31, 63, 64, 100, 127, 255, 256, 400, 511)


@dataclass(frozen=True)
class SliceShape:
    """One worker's slice of a layer's experts.

    Args:
        name: For people.
        hidden_size: H.
        num_stripes: S, 16 channels each.
        top_k: Experts that a token of this model chooses.
        num_experts: Experts of a layer.
    """

    name: str
    hidden_size: int
    num_stripes: int
    top_k: int = 8
    num_experts: int = 256

    @property
    def channels(self) -> int:
        """Intermediate channels of the slice."""
        return self.num_stripes * 16

    @property
    def expert_weights(self) -> int:
        """Weights of one expert's slice: gate, up and down."""
        return 3 * self.hidden_size * self.channels

    def expert_bytes(self, weight_format: str = "fp9") -> int:
        """Bytes of one expert's slice."""
        return self.num_stripes * _native.unit_bytes(self.hidden_size, weight_format)


class RandomExperts:
    """A few experts of random weights, e4m3 or the codes of a format, and what float64 says they compute.

    Every code but NaN occurs. The reference is computed from the codes, not from packed units.

    Args:
        shape: The slice.
    """

    def __init__(self, shape: SliceShape) -> None:
        self.shape = shape
        large = shape.expert_weights > LARGE_EXPERT_WEIGHTS
        self._codes = [
            _random_codes(shape, seed)
            for seed in range(DISTINCT_LARGE_EXPERTS if large else DISTINCT_EXPERTS)
        ]
        self._exact: dict[tuple[int, bool | str], F64] = {}

    def __len__(self) -> int:
        return len(self._codes)

    def fill(self, num_experts: int, weight_format: str, huge_pages: bool) -> U8:
        """Units of ``num_experts`` experts, copies of the few in turn: [E, S, unit_bytes(H, format)]."""
        units = new_memory(num_experts * self.shape.expert_bytes(weight_format), huge_pages).reshape(
            num_experts, self.shape.num_stripes, -1
        )
        packed = [self._pack(number, weight_format) for number in range(min(num_experts, len(self)))]
        for expert in range(num_experts):
            units[expert] = packed[expert % len(packed)]
        return units

    def _pack(self, number: int, weight_format: str) -> U8:
        if weight_format not in LOSSLESS_FORMATS:
            shape = self.shape
            return random_integer_expert(weight_format, shape.hidden_size, shape.channels, number)[0]
        codes = self._codes[number]
        return _native.pack_expert_units(
            codes.gate,
            codes.up,
            codes.down,
            codes.gate_scales,
            codes.up_scales,
            codes.down_scales,
            format=weight_format,
        )

    def _values(self, number: int, weight_format: str) -> tuple[F32, F32, F32]:
        if weight_format not in LOSSLESS_FORMATS:
            shape = self.shape
            return random_integer_expert(weight_format, shape.hidden_size, shape.channels, number)[1]
        codes = self._codes[number]
        return (
            dequantise(codes.gate, codes.gate_scales),
            dequantise(codes.up, codes.up_scales),
            dequantise(codes.down, codes.down_scales),
        )

    def exact(self, expert: int, weight_format: str = "fp9") -> F64:
        """The expert function of the rows VERIFIED_ROWS, without its weight, in float64: [rows, H]."""
        place = expert % len(self._codes), weight_format in LOSSLESS_FORMATS or weight_format
        if place not in self._exact:
            gate, up, down = (each.astype(np.float64) for each in self._values(place[0], weight_format))
            x = random_rows(VERIFIED_ROWS, self.shape.hidden_size).astype(np.float64)
            g = x @ gate.T
            with np.errstate(over="ignore"):  # exp of a large -g is infinite, and silu rightly zero
                self._exact[place] = (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T
        return self._exact[place]


def random_rows(rows: Iterable[int], hidden_size: int) -> F32:
    """Rows of x, [T, H]; a row depends on its number and on H alone."""
    return np.stack(
        [np.random.default_rng(row).standard_normal(hidden_size).astype(np.float32) for row in rows]
    )


def _random_codes(shape: SliceShape, seed: int) -> ExpertWeights:
    rng = np.random.default_rng(seed)
    hidden_blocks, channel_blocks = -(-shape.hidden_size // 128), -(-shape.channels // 128)

    def codes(*size: int) -> U8:
        values = rng.integers(0, 254, size, dtype=np.uint8)
        values += values >= 0x7F  # 0x7f and 0xff are NaN
        return values

    def scales(*size: int) -> F32:
        return (rng.uniform(0.5, 2.0, size) * 2.0**-9).astype(np.float32)

    return ExpertWeights(
        gate=codes(shape.channels, shape.hidden_size),
        up=codes(shape.channels, shape.hidden_size),
        down=codes(shape.hidden_size, shape.channels),
        gate_scales=scales(channel_blocks, hidden_blocks),
        up_scales=scales(channel_blocks, hidden_blocks),
        down_scales=scales(hidden_blocks, channel_blocks),
    )


class ExpertStep:
    """Steps of T rows on experts that are in no cache, and plain reads of the same units in turn.

    Args:
        random: Where the experts come from.
        units: What ``random.fill`` gave, several times the last-level cache.
        num_tokens: Rows of a step.
        top_k: Experts that each row chooses.
        threads: Compute threads.
        isa: Instruction set, or ``"auto"``.
        weight_format: Of the units.
        layer_experts: None: all rows of a step choose the same experts, so that its bytes do not depend on
            T, and the next step takes the next experts. A number: each row chooses its own at random among
            as many experts of a layer, and the next step takes the next layer.
        hot: Every step takes the same experts.
        prefill: ``"f32"``, or ``"bf16"`` for experts of more than 8 rows.
    """

    def __init__(
        self,
        random: RandomExperts,
        units: U8,
        *,
        num_tokens: int,
        top_k: int,
        threads: int,
        isa: str,
        weight_format: str = "fp9",
        layer_experts: int | None = None,
        hot: bool = False,
        prefill: str = "f32",
    ) -> None:
        self._random, self._units, self.top_k = random, units, top_k
        self.num_tokens, self._layer_experts, self._hot = num_tokens, layer_experts, hot
        shape = random.shape
        self.experts = _native.Experts(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.channels,
            num_experts=len(units),
            top_k=top_k,
            first_stripe=0,
            num_stripes=shape.num_stripes,
            max_tokens=num_tokens,
            num_threads=threads,
            spin_us=SPIN_US,
            isa=isa,
            format=weight_format,
            pin_threads=True,
            prefill=prefill,
        )
        self._format = weight_format
        self._tolerance = TOLERANCE if prefill == "f32" else BF16_TOLERANCE
        if weight_format not in LOSSLESS_FORMATS:
            self._tolerance = INTEGER_TOLERANCE
        self._x = random_rows(range(num_tokens), shape.hidden_size)
        self._rng = np.random.default_rng(num_tokens)
        self._weights = self._rng.uniform(0.1, 1.0, (num_tokens, top_k)).astype(np.float32)
        self._y = np.empty_like(self._x)
        self._next = 0
        self._steps = 1
        self.seconds: list[float] = []
        self.read_seconds: list[float] = []
        self.step_bytes: list[int] = []
        self.read_bytes: list[int] = []

    def _choose(self, steps: int) -> I32:
        """Expert ids of the next steps: [N, T, K]."""
        return np.stack([self._choose_one() for _ in range(steps)])

    def _choose_one(self) -> I32:
        start = 0 if self._hot else self._next
        if self._layer_experts is None:
            self._next = (self._next + self.top_k) % len(self._units)
            chosen = np.arange(start, start + self.top_k, dtype=np.int32) % len(self._units)
            return np.tile(chosen, (self.num_tokens, 1))
        self._next = (self._next + self._layer_experts) % len(self._units)
        order = self._rng.random((self.num_tokens, self._layer_experts)).argsort(axis=1)
        return np.ascontiguousarray(start + order[:, : self.top_k], dtype=np.int32)

    def _time(self, ids: I32, compute: bool) -> list[float]:
        return self.experts.time_steps(self._units, self._x, ids, self._weights, self._y, compute)

    def bytes_of(self, ids: I32) -> int:
        """Bytes of the units that a step with these ids [T, K] reads."""
        return len(np.unique(ids)) * int(self._units[0].nbytes)

    def verify(self) -> float:
        """The largest error of a step against float64, over its largest output.

        The rows VERIFIED_ROWS, of those that there are; the others must be finite.

        Raises:
            RuntimeError: It is further off than rounding can be: our own bug.
        """
        ids = self._choose(1)
        [elapsed] = self._time(ids, compute=True)
        self._steps = int(min(MOST_STEPS, max(1, SAMPLE_S / elapsed)))
        rows = [row for row in VERIFIED_ROWS if row < self.num_tokens]
        exact = np.zeros((len(rows), self._x.shape[1]))
        for place, row in enumerate(rows):
            for expert, weight in zip(ids[0, row], self._weights[row], strict=True):
                exact[place] += float(weight) * self._random.exact(int(expert), self._format)[place]
        error = float(abs(self._y[rows] - exact).max() / abs(exact).max())
        if not (error <= self._tolerance and np.isfinite(self._y).all()):
            raise RuntimeError(f"the expert step is {error:.1e} of its largest output off: nothing measured")
        return error

    def sample(self) -> None:
        """Times a few reads and a few steps; an untimed one before each wakes the threads."""
        for compute, seconds, sizes in (
            (False, self.read_seconds, self.read_bytes),
            (True, self.seconds, self.step_bytes),
        ):
            ids = self._choose(1 + self._steps)
            seconds.extend(self._time(ids, compute)[1:])
            sizes.extend(self.bytes_of(each) for each in ids[1:])
        time.sleep(2e-6 * SPIN_US)  # the threads go to sleep, and the cores are free for what is next


def gb_per_s(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The median of the rates, 10^9 bytes per second."""
    return median(size / elapsed for size, elapsed in zip(sizes, seconds, strict=True)) / 1e9
