"""What the facts of workers and of the ways to them mean: one function for each check."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

import duckllm
from duckllm.cluster.survey import RoundTrip
from duckllm.doctor.finding import OK, PROBLEM, WARNING, Finding, Unknown, unknown
from duckllm.doctor.link_facts import STEP_BYTES, LinkFacts, WorkerFacts
from duckllm.doctor.machine_checks import congestion_finding
from duckllm.errors import AuthenticationError, ProtocolError, ProtocolVersionError
from duckllm.moe.fit import SPEED_NOISE, nodes_of, words_on_repeats

ALL_WORKERS = "all workers"
_GIB = 1 << 30
_SLOW_ROUND_TRIP_US = 1000.0
_SLOW_TAIL_US, _TAIL = 5000.0, 10.0
_ETHERNET_MTU = 1500
_SLOW_LINK_MBIT_PER_S = 1000
_LONG_RETRANSMIT_US = 50_000
_CLOCK_OFFSET_S = 1.0


def check_port(facts: WorkerFacts) -> Finding:
    """Whether a worker answers there, and why not."""
    if facts.error is None:
        return Finding(facts.address, "port", OK, "a worker answers")
    check, found = "port", str(facts.error)
    name, _, port = facts.address.rpartition(":")
    name = name.strip("[]")
    if isinstance(facts.error, AuthenticationError):
        check = "token"
        advice = (
            "give host and worker the same file: --token-file token (docs/operations.md says how it is made)"
        )
    elif isinstance(facts.error, ProtocolVersionError):
        check, advice = (
            "version",
            "install the same version of duck-llm on both: pip install -c constraints.txt .",
        )
    elif isinstance(facts.error, ProtocolError):
        advice = (
            f"what listens there is no worker, or an older one: on the node, sudo ss -ltnp 'sport = :{port}'"
        )
    elif isinstance(facts.cause, ConnectionRefusedError):
        advice = f"nothing listens: on the node, duckllm worker --listen 0.0.0.0:{port} --token-file token"
    elif "did not answer" in found:
        advice = "it listens and says nothing: is it stopped? on the node, systemctl status duckllm-worker"
    elif isinstance(facts.cause, TimeoutError):
        advice = f"is the node on? does a firewall drop packets? ping {name}; sudo nft list ruleset"
    elif isinstance(facts.cause, socket.gaierror):
        advice = f"the name is not known: getent hosts {name}, or write the address"
    elif "busy" in found:
        advice = "too many connections are open there: close other hosts, or wait"
    else:
        advice = f"ip route get {name}; ping {name}"
    return Finding(facts.address, check, PROBLEM, found, advice)


def check_build(facts: WorkerFacts) -> Finding | None:
    """Whether the worker is of this version."""
    if facts.info is None:
        return None
    if facts.info.build == duckllm.__version__:
        return Finding(facts.address, "version", OK, facts.info.build)
    found = f"{facts.info.build}, and {duckllm.__version__} here"
    advice = "install the same version on both: pip install -c constraints.txt ."
    return Finding(facts.address, "version", WARNING, found, advice)


def check_worker_memory(facts: WorkerFacts) -> Finding | None:
    """What the worker's node has."""
    if facts.info is None:
        return None
    info = facts.info
    if info.available_bytes is None:
        return unknown(facts.address, "memory", Unknown("the worker does not say; it is of an older build"))
    found = f"{info.available_bytes / _GIB:.1f} of {info.memory_bytes / _GIB:.1f} GiB for experts"
    if info.available_bytes < info.memory_bytes // 2:
        return Finding(
            facts.address, "memory", WARNING, found, "on the node, see who has it: ps aux --sort=-rss | head"
        )
    return Finding(facts.address, "memory", OK, found)


