"""Workers that announce themselves: found at the start, and later taken in where one is lost."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from duckllm.cluster.address import Address
from duckllm.cluster.base import Cluster, OtherNode
from duckllm.cluster.connect import Connection, WorkerInfo
from duckllm.cluster.discovery import BUSY, BUSY_PROBLEM, GONE, REFUSED, Discovery, FoundNode
from duckllm.cluster.discovery_mdns import check_interface, check_zeroconf
from duckllm.cluster.shared_memory import SharedChannel
from duckllm.config import ClusterConfig
from duckllm.errors import ConfigError, WorkerUnavailableError

_LONGEST_RETREAT_S = 1.0  # before a host that met another one looks for nodes again


@dataclass(frozen=True)
class Search:
    """What nodes are looked for, as ``config`` says it, known to be possible.

    Args:
        token: The cluster token.
        interface: Address of this host whose interface alone is searched; None for every one.
    """

    token: str
    interface: str | None


def find_search(config: ClusterConfig) -> Search:
    """What nodes are looked for.

    Raises:
        ConfigError: There is no cluster token, or the interface is none of this host's.
        MissingPackageError: zeroconf is not installed.
    """
    check_zeroconf("cluster")
    if config.cluster_token is None:
        expected = "a token, by which this host and its nodes know each other"
        raise ConfigError("cluster_token", None, expected, "--token-file FILE or $DUCKLLM_CLUSTER_TOKEN")
    interface = config.cluster.partition(":")[2] if config.cluster else ""
    return Search(config.cluster_token, check_interface(interface) if interface else None)


class _TakenError(WorkerUnavailableError):
    """A node serves another host."""

    def __init__(self, address: Address) -> None:
        super().__init__(f"worker {address}: {BUSY_PROBLEM}")
        self.address = address


class DiscoveredCluster(Cluster):
    """The nodes that are found by ``config.discover_wait_s``; they are left running.

    ``config.workers`` of them compute, or for 0 all but the last ``config.spares``, in the order of their
    names. All others wait, those that come later too: what each computes stays as it was planned. A lost one
    is looked for where it was, then wherever a node of its name has announced itself, then the place is taken
    by one that waits; where it gave no sign of life, these come first.

    Args:
        config: Must have a cluster token.
        discovery: Finds nodes; None for multicast DNS. It is closed with the cluster.

    Raises:
        ConfigError: As of :func:`find_search`.
        MissingPackageError: zeroconf is not installed.
        WorkerUnavailableError: Fewer nodes than were asked for have come in time.
    """

    def __init__(self, config: ClusterConfig, discovery: Discovery | None = None) -> None:
        if discovery is None:
            search = find_search(config)
            discovery = Discovery(search.token, search.interface)
        self._discovery = discovery
        try:
            addresses = _choose(discovery, config)
        except BaseException:
            discovery.close()
            raise
        super().__init__(config, addresses, config.cluster_token)
        discovery.in_use = lambda: self.addresses

    def greet(self) -> tuple[WorkerInfo, ...]:
        """As of any cluster; those that another host has taken since they were found are left to it.

        Raises:
            ClusterError: A worker is not available, or too few are free within ``config.discover_wait_s``.
        """
        while True:
            try:
                return super().greet()
            except _TakenError as error:
                # This host has let go of those that it held: another may wait for them, as this one would for
                # those that the other holds. Whoever is back first gets them.
                self.addresses = ()  # all others are free for this host again
                self._discovery.busy(error.address)
                time.sleep(random.uniform(0.0, _LONGEST_RETREAT_S))
                self.addresses = _choose(self._discovery, self.config)

    @property
    def other_nodes(self) -> tuple[OtherNode, ...]:
        """Nodes that wait, are busy, are gone or were refused."""
        used = set(self.addresses)
        known = [node for node in self._discovery.nodes() if node.address not in used]
        refused = [node for node in self._discovery.refused() if node.address is None]
        return tuple(
            OtherNode(
                node.name,
                "" if node.address is None else str(node.address),
                node.state,
                node.memory_bytes,
                node.read_gb_per_s,
                node.problem if node.state in (BUSY, GONE, REFUSED) else "",
            )
            for node in [*known, *refused]
        )

    def _greet(self, address: Address, timeout_s: float, shared: SharedChannel | None = None) -> Connection:
        connection = super()._greet(address, timeout_s, shared)
        if connection.info.is_busy:
            connection.close()
            raise _TakenError(address)
        return connection

    def _bring_back(self, worker: int, deadline: float, attempt_s: float, *, is_silent: bool) -> Connection:
        self._discovery.hurry()
        own, name = self.addresses[worker], self._workers[worker].name
        waiting = sorted(self._discovery.waiting(), key=lambda node: node.name != name)
        others = [node.address for node in waiting if node.address is not None]
        places = (*others, own) if is_silent else (own, *others)
        connection = self._prepare_first(worker, places, deadline, attempt_s)
        if connection.address != own:
            self._discovery.lost(own)
        return connection

    def close(self) -> None:
        """Looks for no more nodes, and lets go of the workers."""
        self._discovery.close()
        super().close()


def _choose(discovery: Discovery, config: ClusterConfig) -> tuple[Address, ...]:
    """The addresses of those that compute.

    Raises:
        WorkerUnavailableError: Too few are free in time.
    """
    found = discovery.wait(nodes_needed(config), config.discover_wait_s)
    chosen = found[: config.workers or len(found) - config.spares]
    return tuple(node.address for node in chosen if node.address is not None)


def nodes_needed(config: ClusterConfig) -> int:
    """How many nodes there are to be before any is given a slice."""
    return max(config.workers, config.min_workers) + config.spares


def look_around(config: ClusterConfig) -> tuple[list[FoundNode], list[FoundNode]]:
    """The nodes that are there, free ones first, and those that are not and why; all are left as they were.

    Raises: as of :class:`DiscoveredCluster`.
    """
    search = find_search(config)
    with Discovery(search.token, search.interface) as discovery:
        found = discovery.wait(nodes_needed(config), config.discover_wait_s, with_busy=True)
        gone = [node for node in discovery.nodes() if node.state == GONE]
        return found, gone + discovery.refused()
