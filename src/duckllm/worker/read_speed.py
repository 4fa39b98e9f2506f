"""How many bytes a second this machine reads from memory: measured once, alone, and kept in the cache.

Called when a worker starts and by ``duckllm doctor``; imports no torch. The loops and their clock are native
(csrc/bench); ``duckllm bench roofline`` takes longer and says more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from pathlib import Path
from statistics import median

from duckllm import _native
from duckllm.config import total_memory_bytes
from duckllm.errors import ConfigError, WeightFormatError
from duckllm.weights.cache_folder import speed_folder
from duckllm.weights.files import FolderLock, write_atomically
from duckllm.weights.recode import available_memory_bytes, private_memory
from duckllm.worker.config import MAX_SPEED
from duckllm.worker.other_load import LoadMeter

_WINDOWS, _FEWEST_WINDOWS = 16, 4
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 9
_TOUCH_LIMIT_S, _READ_LIMIT_S = 0.4, 0.5
# More than most last-level caches, and an eighth of what is available at most.
_MOST_BYTES, _FREE_SHARE = 512 << 20, 8


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as it gives it; ``"unknown"`` where it gives none."""
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def measure_read_speed(num_threads: int, num_bytes: int | None = None) -> float:
    """What the best of the plain read loops reaches, cold, in about a second.

    Args:
        num_threads: Threads that read, each its own part.
        num_bytes: Memory to walk through; None for 512 MiB, or an eighth of what is available.

    Units: GB/s, 10^9 bytes a second; the median of the best loop.

    Raises:
        WeightFormatError: There is no memory.
    """
    loops = _native.CeilingLoops(num_threads)
    if num_bytes is None:
        num_bytes = min(_MOST_BYTES, available_memory_bytes() // _FREE_SHARE)
    granule = loops.granule_bytes
    window_bytes = max(granule, num_bytes // _WINDOWS // granule * granule)
    memory = private_memory((_WINDOWS, window_bytes))
    start, ready = time.monotonic(), 0
    # Where the system is slow to give memory, fewer windows have to do.
    while ready < _WINDOWS and (ready < _FEWEST_WINDOWS or time.monotonic() - start < _TOUCH_LIMIT_S):
        loops.randomise(memory[ready], seed=ready)
        ready += 1
    seconds: dict[str, list[float]] = {variant: [] for variant in loops.variants("read")}
    start, window = time.monotonic(), 0
    for number in range(_MOST_ROUNDS):
        for variant, samples in seconds.items():
            samples.append(loops.read(variant, memory[window])[0])
            window = (window + 1) % ready
        if number + 1 >= _FEWEST_ROUNDS and time.monotonic() - start > _READ_LIMIT_S:
            break
    return window_bytes / min(median(samples) for samples in seconds.values()) / 1e9


def kept_read_speed(num_threads: int) -> tuple[Path, float | None]:
    """Where this machine's figure is kept, and the figure, if there is one.

    Raises:
        ConfigError: This user has no home, and nothing names a folder.
    """
    facts = _machine(num_threads)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    path = speed_folder() / f"{digest[:16]}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        kept = json.loads(path.read_text())
        speed = kept["read_gb_per_s"]
        if kept["machine"] == facts and type(speed) is float and 0 < speed <= MAX_SPEED:
            return path, speed
    return path, None


def read_speed(num_threads: int) -> float:
    """This machine's figure: the one that is kept, else measured now, and kept if nothing else ran.

    Units: GB/s.

    Raises:
        ConfigError: There is no memory to measure with.
    """
    try:
        path, known = kept_read_speed(num_threads)
    except ConfigError:  # nowhere to keep it
        return _measure(num_threads)
    if known is not None:
        return known
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FolderLock(path.parent):  # two workers that start together would disturb each other
            known = kept_read_speed(num_threads)[1]
            if known is None:
                meter = LoadMeter()
                known = _measure(num_threads)
                if not meter.read().is_alone:  # it would be said for ever
                    return known
                content = {"machine": _machine(num_threads), "read_gb_per_s": known}
                write_atomically(path, json.dumps(content).encode())
            return known
    except OSError:  # a folder that cannot be written
        return known if known is not None else _measure(num_threads)


def _measure(num_threads: int) -> float:
    try:
        return round(measure_read_speed(num_threads), 1)
    except WeightFormatError as error:
        raise ConfigError("speed", None, "a figure, as no memory is free to measure it with") from error


def _machine(num_threads: int) -> dict[str, object]:
    """What tells whether a figure is this machine's: a home may be shared by many."""
    return {
        "cpu": cpu_name(),
        "node": os.uname().nodename,
        "memory_bytes": total_memory_bytes(),
        "threads": num_threads,
    }
