"""What every cluster does: connect to its workers, prepare them all at once, bring a lost one back, close.

Clusters differ in where the addresses come from, and in who takes a lost worker's place.
"""

from __future__ import annotations

import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from duckllm.cluster.address import Address
from duckllm.cluster.connect import Connection, PeerEnd, WorkerInfo
from duckllm.cluster.fetch import FetchProgress, wait_all_ready
from duckllm.cluster.liveness import find_silent
from duckllm.cluster.multicast import HostMulticast
from duckllm.cluster.plan import WorkerPlan
from duckllm.cluster.shared_memory import SharedChannel
from duckllm.config import ClusterConfig
from duckllm.errors import (
    ClusterError,
    ConfigError,
    DiskSpaceError,
    DuckError,
    ModelError,
    ModelNotFoundError,
    WorkerUnavailableError,
)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.25  # between two attempts to bring a worker back
_log = logging.getLogger("duckllm")


@dataclass(frozen=True)
class OtherNode:
    """A node that computes nothing.

    Args:
        name: What it goes by; empty where nobody asked.
        address: Where it is; empty of one that is not believed.
        state: ``"waiting"`` to take a lost one's place, ``"new"`` and about to be asked, ``"busy"`` with
            another host, ``"gone"`` or ``"refused"``.
        memory_bytes: Its memory; 0 where that is unknown.
        read_gb_per_s: What it reads from memory; None where that is unknown.
        problem: Why it is busy, gone or refused.
    """

    name: str
    address: str
    state: str
    memory_bytes: int = 0
    read_gb_per_s: float | None = None
    problem: str = ""


