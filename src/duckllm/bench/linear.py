"""Dense linear layers beside the read ceiling and beside PyTorch's own: cold weights, shapes of real models.

Called by ``benchmarks/kernels/linear.py``; whoever measures kernels may use :func:`linear_results`. Each
shape is verified against float64 before it is timed. Everything is timed in turns, so that what else the
machine does falls on all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import numpy.typing as npt

from duckllm import _native
from duckllm.bench.ceilings import FEWEST_REPEATS, Spread, read_ceiling
from duckllm.bench.memory import U8, new_memory
from duckllm.weights.e4m3 import dequantise

F32 = npt.NDArray[np.float32]

# How long the runtime's idle threads spin: longer than Python takes from one product to the next.
SPIN_US = 1000
# Largest error over the largest output; an f32 sum of 16384 terms is far below it.
TOLERANCE = 1e-5
# A sample is made of more products until it takes about this long, but no weight comes twice before all have.
SAMPLE_S = 1e-3
# Rows of a weight that are checked in float64.
CHECKED_OUTPUTS = 64


@dataclass(frozen=True)
class LinearShape:
    """A linear layer of a model: y [T, N] = x [T, K] W^T."""

    name: str
    in_features: int
    out_features: int

    def weight_bytes(self, weight_format: str) -> int:
        """Bytes of the packed weight, its scales not counted."""
        return _native.linear_bytes(self.out_features, self.in_features, weight_format)


QWEN3_30B = (
    LinearShape("q", 2048, 4096),
    LinearShape("k or v", 2048, 512),
    LinearShape("o", 4096, 2048),
    LinearShape("head", 2048, 151936),
)
DEEPSEEK_V32 = (
    LinearShape("q_a", 7168, 1536),
    LinearShape("q_b", 1536, 24576),
    LinearShape("kv_a", 7168, 576),
    LinearShape("o", 16384, 7168),
    LinearShape("shared expert", 7168, 2048),
)
MODELS = {"Qwen3-30B-A3B": QWEN3_30B, "DeepSeek-V3.2": DEEPSEEK_V32}
FORMATS = ("bf16", "fp8", "fp9")
NUM_ROWS = (1, 2, 4, 8, 32, 128, 512)


@dataclass(frozen=True)
class LinearResult:
    """One way to compute one shape with one number of rows.

    Args:
        shape: The layer.
        num_rows: T.
        way: ``"bf16"``, ``"fp8"``, ``"fp9"``, or a name that the caller gave.
        seconds: Median and fastest time of a product.
        weight_bytes: Bytes of weight that a product reads.
        read: The cold read ceiling of the same rounds, GB/s.
    """

    shape: LinearShape
    num_rows: int
    way: str
    seconds: tuple[float, float]
    weight_bytes: int
    read: Spread

    @property
    def gb_per_s(self) -> float:
        """Bytes of weight read in a second, 10^9, by the median."""
        return self.weight_bytes / self.seconds[0] / 1e9

    @property
    def gflop_per_s(self) -> float:
        """Arithmetic speed by the median, a multiplication and an addition for each weight and row."""
        return 2 * self.num_rows * self.shape.in_features * self.shape.out_features / self.seconds[0] / 1e9

    @property
    def of_ceiling(self) -> float:
        """The share of the read ceiling, by the medians."""
        return self.gb_per_s / self.read.median

    @property
    def fastest_of_ceiling(self) -> float:
        """The same by the fastest of each."""
        return self.weight_bytes / self.seconds[1] / 1e9 / self.read.most


@dataclass
class _Sampler:
    """Times one way; its products go through all copies of the weight in turn."""

    run: Callable[[int], object]
    copies: int
    products: int = 1
    seconds: list[float] = field(default_factory=list)
    _next: int = 0

    def _take(self) -> None:
        self.run(self._next)
        self._next = (self._next + 1) % self.copies

    def settle(self) -> None:
        """Finds how many products make a sample."""
        self._take()
        start = time.perf_counter()
        self._take()
        self.products = max(1, min(self.copies - 1, round(SAMPLE_S / (time.perf_counter() - start))))

    def sample(self) -> None:
        self._take()  # wakes the threads
        start = time.perf_counter()
        for _ in range(self.products):
            self._take()
        self.seconds.append((time.perf_counter() - start) / self.products)
        time.sleep(2e-6 * SPIN_US)  # the threads go to sleep, and the cores are free for what is next


class LinearWeights:
    """Copies of one random weight in one format, which together are in no cache.

    Args:
        shape: The layer.
        weight_format: ``"bf16"``, ``"fp8"`` or ``"fp9"``.
        footprint_bytes: Several times the last-level cache; there are three copies at least.
    """

    def __init__(self, shape: LinearShape, weight_format: str, footprint_bytes: int) -> None:
        rng = np.random.default_rng(0)
        self.shape, self.format = shape, weight_format
        size = (shape.out_features, shape.in_features)
        self.scales: F32 | None = None
        if weight_format == "bf16":
            words = rng.integers(0, 1 << 16, size, np.uint16)
            words &= 0x80FF  # the sign, the lowest bit of the exponent and the mantissa
            words |= 0x3F00
            self._stored: npt.NDArray[np.generic] = words
        else:
            codes = rng.integers(0, 0x7F, size, np.uint8)
            codes |= rng.integers(0, 2, size, np.uint8) << 7
            self._stored = codes
            blocks = (-(-size[0] // 128), -(-size[1] // 128))
            self.scales = (rng.uniform(0.5, 2.0, blocks) * 2.0**-9).astype(np.float32)
        packed = _native.pack_linear(self._stored, weight_format)  # type: ignore[arg-type]
        num_copies = max(3, -(-footprint_bytes // packed.nbytes))
        stride = -(-packed.nbytes // 64) * 64
        memory = new_memory(num_copies * stride, huge_pages=True)
        self.copies: list[U8] = [memory[i * stride : i * stride + packed.nbytes] for i in range(num_copies)]
        for copy in self.copies:
            copy[:] = packed

    def run(self, runtime: _native.LinearRuntime, copy: int, x: F32, out: F32 | None = None) -> F32:
        """A product with one of the copies."""
        shape = self.shape
        return runtime.run(
            self.copies[copy], self.scales, shape.out_features, shape.in_features, self.format, x, out
        )

    def dense(self, outputs: slice) -> F32:
        """Some of the weight's rows in f32 [outputs, K], from what was stored, not from what is packed."""
        if self.scales is None:
            words = self._stored[outputs].astype(np.uint32) << 16
            return words.view(np.float32)
        first = outputs.start // 128 * 128
        codes = self._stored[first : outputs.stop].astype(np.uint8)
        scales = self.scales[first // 128 : -(-outputs.stop // 128)]
        return np.asarray(dequantise(codes, scales), np.float32)[outputs.start - first :]

    def verify(self, y: F32, x: F32) -> None:
        """Compares the first and the last outputs of a product with float64.

        Raises:
            RuntimeError: It is further off than rounding can be.
        """
        num = self.shape.out_features
        for outputs in (slice(0, min(CHECKED_OUTPUTS, num)), slice(max(0, num - CHECKED_OUTPUTS), num)):
            exact = x.astype(np.float64) @ self.dense(outputs).astype(np.float64).T
            error = float(abs(y[:, outputs] - exact).max() / abs(exact).max())
            if not error <= TOLERANCE:
                raise RuntimeError(f"{self.shape.name} is {error:.1e} off: nothing measured")


# Another way to compute a shape with weights of a footprint: a function of a copy's number and of x, how many
# copies there are, and the bytes of one.
OtherWay = Callable[[LinearShape, int], tuple[Callable[[int, F32], object], int, int]]


def linear_results(
    shape: LinearShape,
    num_rows: Sequence[int],
    *,
    threads: int,
    footprint_bytes: int,
    isa: str = "auto",
    formats: Sequence[str] = FORMATS,
    others: dict[str, OtherWay] | None = None,
    repeats: int = FEWEST_REPEATS,
) -> Iterator[LinearResult]:
    """Every format, and other ways, for several numbers of rows, each with the read ceiling of its rounds.

    Args:
        shape: The layer.
        num_rows: Numbers of rows.
        threads: Compute threads, and threads of the read ceiling.
        footprint_bytes: Memory that each way goes through; several times the last-level cache.
        isa: Instruction set, or ``"auto"``.
        formats: Formats of the native layers.
        others: Ways to compare with, by name.
        repeats: Rounds, of which the median is taken.

    Raises:
        RuntimeError: A product is wrong.
    """
    runtime = _native.LinearRuntime(max(num_rows), shape.in_features, threads, SPIN_US, isa)
    weights = {name: LinearWeights(shape, name, footprint_bytes) for name in formats}
    ways = {name: make(shape, footprint_bytes) for name, make in (others or {}).items()}
    for count in num_rows:
        rng = np.random.default_rng(count)
        x = rng.standard_normal((count, shape.in_features)).astype(np.float32)
        y = np.empty((count, shape.out_features), np.float32)
        samplers: dict[str, _Sampler] = {}
        sizes: dict[str, int] = {}
        for name, weight in weights.items():
            weight.verify(weight.run(runtime, 0, x, y), x)

            def product(copy: int, weight: LinearWeights = weight, x: F32 = x, y: F32 = y) -> object:
                return weight.run(runtime, copy, x, y)

            samplers[name] = _Sampler(product, len(weight.copies))
            sizes[name] = shape.weight_bytes(name)
        for name, (run, copies, size) in ways.items():

            def other(copy: int, run: Callable[[int, F32], object] = run, x: F32 = x) -> object:
                return run(copy, x)

            samplers[name] = _Sampler(other, copies)
            sizes[name] = size
        for sampler in samplers.values():
            sampler.settle()

        def between(samplers: dict[str, _Sampler] = samplers) -> None:
            for sampler in samplers.values():
                sampler.sample()

        ceiling = read_ceiling(threads, size_bytes=footprint_bytes, isa=isa, repeats=repeats, between=between)
        for name, sampler in samplers.items():
            yield LinearResult(
                shape,
                count,
                name,
                (median(sampler.seconds), min(sampler.seconds)),
                sizes[name],
                ceiling.rate,
            )
