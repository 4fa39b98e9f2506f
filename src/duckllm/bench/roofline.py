"""``duckllm bench roofline``: a machine's ceilings by thread count, and where the kernels stand below them.

Called by cli/bench.py. Puts ceilings.py and points.py together; knows no terminal and no picture.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from duckllm import _native
from duckllm.bench.ceilings import (
    FEWEST_REPEATS,
    LEAST_BYTES_PER_THREAD,
    Ceiling,
    default_size_bytes,
    fma_ceilings,
    memory_ceilings,
)
from duckllm.bench.machine import Caches, available_memory_bytes, commit, cpu_name, read_caches
from duckllm.bench.points import DEEPSEEK_CUT_32_WAYS, Placed, expert_points
from duckllm.config import available_cores
from duckllm.errors import ConfigError, InWords
from duckllm.worker.other_load import LoadMeter, OtherLoad

HUGE_PAGES = {"both": (True, False), "on": (True,), "off": (False,)}
MOST_REPEATS = 10_000
# Below this many last-level caches, what is called cold may still be cached.
COLD_FROM_LLCS = 4
# What a machine that does nothing else uses of its cores.
QUIET_CORES = 0.1

CAVEATS = (
    "A rate is the effective logical one: bytes that a loop asks for, over its time. It is not what passes "
    "the DRAM pins, which prefetchers, page walks and neighbours use too.",
    "A plain store first reads the line that it writes (write-allocate): memset then moves twice the bytes "
    "that are counted, memcpy three for every two. memcpy counts the bytes read and those written.",
    "Cold: no byte is read again before the whole footprint was gone through. A virtual machine may be told "
    "of a last-level cache that is not its own, or not all of it.",
    "A ceiling is the best median of a few loops that are named: a bound from below for what the machine can "
    "do, never from above.",
    "Other programs and other virtual machines share the memory and the clock: look at the spread. "
    "Threads stay on a core each while they are timed, those of a loop and those of a kernel.",
    "Multiply-adds run in registers on no data; scalar is SSE2 with a multiplication and an addition.",
    "A kernel's bytes are its weights alone; its rows all choose the same experts, and its threads are "
    "awake when the clock starts.",
)


@dataclass(frozen=True)
class RooflineConfig:
    """What to measure.

    Args:
        threads: Numbers of threads; empty means 1, 2, 4 and so on up to all cores.
        isa: Instruction set of the memory loops and of the kernels, or ``"auto"``. Multiply-adds are
            measured on every one that the machine has when it is ``"auto"``, else on this one.
        size: Footprint of cold measurements in bytes; 0 means eight times the last-level cache.
        repeats: Samples of each variant.
        huge_pages: ``"both"``, ``"on"`` or ``"off"``.

    Raises:
        ConfigError: A field is out of range, or the memory does not hold ``size``.
    """

    threads: tuple[int, ...] = ()
    isa: str = "auto"
    size: int = 0
    repeats: int = 11
    huge_pages: str = "both"

    def __post_init__(self) -> None:
        cores = available_cores()
        for threads in self.threads:
            if not 1 <= threads <= cores:
                raise ConfigError("threads", threads, f"1 to {cores}, the cores that this process may use")
        isas = ("auto", *_native.available_isas())
        if self.isa not in isas:
            raise ConfigError("isa", self.isa, "one of " + ", ".join(isas))
        if not FEWEST_REPEATS <= self.repeats <= MOST_REPEATS:
            raise ConfigError("repeats", self.repeats, f"{FEWEST_REPEATS} to {MOST_REPEATS}")
        if self.huge_pages not in HUGE_PAGES:
            raise ConfigError("huge_pages", self.huge_pages, "one of " + ", ".join(HUGE_PAGES))
        least = max(self.threads or (cores,)) * LEAST_BYTES_PER_THREAD
        if self.size and self.size < least:
            raise ConfigError("size", f"{self.size} bytes", f"at least {least} bytes")
        # The points need it twice: their weights, and what the ceiling beside them reads.
        need, have = 2 * self.size, available_memory_bytes()
        if need > have:
            raise ConfigError(
                "size",
                InWords(f"{self.size / 1e9:.1f} GB, which needs {need / 1e9:.1f} GB of memory"),
                f"at most half of the {have / 1e9:.1f} GB that are available",
            )


@dataclass(frozen=True)
class Roofline:
    """What was measured: ceilings, and kernels below them."""

    config: RooflineConfig
    size_bytes: int
    caches: Caches
    cores: int
    ceilings: list[Ceiling] = field(default_factory=list)
    points: list[Placed] = field(default_factory=list)
    other_load: OtherLoad = field(default=OtherLoad(0.0, 0.0))

    @property
    def size_per_llc(self) -> float:
        """The cold footprint over the last-level cache."""
        return self.size_bytes / self.caches.llc_bytes

    @property
    def notes(self) -> list[str]:
        """What is particular about this run, before the caveats that hold for all."""
        notes = []
        if self.size_per_llc < COLD_FROM_LLCS:
            notes.append(
                f"NOT COLD: the footprint is {self.size_per_llc:.2f} times the last-level cache; "
                f"{COLD_FROM_LLCS} times or more is."
            )
        if self.caches.source == "assumed":
            notes.append("The system does not tell the sizes of its caches: they are assumed.")
        if self.other_load.programs + self.other_load.hypervisor > QUIET_CORES:
            notes.append(
                f"NOT ALONE: meanwhile other programs used {self.other_load.programs:.2f} cores and other "
                f"virtual machines took {self.other_load.hypervisor:.2f}; the fastest samples say more then."
            )
        return notes

    def memory_roofs(self) -> dict[str, float]:
        """Read ceilings in GB/s by where the data is, the best of pages, most threads."""
        return self._roofs("read", lambda ceiling: f"{ceiling.state} read")

    def compute_roofs(self) -> dict[str, float]:
        """Multiply-add peaks in GFLOP/s by instruction set, most threads."""
        return self._roofs("fma", lambda ceiling: f"{ceiling.isa} multiply-add")

    def _roofs(self, operation: str, name: Callable[[Ceiling], str]) -> dict[str, float]:
        most = max(ceiling.threads for ceiling in self.ceilings)
        roofs: dict[str, float] = {}
        for ceiling in self.ceilings:
            if ceiling.operation == operation and ceiling.threads == most:
                key = name(ceiling)
                roofs[key] = max(roofs.get(key, 0.0), ceiling.rate.median)
        return roofs

    def to_json(self) -> dict[str, object]:
        """Everything as plain values; rates in 10^9 per second."""
        return {
            "benchmark": "roofline",
            "commit": commit(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "cpu": cpu_name(),
            "cores": self.cores,
            "kernel": platform.release(),
            "caches": asdict(self.caches),
            "other_load_cores": _rounded(asdict(self.other_load)),
            **asdict(self.config),
            "threads": sorted({ceiling.threads for ceiling in self.ceilings}),
            "size": self.size_bytes,
            "size_per_llc": round(self.size_per_llc, 2),
            "verified": True,  # what is not right raises instead
            "ceilings": [_ceiling_json(ceiling) for ceiling in self.ceilings],
            "roofs": {
                "gb_per_s": _rounded(self.memory_roofs()),
                "gflop_per_s": _rounded(self.compute_roofs()),
            },
            "points": [_point_json(placed) for placed in self.points],
            "notes": self.notes,
            "caveats": list(CAVEATS),
        }


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def _ceiling_json(ceiling: Ceiling) -> dict[str, object]:
    return {
        "operation": ceiling.operation,
        "state": ceiling.state,
        "threads": ceiling.threads,
        "isa": ceiling.isa,
        "huge_pages": ceiling.huge_pages,
        "huge_page_share": round(ceiling.huge_page_share, 4),
        "footprint_bytes": ceiling.footprint_bytes,
        "unit": ceiling.unit,
        "best": ceiling.best,
        **_rounded(asdict(ceiling.rate)),
        "variants": {name: _rounded(asdict(rate)) for name, rate in ceiling.variants.items()},
    }


def _point_json(placed: Placed) -> dict[str, object]:
    return {
        "name": placed.point.name,
        "flop_per_byte": round(placed.point.flop_per_byte, 4),
        "gflop_per_s": round(placed.point.gflop_per_s, 3),
        "gb_per_s": round(placed.point.gb_per_s, 3),
        "read_gb_per_s": round(placed.read.median, 3),
        "of_ceiling": round(placed.of_ceiling, 4),
        "fastest_gb_per_s": round(placed.fastest.gb_per_s, 3),
        "fastest_read_gb_per_s": round(placed.read.most, 3),
        "fastest_of_ceiling": round(placed.fastest_of_ceiling, 4),
    }


def thread_counts(cores: int) -> tuple[int, ...]:
    """1, 2, 4 and so on, and all cores."""
    counts = []
    threads = 1
    while threads < cores:
        counts.append(threads)
        threads *= 2
    return (*counts, cores)


def measure_roofline(config: RooflineConfig, caches: Caches | None = None) -> Roofline:
    """Verifies the loops and the kernels, then measures them.

    Args:
        config: What to measure.
        caches: Sizes of the caches; the system's where absent.

    Raises:
        ConfigError: The memory does not hold what ``size`` = 0 takes at least.
    """
    caches = caches or read_caches()
    cores = available_cores()
    counts = tuple(sorted(set(config.threads))) or thread_counts(cores)
    size_bytes = config.size or default_size_bytes(caches, available_memory_bytes())
    least = counts[-1] * LEAST_BYTES_PER_THREAD
    if size_bytes < least:
        got = InWords(f"{size_bytes} bytes, a quarter of the memory that is available")
        raise ConfigError("size", got, f"at least {least} bytes")
    huge_pages = HUGE_PAGES[config.huge_pages]
    isa = _native.select_isa() if config.isa == "auto" else config.isa
    meter = LoadMeter()
    roofline = Roofline(config, size_bytes, caches, cores)
    for threads in counts:
        for huge in huge_pages:
            roofline.ceilings.extend(memory_ceilings(threads, size_bytes, isa, huge, config.repeats, caches))
        isas = _native.available_isas() if config.isa == "auto" else [isa]
        roofline.ceilings.extend(fma_ceilings(threads, isas, config.repeats))
    roofline.points.extend(
        expert_points(
            counts[-1],
            size_bytes=size_bytes,
            isa=isa,
            huge_pages=huge_pages[0],
            repeats=config.repeats,
            shape=DEEPSEEK_CUT_32_WAYS,
        )
    )
    return replace(roofline, other_load=meter.read())
