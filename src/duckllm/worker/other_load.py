"""What else used this machine during a measurement, by /proc/stat.

Called by the worker's measurement of its memory and by the benchmarks (:mod:`duckllm.bench.machine`).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

# Cores that others use beside a measurement that counts as undisturbed: a system's own housekeeping.
_HOUSEKEEPING = 0.25


@dataclass(frozen=True)
class OtherLoad:
    """What else used the machine during a measurement, in cores on the average.

    Args:
        programs: Other programs of this machine, its kernel included.
        hypervisor: Time that a virtual machine wanted and did not get ("steal").
    """

    programs: float
    hypervisor: float

    @property
    def is_alone(self) -> bool:
        """Whether that was little enough to believe the measurement."""
        return self.programs + self.hypervisor <= _HOUSEKEEPING


class LoadMeter:
    """Finds out what else used the machine since it was made."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._start = self._read()

    def read(self) -> OtherLoad:
        """The averages from then to now; at least 0, for the two clocks are not read at once."""
        wall_s, own_s, busy_s, steal_s = (
            now - then for now, then in zip(self._read(), self._start, strict=True)
        )
        wall_s = max(wall_s, 1e-9)
        return OtherLoad(max(0.0, (busy_s - own_s) / wall_s), steal_s / wall_s)

    def _read(self) -> tuple[float, float, float, float]:
        times = os.times()
        fields = [int(word) for word in self._stat.read_text().split("\n", 1)[0].split()[1:]]
        user, nice, system, _idle, _iowait, irq, softirq, steal = fields[:8]
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        busy = (user + nice + system + irq + softirq) / ticks_per_s
        return time.monotonic(), times.user + times.system, busy, steal / ticks_per_s
