"""What a benchmark says of the machine it ran on: processor, caches, memory, other load.

Called by the benchmarks; reads /proc and /sys only.
"""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

CPU_FOLDER = Path("/sys/devices/system/cpu")
# Where the system does not tell: what a small cloud machine has.
ASSUMED_L2_BYTES, ASSUMED_LLC_BYTES = 1 << 20, 32 << 20


@dataclass(frozen=True)
class Caches:
    """Data caches of the cores that this process may run on.

    Args:
        l2_bytes: Second-level cache that each core has to itself (its share, where cores share one).
        llc_bytes: All last-level caches together.
        source: ``"system"``, or ``"assumed"`` where the system does not tell.
    """

    l2_bytes: int
    llc_bytes: int
    source: str = "system"


def read_caches(cpu_folder: Path = CPU_FOLDER) -> Caches:
    """The caches as the system describes them; a virtual machine may be told of more than it gets."""
    allowed = os.sched_getaffinity(0)
    levels: dict[int, dict[str, int]] = {}  # level -> cores that share a cache -> its bytes
    for cpu in allowed:
        for index in (cpu_folder / f"cpu{cpu}" / "cache").glob("index*"):
            try:
                kind = (index / "type").read_text().strip()
                level = int((index / "level").read_text())
                size = parse_cache_size((index / "size").read_text())
                sharers = (index / "shared_cpu_list").read_text().strip()
            except (OSError, ValueError):
                continue
            if kind in ("Data", "Unified"):
                levels.setdefault(level, {})[sharers] = size
    if 2 not in levels:
        return Caches(ASSUMED_L2_BYTES, ASSUMED_LLC_BYTES, "assumed")
    return Caches(
        l2_bytes=sum(levels[2].values()) // len(allowed),
        llc_bytes=sum(levels[max(levels)].values()),
    )


def parse_cache_size(text: str) -> int:
    """Bytes of ``"1024K"`` and the like, as /sys writes them."""
    text = text.strip()
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
    return int(text.rstrip("KMG")) * unit


def available_memory_bytes() -> int:
    """What can be allocated without pushing anything else out, by /proc/meminfo and the control group."""
    available = 1 << 62
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return available
    return max(0, min(available, limit - used))


def cpu_name() -> str:
    """The processor's name as it gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def commit() -> str:
    """The checkout's commit that this package runs from; ``"unknown"`` outside of one."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
