"""The host's way to a worker: connect, authenticate, hello, prepare. One path, local workers and static ones.

Called by :mod:`duckllm.cluster.base`. What it hands back is a :class:`Connection` whose next frame is the
first step request; the native transport takes its socket over.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import duckllm
from duckllm import _native
from duckllm._native import FrameType
from duckllm.cluster.address import Address, is_loopback, parse_address
from duckllm.cluster.auth import authenticate_host
from duckllm.cluster.fetch import wait_all_ready
from duckllm.cluster.frames import ControlChannel, PeerClosedError, safe_text
from duckllm.cluster.plan import WorkerPlan
from duckllm.cluster.shared_memory import SharedChannel
from duckllm.config import WEIGHT_FORMATS
from duckllm.errors import AuthenticationError, ProtocolError, WorkerUnavailableError, show_value

T = TypeVar("T")
THIS_MACHINE = "this machine"  # no address is called so
PeerEnd = tuple[int, Any]  # address family and the system's own form of the address
MAX_UNIX_TIME_S, MAX_GB_PER_S = 1e11, 1e6
_log = logging.getLogger("duckllm")
_MAX_FACT_CHARACTERS = 100  # of what a worker says of itself, which is shown to the user


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker says of itself.

    Args:
        address: Where it is.
        isa: The instruction set its kernels use, and the bf16 multipliers where prefill uses them.
        build: Its duck-llm version.
        threads: Its compute threads.
        pid: Its process id, on its own node.
        memory_bytes: Memory of its node.
        available_bytes: Memory that a plan may take of it; None where it does not say.
        read_gb_per_s: What its node reads from memory, GB/s; None where it does not say.
        clock_offset_s: How far its clock is ahead of this host's; None where it does not say.
        clock_error_s: By how much that may be wrong, half of the round trip.
        name: What its node goes by; empty where it does not say.
        keeps_weights: Whether weights that a host sends stay on its disk; what does not say so, keeps them.
        is_busy: Whether it serves another host; what does not say so, may.
        first_stripe: First stripe of its slice.
        num_stripes: Stripes of its slice; 0 before it is prepared.
        weight_format: Format that it computes in; empty before it is prepared.
        weight_bytes: Its slice in that format; 0 before it is prepared.
        own_memory_bytes: Of them, how many lie in memory of its own; the others are mapped from files.
        huge_page_bytes: Of these, how many in huge pages.
        reached_at: Its machine as the connection knows it: the IP address, or :data:`THIS_MACHINE` where that
            is an address of the host's own.
    """

    address: str
    isa: str
    build: str
    threads: int
    pid: int
    memory_bytes: int
    available_bytes: int | None = None
    read_gb_per_s: float | None = None
    clock_offset_s: float | None = None
    clock_error_s: float = 0.0
    name: str = ""
    keeps_weights: bool = True
    is_busy: bool = False
    first_stripe: int = 0
    num_stripes: int = 0
    weight_format: str = ""
    weight_bytes: int = 0
    own_memory_bytes: int = 0
    huge_page_bytes: int = 0
    reached_at: str = ""

    @property
    def machine(self) -> str:
        """What workers of one machine have in common: its IP address, or that it is the host's own."""
        return self.reached_at or parse_address(self.address).end[0]


