"""Requests of steps by UDP multicast: the group's sockets, and the key of its datagrams.

Called by :mod:`duckllm.cluster.base`, whose host sends to a group, and by :mod:`duckllm.worker.session`,
which joins it. What goes over the sockets is csrc/transport's and csrc/worker's affair.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
from collections.abc import Sequence

from duckllm import _native
from duckllm.cluster.plan import MulticastPlan
from duckllm.config import parse_multicast
from duckllm.errors import ConfigError, InWords

IP_MTU_DISCOVER, IP_MTU, IP_MULTICAST_ALL = 10, 14, 49  # of linux/in.h
IP_PMTUDISC_DO, SO_RCVBUFFORCE = 2, 33
_HEADERS_BYTES = 28 + _native.DATAGRAM_HEADER_BYTES  # IPv4, UDP and ours
_MOST_MTU_BYTES, _LEAST_MTU_BYTES = 9000, 576
# Steps of another lane come while the first one's are computed. Linux gives at most net.core.rmem_max to who
# is not root.
_RECEIVE_BUFFER_BYTES = 8 << 20


class HostMulticast:
    """A host's socket to a group, and what workers are told of it; one for each session.

    Args:
        text: As :attr:`duckllm.config.ClusterConfig.multicast` has it; not ``"off"``.
        local_addresses: This host's ends of its connections to the workers, IP addresses.
        token: The cluster token, or None.

    Attributes:
        plan: What workers are told.
        session: What the native transport makes datagrams of.

    Raises:
        ConfigError: There is no such interface here, or several and none is named.
    """

    def __init__(self, text: str, local_addresses: Sequence[str], token: str | None) -> None:
        group = parse_multicast(text)
        assert group is not None
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            interface = group.interface or _only_interface(text, local_addresses)
            try:
                self._socket.setsockopt(
                    socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(interface)
                )
                self._socket.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
                self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
                self._socket.connect((group.group, group.port))
                mtu_bytes = self._socket.getsockopt(socket.IPPROTO_IP, IP_MTU)
            except OSError as error:
                expected = f"a group that {interface}, an address of this host, can send to"
                raise ConfigError("multicast", text, expected, error.strerror or "") from error
            if mtu_bytes < _LEAST_MTU_BYTES:
                raise ConfigError("multicast", text, f"an interface whose MTU is at least {_LEAST_MTU_BYTES}")
        except BaseException:
            self.close()
            raise
        fragment_bytes = (min(mtu_bytes, _MOST_MTU_BYTES) - _HEADERS_BYTES) // 8 * 8
        session, nonce = secrets.token_hex(8), secrets.token_hex(32)
        self.plan = MulticastPlan(group.group, group.port, session, nonce, fragment_bytes)
        self.session = native_session(self.plan, token)

    def detach_socket(self) -> int:
        """Gives the descriptor away."""
        return self._socket.detach()

    def close(self) -> None:
        """Closes the socket, if it is still here."""
        self._socket.close()


def _only_interface(text: str, local_addresses: Sequence[str]) -> str:
    different = sorted(set(local_addresses))
    if any(":" in address for address in different):
        raise ConfigError("multicast", text, "off with workers at IPv6 addresses, or GROUP:PORT@INTERFACE")
    if len(different) != 1:
        got = InWords(f"workers reached from {', '.join(different)}")
        raise ConfigError("multicast", got, f"{text}@INTERFACE, the address of the one that all are behind")
    return different[0]


def join_group(
    plan: MulticastPlan, interface: str, token: str | None
) -> tuple[_native.MulticastReceiver, int]:
    """A worker's ear to a group, and how many bytes of datagrams wait for it while it computes.

    Args:
        plan: What the host says.
        interface: The address of this node at which the host reached it, whose interface is listened at.
        token: The cluster token, or None.

    Raises:
        OSError: The group cannot be joined.
    """
    address = interface.removeprefix("::ffff:")
    if ":" in address:
        raise OSError("multicast needs IPv4, and the host is connected over IPv6")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
        ear.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # several workers of one machine
        with contextlib.suppress(OSError):
            ear.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
            ear.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, _RECEIVE_BUFFER_BYTES)
        ear.bind((plan.group, plan.port))
        ear.setsockopt(socket.IPPROTO_IP, IP_MULTICAST_ALL, 0)
        membership = socket.inet_aton(plan.group) + socket.inet_aton(address)
        ear.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
        # The kernel doubles what it is asked for, and counts its own bookkeeping too.
        room_bytes = ear.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2
        session = native_session(plan, token)
        return _native.MulticastReceiver(ear.detach(), session), room_bytes


def native_session(plan: MulticastPlan, token: str | None) -> _native.MulticastSession:
    """What datagrams are made of and checked against; the key is known to who knows the token alone."""
    message = b"duck-llm multicast" + bytes.fromhex(plan.nonce)
    key = hmac.new((token or "").encode(), message, hashlib.sha256).digest()
    return _native.MulticastSession(
        int(plan.session, 16), key[: _native.MULTICAST_KEY_BYTES], plan.fragment_bytes
    )
