"""Ideas for the fp9 kernels that lost, or were chosen between, measured beside production's kernels.

Called by ``duckllm bench ablation``. The variants are in csrc/ablation, a module of its own that is built on
request. Each is compared with production's result before anything is timed; then all take turns, on the same
threads and on as many bytes that are in no cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from types import ModuleType

import numpy as np

from duckllm import _native
from duckllm.bench.ceilings import FEWEST_REPEATS, default_size_bytes
from duckllm.bench.expert_step import (
    F32,
    I32,
    SPIN_US,
    RandomExperts,
    SliceShape,
    random_rows,
)
from duckllm.bench.machine import available_memory_bytes, read_caches
from duckllm.bench.memory import U8, new_memory
from duckllm.config import available_cores
from duckllm.errors import ConfigError, InWords
from duckllm.worker.other_load import LoadMeter, OtherLoad

HIDDEN_SIZE = 7168
CHANNELS = (64, 128)
EXPERTS = 8
# One expert: a step is short, so that other jobs rarely cut it.
TILE_ROWS, TILE_EXPERTS = 96, 1
CHUNK_ROWS = (24, 48, 96)
# What csrc/kernels has chosen: rows in registers by instruction set, and rows that use a decoded tile.
PRODUCTION_TILE_ROWS = {"avx512": 10, "avx2": 6}
PRODUCTION_CHUNK_ROWS = 48
STEPS = 3  # of a variant in a round, after one that is not timed
# Where a variant sums in another order: its largest difference over the largest output.
TOLERANCE = 1e-5
MOST_REPEATS = 10_000
PRODUCTION, SHIPPED, PLAIN_READ = "production", "production, as shipped", "plain read of the units"
# Change of speed that the reference system's author measured on an Intel N100 (AVX2), by channels.
REFERENCE: dict[str, str | dict[int, float]] = {
    "whole expert prefetched first": "slower",
    "scale on x before the dot": {64: -0.013},
    # The reference kept one chain: there two lost to one, here one is held against two.
    "one chain of FMAs": {64: 0.057, 128: 0.0},
    "signs: 16-bit chunks": {64: -0.002},
    "signs: two 16-bit chunks": {64: -0.002},
    # Likewise: explicit pre-scaling lost there, and is production's here.
    "x unscaled, scale in the sums": {64: 0.006},
    "down by blocks of 128 outputs": {64: -0.057, 128: -0.035},
    "signs: table of 65536 entries": {64: -0.24, 128: -0.26},
}


@dataclass(frozen=True)
class AblationConfig:
    """What to measure.

    Args:
        channels: Intermediate channels of the slices, multiples of 16; DeepSeek-V3.2's hidden size.
        threads: Threads; 0 means all cores.
        isa: ``"auto"``, ``"avx2"`` or ``"avx512"``.
        repeats: Rounds, in each of which every variant has its turn.

    Raises:
        ConfigError: A field is out of range.
    """

    channels: tuple[int, ...] = CHANNELS
    threads: int = 0
    isa: str = "auto"
    repeats: int = 51

    def __post_init__(self) -> None:
        if not self.channels:
            raise ConfigError("channels", "", "a number at least")
        for channels in self.channels:
            if not (16 <= channels <= 2048 and channels % 16 == 0):
                raise ConfigError("channels", channels, "a multiple of 16, 16 to 2048")
        cores = available_cores()
        if not 0 <= self.threads <= cores:
            raise ConfigError("threads", self.threads, f"1 to {cores}, the cores that this process may use")
        isas = ("auto", *(isa for isa in _native.available_isas() if isa in PRODUCTION_TILE_ROWS))
        isa = _native.select_isa() if self.isa == "auto" else self.isa
        if self.isa not in isas or isa not in PRODUCTION_TILE_ROWS:
            raise ConfigError("isa", isa, "one of " + ", ".join(isas) + "; there are no scalar variants")
        if not FEWEST_REPEATS <= self.repeats <= MOST_REPEATS:
            raise ConfigError("repeats", self.repeats, f"{FEWEST_REPEATS} to {MOST_REPEATS}")


@dataclass(frozen=True)
class Trial:
    """One variant beside production's.

    Args:
        name: Which.
        question: What it is one answer to.
        channels: Of the slice.
        step_s: Median time of a step.
        speed: The time of production's choice over the variant's in the same round, minus 1: below 0 is
            slower. Both are compiled from the same source. The median of the rounds; ``low`` and ``high``
            are the quartiles.
        best: The same of the fastest step of each, which says more where the machine is shared.
        gb_per_s: The rate of reading its weights.
        reference: What was measured on the reference system, in words or as a change of speed.
    """

    name: str
    question: str
    channels: int
    step_s: float
    speed: float
    low: float
    high: float
    best: float
    gb_per_s: float
    reference: str | float | None = None


@dataclass(frozen=True)
class AblationRun:
    """Everything that was measured."""

    config: AblationConfig
    threads: int
    isa: str
    decode: list[Trial] = field(default_factory=list)
    tiles: list[Trial] = field(default_factory=list)
    other_load: OtherLoad = field(default=OtherLoad(0.0, 0.0))


def load_module() -> ModuleType:
    """The module of the variants.

    Raises:
        ConfigError: This build is without it; says how to build one that has it.
    """
    try:
        from duckllm import _ablation
    except ImportError as error:
        raise ConfigError(
            "ablation",
            InWords("a build without the module duckllm._ablation"),
            "one that has it",
            "from a checkout: pip install -e . -C cmake.define.DUCK_BUILD_ABLATION=ON",
        ) from error
    return _ablation


def same(result: F32, production: F32, same_bits: bool, name: str) -> None:
    """Compares a variant's result with production's.

    Raises:
        RuntimeError: It differs: in a bit, or by more than rounding where the order of summation does.
    """
    if same_bits:
        right = np.array_equal(result.view(np.uint32), production.view(np.uint32))
    else:
        right = bool(abs(result - production).max() <= TOLERANCE * abs(production).max())
    if not right:
        raise RuntimeError(f"{name}: the result is not production's: nothing measured")


class Bench:
    """Slices of one shape in memory, production's kernels and the variants on them.

    Args:
        module: duckllm._ablation.
        channels: Of the slices.
        threads: Compute threads.
        isa: Instruction set.
        size_bytes: Footprint of the experts, several times the last-level cache.
    """

    def __init__(self, module: ModuleType, channels: int, threads: int, isa: str, size_bytes: int) -> None:
        self.channels = channels
        shape = SliceShape("", HIDDEN_SIZE, channels // 16)
        num_experts = max(2 * EXPERTS, -(-size_bytes // shape.expert_bytes()))
        self.expert_bytes = shape.expert_bytes()
        self.units = {0: RandomExperts(shape).fill(num_experts, "fp9", huge_pages=True)}
        self._module = module
        self.ablation = module.Ablation(
            HIDDEN_SIZE, shape.num_stripes, EXPERTS, TILE_ROWS, threads, SPIN_US, isa
        )
        self.experts = _native.Experts(
                HIDDEN_SIZE, channels, num_experts, EXPERTS, 0, shape.num_stripes, TILE_ROWS, threads,
                SPIN_US, isa, pin_threads=True,
        )  # fmt: skip
        self.x = random_rows(range(TILE_ROWS), HIDDEN_SIZE)
        self.weights = np.random.default_rng(1).uniform(0.1, 1.0, EXPERTS).astype(np.float32)
        self._next = 0

    def in_layout(self, layout: int) -> U8:
        """The units in one of the layouts of csrc/ablation/variants.h."""
        if layout not in self.units:
            units = self.units[0]
            out = new_memory(units.nbytes, huge_pages=True).reshape(units.shape)
            self._module.convert_layout(units, layout, HIDDEN_SIZE, out)
            self.units[layout] = out
        return self.units[layout]

    def choose(self, steps: int, num_experts: int) -> I32:
        """The next experts of each of the steps, [N, K]."""
        ids = np.arange(self._next, self._next + steps * num_experts, dtype=np.int32) % len(self.units[0])
        self._next = (self._next + steps * num_experts) % len(self.units[0])
        return ids.reshape(steps, num_experts)

    def shipped(self, ids: I32, num_rows: int, out: F32, compute: bool = True) -> list[float]:
        """Times production as the package ships it."""
        rows = np.ascontiguousarray(np.broadcast_to(ids[:, None], (len(ids), num_rows, ids.shape[1])))
        weights = np.tile(self.weights[: ids.shape[1]], (num_rows, 1))
        return self.experts.time_steps(self.units[0], self.x[:num_rows], rows, weights, out, compute)


Timed = Callable[[I32, F32], list[float]]


def in_turns(
    bench: Bench, runs: dict[str, Timed], num_experts: int, num_rows: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of every run in every round, the median of its steps; each round has an order of its own."""
    out = np.empty((num_rows, HIDDEN_SIZE), np.float32)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = np.random.default_rng(0)
    for _ in range(repeats):
        for name in order.permutation(list(runs)):
            elapsed = runs[name](bench.choose(1 + STEPS, num_experts), out)
            seconds[name].append(median(elapsed[1:]))
            time.sleep(2e-6 * SPIN_US)  # the threads go to sleep: the next run may be on others
    return seconds