class Cluster(ABC):
    """Workers at known addresses; a context manager.

    Args:
        config: Time-outs and the like.
        addresses: Where the workers are, in worker order.
        token: The cluster token, or None.
    """

    def __init__(self, config: ClusterConfig, addresses: Sequence[Address], token: str | None) -> None:
        self.config = config
        self.addresses = tuple(addresses)
        self._token = token
        self._session = secrets.token_hex(16)
        self._plans: tuple[WorkerPlan, ...] = ()
        self._workers: tuple[WorkerInfo, ...] = ()
        self._ends: list[PeerEnd] = []
        self._preparing: list[Connection] = []
        self._multicast: HostMulticast | None = None

    @property
    def multicast(self) -> HostMulticast | None:
        """The group that :meth:`begin` told workers of, for the transport; None where there is none."""
        return self._multicast

    @property
    def num_workers(self) -> int:
        """W."""
        return len(self.addresses)

    @property
    def num_here(self) -> int:
        """How many of them this process started on its machine, and so shares cores and memory with."""
        return 0

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """What the workers said of themselves, in worker order; empty before they are ready."""
        return self._workers

    @property
    def other_nodes(self) -> tuple[OtherNode, ...]:
        """Nodes that are known and compute nothing, as far as this kind of cluster says.

        Threading: any thread.
        """
        return ()

    def connect(self, plans: Sequence[WorkerPlan]) -> list[Connection]:
        """:meth:`begin` and :meth:`wait_ready` in one."""
        self.begin(plans)
        return self.wait_ready()

    def greet(self) -> tuple[WorkerInfo, ...]:
        """Connects to every worker; what they say of themselves, in worker order, for plans to be made of.

        Raises:
            ClusterError: A worker is not available, or speaks another protocol.
        """
        assert not self._preparing
        try:
            for worker, address in enumerate(self.addresses):
                timeout_s = self.config.connect_timeout_s
                self._preparing.append(self._greet(address, timeout_s, self._shared(worker)))
        except BaseException:
            self._hang_up()
            raise
        return tuple(connection.info for connection in self._preparing)

    def begin(self, plans: Sequence[WorkerPlan]) -> None:
        """Gives every worker its plan, after :meth:`greet` if that was not; all prepare side by side.

        Args:
            plans: One a worker, in worker order, as :func:`duckllm.moe.placement.plan_workers` makes them.

        Raises:
            ConfigError: Another number of plans than of workers; or requests by multicast cannot be sent.
            ClusterError: A worker is not available, refuses, or speaks another protocol.
        """
        if len(plans) != self.num_workers:
            raise ConfigError("plans", len(plans), f"one for each of the {self.num_workers} workers")
        if not self._preparing:
            self.greet()
        try:
            self._plans = self._with_multicast(plans)
            for connection, plan in zip(self._preparing, self._plans, strict=True):
                connection.send_plan(plan, share_folder=self.config.share_folder)
        except BaseException:
            self._hang_up()
            raise

    def _with_multicast(self, plans: Sequence[WorkerPlan]) -> tuple[WorkerPlan, ...]:
        """The plans, with a group of this session's where one is asked for."""
        if self._multicast is not None:
            self._multicast.close()
            self._multicast = None
        if self.config.multicast == "off":
            return tuple(plans)
        local_addresses = [connection.local_address for connection in self._preparing]
        self._multicast = HostMulticast(self.config.multicast, local_addresses, self._token)
        return tuple(replace(plan, multicast=self._multicast.plan) for plan in plans)

    def wait_ready(self) -> list[Connection]:
        """Waits until every worker has prepared, and sends each the weights that it finds nowhere else.

        The connections are the caller's then.

        Raises:
            ClusterError: A worker is gone, refuses, or takes too long.
            ModelError: A worker cannot use its weights; the message names the worker and the file. Or this
                host lacks the file of a shard.
        """
        try:
            with FetchProgress(self.num_workers) as progress:
                wait_all_ready(self._preparing, self.config.prepare_timeout_s, progress)
        except BaseException:
            self._hang_up()
            raise
        connections, self._preparing = self._preparing, []
        self._workers = tuple(connection.info for connection in connections)
        self._ends = [connection.peer_end for connection in connections]
        return connections

    def find_silent(self, workers: Sequence[int], timeout_s: float) -> list[int]:
        """Which of these workers do not even say within ``timeout_s`` seconds that they live."""
        ends = {worker: self._ends[worker] for worker in workers}
        return find_silent(ends, self._token is not None, timeout_s)

    def replace(self, worker: int, deadline: float, *, is_silent: bool = False) -> Connection:
        """A new connection in the place of a worker whose last one is closed, prepared with the same slice.

        Args:
            worker: Its index; slices and the order of sums stay as they are.
            deadline: Until when it is tried again (time.monotonic() seconds).
            is_silent: Whether it gave no sign of life, so that another is tried first where there is one.

        Raises:
            ClusterError: Nobody was there by then; or what was there is not to be waited for.
            ModelError: Who was there cannot use its weights.
        """
        pause_s, limit_s = _FIRST_PAUSE_S, 2 * self.config.worker_silence_s
        while True:
            try:
                left_s = max(deadline - time.monotonic(), _FIRST_PAUSE_S)
                attempt_s = min(limit_s, self.config.connect_timeout_s, left_s)
                connection = self._bring_back(worker, deadline, attempt_s, is_silent=is_silent)
                break
            except (WorkerUnavailableError, ModelNotFoundError):  # its disk may be on the way
                if time.monotonic() + pause_s >= deadline:
                    raise
            time.sleep(pause_s)
            pause_s, limit_s = min(2 * pause_s, _LONGEST_PAUSE_S), 2 * limit_s
        before, now = self._workers[worker], connection.info
        if now.isa != before.isa:
            _log.warning(
                "worker %s computes with %s where %s computed with %s: sums may differ in their last bits",
                *(now.address, now.isa, before.address, before.isa),
            )
        self._workers = (*self._workers[:worker], now, *self._workers[worker + 1 :])
        self._ends[worker] = connection.peer_end
        self.addresses = (*self.addresses[:worker], connection.address, *self.addresses[worker + 1 :])
        return connection

    @abstractmethod
    def _bring_back(self, worker: int, deadline: float, attempt_s: float, *, is_silent: bool) -> Connection:
        """One attempt of :meth:`replace`.

        Args:
            worker: Its index.
            deadline: Until when whoever is there may prepare.
            attempt_s: Limit for connecting and for each answer before the plan, seconds.
            is_silent: As for :meth:`replace`.

        Raises:
            WorkerUnavailableError: Nobody is there; it will be tried again.
        """

    def _shared(self, worker: int) -> SharedChannel | None:
        """The memory shared with a worker; None where there is none."""
        return None

    def _greet(self, address: Address, timeout_s: float, shared: SharedChannel | None = None) -> Connection:
        return Connection(address, self._token, timeout_s, self._session, shared)

    def _prepare(
        self,
        worker: int,
        address: Address,
        deadline: float,
        attempt_s: float,
        shared: SharedChannel | None = None,
    ) -> Connection:
        """A connection to that address, prepared with a worker's slice."""
        connection = self._greet(address, attempt_s, shared)
        try:
            connection.send_plan(self._plans[worker], share_folder=self.config.share_folder)
            left_s = max(deadline - time.monotonic(), attempt_s)
            connection.wait_ready(min(left_s, self.config.prepare_timeout_s))
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare_first(
        self, worker: int, places: Sequence[Address], deadline: float, attempt_s: float
    ) -> Connection:
        """A connection to the first of these addresses that takes a worker's slice.

        Raises:
            WorkerUnavailableError: None does; the message has every reason where there are several.
            ClusterError: The only one does not.
            ModelError: The only one cannot.
        """
        problems: list[DuckError] = []
        for address in places:
            try:
                return self._prepare(worker, address, deadline, attempt_s)
            except (ClusterError, DiskSpaceError, ModelError) as error:
                problems.append(error)
        if len(problems) == 1:
            raise problems[0]
        raise WorkerUnavailableError("; ".join(map(str, problems))) from problems[0]

    def close(self) -> None:
        """Lets go of the workers; connections that :meth:`wait_ready` gave are the transport's to close."""
        self._hang_up()

    def _hang_up(self) -> None:
        connections, self._preparing = self._preparing, []
        for connection in connections:
            connection.close()
        if self._multicast is not None:
            self._multicast.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
