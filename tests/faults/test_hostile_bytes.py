"""Whatever arrives at a worker's port, in whatever phase: that connection ends, and nothing else changes.

After every attack the same process must serve a correct step, with as many descriptors and threads as before
and no more memory than allocators' noise.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duckllm import _native
from duckllm._native import ErrorCode, FrameType
from duckllm.weights.manifest import Manifest
from worker_harness import (
    WorkerProcess,
    check_serves,
    connect,
    frame,
    make_step,
    plan_for,
    raw_socket,
    read_error,
    read_exactly,
    read_frame,
    running_worker,
    step_frame,
)

RSS_GROWTH_BYTES = 5e6
OPENING = frame(FrameType.AUTH_OPEN, _native.encode_auth_payload(False, bytes(32)))
HELLO = frame(FrameType.HELLO, b"{}")


@pytest.fixture(scope="module")
def hurried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker with short time-outs."""
    flags = ("--handshake-timeout-s", "0.4", "--frame-timeout-s", "0.4", "--send-timeout-s", "0.4")
    folder: Path = tmp_path_factory.mktemp("hurried")
    with running_worker(folder, *flags) as process:
        yield process


@contextmanager
def unharmed(worker: WorkerProcess, model: Manifest) -> Iterator[None]:
    """The worker is as it was, in the end, and serves."""
    check_serves(worker, model)
    counts, rss = settled_counts(worker), worker.rss_bytes()
    yield
    assert worker.process.poll() is None
    check_serves(worker, model, seed=1)
    assert settled_counts(worker, counts) == counts
    assert worker.rss_bytes() - rss < RSS_GROWTH_BYTES


def settled_counts(worker: WorkerProcess, expected: tuple[int, int] | None = None) -> tuple[int, int]:
    """Descriptors and threads once they stop changing (a connection's thread ends just after its socket)."""
    deadline = time.monotonic() + 10
    last = worker.counts()
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = worker.counts()
        if now == last and expected in (None, now):
            break
        last = now
    return last


def in_opening(worker: WorkerProcess, _: Manifest) -> socket.socket:
    return raw_socket(worker.address)


def in_hello(worker: WorkerProcess, _: Manifest) -> socket.socket:
    raw = raw_socket(worker.address)
    raw.sendall(OPENING)
    assert read_frame(raw) is not None
    return raw


def in_prepare(worker: WorkerProcess, model: Manifest) -> socket.socket:
    raw = in_hello(worker, model)
    raw.sendall(HELLO)
    assert read_frame(raw) is not None
    return raw


def in_steps(worker: WorkerProcess, model: Manifest) -> socket.socket:
    connection = connect(worker.address, plan_for(model)[0])
    raw = socket.socket(fileno=connection.detach_socket())
    raw.settimeout(20)
    return raw


PHASES = [in_opening, in_hello, in_prepare, in_steps]
Phase = Callable[[WorkerProcess, Manifest], socket.socket]


def good_frame(phase: Phase, model: Manifest) -> bytes:
    """What a host would send next."""
    if phase is in_opening:
        return OPENING
    if phase is in_hello:
        return HELLO
    if phase is in_prepare:
        return frame(FrameType.PREPARE, json.dumps(plan_for(model)[0].to_json()).encode())
    return step_frame(make_step(model, 1))


def header(
    kind: int,
    payload_bytes: int,
    *,
    version: int = _native.PROTOCOL_VERSION,
    magic: bytes = b"DUCK",
    reserved: int = 0,
) -> bytes:
    numbers = ((version, 2), (kind, 2), (payload_bytes, 4), (reserved, 4), (0, 8))
    return magic + b"".join(value.to_bytes(size, "little") for value, size in numbers)


@pytest.mark.parametrize("phase", PHASES)
def test_wrong_headers_are_refused_with_a_reason(
    worker: WorkerProcess, model: Manifest, phase: Phase
) -> None:
    expected_kind = int.from_bytes(good_frame(phase, model)[6:8], "little")
    attacks = {
        header(expected_kind, 36, magic=b"KCUD"): (ErrorCode.PROTOCOL, "magic: got"),
        b"GET / HTTP/1.1\r\nHost: duck\r\n\r\n": (ErrorCode.PROTOCOL, "magic: got"),
        header(expected_kind, 36, version=1): (ErrorCode.VERSION, "protocol version"),
        header(expected_kind, 36, reserved=1): (ErrorCode.PROTOCOL, "reserved bytes: got 1"),
        header(99, 0): (ErrorCode.PROTOCOL, "frame type: got 99"),
        header(expected_kind, 0xFFFFFFFF): (ErrorCode.PROTOCOL, "payload bytes: got 4294967295"),
        header(9, 40) + bytes(40): (ErrorCode.PROTOCOL, "got STEP_REPLY, expected"),
        header(7, 4) + bytes(4): (ErrorCode.PROTOCOL, "got ERROR, expected"),
    }
    with unharmed(worker, model):
        for data, (code, sentence) in attacks.items():
            with phase(worker, model) as raw:
                raw.sendall(data)
                error = read_error(raw)
            assert error is not None, data
            assert error[0] == code.value
            assert sentence in error[1]


