"""How workers come to be: spawned here, or a list of addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duckllm.cluster.base import Cluster
    from duckllm.config import ClusterConfig


def open_cluster(config: ClusterConfig) -> Cluster:
    """The cluster that ``config`` describes: workers at its addresses, else workers started here.

    Raises:
        ConfigError: An address is malformed.
        WorkerUnavailableError: A local worker did not start.
    """
    from duckllm.cluster.local import LocalCluster
    from duckllm.cluster.static import StaticCluster

    return StaticCluster(config) if config.addresses else LocalCluster(config)
