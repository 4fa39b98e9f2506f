"""When a worker is started again, and when the whole node is.

Called by :mod:`duckllm.node_image.init`. The clock of the machine's own watchdog goes on as long as the loop
that calls :meth:`Watchdog.pet` does, so a node that hangs altogether is reset by its hardware.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from pathlib import Path

from duckllm import _native
from duckllm._native import FrameType

TIMEOUT_S = 60
_WDIOC_SETTIMEOUT = 0xC0045706  # of linux/watchdog.h


class Watchdog:
    """The machine's watchdog, or the kernel's own; nothing where there is neither."""

    def __init__(self, device: Path = Path("/dev/watchdog0")) -> None:
        self._device: int | None = None
        self.name = "none"
        with contextlib.suppress(OSError):
            self._device = os.open(device, os.O_WRONLY | os.O_CLOEXEC)
            self.name = "unnamed"
            fcntl.ioctl(self._device, _WDIOC_SETTIMEOUT, struct.pack("i", TIMEOUT_S))
        with contextlib.suppress(OSError):
            self.name = Path(f"/sys/class/watchdog/{device.name}/identity").read_text().strip()

    def pet(self) -> None:
        """Says that all is well for another minute."""
        if self._device is not None:
            with contextlib.suppress(OSError):
                os.write(self._device, b"\0")


class Restarts:
    """Whether a worker that ended is worth another start.

    Args:
        most: So many ends within ``window_s`` are the worker's own affair; one more is the node's.
        window_s: Seconds.
    """

    def __init__(self, most: int = 5, window_s: float = 120.0) -> None:
        self._most, self._window_s = most, window_s
        self._ends: list[float] = []

    def ended(self, now_s: float) -> bool:
        """Counts an end; False when the node has to be started again."""
        self._ends = [end for end in self._ends if now_s - end < self._window_s] + [now_s]
        return len(self._ends) <= self._most


def answers(port: int, has_token: bool, timeout_s: float = 5.0) -> bool:
    """Whether the worker of this node gives a sign of life, which it does while it computes.

    The question is a host's: the first frame of a connection, to which any byte is an answer.
    """
    payload = _native.encode_auth_payload(has_token, os.urandom(_native.NONCE_BYTES))
    question = _native.encode_frame_header(FrameType.AUTH_OPEN, len(payload)) + payload
    try:
        with socket.create_connection(("127.0.0.1", port), timeout_s) as connection:
            connection.sendall(question)
            connection.shutdown(
                socket.SHUT_WR
            )  # that was all; read to the end, or the worker hears of a reset
            heard = connection.recv(4096)
            while connection.recv(4096):
                pass
            return bool(heard)
    except OSError:
        return False
