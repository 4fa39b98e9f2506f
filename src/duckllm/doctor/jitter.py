"""How evenly the cores of this machine compute: a piece of work, often, on each core, and what came between.

Called by ``duckllm doctor --jitter``. A layer's step is over when the slowest worker has answered, and a
worker when its slowest thread has: what rarely happens on one core happens in every step of many.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from duckllm.doctor.jitter_counters import Counters, kept_free, read_counters, siblings
from duckllm.errors import ConfigError

DEFAULT_SAMPLES = 20_000
LEAST_SAMPLES, MOST_SAMPLES = 1000, 1_000_000  # 99.9 % of fewer says nothing; of more it takes minutes
PIECE_US = 50.0  # about a worker's part of a layer's step
SLOW = 1.25  # times the median: a piece that something came between
_ELEMENTS = 1024  # 16 KiB in all: what every core has of its own, next to it
_SCHEDULERS = {os.SCHED_OTHER: "normal", os.SCHED_FIFO: "fifo", os.SCHED_RR: "rr"}
Clock = Callable[[], int]


@dataclass(frozen=True)
class CoreJitter:
    """One core's pieces.

    Args:
        core: Its number.
        num_samples: How often the piece was computed.
        p50_us: Half of them took no longer.
        p99_us: 99 of 100.
        p999_us: 999 of 1000.
        max_us: The longest.
        num_slow: How many took over 1.25 times the median.
        num_switched: In how many of these another thread ran on the core.
        lost: Part of the time beyond what the median would have taken, 0 to 1.
        seconds: How long all of it took.
        interrupts: By name, as :class:`~duckllm.doctor.jitter_counters.Counters`, while it ran.
        softirqs: The same.
        num_switches: How often another thread took the core.
        waited_s: How long this one waited for it; None where that is not counted.
        stolen_s: How long a hypervisor gave it to others.
        mhz: Its clock after and before; None where that is not told.
        siblings: Other threads of the same core.
        siblings_busy: How busy these were, 0 to 1 for each, summed.
        is_isolated: Whether the kernel keeps other programs off it.
        is_tickless: Whether the kernel spares it the timer while one program runs.
    """

    core: int
    num_samples: int
    p50_us: float
    p99_us: float
    p999_us: float
    max_us: float
    num_slow: int
    num_switched: int
    lost: float
    seconds: float
    interrupts: dict[str, int] = field(default_factory=dict)
    softirqs: dict[str, int] = field(default_factory=dict)
    num_switches: int = 0
    waited_s: float | None = None
    stolen_s: float = 0.0
    mhz: tuple[float, float] | None = None
    siblings: tuple[int, ...] = ()
    siblings_busy: float = 0.0
    is_isolated: bool = False
    is_tickless: bool = False


@dataclass(frozen=True)
class Jitter:
    """All cores.

    Args:
        piece_us: What the piece takes on the first core, at its median.
        scheduler: This process's: ``"normal"``, ``"fifo"`` or ``"rr"``, with its priority or niceness.
        load: Mean number of threads that ran or wanted to in the last minute, before the measurement.
        cores: Each core.
    """

    piece_us: float
    scheduler: str
    load: float
    cores: tuple[CoreJitter, ...]


def measure_jitter(
    samples: int = DEFAULT_SAMPLES,
    *,
    root: Path = Path("/"),
    clock: Clock = time.perf_counter_ns,
    cores: Sequence[int] | None = None,
) -> Jitter:
    """Computes the piece on each core in turn, pinned to it, and gives this thread its cores back.

    Args:
        samples: How often on each.
        root: Where ``proc`` and ``sys`` are.
        clock: Nanoseconds.
        cores: Which; None for every one that this process may run on.

    Raises:
        ConfigError: Too few or too many samples.
    """
    if not LEAST_SAMPLES <= samples <= MOST_SAMPLES:
        raise ConfigError("samples", samples, f"a number from {LEAST_SAMPLES} to {MOST_SAMPLES}")
    load = os.getloadavg()[0]
    chosen = sorted(os.sched_getaffinity(0)) if cores is None else list(cores)
    with _pinned(chosen[0]):
        piece = _Piece.of(PIECE_US, clock)
    found = []
    for core in chosen:
        with _pinned(core):
            found.append(_measure_core(core, piece, samples, root, clock))
    return Jitter(found[0].p50_us, _scheduler(), load, tuple(found))


def summarise(
    core: int,
    times_ns: npt.NDArray[np.int64],
    num_switched: int,
    seconds: float,
    before: Counters,
    after: Counters,
    root: Path = Path("/"),
) -> CoreJitter:
    """What the times and counts of one core come to."""
    p50, p99, p999 = (float(each) / 1e3 for each in np.percentile(times_ns, [50, 99, 99.9]))
    beyond = times_ns / 1e3 - p50
    others = siblings(core, root)
    busy_s = sum(after.busy_s.get(each, 0.0) - before.busy_s.get(each, 0.0) for each in others)
    waited_s = None
    if after.waited_s is not None and before.waited_s is not None:
        waited_s = after.waited_s - before.waited_s
    return CoreJitter(
        core,
        len(times_ns),
        p50,
        p99,
        p999,
        float(times_ns.max()) / 1e3,
        int(np.count_nonzero(times_ns > SLOW * 1e3 * p50)),
        num_switched,
        float(np.maximum(beyond, 0).sum() / (times_ns.sum() / 1e3)),
        seconds,
        _grown(before.interrupts, after.interrupts),
        _grown(before.softirqs, after.softirqs),
        after.num_switches - before.num_switches,
        waited_s,
        max(0.0, after.stolen_s - before.stolen_s),
        None if before.mhz is None or after.mhz is None else (before.mhz, after.mhz),
        others,
        busy_s / seconds if seconds > 0 else 0.0,
        core in kept_free("isolated", root),
        core in kept_free("nohz_full", root),
    )


class _Piece:
    """The work: arc tangents, so many rounds of them, of numbers that lie in each core's own cache."""

    def __init__(self, num_rounds: int) -> None:
        self._rounds = range(num_rounds)
        self._x = np.linspace(0.1, 7.0, _ELEMENTS)
        self._y = np.empty_like(self._x)

    @classmethod
    def of(cls, us: float, clock: Clock) -> _Piece:
        """The piece that takes so long where nothing comes between."""
        one = cls(1)
        taken = []
        for _ in range(200):
            start = clock()
            one.compute()
            taken.append(clock() - start)
        usual_ns = max(1, sorted(taken)[len(taken) // 2])
        return cls(max(1, round(1e3 * us / usual_ns)))

    def compute(self) -> None:
        """Computes it once."""
        for _ in self._rounds:
            np.arctan(self._x, out=self._y)


def _measure_core(core: int, piece: _Piece, samples: int, root: Path, clock: Clock) -> CoreJitter:
    times = np.empty(samples, np.int64)
    compute = piece.compute
    for _ in range(200):
        compute()
    begun = [0] * 101
    for number in range(len(begun)):
        begun[number] = clock()
        compute()
    usual_ns = int(np.median(np.diff(np.array(begun))))
    slow_ns, num_switched = int(SLOW * usual_ns), 0
    usage, who = resource.getrusage, resource.RUSAGE_THREAD
    with _no_collection():
        before = read_counters(core, root)
        known = usage(who).ru_nivcsw
        started = clock()
        for number in range(samples):
            start = clock()
            compute()
            taken = clock() - start
            times[number] = taken
            if taken > slow_ns:  # only then is there something to ask the kernel
                now = usage(who).ru_nivcsw
                num_switched += now != known
                known = now
        seconds = (clock() - started) / 1e9
        after = read_counters(core, root)
    return summarise(core, times, num_switched, seconds, before, after, root)


@contextlib.contextmanager
def _pinned(core: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _scheduler() -> str:
    policy = os.sched_getscheduler(0)
    name = _SCHEDULERS.get(policy, f"policy {policy}")
    if name == "normal":
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        return name if nice == 0 else f"{name}, nice {nice}"
    return f"{name}, priority {os.sched_getparam(0).sched_priority}"


def _grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    counts = {name: count - before.get(name, 0) for name, count in after.items()}
    kept = [(name, count) for name, count in counts.items() if count > 0]
    return dict(sorted(kept, key=lambda each: -each[1]))