class Connection:
    """A worker that has authenticated, and once prepared is ready for steps.

    Args:
        address: The worker's address.
        token: The cluster token, or None.
        timeout_s: Limit for connecting and for each answer, seconds.
        session: Names the host's session, so that a worker lets go of an older connection of the same one.
        shared: Memory that the worker's process inherited; None for steps through the connection.

    Attributes:
        memory: The host's end of it, where the worker takes its steps from there.
        multicast_bytes: Bytes of datagrams that wait for the worker while it computes; 0 where it takes no
            requests by multicast.

    Raises:
        WorkerUnavailableError: Nothing answers there, or not in time, or it is busy.
        AuthenticationError: The tokens differ or are missing.
        ProtocolVersionError: The worker speaks another protocol version.
        ProtocolError: What answers is no worker, or breaks the protocol.
    """

    def __init__(
        self,
        address: Address,
        token: str | None,
        timeout_s: float,
        session: str = "",
        shared: SharedChannel | None = None,
    ) -> None:
        self.address = address
        self._timeout_s, self._session, self._shared = timeout_s, session, shared
        self.memory: _native.SharedMemory | None = None
        self._socket = _open_socket(address, timeout_s)
        try:
            self.peer_end: PeerEnd = (self._socket.family, _peer_end(self._socket, address))
            if token is None and not is_loopback(str(self.peer_end[1][0])):
                raise AuthenticationError(
                    f"cluster_token: got none, expected one, as worker {address} is beyond loopback"
                )
            self.channel = ControlChannel(
                self._socket, us="this host", peer=f"worker {address}", hears_errors=True
            )
            self.info = self._guarded(lambda deadline: self._hello(token, deadline), timeout_s)
        except BaseException:
            self.close()
            raise
        self.plan: WorkerPlan | None = None
        self.verified_stripes = self.fetched_bytes = self.multicast_bytes = 0

    @property
    def local_address(self) -> str:
        """This host's end of the connection, an IP address."""
        return str(self._socket.getsockname()[0])

    def send_plan(self, plan: WorkerPlan, *, share_folder: bool = True) -> None:
        """Sends the plan; the worker maps and verifies its weights meanwhile.

        Args:
            plan: The plan.
            share_folder: Whether the worker may open ``plan.folder`` by its path.
        """
        message = (plan if share_folder else replace(plan, folder="")).to_json()
        self._guarded(
            lambda deadline: self.channel.send_json(FrameType.PREPARE, message, deadline=deadline),
            self._timeout_s,
        )
        self.plan = plan

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the worker has mapped and verified its weights, and sends it those that it lacks.

        Raises:
            WorkerUnavailableError: Silent for ``timeout_s``, gone, or busy with another host.
            ModelNotFoundError: Neither the worker nor this host finds such a file.
            WeightHashError: A stripe is not what the plan says.
            ModelError: The worker cannot use its files for another reason.
        """
        wait_all_ready([self], timeout_s)

    def set_ready(self, ready: dict[str, Any]) -> None:
        """Takes what the worker says in READY.

        Raises:
            ProtocolError: A field is missing or of the wrong kind.
        """
        assert self.plan is not None
        plan, peer = self.plan, self.channel.peer
        self.verified_stripes = _count(ready, "verified_stripes", peer)
        self.fetched_bytes = _count(ready, "fetched_bytes", peer)
        weight_format = _text(ready, "weight_format", peer)
        used = weight_format.split("+")
        if not set(used) <= set(WEIGHT_FORMATS):
            expected = f"one of {', '.join(WEIGHT_FORMATS)}, or several with a plus"
            raise ProtocolError(f"weight_format from {peer}: got {weight_format!r}, expected {expected}")
        if plan.multicast is not None:
            self.multicast_bytes = _count(ready, "multicast_bytes", peer)
            if self.multicast_bytes == 0:
                reason = safe_text(str(ready.get("multicast_problem", "no reason")))
                _log.warning("worker %s takes no requests by multicast: %s", self.address, reason)
        self.info = replace(
            self.info,
            first_stripe=plan.first_stripe,
            num_stripes=plan.num_stripes,
            weight_format=weight_format,
            weight_bytes=plan.computed_bytes(used),
            own_memory_bytes=_optional_count(ready, "own_memory_bytes", peer) or 0,
            huge_page_bytes=_optional_count(ready, "huge_page_bytes", peer) or 0,
        )

    def ping(self, num_bytes: int) -> float:
        """Seconds until the worker has sent so many bytes back; only before :meth:`send_plan`.

        Raises:
            WorkerUnavailableError: It is gone, or does not answer in time.
            ProtocolError: It answers something else.
        """
        assert self.plan is None
        payload = bytes(num_bytes)

        def exchange(deadline: float) -> float:
            start = time.perf_counter()
            self.channel.send(FrameType.PING, payload, deadline=deadline)
            answer = self.channel.receive(FrameType.PING, deadline=deadline)
            seconds = time.perf_counter() - start
            if answer != payload:
                got = f"{len(answer)} other bytes"
                raise ProtocolError(
                    f"PING from {self.channel.peer}: got {got}, expected the {num_bytes} sent"
                )
            return seconds

        return self._guarded(exchange, self._timeout_s)

    def detach_socket(self) -> int:
        """Gives the descriptor away; the connection is over for this object."""
        return self._socket.detach()

    def close(self) -> None:
        """Closes the connection, if it is still here; a worker then waits for its next host."""
        self._socket.close()

    def _hello(self, token: str | None, deadline: float) -> WorkerInfo:
        authenticate_host(self.channel, token, deadline=deadline)
        hello = {
            "protocol_version": _native.PROTOCOL_VERSION,
            "build": duckllm.__version__,
            "pid": os.getpid(),
            "session": self._session,
            "shared_memory": self._shared is not None,
        }
        sent_s, start = time.time(), time.monotonic()
        self.channel.send_json(FrameType.HELLO, hello, deadline=deadline)
        answer = self.channel.receive_json(FrameType.HELLO, deadline=deadline)
        error_s = (time.monotonic() - start) / 2
        if self._shared is not None and answer.get("shared_memory") is True:
            self.memory = self._shared.host_end()
        peer = self.channel.peer
        worker_s = _number(answer, "unix_time_s", peer, MAX_UNIX_TIME_S)
        return WorkerInfo(
            address=str(self.address),
            isa=_text(answer, "isa", peer),
            build=_text(answer, "build", peer),
            threads=_count(answer, "threads", peer),
            pid=_count(answer, "pid", peer),
            memory_bytes=_count(answer, "memory_bytes", peer),
            available_bytes=_optional_count(answer, "available_bytes", peer),
            read_gb_per_s=_number(answer, "read_gb_per_s", peer, MAX_GB_PER_S) or None,
            clock_offset_s=None if worker_s is None else worker_s - (sent_s + error_s),
            clock_error_s=error_s,
            name="" if answer.get("node_name") is None else _text(answer, "node_name", peer),
            keeps_weights=answer.get("keeps_weights") is not False,
            is_busy=answer.get("is_busy") is True,
            reached_at=self._machine(),
        )

    def _machine(self) -> str:
        peer = str(self.peer_end[1][0])
        return THIS_MACHINE if is_loopback(peer) or peer == self.local_address else peer

    def _guarded(self, action: Callable[[float], T], timeout_s: float) -> T:
        """Runs one exchange under its deadline; sockets' own errors become typed ones."""
        with self.socket_errors():
            try:
                return action(time.monotonic() + timeout_s)
            except TimeoutError as error:
                raise WorkerUnavailableError(
                    f"worker {self.address} did not answer within {timeout_s:g} s"
                ) from error

    @contextmanager
    def socket_errors(self) -> Iterator[None]:
        """Turns what sockets say into errors of ours.

        Raises:
            WorkerUnavailableError: The connection ended or failed.
            DuckError: What the worker said before.
        """
        try:
            yield
        except PeerClosedError as error:
            raise WorkerUnavailableError(f"{error}") from error
        except OSError as error:
            # The worker may have said why before it closed.
            self.channel.raise_reported_error(deadline=time.monotonic() + 1.0)
            reason = error.strerror or str(error)
            raise WorkerUnavailableError(f"worker {self.address} is not available: {reason}") from error