def trial(
    name: str, question: str, bench: Bench, seconds: list[float], production: list[float], num_bytes: int
) -> Trial:
    """A variant's times beside production's of the same rounds."""
    speeds = [base / mine - 1 for base, mine in zip(production, seconds, strict=True)]
    low, middle, high = quantiles(speeds, n=4)
    known = REFERENCE.get(name)
    reference = known if known is None or isinstance(known, str) else known.get(bench.channels)
    step_s = median(seconds)
    best = min(production) / min(seconds) - 1
    return Trial(
        name, question, bench.channels, step_s, middle, low, high, best, num_bytes / step_s / 1e9, reference
    )


def measure_decode(bench: Bench, repeats: int) -> list[Trial]:
    """One row: every variant, verified, then in turns."""
    ids, out = bench.choose(1, EXPERTS), np.empty((1, HIDDEN_SIZE), np.float32)
    bench.shipped(ids, 1, out)
    production = out.copy()
    x = bench.x[:1]
    runs: dict[str, Timed] = {
        PLAIN_READ: lambda ids, out: bench.shipped(ids, 1, out, compute=False),
        SHIPPED: lambda ids, out: bench.shipped(ids, 1, out),
    }
    questions = {PLAIN_READ: "ceiling", SHIPPED: PRODUCTION}
    bases = {PLAIN_READ: PRODUCTION, SHIPPED: PRODUCTION}
    for number, (name, question, layout, same_bits, base) in enumerate(bench.ablation.variants()):
        units = bench.in_layout(layout)

        def run(ids: I32, out: F32, number: int = number, units: U8 = units) -> list[float]:
            timed: list[float] = bench.ablation.decode(number, units, x, ids, bench.weights, out)
            return timed

        out[:] = np.nan
        run(ids, out)
        same(out, production, same_bits, name)
        runs[name], questions[name], bases[name] = run, question, base
    seconds = in_turns(bench, runs, EXPERTS, 1, repeats)
    return [
        trial(name, questions[name], bench, times, seconds[bases[name]], EXPERTS * bench.expert_bytes)
        for name, times in seconds.items()
    ]


