"""Facts of one worker and of the way to it, from a real connection, /proc and /sys; judges nothing."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from duckllm import _native
from duckllm.cluster.address import Address, is_loopback
from duckllm.cluster.connect import Connection, WorkerInfo
from duckllm.cluster.survey import RoundTrip, step_message_bytes, time_round_trips
from duckllm.doctor.finding import Unknown
from duckllm.doctor.machine_facts import congestion_of
from duckllm.errors import ClusterError

T = TypeVar("T")
TIMEOUT_S = 5.0
# A step of one token of DeepSeek-V3.2.
STEP_BYTES = step_message_bytes(7168, 8)
_SAMPLES = 300
# linux/in.h, linux/tcp.h, linux/sockios.h, which Python's socket does not name.
_IP_MTU, _IPV6_MTU, _TCP_INFO, _SIOCGIFADDR = 14, 24, 11, 0x8915
_RTO_OFFSET, _MSS_OFFSET, _INFO_BYTES = 8, 16, 20


@dataclass(frozen=True)
class Interface:
    """The network interface that a worker is reached by.

    Args:
        name: Its name.
        mtu: Largest packet, bytes.
        mbit_per_s: Its speed, as the kernel says it.
        duplex: ``"full"`` or ``"half"``, as the kernel says it.
        is_wireless: Whether it is wireless.
    """

    name: str
    mtu: int | Unknown
    mbit_per_s: int | Unknown
    duplex: str | Unknown
    is_wireless: bool


@dataclass(frozen=True)
class LinkFacts:
    """The way to a worker.

    Args:
        beyond_loopback: Whether it leaves this machine.
        interface: The interface.
        path_mtu: Largest packet of the whole way.
        segment_bytes: Largest piece of a message that TCP puts in a packet.
        retransmit_us: How long TCP waits before it sends a lost piece again.
        congestion: TCP's congestion control.
        options: What of the options of our connections is set, and what could not be, in words.
        route: The route's command, without what is to be changed; None where it is unknown.
        has_rto_setting: Whether this kernel has net.ipv4.tcp_rto_min_us.
    """

    beyond_loopback: bool
    interface: Interface | Unknown
    path_mtu: int | Unknown
    segment_bytes: int | Unknown
    retransmit_us: int | Unknown
    congestion: str | Unknown
    options: str
    route: str | None
    has_rto_setting: bool


@dataclass(frozen=True)
class WorkerFacts:
    """One worker.

    Args:
        address: Where it is.
        error: Why nothing else is known; None where it answers.
        cause: What the system said, where it was the system that refused.
        info: What the worker says of itself.
        link: The way to it.
        small: Times of messages without content.
        step: Times of messages of the size of a step.
    """

    address: str
    error: ClusterError | None = None
    cause: BaseException | None = None
    info: WorkerInfo | None = None
    link: LinkFacts | None = None
    small: RoundTrip | None = None
    step: RoundTrip | None = None


def gather_worker(address: Address, token: str | None, root: Path = Path("/")) -> WorkerFacts:
    """The facts of one worker; it is left as it was.

    Args:
        address: Where it is.
        token: The cluster token, or None.
        root: Where ``proc`` and ``sys`` are.
    """
    info = link = small = None
    try:
        with contextlib.closing(Connection(address, token, TIMEOUT_S)) as connection:
            info = connection.info
            small = time_round_trips(connection, 0, _SAMPLES)
            step = time_round_trips(connection, STEP_BYTES, _SAMPLES)
            link = read_link(connection.channel.connection, root)
    except ClusterError as error:
        return WorkerFacts(str(address), error, error.__cause__, info, link, small)
    return WorkerFacts(str(address), None, None, info, link, small, step)


def read_link(connection: socket.socket, root: Path = Path("/")) -> LinkFacts:
    """What the kernel says of a connection, after some messages went over it."""
    own, peer = str(connection.getsockname()[0]), str(connection.getpeername()[0])
    is_ipv6 = connection.family == socket.AF_INET6
    level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if is_ipv6 else (socket.IPPROTO_IP, _IP_MTU)
    name = _or_unknown(lambda: find_interface(own, root))
    return LinkFacts(
        beyond_loopback=not is_loopback(peer),
        interface=name if isinstance(name, Unknown) else read_interface(name, root),
        path_mtu=_or_unknown(lambda: connection.getsockopt(level, option)),
        segment_bytes=_or_unknown(lambda: _tcp_info(connection, _MSS_OFFSET)),
        retransmit_us=_or_unknown(lambda: _tcp_info(connection, _RTO_OFFSET)),
        congestion=_or_unknown(lambda: congestion_of(connection)),
        options=_native.describe_connection(connection.fileno()),
        route=find_route(peer, root),
        has_rto_setting=(root / "proc/sys/net/ipv4/tcp_rto_min_us").exists(),
    )


def find_interface(own_ip: str, root: Path = Path("/")) -> str:
    """The interface that has an address of this machine.

    Raises:
        OSError: None has.
    """
    address = ipaddress.ip_address(own_ip.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        for line in (root / "proc/net/if_inet6").read_text().splitlines():
            words = line.split()
            if len(words) == 6 and words[0] == address.packed.hex():
                return words[5]
    else:
        packed = (getattr(address, "ipv4_mapped", None) or address).packed
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                with contextlib.suppress(OSError):  # one without an IPv4 address
                    if fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)[20:24] == packed:
                        return name
        if is_loopback(own_ip):  # any address of 127.0.0.0/8
            return "lo"
    raise OSError(f"no interface has {own_ip}")


def read_interface(name: str, root: Path = Path("/")) -> Interface:
    """What the kernel says of an interface."""
    folder = root / "sys/class/net" / name

    def speed() -> int:
        value = int((folder / "speed").read_text())
        if value <= 0:
            raise ValueError("the driver does not say")
        return value

    return Interface(
        name,
        _or_unknown(lambda: int((folder / "mtu").read_text())),
        _or_unknown(speed),
        _or_unknown(lambda: (folder / "duplex").read_text().strip()),
        (folder / "wireless").exists() or (folder / "phy80211").exists(),
    )


def find_route(peer_ip: str, root: Path = Path("/")) -> str | None:
    """The route to an IPv4 address as ``ip route`` takes it: the most specific one of /proc/net/route."""
    try:
        address = int(ipaddress.IPv4Address(peer_ip))
        lines = (root / "proc/net/route").read_text().splitlines()[1:]
    except (OSError, ValueError):
        return None
    best: tuple[int, str] | None = None
    for line in lines:
        words = line.split()
        with contextlib.suppress(ValueError, IndexError):
            destination, gateway, mask = (socket.ntohl(int(words[field], 16)) for field in (1, 2, 7))
            if address & mask == destination and (best is None or mask > best[0]):
                target = f"{ipaddress.IPv4Address(destination)}/{mask.bit_count()}" if mask else "default"
                via = f" via {ipaddress.IPv4Address(gateway)}" if gateway else ""
                best = (mask, f"{target}{via} dev {words[0]}")
    return None if best is None else best[1]


def _tcp_info(connection: socket.socket, offset: int) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
    return int(struct.unpack_from("=I", info, offset)[0])


def _or_unknown(find: Callable[[], T]) -> T | Unknown:
    try:
        return find()
    except OSError as error:
        return Unknown(error.strerror or str(error))
    except (ValueError, struct.error) as error:
        return Unknown(str(error))
