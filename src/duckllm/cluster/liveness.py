"""Whether workers live: each is asked on a connection of its own, which it answers while it computes.

Called by :mod:`duckllm.cluster.base`. The question is the first frame of every connection, AUTH_OPEN; any
byte in return is a sign of life. A stopped process is told by that too: its kernel accepts the connection,
but nobody answers.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Mapping

from duckllm import _native
from duckllm._native import FrameType
from duckllm.cluster.connect import PeerEnd


def find_silent(ends: Mapping[int, PeerEnd], has_token: bool, timeout_s: float) -> list[int]:
    """The workers that give no sign of life.

    Args:
        ends: Where each worker is, by its index.
        has_token: Whether the host has a cluster token, as the question says.
        timeout_s: How long all of them have, seconds.
    """
    payload = _native.encode_auth_payload(has_token, secrets.token_bytes(_native.NONCE_BYTES))
    question = _native.encode_frame_header(FrameType.AUTH_OPEN, len(payload)) + payload
    deadline = time.monotonic() + timeout_s
    silent = set(ends)
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for worker, (family, end) in ends.items():
            connection = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError, OSError):
                connection.connect(end)
            selector.register(connection, selectors.EVENT_WRITE, worker)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, event in selector.select(left):
                connection = key.fileobj  # type: ignore[assignment]
                try:
                    if event & selectors.EVENT_WRITE:
                        connection.send(question)
                        selector.modify(connection, selectors.EVENT_READ, key.data)
                        continue
                    if connection.recv(1):
                        silent.discard(key.data)
                except OSError:
                    pass  # refused or reset: nobody is there
                selector.unregister(connection)
    return sorted(silent)