def check_worker_speed(facts: WorkerFacts) -> Finding | None:
    """What the worker says it computes with, and reads."""
    if facts.info is None:
        return None
    info = facts.info
    found = f"{info.isa}, {info.threads} threads"
    if info.read_gb_per_s is None:
        advice = "shares will be even: start it without --speed 0 to measure, or with --speed GB_PER_S"
        return Finding(facts.address, "speed", WARNING, f"{found}; it says no memory speed", advice)
    found += f", {info.read_gb_per_s:.1f} GB/s"
    if info.isa == "scalar":
        advice = "unset DUCK_FORCE_ISA on the node, or use a CPU with AVX2"
        return Finding(facts.address, "speed", WARNING, found, advice)
    return Finding(facts.address, "speed", OK, found)


def check_worker_clock(facts: WorkerFacts) -> Finding | None:
    """How far the worker's clock is from this one."""
    if facts.info is None:
        return None
    offset = facts.info.clock_offset_s
    if offset is None:
        return unknown(facts.address, "clock", Unknown("the worker does not say; it is of an older build"))
    found = f"{offset:+.3f} s from here, to {1e3 * facts.info.clock_error_s:.1f} ms"
    if abs(offset) > _CLOCK_OFFSET_S + facts.info.clock_error_s:
        advice = "logs cannot be compared; on both: sudo timedatectl set-ntp true"
        return Finding(facts.address, "clock", WARNING, found, advice)
    return Finding(facts.address, "clock", OK, found)


def check_small(facts: WorkerFacts) -> Finding | None:
    """Round trip of an empty message."""
    return None if facts.small is None else _round_trip(facts.address, "round trip, empty", facts.small)


def check_step(facts: WorkerFacts) -> Finding | None:
    """Round trip of a message of the size of a step."""
    if facts.step is None:
        return None
    return _round_trip(facts.address, f"round trip, {facts.step.num_bytes / 1000:.0f} kB", facts.step)


def _round_trip(where: str, check: str, trip: RoundTrip) -> Finding:
    found = f"{trip.median_us:.0f} us, 99 of 100 within {trip.p99_us:.0f} us"
    if trip.median_us > _SLOW_ROUND_TRIP_US:
        advice = (
            "every layer waits so long: use a cable and a switch, not Wi-Fi or a tunnel; ip route get ADDRESS"
        )
        return Finding(where, check, WARNING, found, advice)
    if trip.p99_us > max(_SLOW_TAIL_US, _TAIL * trip.median_us):
        advice = "stop what else runs on either end, or give workers fewer threads than cores: --threads"
        return Finding(where, check, WARNING, found, advice)
    return Finding(where, check, OK, found)


