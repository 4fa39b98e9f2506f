"""What the node sets so that nothing comes between a step and its cores.

Called by :mod:`duckllm.node_image.init` before the worker starts. Each setting is a file below /proc or /sys;
what a machine does not have is left out, and said.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path

# Why: statistics and compaction in the background are what a waiting step would meet; huge pages are for who
# asks for them, which is the worker for all of its slice; the last two are what docs/operations.md asks for.
_KERNEL = {
    "proc/sys/vm/stat_interval": "30",
    "proc/sys/vm/compaction_proactiveness": "0",
    "proc/sys/vm/swappiness": "0",
    # Newer kernels (6.7 on) else let a core keep up to an eighth of the memory in a list of its own.
    "proc/sys/vm/percpu_pagelist_high_fraction": "512",
    "proc/sys/vm/lowmem_reserve_ratio": "0",  # the first 16 MiB are for cards of another century
    "proc/sys/kernel/nmi_watchdog": "0",
    "proc/sys/kernel/sysrq": "0",
    "proc/sys/kernel/panic": "10",
    "proc/sys/kernel/panic_on_oops": "1",
    "sys/kernel/mm/transparent_hugepage/enabled": "madvise",
    "sys/kernel/mm/transparent_hugepage/defrag": "madvise",
    "proc/sys/net/core/rmem_max": "8388608",
    "proc/sys/net/ipv4/tcp_rto_min_us": "1000",
}
_MOST_WAKE_US = 20
_HOUSEKEEPING = "1"  # mask: core 0, where a step's network is read too


def tune(root: Path = Path("/")) -> list[str]:
    """Sets all of it; one line for each kind of setting, of what was done or is not there."""
    said = []
    missing = [name.rpartition("/")[2] for name, value in _KERNEL.items() if not write(root / name, value)]
    said.append("kernel settings" + (f", not here: {', '.join(missing)}" if missing else ""))
    total_kb = int((root / "proc/meminfo").read_text().partition("MemTotal:")[2].split()[0])
    # What a kernel keeps free by itself; where it gives huge pages, it would keep tens of MB more.
    write(root / "proc/sys/vm/min_free_kbytes", str(math.isqrt(16 * total_kb)))
    # As many huge pages as a plan's slice takes, from the moment that it comes; none are kept for another.
    write(root / "proc/sys/vm/nr_overcommit_hugepages", str(total_kb // 2048))
    governors = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor"))
    set_there = sum(write(path, "performance") for path in governors)
    said.append(f"performance governor on {set_there} cores" if set_there else "no clock governor here")
    said.append(_idle_lightly(root))
    said.append(_keep_interrupts_on_core_0(root))
    said.append(_swap_off(root))
    return said


def make_room(root: Path = Path("/")) -> None:
    """Frees the page cache and puts free memory together, so that a slice gets huge pages."""
    write(root / "proc/sys/vm/drop_caches", "3")
    write(root / "proc/sys/vm/compact_memory", "1")


def write(path: Path, value: str) -> bool:
    """Whether a setting could be set."""
    try:
        with path.open("r+") as file:
            file.write(value)
    except OSError:
        return False
    return True


def isolated_cores(root: Path = Path("/")) -> str:
    """The cores that the scheduler leaves alone, as the kernel writes them; empty for none."""
    path = root / "sys/devices/system/cpu/isolated"
    return path.read_text().strip() if path.exists() else ""


def _idle_lightly(root: Path) -> str:
    """Turns idle states off that take long to leave: a worker's threads wait before each layer's step."""
    slow = 0
    for path in sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpuidle/state[0-9]*/latency")):
        if int(path.read_text()) > _MOST_WAKE_US:
            slow += write(path.parent / "disable", "1")
    return f"{slow} idle states off that take more than {_MOST_WAKE_US} us to leave"


def _keep_interrupts_on_core_0(root: Path) -> str:
    write(root / "proc/irq/default_smp_affinity", _HOUSEKEEPING)
    write(root / "sys/devices/virtual/workqueue/cpumask", _HOUSEKEEPING)
    paths = sorted((root / "proc/irq").glob("[0-9]*/smp_affinity"))
    moved = sum(write(path, _HOUSEKEEPING) for path in paths)
    cores = isolated_cores(root)
    return f"{moved} of {len(paths)} interrupts on core 0, isolated cores: {cores or 'none'}"


def _swap_off(root: Path) -> str:
    swaps: Sequence[str] = (root / "proc/swaps").read_text().splitlines()[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    for line in swaps:
        libc.swapoff(line.split()[0].encode())
    return f"swap off ({len(swaps)} of it were on)" if swaps else "no swap"
