"""What every cluster does: connect to its workers, prepare them all at once, close.

Local and static clusters differ only in where the addresses come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from duckllm.cluster.address import Address
from duckllm.cluster.connect import Connection, WorkerInfo
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

    @property
    def num_workers(self) -> int:
        """W."""
        return len(self.addresses)

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """What the connected workers said of themselves, in worker order; empty before :meth:`connect`."""
        return self._workers

    def connect(self, plans: Sequence[WorkerPlan]) -> list[Connection]:
        """Connects to every worker and prepares all of them side by side.

        Args:
            plans: One a worker, in worker order, as :func:`duckllm.moe.placement.plan_workers` makes them.

        Raises:
            ConfigError: Another number of plans than of workers.
            ClusterError: A worker is not available, refuses, or speaks another protocol.
            ModelError: A worker cannot use its weights; the message names the worker and the file.
        """
        if len(plans) != self.num_workers:
            raise ConfigError("plans", len(plans), f"one for each of the {self.num_workers} workers")
        connections: list[Connection] = []
        try:
            for address in self.addresses:
                connections.append(Connection(address, self._token, self.config.connect_timeout_s))
            for connection, plan in zip(connections, plans, strict=True):
                connection.send_plan(plan)
            for connection in connections:
                connection.wait_ready(self.config.prepare_timeout_s)
        except BaseException:
            for connection in connections:
                connection.close()
            raise
        self._workers = tuple(connection.info for connection in connections)
        return connections

    def close(self) -> None:
        """Lets go of the workers; the transport closes the connections themselves."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
