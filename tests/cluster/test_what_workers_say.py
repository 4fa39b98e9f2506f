"""Texts and numbers from a worker may be anything: the user is shown them only once they are safe."""

from __future__ import annotations

import json
import socket
from typing import Any

import numpy as np
import pytest

from duckllm import _native
from duckllm._native import ErrorCode, FrameType
from duckllm.cluster import connect as connect_module
from duckllm.cluster.address import Address
from duckllm.cluster.connect import Connection
from duckllm.errors import ModelNotFoundError, ProtocolError, WorkerLostError, WorkerUnavailableError
from duckllm.transport.transport import Transport
from worker_harness import fake_worker, frame

HELLO = {"isa": "avx2", "build": "0.1.0", "threads": 2, "pid": 7, "memory_bytes": 1 << 33}
CHALLENGE = frame(FrameType.AUTH_CHALLENGE, _native.encode_auth_payload(False, bytes(_native.NONCE_BYTES)))
EVIL = b"no \x1b[2J\r\nduck\x00\x7f \xff \xe2\x80\xae\xf0\x9f\xa6\x86"
SAFE = "no ?[2J??duck?? \N{REPLACEMENT CHARACTER} ?\N{DUCK}"


def error_frame(code: ErrorCode, text: bytes) -> bytes:
    return frame(FrameType.ERROR, code.value.to_bytes(4, "little") + text)


def test_the_facts_of_a_worker() -> None:
    with fake_worker(CHALLENGE, frame(FrameType.HELLO, json.dumps(HELLO).encode())) as address:
        connection = Connection(address, None, 5.0)
        connection.close()
    facts = {name: getattr(connection.info, name) for name in HELLO}
    assert facts == HELLO


def test_a_connection_that_is_reset_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as never_connected:
        monkeypatch.setattr(connect_module, "_open_socket", lambda address, timeout_s: never_connected)
        with pytest.raises(WorkerUnavailableError, match=r"worker a:5 is not available: .*not connected"):
            Connection(Address("a", 5), None, 5.0)


@pytest.mark.parametrize(
    ("fact", "value", "words"),
    [
        ("isa", "avx2\x1b[31m", "got 'avx2\\x1b[31m', expected a printable text of at most 100 characters"),
        ("build", "0.1\n", "got '0.1\\n', expected a printable text"),
        ("isa", "x" * 301, "got '" + "x" * 117 + "..." + "x" * 117 + "', expected a printable text"),
        ("isa", None, "got None, expected a printable text"),
        ("threads", 2.0, "got 2.0, expected a whole number from 0"),
        ("pid", -1, "got -1, expected a whole number from 0"),
        ("pid", True, "got True, expected a whole number from 0"),
        ("memory_bytes", 1 << 63, "got 9223372036854775808, expected a whole number from 0"),
        ("available_bytes", -1, "got -1, expected a whole number from 0"),
        ("read_gb_per_s", -0.5, "got -0.5, expected a number from 0 to 1e+06"),
        ("read_gb_per_s", float("nan"), "got nan, expected a number from 0 to 1e+06"),
        ("read_gb_per_s", 10**400, "got 1000"),
        ("read_gb_per_s", True, "got True, expected a number"),
        ("unix_time_s", "now", "got 'now', expected a number from 0 to 1e+11"),
        ("unix_time_s", float("inf"), "got inf, expected a number from 0 to 1e+11"),
    ],
)
def test_a_fact_that_is_none_is_refused(fact: str, value: Any, words: str) -> None:
    hello = frame(FrameType.HELLO, json.dumps(HELLO | {fact: value}).encode())
    with fake_worker(CHALLENGE, hello) as address, pytest.raises(ProtocolError) as caught:
        Connection(address, None, 5.0)
    assert str(caught.value).startswith(f"{fact} from worker {address}: {words}")


def test_a_refusal_before_the_first_step_is_one_safe_line() -> None:
    answer = error_frame(ErrorCode.MODEL_NOT_FOUND, EVIL)
    with fake_worker(answer) as address, pytest.raises(ModelNotFoundError) as caught:
        Connection(address, None, 5.0)
    assert str(caught.value) == f"worker {address}: {SAFE}"


def test_a_refusal_of_a_step_is_one_safe_line() -> None:
    class Prepared:
        address = "127.0.0.1:1"
        memory = None
        multicast_bytes = 0

        def __init__(self, connection: socket.socket) -> None:
            self.detach_socket = connection.detach

    ours, theirs = socket.socketpair()
    with theirs, Transport([Prepared(ours)], 4, 1, max_step_tokens=1) as transport:  # type: ignore[list-item]
        ones = np.ones((1, 1), np.float32)
        ticket = transport.submit(3, np.ones((1, 4), np.float32), ones.astype(np.int32), ones)
        theirs.sendall(error_frame(ErrorCode.INTERNAL, EVIL.replace(b"\0", b"")))
        with pytest.raises(WorkerLostError) as caught:
            transport.wait(ticket)
    sentence = f"it ended the session: {SAFE.replace('??duck??', '??duck?')}"
    assert str(caught.value) == f"worker 127.0.0.1:1 is lost at layer 3: {sentence}"
