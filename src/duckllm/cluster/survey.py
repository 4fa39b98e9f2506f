"""Asks running workers what they are and how far away, and leaves them as they were.

Called by ``duckllm plan`` and ``duckllm doctor``; a worker that is busy with a host answers too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from duckllm import _native
from duckllm.cluster.address import Address
from duckllm.cluster.connect import Connection, WorkerInfo

_TIMEOUT_S = 5.0
_WARM_UP = 3


@dataclass(frozen=True)
class RoundTrip:
    """Times until a worker had sent a message back.

    Args:
        num_bytes: Payload, in each direction.
        samples_us: Each time, in ascending order.
    """

    num_bytes: int
    samples_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """Half of them were faster."""
        return self.samples_us[len(self.samples_us) // 2]

    @property
    def p99_us(self) -> float:
        """99 of 100 were faster, or all where there are fewer."""
        return self.samples_us[min(len(self.samples_us) - 1, len(self.samples_us) * 99 // 100)]


def step_message_bytes(hidden_size: int, top_k: int) -> int:
    """Payload of the request for one token's step, with f32 on the wire."""
    return min(_native.MAX_PING_BYTES, _native.STEP_REQUEST_HEADER_BYTES + 4 * hidden_size + 8 * top_k)


def time_round_trips(connection: Connection, num_bytes: int, count: int, limit_s: float = 1.0) -> RoundTrip:
    """Sends a message so often, or for so long, one at a time; the first few are not counted.

    Raises:
        ClusterError: The worker is gone, or answers something else.
    """
    for _ in range(_WARM_UP):
        connection.ping(num_bytes)
    samples: list[float] = []
    start = time.monotonic()
    while len(samples) < count and (not samples or time.monotonic() - start < limit_s):
        samples.append(1e6 * connection.ping(num_bytes))
    return RoundTrip(num_bytes, tuple(sorted(samples)))


def survey(
    addresses: Sequence[Address], token: str | None, num_bytes: int, count: int = 20
) -> list[tuple[WorkerInfo, RoundTrip]]:
    """What each worker says of itself, and messages of so many bytes to it and back.

    Raises:
        ClusterError: A worker is not available, or refuses.
    """
    found = []
    for address in addresses:
        connection = Connection(address, token, _TIMEOUT_S)
        try:
            found.append((connection.info, time_round_trips(connection, num_bytes, count)))
        finally:
            connection.close()
    return found