def tile_name(tile_rows: int, chunk_rows: int) -> str:
    """A choice of the tile kernels, for people."""
    return f"{tile_rows} in registers, {chunk_rows} a tile"


def measure_tiles(bench: Bench, repeats: int, isa: str) -> list[Trial]:
    """Many rows that choose the same experts: every choice of the tile kernels, verified, then in turns."""
    ids, out = bench.choose(1, TILE_EXPERTS), np.empty((TILE_ROWS, HIDDEN_SIZE), np.float32)
    bench.shipped(ids, TILE_ROWS, out)
    production = out.copy()
    weights = bench.weights[:TILE_EXPERTS]
    runs: dict[str, Timed] = {SHIPPED: lambda ids, out: bench.shipped(ids, TILE_ROWS, out)}
    for number, tile_rows in enumerate(bench.ablation.tile_rows()):
        for chunk_rows in CHUNK_ROWS:

            def run(ids: I32, out: F32, number: int = number, chunk: int = chunk_rows) -> list[float]:
                timed: list[float] = bench.ablation.tiles(
                    number, chunk, bench.units[0], bench.x, ids, weights, out
                )
                return timed

            name = tile_name(tile_rows, chunk_rows)
            out[:] = np.nan
            run(ids, out)
            same(out, production, True, name)
            runs[name] = run
    seconds = in_turns(bench, runs, TILE_EXPERTS, TILE_ROWS, repeats)
    base = seconds[tile_name(PRODUCTION_TILE_ROWS[isa], PRODUCTION_CHUNK_ROWS)]
    return [
        trial(name, "tiles", bench, times, base, TILE_EXPERTS * bench.expert_bytes)
        for name, times in seconds.items()
    ]


def measure_ablation(config: AblationConfig, size_bytes: int = 0) -> AblationRun:
    """Verifies every variant against production and measures them in turns.

    Args:
        config: What to measure.
        size_bytes: Footprint of the experts of each layout; 0 means eight times the last-level cache.

    Raises:
        ConfigError: The module is not built, or the memory is too small.
    """
    module = load_module()
    have = available_memory_bytes()
    size_bytes = size_bytes or default_size_bytes(read_caches(), have)
    need = 5 * size_bytes
    if need > have:
        words = f"{have / 1e9:.1f} GB available"
        raise ConfigError("memory", InWords(words), f"{need / 1e9:.1f} GB: four layouts and what reads them")
    threads = config.threads or available_cores()
    isa = _native.select_isa() if config.isa == "auto" else config.isa
    meter = LoadMeter()
    run = AblationRun(config, threads, isa)
    for channels in config.channels:
        bench = Bench(module, channels, threads, isa, size_bytes)
        run.decode.extend(measure_decode(bench, config.repeats))
        if channels == config.channels[0]:
            run.tiles.extend(measure_tiles(bench, config.repeats, isa))
    return replace(run, other_load=meter.read())
