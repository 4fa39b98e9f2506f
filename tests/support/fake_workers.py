"""Workers that a test plays itself, byte by byte, over socket pairs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from duckllm import _native
from duckllm._native import FrameType
from duckllm.cluster.address import Address
from duckllm.transport.transport import Transport
from worker_harness import read_frame

F32 = npt.NDArray[np.float32]
HIDDEN_SIZE = 6
TOP_K = 2


class FakeConnection:
    """What the transport takes of a connection."""

    def __init__(self, port: int, connection: socket.socket) -> None:
        self.address = Address("127.0.0.1", port)
        self._connection = connection
        self.memory = None
        self.multicast_bytes = 0

    def detach_socket(self) -> int:
        return self._connection.detach()


@contextmanager
def fake_workers(count: int, **options: object) -> Iterator[tuple[Transport, list[socket.socket]]]:
    """A transport and the other ends of its connections; addresses are 127.0.0.1:1, :2 and so on."""
    pairs = [socket.socketpair() for _ in range(count)]
    for _, theirs in pairs:
        theirs.settimeout(20)
    connections = [FakeConnection(index + 1, ours) for index, (ours, _) in enumerate(pairs)]
    settings = {"max_step_tokens": 4, "step_timeout_s": 20.0, **options}
    transport = Transport(connections, HIDDEN_SIZE, TOP_K, **settings)  # type: ignore[arg-type]
    try:
        yield transport, [theirs for _, theirs in pairs]
    finally:
        transport.close()
        for _, theirs in pairs:
            theirs.close()


def submit(transport: Transport, num_tokens: int = 1, *, layer: int = 5, lane: int = 0) -> int:
    """A step whose inputs do not matter."""
    ids = np.zeros((num_tokens, TOP_K), np.int32)
    weights = np.ones((num_tokens, TOP_K), np.float32)
    return transport.submit(layer, np.ones((num_tokens, HIDDEN_SIZE), np.float32), ids, weights, lane=lane)


def reply_frame(sequence: int, y: F32, *, layer: int = 5, lane: int = 0, compute_us: int = 0) -> bytes:
    """A whole STEP_REPLY in f32."""
    payload = _native.encode_step_reply_header(layer, len(y), compute_us, lane) + y.tobytes()
    return _native.encode_frame_header(FrameType.STEP_REPLY, len(payload), sequence) + payload


def read_request(worker: socket.socket) -> tuple[bytes, int]:
    """The next STEP_REQUEST: payload and sequence."""
    got = read_frame(worker)
    assert got is not None
    kind, payload, sequence = got
    assert kind == FrameType.STEP_REQUEST
    return payload, sequence


def rows(*values: float) -> F32:
    """[T, H] with one value per row."""
    return np.repeat(np.array(values, np.float32)[:, None], HIDDEN_SIZE, axis=1)


def as_bf16(values: F32) -> npt.NDArray[np.uint16]:
    """Nearest-even bf16 bits, by way of float64 distances; finite values only."""
    bits = values.view(np.uint32)
    low = (bits >> 16).astype(np.uint16)
    down = (low.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    up = ((low.astype(np.uint32) + 1) << 16).view(np.float32).astype(np.float64)
    exact = values.astype(np.float64)
    to_up = np.abs(up - exact) < np.abs(exact - down)
    tie = np.abs(up - exact) == np.abs(exact - down)
    return np.where(to_up | (tie & (low & 1 == 1)), low + 1, low).astype(np.uint16)
