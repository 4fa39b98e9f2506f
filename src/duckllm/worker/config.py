"""A worker's configuration, as its command line gives it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from duckllm.config import available_cores
from duckllm.errors import ConfigError

DEFAULT_LISTEN = "127.0.0.1:7411"
_SPIN_US_WITH_SPARE_CORES = 200


@dataclass(frozen=True)
class WorkerConfig:
    """How a worker listens, computes and waits.

    Args:
        listen: Address to listen on; port 0 takes a free one.
        model: Its own converted model, looked into before the host's folder; None for none.
        threads: Compute threads; 0 takes every core.
        spin_us: How long idle threads spin before they sleep, microseconds; -1 decides by the cores.
        token: The cluster token; needed beyond loopback.
        exit_with_stdin: Whether to leave when standard input ends.
        handshake_timeout_s: From accepting a connection to its complete plan, seconds.
        frame_timeout_s: From the first byte of a step request to its last, seconds.
        send_timeout_s: For the host to take one reply, seconds.
    """

    listen: str = DEFAULT_LISTEN
    model: Path | None = None
    threads: int = 0
    spin_us: int = -1
    token: str | None = None
    exit_with_stdin: bool = False
    handshake_timeout_s: float = 10.0
    frame_timeout_s: float = 30.0
    send_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.threads <= 1024:
            raise ConfigError("threads", self.threads, "0 (every core) to 1024")
        if not -1 <= self.spin_us <= 1_000_000:
            raise ConfigError("spin_us", self.spin_us, "-1 (decide by the cores) to 1000000")
        for field in ("handshake_timeout_s", "frame_timeout_s", "send_timeout_s"):
            if not 0.001 <= getattr(self, field) <= 1e6:
                raise ConfigError(field, getattr(self, field), "0.001 to 1000000")

    @property
    def resolved_threads(self) -> int:
        """Compute threads, 0 resolved."""
        return self.threads or available_cores()

    @property
    def resolved_spin_us(self) -> int:
        """Spin time, -1 resolved."""
        if self.spin_us >= 0:
            return self.spin_us
        return _SPIN_US_WITH_SPARE_CORES if self.resolved_threads < available_cores() else 0
