"""What every cluster does: connect to its workers, prepare them all at once, close.

Local and static clusters differ only in where the addresses come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from duckllm.cluster.address import Address
from duckllm.cluster.connect import Connection, WorkerInfo
from duckllm.cluster.fetch import FetchProgress, wait_all_ready
from duckllm.cluster.plan import WorkerPlan
from duckllm.config import ClusterConfig
from duckllm.errors import ConfigError


class Cluster:
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
        self._workers: tuple[WorkerInfo, ...] = ()
        self._preparing: list[Connection] = []

    @property
    def num_workers(self) -> int:
        """W."""
        return len(self.addresses)

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """What the workers said of themselves, in worker order; empty before they are ready."""
        return self._workers

    def connect(self, plans: Sequence[WorkerPlan]) -> list[Connection]:
        """:meth:`begin` and :meth:`wait_ready` in one."""
        self.begin(plans)
        return self.wait_ready()

    def begin(self, plans: Sequence[WorkerPlan]) -> None:
        """Connects to every worker and gives it its plan; all of them prepare side by side meanwhile.

        Args:
            plans: One a worker, in worker order, as :func:`duckllm.moe.placement.plan_workers` makes them.

        Raises:
            ConfigError: Another number of plans than of workers.
            ClusterError: A worker is not available, refuses, or speaks another protocol.
        """
        if len(plans) != self.num_workers:
            raise ConfigError("plans", len(plans), f"one for each of the {self.num_workers} workers")
        assert not self._preparing
        try:
            for address in self.addresses:
                self._preparing.append(Connection(address, self._token, self.config.connect_timeout_s))
            for connection, plan in zip(self._preparing, plans, strict=True):
                connection.send_plan(plan, share_folder=self.config.share_folder)
        except BaseException:
            self._hang_up()
            raise

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
        return connections

    def close(self) -> None:
        """Lets go of the workers; connections that :meth:`wait_ready` gave are the transport's to close."""
        self._hang_up()

    def _hang_up(self) -> None:
        connections, self._preparing = self._preparing, []
        for connection in connections:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