def _open_socket(address: Address, timeout_s: float) -> socket.socket:
    try:
        connection = socket.create_connection((address.name, address.port), timeout=timeout_s)
        _native.set_connection_options(connection.fileno())
        return connection
    except TimeoutError as error:
        raise WorkerUnavailableError(
            f"worker {address} is not available: no answer within {timeout_s:g} s"
        ) from error
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WorkerUnavailableError(f"worker {address} is not available: {reason}") from error


def _peer_end(connection: socket.socket, address: Address) -> Any:
    try:
        return connection.getpeername()
    except OSError as error:  # reset already
        raise WorkerUnavailableError(f"worker {address} is not available: {error.strerror}") from error


def _text(answer: dict[str, Any], name: str, peer: str) -> str:
    value = answer.get(name)
    if not isinstance(value, str) or len(value) > _MAX_FACT_CHARACTERS or not value.isprintable():
        expected = f"a printable text of at most {_MAX_FACT_CHARACTERS} characters"
        raise ProtocolError(f"{name} from {peer}: got {show_value(value)}, expected {expected}")
    return value


def _count(answer: dict[str, Any], name: str, peer: str) -> int:
    value = answer.get(name)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ProtocolError(f"{name} from {peer}: got {show_value(value)}, expected a whole number from 0")
    return value


def _optional_count(answer: dict[str, Any], name: str, peer: str) -> int | None:
    return None if answer.get(name) is None else _count(answer, name, peer)


def _number(answer: dict[str, Any], name: str, peer: str, most: float) -> float | None:
    """A number from 0 to ``most``; None where the worker says none."""
    value = answer.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value <= most:
        expected = f"a number from 0 to {most:g}"
        raise ProtocolError(f"{name} from {peer}: got {show_value(value)}, expected {expected}")
    return float(value)
