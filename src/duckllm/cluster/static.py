"""Workers that somebody else started, at a list of addresses."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from duckllm.cluster.address import parse_addresses
from duckllm.cluster.base import Cluster
from duckllm.cluster.connect import Connection
from duckllm.cluster.plan import WorkerPlan
from duckllm.config import ClusterConfig
from duckllm.errors import ClusterError, ConfigError

_log = logging.getLogger("duckllm")


class StaticCluster(Cluster):
    """The workers at ``config.addresses``, of which the last ``config.spares`` wait; they are left running.

    A lost worker is looked for at its own address, where it has its weights, then at the spares'; one that
    gave no sign of life at the spares' first. Whoever takes its place leaves the spares, and the address that
    was lost goes to their end.

    Args:
        config: Must name at least one address, and more than there are spares.

    Raises:
        ConfigError: An address is malformed or named twice; the message shows the entry.
    """

    def __init__(self, config: ClusterConfig) -> None:
        addresses = parse_addresses(config.addresses)
        if not addresses:
            raise ConfigError("addresses", config.addresses, "at least one name:port")
        num_workers = config.num_workers
        super().__init__(config, addresses[:num_workers], config.cluster_token)
        self.spares = addresses[num_workers:]

    def begin(self, plans: Sequence[WorkerPlan]) -> None:
        """As :meth:`Cluster.begin`; a spare that is not there, or refuses, is a warning in the log."""
        super().begin(plans)
        for address in self.spares:
            try:
                self._greet(address, self.config.connect_timeout_s).close()
            except ClusterError as error:
                _log.warning("spare: %s", error)

    def _bring_back(self, worker: int, deadline: float, attempt_s: float, *, is_silent: bool) -> Connection:
        own = self.addresses[worker]
        places = (*self.spares, own) if is_silent else (own, *self.spares)
        connection = self._prepare_first(worker, places, deadline, attempt_s)
        if connection.address != own:
            self.spares = (*(spare for spare in self.spares if spare != connection.address), own)
        return connection
