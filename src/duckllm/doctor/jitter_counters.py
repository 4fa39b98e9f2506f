"""What the kernel has counted of a core: interrupts by name, softirqs, stolen time, its clock; no judgement.

Called by :mod:`duckllm.doctor.jitter` before and after a core is measured. Every file may be missing or odd:
what it says is then left out.
"""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass
from pathlib import Path

# Of /proc/interrupts, what is no device's.
KERNEL_INTERRUPTS = {
    "LOC": "timer",
    "RES": "rescheduling",
    "CAL": "function calls",
    "TLB": "TLB shootdowns",
    "IWI": "IRQ work",
    "HYP": "hypervisor",
    "NMI": "NMI",
    "PMI": "performance counters",
}
_IDLE, _IOWAIT, _STEAL = 3, 4, 7  # fields of a line of /proc/stat
_MAX_NAMES = 4096  # of interrupts; machines have hundreds


@dataclass(frozen=True)
class Counters:
    """Counts of one core since the machine's start, and of this thread since its own.

    Args:
        interrupts: By name: of the kernel's as in KERNEL_INTERRUPTS, of devices the number and the name.
        softirqs: By name.
        stolen_s: Time that a hypervisor gave to others while this core had something to do, seconds.
        busy_s: Time that each core was not idle, by its number, seconds.
        num_switches: How often this thread had to make way for another.
        waited_s: How long this thread was ready and did not run, seconds; None where that is not counted.
        mhz: The core's clock; None where that is not told.
    """

    interrupts: dict[str, int]
    softirqs: dict[str, int]
    stolen_s: float
    busy_s: dict[int, float]
    num_switches: int
    waited_s: float | None
    mhz: float | None


def read_counters(core: int, root: Path = Path("/")) -> Counters:
    """The counts of now.

    Args:
        core: Its number.
        root: Where ``proc`` and ``sys`` are.
    """
    stolen_s, busy_s = _stat(core, root)
    waited_s = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        waited_s = int(_text(root, "proc/thread-self/schedstat").split()[1]) / 1e9
    mhz = None
    with contextlib.suppress(OSError, ValueError):
        mhz = int(_text(root, f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq")) / 1e3
    return Counters(
        _per_core(core, root, "proc/interrupts"),
        _per_core(core, root, "proc/softirqs"),
        stolen_s,
        busy_s,
        resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw,
        waited_s,
        mhz,
    )


def siblings(core: int, root: Path = Path("/")) -> tuple[int, ...]:
    """Other numbers of the same core: its further threads."""
    with contextlib.suppress(OSError, ValueError):
        listed = parse_cores(_text(root, f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"))
        return tuple(each for each in listed if each != core)
    return ()


def kept_free(name: str, root: Path = Path("/")) -> tuple[int, ...]:
    """The cores of a list of the kernel's: ``"isolated"`` or ``"nohz_full"``."""
    with contextlib.suppress(OSError, ValueError):
        return parse_cores(_text(root, f"sys/devices/system/cpu/{name}"))
    return ()


def parse_cores(text: str) -> tuple[int, ...]:
    """The numbers in ``"0-2,4"``.

    Raises:
        ValueError: It is no such list.
    """
    found: list[int] = []
    for part in text.strip().split(","):
        if part and part != "(null)":
            first, _, last = part.partition("-")
            low, high = int(first), int(last or first)
            if not 0 <= low <= high < 1 << 16:
                raise ValueError(f"no cores: {part!r}")
            found += range(low, high + 1)
    return tuple(found)


def _per_core(core: int, root: Path, file: str) -> dict[str, int]:
    """One core's column of a table of counts."""
    counts: dict[str, int] = {}
    with contextlib.suppress(OSError):
        lines = _text(root, file).splitlines()
        # Cores that are off have no column.
        columns = lines[0].split() if lines else []
        if f"CPU{core}" not in columns:
            return counts
        at = columns.index(f"CPU{core}") + 1
        for line in lines[1:_MAX_NAMES]:
            words = line.split()
            if len(words) > at and words[at].isdigit():
                number = words[0].rstrip(":")
                name = KERNEL_INTERRUPTS.get(number, number)
                if number.isdigit():
                    name = f"{number} {words[-1]}"
                counts[name] = int(words[at])
    return counts


def _stat(core: int, root: Path) -> tuple[float, dict[int, float]]:
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    stolen_s, busy_s = 0.0, {}
    with contextlib.suppress(OSError):
        for line in _text(root, "proc/stat").splitlines():
            words = line.split()
            number = words[0].removeprefix("cpu") if words else ""
            fields = words[1:9]
            if number.isdigit() and len(fields) == 8 and all(each.isdigit() for each in fields):
                ticks = [int(each) for each in fields]
                busy_s[int(number)] = (sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT]) * tick_s
                if int(number) == core:
                    stolen_s = ticks[_STEAL] * tick_s
    return stolen_s, busy_s


def _text(root: Path, file: str) -> str:
    return (root / file).read_text(encoding="ascii", errors="replace")
