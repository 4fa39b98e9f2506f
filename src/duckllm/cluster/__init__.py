"""How workers come to be: spawned here, a list of addresses, placed by Ray, or found on the network."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duckllm.cluster.base import Cluster
    from duckllm.config import ClusterConfig


def check_cluster(config: ClusterConfig) -> None:
    """Refuses early, before anything is loaded, what :func:`open_cluster` would.

    Raises:
        ConfigError: The address of Ray is malformed; or nodes are to be found without a cluster token, or
            through an interface that is not here.
        MissingPackageError: Ray, or zeroconf, is needed and not installed.
    """
    if config.kind == "discover":
        from duckllm.cluster.discovery_cluster import find_search

        find_search(config)
    if config.kind == "ray":
        from duckllm.cluster.ray_cluster import find_ray

        find_ray(config)


def open_cluster(config: ClusterConfig) -> Cluster:
    """The cluster that ``config`` describes: workers at its addresses, found, placed by Ray, or started here.

    Raises:
        ConfigError: An address is malformed; or Ray has no room for so many workers.
        MissingPackageError: Ray, or zeroconf, is needed and not installed.
        WorkerUnavailableError: A worker did not start, there is no such Ray, or too few nodes were found.
    """
    if config.kind == "discover":
        from duckllm.cluster.discovery_cluster import DiscoveredCluster

        return DiscoveredCluster(config)
    if config.kind == "ray":
        from duckllm.cluster.ray_cluster import RayCluster

        return RayCluster(config)
    from duckllm.cluster.local import LocalCluster
    from duckllm.cluster.static import StaticCluster

    return StaticCluster(config) if config.addresses else LocalCluster(config)
