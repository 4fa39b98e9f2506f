"""What the unevenness of cores means, and what to change: a line for each cause."""

from __future__ import annotations

from collections.abc import Sequence

from duckllm.config import count_of
from duckllm.doctor.jitter import CoreJitter, Jitter
from duckllm.doctor.jitter_counters import KERNEL_INTERRUPTS

_EVEN = 1.1  # p99.9 by p50 up to which nothing needs to be done
_MANY_SWITCHES, _MANY_TICKS, _MANY_DEVICE, _MANY_CALLS = 1.0, 50.0, 10.0, 50.0  # a second
_MUCH_STOLEN, _MUCH_BUSY, _CLOCK_CHANGE = 0.01, 0.2, 0.05


def rate(core: CoreJitter, count: float) -> float:
    """How often a second."""
    return count / core.seconds if core.seconds > 0 else 0.0


def devices(core: CoreJitter) -> dict[str, int]:
    """Interrupts of devices, by number and name."""
    return {name: count for name, count in core.interrupts.items() if name.partition(" ")[0].isdigit()}


def causes(core: CoreJitter) -> str:
    """What came between, the most frequent first, a second."""
    counted = {"other programs": core.num_switches, **core.interrupts}
    known = {*KERNEL_INTERRUPTS.values(), "other programs", *devices(core)}
    rates = {name: rate(core, count) for name, count in counted.items() if name in known}
    ordered = sorted(rates.items(), key=lambda each: -each[1])
    words = [f"{name} {each:.0f}/s" for name, each in ordered if each >= 0.5][:4]
    if core.stolen_s > 0 and core.seconds > 0:
        words.append(f"stolen {100 * core.stolen_s / core.seconds:.1f} %")
    if core.waited_s is not None and core.waited_s >= 0.001:
        words.append(f"waited {1e3 * core.waited_s:.0f} ms")
    if core.siblings:
        words.append(f"core {','.join(map(str, core.siblings))} is its other thread")
    if core.mhz is not None:
        words.append(f"{core.mhz[1]:.0f} MHz")
    return ", ".join(words) or "nothing counted"


def advise(found: Jitter) -> list[str]:
    """What to change, the largest cause first; one line where all is even."""
    uneven = [core for core in found.cores if core.p999_us > _EVEN * core.p50_us]
    if not uneven:
        return ["all cores are even: 999 of 1000 pieces take at most 1.1 times the median"]
    lines = []
    if named := _cores_with(uneven, lambda core: rate(core, core.num_switches) >= _MANY_SWITCHES):
        num_slow = max(1, sum(core.num_slow for core in uneven))
        share = min(1.0, sum(core.num_switched for core in uneven) / num_slow)
        lines.append(
            f"other programs ran on {named} ({100 * share:.0f} % of the slow pieces): stop them (top), or "
            "keep them off: sudo systemctl set-property --runtime system.slice AllowedCPUs=0 (user.slice "
            "too), at boot isolcpus=; or go before them: sudo chrt -f 10 duckllm worker ..., with "
            "kernel.sched_rt_runtime_us=-1, or the kernel lets others in for 50 ms of each second"
        )
    if named := _cores_with(uneven, lambda core: core.stolen_s > _MUCH_STOLEN * core.seconds):
        lines.append(
            f"a hypervisor took {named} away: no setting here changes that, a machine of one's own does"
        )
    busy = {
        name for core in uneven for name, count in devices(core).items() if rate(core, count) > _MANY_DEVICE
    }
    if busy:
        numbers = " ".join(sorted(name.partition(" ")[0] for name in busy))
        lines.append(
            f"devices interrupt ({', '.join(sorted(busy))}): for i in {numbers}; do echo 0 | sudo tee "
            "/proc/irq/$i/smp_affinity_list; done, where core 0 does not compute; stop irqbalance"
        )
    if named := _cores_with(
        uneven,
        lambda core: not core.is_tickless and rate(core, core.interrupts.get("timer", 0)) > _MANY_TICKS,
    ):
        numbers = ",".join(str(core.core) for core in found.cores if core.core) or "1-"
        lines.append(
            f"the timer ticks on {named}: at boot nohz_full={numbers} and rcu_nocbs={numbers}, which holds "
            "while one thread runs on each"
        )
    calls = ("function calls", "TLB shootdowns", "rescheduling")
    if named := _cores_with(
        uneven, lambda core: rate(core, sum(core.interrupts.get(each, 0) for each in calls)) > _MANY_CALLS
    ):
        lines.append(f"other cores interrupt {named}: programs that run on both; give each its own cores")
    if named := _cores_with(uneven, lambda core: core.siblings_busy > _MUCH_BUSY):
        lines.append(
            f"the other thread of {named} is busy: one thread a core (--threads), or echo off | sudo tee "
            "/sys/devices/system/cpu/smt/control"
        )
    if named := _cores_with(
        uneven,
        lambda core: core.mhz is not None and abs(core.mhz[1] / core.mhz[0] - 1) > _CLOCK_CHANGE,
    ):
        lines.append(f"the clock of {named} changes: sudo cpupower frequency-set -g performance")
    return lines or ["what came between is not counted by this kernel: firmware (SMI), or the hypervisor"]


def _cores_with(cores: Sequence[CoreJitter], holds: object) -> str:
    assert callable(holds)
    numbers = [str(core.core) for core in cores if holds(core)]
    if not numbers:
        return ""
    shown = ", ".join(numbers[:8]) + (", ..." if len(numbers) > 8 else "")
    return f"core {shown}" if len(numbers) == 1 else f"{count_of(len(numbers), 'core')} ({shown})"
