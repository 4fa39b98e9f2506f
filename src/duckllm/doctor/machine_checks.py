"""What the facts of this machine mean: one function for each check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from duckllm.doctor.finding import OK, PROBLEM, WARNING, Finding, Unknown, unknown
from duckllm.doctor.machine_facts import MachineFacts

HERE = "this machine"
_GIB = 1 << 30
# Reads of usual machines, GB/s by threads (docs/operations.md); beyond the last, so much for each thread.
_USUAL_GB_PER_S = {1: 14.0, 2: 28.0, 4: 35.0}
_USUAL_OF_MANY_GB_PER_S = 8.0
# A figure that is kept and one of now that differ by more are not of the same state of the machine.
_KEPT_DIFFERENCE = 1.25
_FEW_SPEEDS = 2
_SLOW_PREFERENCES = ("power", "balance_power")


def usual_gb_per_s(cores: int) -> float:
    """What a machine of so many cores usually reads."""
    known = max(threads for threads in _USUAL_GB_PER_S if threads <= cores)
    return max(_USUAL_GB_PER_S[known], _USUAL_OF_MANY_GB_PER_S * cores if cores > known else 0.0)


def check_cpu(facts: MachineFacts) -> Finding:
    """The instruction set."""
    if isinstance(facts.isa, Unknown):
        return Finding(HERE, "CPU", PROBLEM, f"{facts.cpu}: {facts.isa.reason}", "unset DUCK_FORCE_ISA")
    best = facts.isas[-1]
    found = f"{facts.cpu}: computes with {facts.isa}"
    if facts.isa != best:
        advice = f"it has {best}: unset DUCK_FORCE_ISA (it is {facts.forced_isa!r})"
        return Finding(HERE, "CPU", WARNING, found, advice)
    if facts.isa == "scalar":
        return Finding(HERE, "CPU", WARNING, f"{found}, without AVX2", "use a CPU with AVX2 or AVX-512")
    if facts.bf16:
        found += f"; --prefill bf16 may use {facts.bf16[-1]}"
    return Finding(HERE, "CPU", OK, found)


def check_cores(facts: MachineFacts) -> Finding:
    """Cores, and whether two are one."""
    found = f"{facts.cores} to run on"
    if isinstance(facts.smt, Unknown):
        return Finding(HERE, "cores", OK, f"{found}; whether they share cores is unknown: {facts.smt.reason}")
    if not facts.smt:
        return Finding(HERE, "cores", OK, f"{found}, each a core of its own")
    found += ", two for each core: one thread a core often reads as much"
    half = max(1, facts.cores // 2)
    return Finding(HERE, "cores", OK, found, f"compare: duckllm bench kernel --threads {half},{facts.cores}")


def check_memory(facts: MachineFacts) -> Finding:
    """Memory that can be had."""
    if isinstance(facts.memory_bytes, Unknown):
        return unknown(HERE, "memory", facts.memory_bytes)
    total, available = facts.memory_bytes
    found = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB available"
    if available < total // 4:
        return Finding(HERE, "memory", WARNING, found, "see who has it: ps aux --sort=-rss | head")
    return Finding(HERE, "memory", OK, found)


def check_read_speed(facts: MachineFacts) -> Finding:
    """Memory bandwidth against what is usual."""
    if isinstance(facts.read_gb_per_s, Unknown):
        return unknown(HERE, "memory speed", facts.read_gb_per_s)
    speed, usual = facts.read_gb_per_s, usual_gb_per_s(facts.cores)
    found = f"{speed:.1f} GB/s read by {facts.cores} threads; {usual:.0f} are usual"
    if speed < usual / 2:
        advice = (
            "stop what else runs (top); is there a memory module in every channel? sudo dmidecode -t memory"
        )
        return Finding(HERE, "memory speed", WARNING, found, advice)
    return Finding(HERE, "memory speed", OK, found)


def check_said_speed(facts: MachineFacts) -> Finding | None:
    """Whether workers here say what is measured now; nothing where they said nothing yet.

    Those that were asked, or else what the next one to start will say. Each speaks of the whole machine's
    memory, as far as its threads read it.
    """
    kept = facts.kept_gb_per_s
    said = facts.said_gb_per_s or (((kept[1], facts.cores),) if kept else ())
    if not said:
        return None
    speeds = list(dict.fromkeys(f"{speed:.1f}" for speed, _ in sorted(said, reverse=True)))
    words = " and ".join(speeds) if len(speeds) <= _FEW_SPEEDS else f"{speeds[-1]} to {speeds[0]}"
    found = f"workers here say {words} GB/s"
    now = facts.read_gb_per_s
    if isinstance(now, Unknown) or not any(_is_off(*each, now, facts.cores) for each in said):
        return Finding(HERE, "said speed", OK, found)
    remove = f"rm {kept[0]}, and " if kept else ""
    advice = f"if nothing else runs, have it measured again: {remove}start the worker again, without --speed"
    return Finding(HERE, "said speed", WARNING, f"{found}, but {now:.1f} are measured now", advice)


def _is_off(said: float, threads: int, now: float, cores: int) -> bool:
    """Whether a figure is not of the machine as it is; fewer threads than cores may read less."""
    return said > now * _KEPT_DIFFERENCE or (threads >= cores and said < now / _KEPT_DIFFERENCE)


def check_huge_pages(facts: MachineFacts) -> Finding:
    """Transparent huge pages."""
    if isinstance(facts.huge_pages, Unknown):
        return unknown(HERE, "huge pages", facts.huge_pages)
    if facts.huge_pages in ("always", "madvise"):
        return Finding(HERE, "huge pages", OK, facts.huge_pages)
    advice = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    return Finding(HERE, "huge pages", WARNING, facts.huge_pages, advice)


def check_reserved_pages(facts: MachineFacts) -> Finding:
    """Huge pages that are set aside for programs that ask for them, which this one does not."""
    if isinstance(facts.reserved_pages, Unknown):
        return unknown(HERE, "reserved huge pages", facts.reserved_pages)
    total, free = facts.reserved_pages
    found = f"{free} of {total} free"
    if free:
        advice = "duck-llm uses transparent ones: sudo sysctl -w vm.nr_hugepages=0, unless others need them"
        return Finding(HERE, "reserved huge pages", WARNING, found, advice)
    return Finding(HERE, "reserved huge pages", OK, "none" if not total else found)


def check_governors(facts: MachineFacts) -> Finding:
    """The cores' clocks."""
    if isinstance(facts.governors, Unknown):
        return unknown(HERE, "clock governor", facts.governors)
    found = ", ".join(facts.governors)
    for each in facts.governors:
        governor, _, preference = each.partition("/")
        if governor == "performance":
            continue
        if governor == "powersave" and preference and preference not in _SLOW_PREFERENCES:
            continue  # of drivers whose "powersave" follows the load
        if governor not in ("powersave", "conservative", "ondemand"):
            continue
        advice = "sudo cpupower frequency-set -g performance"
        return Finding(HERE, "clock governor", WARNING, found, advice)
    return Finding(HERE, "clock governor", OK, found)


