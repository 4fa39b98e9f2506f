"""Ceilings of memory and arithmetic by thread count: read, memset, memcpy and f32 multiply-add.

Called by roofline.py, points.py and whatever measures a kernel (:func:`read_ceiling`). The loops and their
clock are native (csrc/bench); here is which memory they go through, how often, and that what they did is
right. A measurement whose loop did something else raises ``RuntimeError``: that is our own bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from duckllm import _native
from duckllm.bench.machine import Caches, available_memory_bytes, read_caches
from duckllm.bench.memory import U8, Windows, huge_page_share, new_memory

# The operations, and the words that other tools have for them.
OPERATIONS = {"read": "read", "fill": "memset", "copy": "memcpy"}
NUM_WINDOWS = 16
# Every window has a granule, which is 4096 bytes, for each thread.
LEAST_BYTES_PER_THREAD = NUM_WINDOWS * 4096
# "Cold" is several times the last-level cache; nothing is read twice before that much else was.
COLD_LLC_MULTIPLE = 8
LEAST_COLD_BYTES = 256 << 20
FEWEST_REPEATS = 9
# A sample shorter than this is made of more passes.
HOT_SAMPLE_S = 1e-3
FMA_STEPS = 1 << 19


@dataclass(frozen=True)
class Spread:
    """Rates of the repeats: their median, the slowest and the fastest."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, amount: float, seconds: Sequence[float]) -> Spread:
        """The rates of ``amount`` per time, in 10^9 per second."""
        return cls(amount / median(seconds) / 1e9, amount / max(seconds) / 1e9, amount / min(seconds) / 1e9)


@dataclass(frozen=True)
class Ceiling:
    """One measured ceiling, the best of its declared variants.

    Args:
        operation: ``"read"``, ``"memset"``, ``"memcpy"`` or ``"fma"``.
        state: Where the data is: ``"cold"``, ``"llc"``, ``"l2"``, or ``"registers"`` for fma.
        threads: Threads, each with a part of its own.
        isa: Instruction set of the loops.
        unit: ``"GB/s"`` or ``"GFLOP/s"``.
        variants: Rates by the name of the loop. memcpy counts the bytes read and those written.
        footprint_bytes: Memory that was gone through; 0 for fma.
        huge_pages: Whether huge pages were asked for; None for fma.
        huge_page_share: How much of the memory was in huge pages, 0 to 1.
    """

    operation: str
    state: str
    threads: int
    isa: str
    unit: str
    variants: dict[str, Spread]
    footprint_bytes: int = 0
    huge_pages: bool | None = None
    huge_page_share: float = 0.0

    @property
    def best(self) -> str:
        """Name of the variant with the highest median."""
        return max(self.variants, key=lambda name: self.variants[name].median)

    @property
    def rate(self) -> Spread:
        """Rates of the best variant."""
        return self.variants[self.best]