@pytest.mark.parametrize("phase", PHASES)
def test_a_header_of_10_mb_sets_no_memory_aside(worker: WorkerProcess, model: Manifest, phase: Phase) -> None:
    with unharmed(worker, model):
        for kind in range(1, 13):
            with phase(worker, model) as raw:
                raw.sendall(header(kind, 10_000_000))
                error = read_error(raw) if (phase, kind) != (in_steps, 8) else None
                if (phase, kind) == (in_steps, 8):
                    # As a type it may be that large; as a step of this plan it may not.
                    raw.sendall(_native.encode_step_request_header(1, 1, 3))
                    error = read_error(raw)
            assert error is not None
            assert error[0] == ErrorCode.PROTOCOL.value


@pytest.mark.parametrize("phase", PHASES)
def test_10_mb_of_anything(worker: WorkerProcess, model: Manifest, phase: Phase) -> None:
    generator = np.random.default_rng(11)
    with unharmed(worker, model):
        for data in (generator.bytes(10_000_000), bytes(10_000_000), b"DUCK" * 2_500_000):
            with phase(worker, model) as raw:
                try:
                    raw.sendall(data)
                except OSError:
                    continue  # the worker closed before it had taken all of it
                read_exactly(raw, 10_000)


@pytest.mark.parametrize("phase", PHASES)
def test_a_frame_cut_at_every_byte(worker: WorkerProcess, model: Manifest, phase: Phase) -> None:
    whole = good_frame(phase, model)
    head = 24 + 16
    cuts = [
        *range(min(head, len(whole))),
        *range(head, len(whole), max(1, (len(whole) - head) // 40)),
        len(whole) - 1,
    ]
    if phase is in_steps:
        cuts = cuts[::3]  # each needs a session of its own
    with unharmed(worker, model):
        for cut in cuts:
            with phase(worker, model) as raw:
                raw.sendall(whole[:cut])
                raw.shutdown(socket.SHUT_WR)
                assert read_exactly(raw, 1) == b""


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("cut", [1, 23, 24, 30])
def test_half_a_frame_and_then_silence(
    hurried: WorkerProcess, model: Manifest, phase: Phase, cut: int
) -> None:
    whole = good_frame(phase, model)
    with unharmed(hurried, model), phase(hurried, model) as raw:
        raw.sendall(whole[: min(cut, len(whole) - 1)])
        error = read_error(raw)
        assert error is not None
        assert error[0] == ErrorCode.TIMEOUT.value
        expected = (
            "half a frame: got" if phase is in_steps else "handshake: got no complete plan within 0.4 s"
        )
        assert expected in error[1]


@pytest.mark.parametrize("phase", [in_opening, in_hello, in_prepare])
def test_silence_in_the_handshake(hurried: WorkerProcess, model: Manifest, phase: Phase) -> None:
    with unharmed(hurried, model), phase(hurried, model) as raw:
        error = read_error(raw)
        assert error == (ErrorCode.TIMEOUT.value, "handshake: got no complete plan within 0.4 s")


def test_bytes_that_trickle_do_not_extend_the_handshake(hurried: WorkerProcess, model: Manifest) -> None:
    with unharmed(hurried, model), raw_socket(hurried.address) as raw:
        for byte in OPENING:
            try:
                raw.sendall(bytes([byte]))
            except OSError:
                break
            time.sleep(0.05)
        else:
            raise AssertionError("the worker waited for the whole frame")


def test_silence_between_steps_is_no_fault(hurried: WorkerProcess, model: Manifest) -> None:
    step = make_step(model, 1)
    with unharmed(hurried, model), in_steps(hurried, model) as raw:
        for _ in range(2):
            time.sleep(1.0)
            raw.sendall(step_frame(step))
            got = read_frame(raw)
            assert got is not None
            assert got[0] == FrameType.STEP_REPLY


def test_a_host_that_takes_no_replies_is_let_go(hurried: WorkerProcess, model: Manifest) -> None:
    step = make_step(model, 8)
    with unharmed(hurried, model), in_steps(hurried, model) as raw:
        raw.settimeout(0.5)
        data = step_frame(step) * 1000
        ended = False
        for _ in range(200):
            try:
                raw.sendall(data)
            except OSError:
                ended = True
                break
        assert ended
    assert "did not take it within 400 ms" in hurried.log()


STEP_FAULTS = [
    ("layer", lambda s: _head(s, layer=2), "step layer: got 2, expected a layer of the plan"),
    ("no tokens", lambda s: _head(s, tokens=0), "step tokens: got 0, expected 1 to 8"),
    ("too many tokens", lambda s: _head(s, tokens=9), "step tokens: got 9, expected 1 to 8"),
    ("no experts", lambda s: _head(s, top_k=0), "step top_k: got 0, expected 1 to 3"),
    ("too many experts", lambda s: _head(s, top_k=4), "step top_k: got 4, expected 1 to 3"),
    (
        "fewer tokens than bytes",
        lambda s: _head(s, tokens=1),
        "STEP_REQUEST payload bytes: got 640, expected 328",
    ),
    (
        "more tokens than bytes",
        lambda s: _head(s, tokens=3),
        "STEP_REQUEST payload bytes: got 640, expected 952",
    ),
    ("x dtype", lambda s: s[:36] + b"\2" + s[37:], "x dtype: got 2"),
    ("reply dtype", lambda s: s[:37] + b"\2" + s[38:], "reply dtype: got 2"),
    ("reserved", lambda s: s[:39] + b"\1" + s[40:], "reserved bytes: got 256, expected 0"),
    ("expert id", lambda s: s[:44] + (6).to_bytes(4, "little") + s[48:], "6"),
    ("negative id", lambda s: s[:44] + b"\xff\xff\xff\xff" + s[48:], "-1"),
]


def _head(data: bytes, *, layer: int = 1, tokens: int = 2, top_k: int = 3) -> bytes:
    return data[:24] + _native.encode_step_request_header(layer, tokens, top_k) + data[40:]


@pytest.mark.parametrize(
    ("change", "sentence"), [entry[1:] for entry in STEP_FAULTS], ids=[entry[0] for entry in STEP_FAULTS]
)
def test_a_step_that_does_not_fit_the_plan(
    worker: WorkerProcess, model: Manifest, change: Callable[[bytes], bytes], sentence: str
) -> None:
    good = step_frame(make_step(model, 2))
    with unharmed(worker, model), in_steps(worker, model) as raw:
        raw.sendall(good + change(good) + good)
        got = read_frame(raw)  # what came before is answered, what came after is not
        assert got is not None
        assert got[0] == FrameType.STEP_REPLY
        error = read_error(raw)
        assert error is not None
        assert error[0] == ErrorCode.PROTOCOL.value
        assert sentence in error[1]


@pytest.mark.parametrize(
    "payload",
    [
        b"[]",
        b"17",
        b"{",
        b"\xff\xfe",
        b'{"a":' * 900_000,
        b"[" * 4_000_000,
        b'{"hidden_size":' + b"9" * 100_000 + b"}",
        b'{"layers":[{}]}',
    ],
    ids=["list", "number", "cut", "not-utf8", "deep-objects", "deep-lists", "long-number", "fields"],
)
def test_a_plan_that_is_no_plan(worker: WorkerProcess, model: Manifest, payload: bytes) -> None:
    with unharmed(worker, model), in_prepare(worker, model) as raw:
        raw.sendall(frame(FrameType.PREPARE, payload))
        error = read_error(raw)
        assert error is not None
        assert error[0] == ErrorCode.PROTOCOL.value


@pytest.mark.parametrize("phase", PHASES)
def test_random_bytes(worker: WorkerProcess, model: Manifest, phase: Phase) -> None:
    whole = good_frame(phase, model)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        prefix=st.integers(0, min(64, len(whole))),
        noise=st.binary(min_size=1, max_size=200),
        suffix=st.booleans(),
    )
    def attack(prefix: int, noise: bytes, suffix: bool) -> None:
        with phase(worker, model) as raw:
            data = whole[:prefix] + noise + (whole[prefix + len(noise) :] if suffix else b"")
            try:
                raw.sendall(data)
                raw.shutdown(socket.SHUT_WR)
            except OSError:
                return
            read_exactly(raw, 1 << 20)  # ends, however it ends

    with unharmed(worker, model):
        attack()


def test_more_connections_than_there_is_room_for(hurried: WorkerProcess, model: Manifest) -> None:
    with unharmed(hurried, model):
        crowd = [raw_socket(hurried.address) for _ in range(30)]
        errors = [read_error(raw) for raw in crowd]
        for raw in crowd:
            raw.close()
        busy = [error for error in errors if error is not None and error[0] == ErrorCode.BUSY.value]
        late = [error for error in errors if error is not None and error[0] == ErrorCode.TIMEOUT.value]
        assert (len(late), len(busy)) == (8, 22)
        assert busy[0] == (ErrorCode.BUSY.value, "busy: 8 connections are open, expected fewer")


def test_a_crowd_does_not_disturb_a_session(hurried: WorkerProcess, model: Manifest) -> None:
    step = make_step(model, 3)
    with unharmed(hurried, model), in_steps(hurried, model) as raw:
        raw.sendall(step_frame(step))
        first = read_frame(raw)
        for _ in range(50):
            with raw_socket(hurried.address) as other:
                other.sendall(b"x" * 24)
                read_exactly(other, 1000)
        raw.sendall(step_frame(step))
        second = read_frame(raw)
    assert first is not None
    assert second is not None
    assert first[1][40:] == second[1][40:]