def check_swap(facts: MachineFacts) -> Finding:
    """Swap in use."""
    if isinstance(facts.swap_bytes, Unknown):
        return unknown(HERE, "swap", facts.swap_bytes)
    total, used = facts.swap_bytes
    found = f"{used / _GIB:.1f} of {total / _GIB:.1f} GiB used" if total else "none"
    memory = facts.memory_bytes
    if used > (_GIB if isinstance(memory, Unknown) else memory[0] // 50):
        return Finding(HERE, "swap", WARNING, found, "free memory, then: sudo swapoff -a && sudo swapon -a")
    return Finding(HERE, "swap", OK, found)


def check_clock(facts: MachineFacts) -> Finding:
    """Whether the time is kept right, so that logs of nodes can be compared."""
    if isinstance(facts.clock_is_kept, Unknown):
        return unknown(HERE, "clock", facts.clock_is_kept)
    if facts.clock_is_kept:
        return Finding(HERE, "clock", OK, "kept right")
    return Finding(HERE, "clock", WARNING, "nothing keeps it right", "sudo timedatectl set-ntp true")


def check_congestion(facts: MachineFacts) -> Finding:
    """TCP's congestion control of duck-llm's connections, which choose it themselves where they may."""
    if isinstance(facts.congestion, Unknown):
        return unknown(HERE, "TCP congestion control", facts.congestion)
    found = congestion_finding(HERE, facts.congestion)
    if isinstance(facts.default_congestion, Unknown) or facts.default_congestion == facts.congestion:
        return found
    if found.status != OK:
        return found
    words = f"{found.found}, which duck-llm's connections choose; the system's is {facts.default_congestion}"
    return replace(found, found=words)


def congestion_finding(where: str, congestion: str) -> Finding:
    """What a congestion control means for steps: BBR's waits after a loss are the longest."""
    check = "TCP congestion control"
    if congestion.startswith("bbr"):
        advice = "sudo sysctl -w net.ipv4.tcp_congestion_control=cubic"
        return Finding(where, check, WARNING, f"{congestion}, whose steps wait longest after a loss", advice)
    return Finding(where, check, OK, congestion)


def check_cards(facts: MachineFacts) -> Finding:
    """Whether a host here would compute on a GPU."""
    if not facts.cards:
        return Finding(HERE, "GPU", OK, "no NVIDIA card: a host here computes on its CPU")
    found = ", ".join(facts.cards)
    if facts.card_problem:
        advice = "docs/operations.md, A host with a GPU; a node that only computes experts needs none"
        return Finding(HERE, "GPU", WARNING, f"{found}; not used, as {facts.card_problem}", advice)
    return Finding(HERE, "GPU", OK, f"{found}: a host here computes on it where the model fits")


CHECKS: tuple[Callable[[MachineFacts], Finding | None], ...] = (
    *(check_cpu, check_cores, check_memory, check_read_speed, check_said_speed, check_huge_pages),
    *(check_reserved_pages, check_governors, check_swap, check_clock, check_congestion, check_cards),
)


def check_machine(facts: MachineFacts) -> list[Finding]:
    """Every check of this machine."""
    return [finding for check in CHECKS if (finding := check(facts)) is not None]
