"""``--cluster discover`` of verbs that load nothing: finds the nodes, and says who is not taken in.

Used by ``duckllm plan`` and ``duckllm doctor``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from duckllm.cli.common import Waiting, parse_workers
from duckllm.cluster.token import read_token
from duckllm.config import ClusterConfig
from duckllm.errors import ConfigError

if TYPE_CHECKING:
    from duckllm.cluster.discovery import FoundNode

DiscoverOption = Annotated[
    str | None,
    typer.Option(
        help="discover finds nodes that run duckllm worker --announce; discover:ADDRESS on one network of "
        "this host.",
        show_default=False,
    ),
]


def discover(
    cluster: str, workers: str | None, token_file: Path | None, min_workers: int, discover_wait_s: float
) -> tuple[list[FoundNode], list[FoundNode]]:
    """The nodes that a start would take in, in their order, and those that it would not and why.

    Raises:
        ConfigError: It is another kind of cluster, or one of the others is malformed or missing.
        MissingPackageError: zeroconf is not installed.
        WorkerUnavailableError: Too few nodes were found.
    """
    from duckllm.cluster.discovery_cluster import look_around

    if cluster.partition(":")[0] != "discover":
        expected = "discover or discover:10.0.0.1; other workers are listed with --workers"
        raise ConfigError("cluster", cluster, expected)
    asked = 0 if workers is None else parse_workers(workers)
    if not isinstance(asked, int):
        raise ConfigError("workers", workers, "a number, with cluster discover")
    config = ClusterConfig(
        workers=asked,
        cluster=cluster,
        min_workers=min_workers,
        discover_wait_s=discover_wait_s,
        cluster_token=read_token(token_file),
    )
    with Waiting("Looking for nodes"):
        found, others = look_around(config)
    return found[: asked or None], others


def check_undiscovered(cluster: str | None, min_workers: int, discover_wait_s: float) -> None:
    """Refuses what only ``--cluster discover`` has a use for.

    Raises:
        ConfigError: There is some of it.
    """
    if cluster is None:
        ClusterConfig(min_workers=min_workers, discover_wait_s=discover_wait_s)
