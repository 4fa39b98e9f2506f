"""Shards from the host, over the control connection: asked for all at once, checked as they arrive.

Called by :mod:`duckllm.worker.weights` between PREPARE and READY; :mod:`duckllm.cluster.fetch` is the other
end. Knows neither files nor the cache.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from duckllm import _native
from duckllm._native import FrameType
from duckllm.cluster.frames import ControlChannel
from duckllm.errors import ProtocolError, WeightHashError

# For the next piece of a shard; a host that is still importing and loading sends none yet.
FETCH_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Shard:
    """One stripe of every expert of a layer.

    Args:
        layer: The layer.
        stripe: The stripe, counted over the whole expert.
        sha256: SHA-256 of its units, one behind the other.
    """

    layer: int
    stripe: int
    sha256: str


def request_shards(channel: ControlChannel, shards: Sequence[Shard]) -> None:
    """Asks the host for shards, given layer by layer, which it then sends in this order."""
    stripes: dict[int, list[int]] = {}
    for shard in shards:
        stripes.setdefault(shard.layer, []).append(shard.stripe)
    wanted = [[layer, its_stripes] for layer, its_stripes in stripes.items()]
    channel.send_json(FrameType.FETCH, {"shards": wanted}, deadline=time.monotonic() + FETCH_TIMEOUT_S)


def new_buffer() -> memoryview:
    """Room for the largest piece of a shard, with what comes before it."""
    return memoryview(bytearray(_native.SHARD_HEADER_BYTES + _native.MAX_SHARD_PIECE_BYTES))


def receive_shard(
    channel: ControlChannel,
    shard: Shard,
    num_bytes: int,
    buffer: memoryview,
    take: Callable[[memoryview], object],
) -> None:
    """Hands the pieces of the next shard on as they come; what they are is known only in the end.

    Args:
        channel: The connection, on which the shard is the next.
        shard: Which one was asked for.
        num_bytes: Its length.
        buffer: As :func:`new_buffer` makes it.
        take: Called with each piece, in order; it lies in the buffer.

    Raises:
        ProtocolError: Something else came.
        WeightHashError: It is not what the plan says.
        PeerClosedError: The host is gone.
        TimeoutError: It fell silent.
    """
    head = _native.SHARD_HEADER_BYTES
    digest, done = hashlib.sha256(), 0
    while done < num_bytes:
        deadline = time.monotonic() + FETCH_TIMEOUT_S
        try:
            payload = channel.receive_into(FrameType.SHARD, buffer, deadline=deadline)
        except TimeoutError:
            raise TimeoutError(
                f"SHARD: got no whole piece of layer {shard.layer}, stripe {shard.stripe} "
                f"within {FETCH_TIMEOUT_S:g} s"
            ) from None
        expected = (shard.layer, shard.stripe, done)
        got = _native.decode_shard_header(bytes(payload[:head]))
        if got != expected:
            raise ProtocolError(
                f"SHARD from {channel.peer}: got layer, stripe and offset {got}, expected {expected}"
            )
        piece = payload[head:]
        length = min(_native.MAX_SHARD_PIECE_BYTES, num_bytes - done)
        if len(piece) != length:
            raise ProtocolError(
                f"SHARD from {channel.peer}: layer {shard.layer}, stripe {shard.stripe}: got a piece of "
                f"{len(piece)} bytes, expected {length}"
            )
        digest.update(piece)
        take(piece)
        done += length
    if digest.hexdigest() != shard.sha256:
        raise WeightHashError(
            f"{channel.peer} sent layer {shard.layer}, stripe {shard.stripe} with SHA-256 "
            f"{digest.hexdigest()}, expected {shard.sha256}"
        )