def check_mtu(facts: WorkerFacts) -> Finding | None:
    """Size of packets, and whether larger ones would help."""
    link = facts.link
    if link is None:
        return None
    if isinstance(link.path_mtu, Unknown):
        return unknown(facts.address, "MTU", link.path_mtu)
    name = "" if isinstance(link.interface, Unknown) else link.interface.name
    found = f"{link.path_mtu}" + (f" by {name}" if name else "")
    if not isinstance(link.segment_bytes, Unknown) and link.segment_bytes:
        packets = -(-STEP_BYTES // link.segment_bytes)
        found += f"; a step of one token is {packets} packet{'' if packets == 1 else 's'}"
    if not isinstance(link.interface, Unknown) and not isinstance(link.interface.mtu, Unknown):
        mtu = link.interface.mtu
        if link.beyond_loopback and link.path_mtu < mtu:
            found += f"; {name} has {mtu}"
            advice = f"something between takes less: tracepath {facts.address.rpartition(':')[0]}"
            return Finding(facts.address, "MTU", WARNING, found, advice)
    if link.beyond_loopback and link.path_mtu <= _ETHERNET_MTU:
        device = name or "DEV"
        advice = (
            f"jumbo frames help if all nodes and the switch have them: sudo ip link set {device} mtu 9000"
        )
        return Finding(facts.address, "MTU", OK, found, advice)
    return Finding(facts.address, "MTU", OK, found)


def check_link_speed(facts: WorkerFacts) -> Finding | None:
    """The link's speed; nothing where no link is on the way."""
    link = facts.link
    if link is None or not link.beyond_loopback:
        return None
    if isinstance(link.interface, Unknown):
        return unknown(facts.address, "link", link.interface)
    interface = link.interface
    if interface.is_wireless:
        found = f"{interface.name} is wireless"
        return Finding(facts.address, "link", WARNING, found, "use a cable: every layer waits for the air")
    if isinstance(interface.mbit_per_s, Unknown):
        return unknown(facts.address, "link", Unknown(f"{interface.name}: {interface.mbit_per_s.reason}"))
    found = f"{interface.name}: {interface.mbit_per_s} Mbit/s"
    if interface.duplex == "half":
        advice = f"is the switch's port set by hand? sudo ethtool {interface.name}"
        return Finding(facts.address, "link", WARNING, f"{found}, half duplex", advice)
    if interface.mbit_per_s < _SLOW_LINK_MBIT_PER_S:
        return Finding(
            facts.address, "link", WARNING, found, f"is the cable whole? sudo ethtool {interface.name}"
        )
    return Finding(facts.address, "link", OK, found)


def check_retransmit(facts: WorkerFacts) -> Finding | None:
    """How long a lost packet stalls a step; nothing where no packet can be lost."""
    link = facts.link
    if link is None or not link.beyond_loopback:
        return None
    if isinstance(link.retransmit_us, Unknown):
        return unknown(facts.address, "retransmission", link.retransmit_us)
    found = f"a lost packet stalls a step for {link.retransmit_us / 1e3:.0f} ms; {link.options}"
    if link.retransmit_us < _LONG_RETRANSMIT_US:
        return Finding(facts.address, "retransmission", OK, found)
    return Finding(facts.address, "retransmission", WARNING, found, _shorten_retransmission(link))


def _shorten_retransmission(link: LinkFacts) -> str:
    if link.has_rto_setting:
        return "on both ends: sudo sysctl -w net.ipv4.tcp_rto_min_us=1000"
    return f"on both ends: sudo ip route change {link.route or 'ROUTE'} rto_min 1ms"


def check_link_congestion(facts: WorkerFacts) -> Finding | None:
    """TCP's congestion control towards the worker; nothing on loopback."""
    if facts.link is None or not facts.link.beyond_loopback:
        return None
    if isinstance(facts.link.congestion, Unknown):
        return unknown(facts.address, "TCP congestion control", facts.link.congestion)
    return congestion_finding(facts.address, facts.link.congestion)


CHECKS: tuple[Callable[[WorkerFacts], Finding | None], ...] = (
    *(check_port, check_build, check_worker_memory, check_worker_speed, check_worker_clock, check_small),
    *(check_step, check_mtu, check_link_speed, check_retransmit, check_link_congestion),
)


def check_worker(facts: WorkerFacts) -> list[Finding]:
    """Every check of one worker and the way to it."""
    return [finding for check in CHECKS if (finding := check(facts)) is not None]


def check_flock(workers: Sequence[WorkerFacts]) -> list[Finding]:
    """What the workers mean together: instruction sets, and speeds."""
    infos = [worker.info for worker in workers if worker.info is not None]
    if len(infos) < 2:
        return []
    findings = []
    repeats = words_on_repeats([info.isa for info in infos])
    if repeats:
        advice = "for one: DUCK_FORCE_ISA=avx2 duckllm worker, on every node"
        findings.append(Finding(ALL_WORKERS, "instruction sets", WARNING, repeats, advice))
    else:
        findings.append(Finding(ALL_WORKERS, "instruction sets", OK, infos[0].isa))
    speeds = [node.gb_per_s for node in nodes_of(infos) if node.gb_per_s]
    if len(speeds) == len(infos):
        found = f"{min(speeds):.1f} to {max(speeds):.1f} GB/s, {sum(speeds):.1f} together"
        apart = max(speeds) > SPEED_NOISE * min(speeds)
        found += "; shares auto follow them" if apart else "; shares auto are even"
        if len({info.machine for info in infos}) < len(infos):
            found += "; workers on one machine divide its speed"
        findings.append(Finding(ALL_WORKERS, "speeds", OK, found))
    return findings
