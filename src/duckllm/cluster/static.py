"""Workers that somebody else started, at a list of addresses."""

from __future__ import annotations

from duckllm.cluster.address import parse_address
from duckllm.cluster.base import Cluster
from duckllm.config import ClusterConfig
from duckllm.errors import ConfigError


class StaticCluster(Cluster):
    """The workers at ``config.addresses``; they are left running.

    Args:
        config: Must name at least one address.

    Raises:
        ConfigError: An address is malformed or named twice; the message shows the entry. Or an option is set
            that such workers have of their own.
    """

    def __init__(self, config: ClusterConfig) -> None:
        addresses = [parse_address(entry) for entry in config.addresses]
        if not addresses:
            raise ConfigError("addresses", config.addresses, "at least one name:port")
        for entry, address in zip(config.addresses, addresses, strict=True):
            if addresses.count(address) > 1:
                raise ConfigError("addresses", entry, "each worker once")
        for field in ("threads_per_worker", "spin_us", "prefill"):
            value = getattr(config, field)
            if value != getattr(ClusterConfig, field):
                raise ConfigError(field, value, "nothing with workers elsewhere, whose own options say so")
        super().__init__(config, addresses, config.cluster_token)
