"""Configuration as frozen dataclasses; ``"auto"`` is resolved once, before freezing.

Called by the command line and by :class:`duckllm.LLM`; knows nothing of models, sockets or tensors.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from duckllm.errors import ConfigError

WIRE_DTYPES = ("f32", "bf16")


@dataclass(frozen=True)
class ClusterConfig:
    """How the workers come to be and how the host speaks with them.

    Args:
        workers: Number of workers to start here, when ``addresses`` is empty.
        addresses: Addresses of running workers, ``"name:port"``; empty means "start them here".
        threads_per_worker: Compute threads of each worker started here; 0 divides the cores evenly.
        spin_us: How long an idle thread spins before it sleeps, microseconds; -1 decides by the cores.
        wire_dtype: Activations on the wire, ``"f32"`` or ``"bf16"``.
        reply_dtype: Partial sums on the wire, ``"f32"`` or ``"bf16"``.
        max_step_tokens: Most tokens in one step.
        connect_timeout_s: Limit for connecting and for each message before the first step, seconds.
        prepare_timeout_s: Limit for a worker to map and verify its weights, seconds.
        step_timeout_s: Limit for one step's answer, seconds.
        cluster_token: Shared secret; None where every worker is on loopback and has none.
    """

    workers: int = 2
    addresses: tuple[str, ...] = ()
    threads_per_worker: int = 0
    spin_us: int = -1
    wire_dtype: str = "f32"
    reply_dtype: str = "f32"
    max_step_tokens: int = 256
    connect_timeout_s: float = 10.0
    prepare_timeout_s: float = 600.0
    step_timeout_s: float = 30.0
    cluster_token: str | None = None

    def __post_init__(self) -> None:
        for field, least in (
            ("workers", 1),
            ("threads_per_worker", 0),
            ("spin_us", -1),
            ("max_step_tokens", 1),
        ):
            value = getattr(self, field)
            if type(value) is not int or value < least:
                raise ConfigError(field, value, f"a whole number of at least {least}")
        for field in ("wire_dtype", "reply_dtype"):
            if getattr(self, field) not in WIRE_DTYPES:
                raise ConfigError(field, getattr(self, field), "one of " + ", ".join(WIRE_DTYPES))
        for field in ("connect_timeout_s", "prepare_timeout_s", "step_timeout_s"):
            value = getattr(self, field)
            if type(value) not in (int, float) or not 0 < value < float("inf"):
                raise ConfigError(field, value, "a number above 0")
        if not isinstance(self.cluster_token, str | None):
            raise ConfigError("cluster_token", type(self.cluster_token).__name__, "text, or None")


def available_cores() -> int:
    """Cores that this process may run on (its affinity mask, not the machine's count)."""
    return len(os.sched_getaffinity(0))