def default_size_bytes(caches: Caches, available_bytes: int) -> int:
    """Footprint of cold measurements: several times the last-level cache, at most a quarter of the memory."""
    wanted = max(COLD_LLC_MULTIPLE * caches.llc_bytes, LEAST_COLD_BYTES)
    return min(wanted, available_bytes // 4)


def exclusive_or(data: U8) -> int:
    """The exclusive or of the 64-bit words, what a read loop must have seen."""
    return int(np.bitwise_xor.reduce(data.view(np.uint64)))


def expect(right: bool, what: str) -> None:
    """Stops a measurement whose loop did not do what it is timed for."""
    if not right:
        raise RuntimeError(f"the loop of {what} did not do its work: nothing measured")


class MemoryCeilings:
    """Measures read, memset and memcpy on one memory, with one number of threads.

    Args:
        threads: How many threads share the work.
        size_bytes: Footprint of the cold measurements; at least ``LEAST_BYTES_PER_THREAD`` for each thread.
        isa: Instruction set of the loops, or ``"auto"``.
        huge_pages: Ask for huge pages, or for small ones.
    """

    def __init__(self, threads: int, size_bytes: int, isa: str, huge_pages: bool) -> None:
        self._loops = _native.CeilingLoops(threads, isa)
        self._huge_pages = huge_pages
        self._memory = new_memory(size_bytes, huge_pages)
        self._windows = Windows(self._memory, self._loops.granule_bytes, NUM_WINDOWS)
        self._used = self._memory[: NUM_WINDOWS * self._windows.window_bytes]
        self._loops.randomise(self._used, seed=threads)
        self._checksums = [exclusive_or(window) for window in self._windows]
        self._share = huge_page_share(self._memory)

    def verify(self) -> None:
        """Runs every variant once and looks at what it did, in all places."""
        target, source = self._first_two()
        for variant in _native.CeilingLoops.variants("read"):
            expect(self._loops.read(variant, source)[1] == self._checksums[1], f"read/{variant}")
        for operation in ("fill", "copy"):
            for number, variant in enumerate(_native.CeilingLoops.variants(operation)):
                self._loops.fill("libc", target, 0)
                self._write(operation, variant, target, source, value=number + 1)
                self._expect_written(operation, variant, target, source, value=number + 1)
        self._loops.randomise(self._used, seed=self._loops.num_threads)

    def _first_two(self) -> tuple[U8, U8]:
        windows = iter(self._windows)
        return next(windows), next(windows)

    def _write(
        self, operation: str, variant: str, target: U8, source: U8, value: int, passes: int = 1, warm: int = 0
    ) -> float:
        if operation == "fill":
            return self._loops.fill(variant, target, value, passes, warm)
        return self._loops.copy(variant, target, source, passes, warm)

    def _expect_written(self, operation: str, variant: str, target: U8, source: U8, value: int) -> None:
        right = (target == value).all() if operation == "fill" else np.array_equal(target, source)
        expect(bool(right), f"{operation}/{variant}")

    def sample_cold_read(self, variant: str) -> float:
        """Seconds to read the next window, which is in no cache."""
        number, window = self._windows.take()
        seconds, checksum = self._loops.read(variant, window)
        expect(checksum == self._checksums[number], f"read/{variant}")
        return seconds

    @property
    def window_bytes(self) -> int:
        """Bytes that one sample reads."""
        return self._windows.window_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all windows together."""
        return self._used.nbytes

    def cold(self, operation: str, repeats: int, between: Callable[[], object] | None = None) -> Ceiling:
        """All variants of an operation in turns on window after window; ``between`` is called each round.

        Writing leaves other data behind: read first.
        """
        variants = _native.CeilingLoops.variants(operation)
        seconds: dict[str, list[float]] = {variant: [] for variant in variants}
        for repeat in range(repeats):
            filled: dict[str, U8] = {}
            for variant in variants:
                if operation == "read":
                    seconds[variant].append(self.sample_cold_read(variant))
                    continue
                _, target = self._windows.take()
                _, source = self._windows.take() if operation == "copy" else (0, target)
                seconds[variant].append(self._write(operation, variant, target, source, value=repeat % 256))
                filled[variant] = target
            if between is not None:
                between()
        if operation == "fill":  # a copy repeated shows nothing: verify() has looked at its first
            for variant, target in filled.items():
                self._expect_written(operation, variant, target, target, value=(repeats - 1) % 256)
        return self._ceiling(operation, "cold", seconds, self._windows.window_bytes, self._used.nbytes)

    def hot(self, operation: str, state: str, footprint_bytes: int, repeats: int) -> Ceiling:
        """All variants of an operation in turns on the same memory, which fits in a cache."""
        granule = self._loops.granule_bytes
        halves = 2 if operation == "copy" else 1
        part = footprint_bytes // halves // granule * granule
        target, source = self._used[:part], self._used[part : 2 * part]
        self._loops.randomise(self._used[: halves * part], seed=footprint_bytes)
        checksum = exclusive_or(target)
        seconds: dict[str, list[float]] = {
            variant: [] for variant in _native.CeilingLoops.variants(operation)
        }
        value = 0
        for repeat in range(-1, repeats):
            for variant, times in seconds.items():
                value = (value + 1) % 256  # another one than the variant before has left
                # The round before the first tells how many passes make a sample.
                passes = 1 if repeat < 0 else max(1, min(10000, round(HOT_SAMPLE_S / times[0])))
                if operation == "read":
                    elapsed, seen = self._loops.read(variant, target, passes, 1)
                    expect(seen == checksum, f"read/{variant}")
                else:
                    if operation == "copy":  # else the copy before has left the same bytes
                        self._loops.randomise(target, seed=value)
                    elapsed = self._write(operation, variant, target, source, value, passes, 1)
                    self._expect_written(operation, variant, target, source, value)
                times.append(elapsed / passes)
        seconds = {variant: times[1:] for variant, times in seconds.items()}
        return self._ceiling(operation, state, seconds, part, halves * part)

    def _ceiling(
        self, operation: str, state: str, seconds: dict[str, list[float]], moved: int, footprint: int
    ) -> Ceiling:
        if operation == "copy":
            moved *= 2
        return Ceiling(
            operation=OPERATIONS[operation],
            state=state,
            threads=self._loops.num_threads,
            isa=self._loops.isa,
            unit="GB/s",
            variants={variant: Spread.of(moved, times) for variant, times in seconds.items()},
            footprint_bytes=footprint,
            huge_pages=self._huge_pages,
            huge_page_share=self._share,
        )


def hot_footprints(caches: Caches, threads: int) -> dict[str, int]:
    """Bytes that stay in each cache by its name: half of it, so that code and neighbours fit too."""
    return {"l2": caches.l2_bytes // 2 * threads, "llc": caches.llc_bytes // 2}


def memory_ceilings(
    threads: int, size_bytes: int, isa: str, huge_pages: bool, repeats: int, caches: Caches
) -> Iterator[Ceiling]:
    """Read, memset and memcpy: cold, then in the last-level cache, then in the second level.

    A cache whose share does not fit in ``size_bytes``, or is no larger than the level below, is left out.
    """
    ceilings = MemoryCeilings(threads, size_bytes, isa, huge_pages)
    ceilings.verify()
    for operation in OPERATIONS:
        yield ceilings.cold(operation, repeats)
    footprints = hot_footprints(caches, threads)
    states = [state for state in ("llc", "l2") if footprints[state] <= ceilings.used_bytes]
    if footprints["llc"] <= footprints["l2"] and "llc" in states:
        states.remove("llc")
    for state in states:
        for operation in OPERATIONS:
            yield ceilings.hot(operation, state, footprints[state], repeats)


def fma_ceilings(
    threads: int, isas: Sequence[str], repeats: int, steps: int = FMA_STEPS
) -> Iterator[Ceiling]:
    """Single-precision multiply-adds in registers, each ISA in turn in every round."""
    loops = {isa: _native.CeilingLoops(threads, isa) for isa in isas}
    seconds: dict[str, list[float]] = {isa: [] for isa in isas}
    for _ in range(repeats):
        for isa, loop in loops.items():
            elapsed, total = loop.fma(steps)
            lanes = loop.fma_lanes
            expect(total == lanes * (lanes - 1) / 2 + lanes * steps, f"fma/{isa}")
            seconds[isa].append(elapsed)
    for isa, loop in loops.items():
        rate = Spread.of(loop.flop_per_step * steps, seconds[isa])
        yield Ceiling("fma", "registers", threads, isa, "GFLOP/s", {"chains": rate})


def read_ceiling(
    threads: int,
    *,
    size_bytes: int | None = None,
    isa: str = "auto",
    huge_pages: bool = True,
    repeats: int = FEWEST_REPEATS,
    between: Callable[[], object] | None = None,
) -> Ceiling:
    """The cold read ceiling, measured in alternation with something else.

    Each of the ``repeats`` rounds reads a window with every variant and then calls ``between``, which
    measures one sample of its own. So the ceiling and what is held against it see the same neighbours,
    clocks and temperatures. ``between`` should leave the cores idle: threads that still spin when it returns
    take time from the reads.

    Args:
        threads: Threads that read, each its own part.
        size_bytes: Footprint, several times the last-level cache; None: :func:`default_size_bytes`.
        isa: Instruction set of the loops, or ``"auto"``.
        huge_pages: Ask for huge pages, or for small ones.
        repeats: Rounds.
        between: Called after each round.

    Units: rates in GB/s, 10^9 bytes per second.

    Raises:
        ValueError: Threads or ISA that this machine does not have.
    """
    if size_bytes is None:
        size_bytes = default_size_bytes(read_caches(), available_memory_bytes())
    ceilings = MemoryCeilings(threads, size_bytes, isa, huge_pages)
    ceilings.verify()
    return ceilings.cold("read", repeats, between)
