"""Hosts and workers that die while weights are sent, and either end sending the other what it should not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from duckllm import _native
from duckllm._native import ErrorCode, FrameType
from duckllm.cluster.connect import Connection
from duckllm.errors import DiskSpaceError, ProtocolError, WorkerUnavailableError
from duckllm.weights.manifest import Manifest
from worker_harness import (
    WorkerProcess,
    check_serves,
    connect,
    fake_worker,
    frame,
    make_model,
    plan_for,
    raw_socket,
    read_error,
    read_frame,
    relay_to,
    running_worker,
)

OPENING = frame(FrameType.AUTH_OPEN, _native.encode_auth_payload(False, bytes(32)))
CHALLENGE = frame(FrameType.AUTH_CHALLENGE, _native.encode_auth_payload(False, bytes(32)))
FACTS = {"isa": "avx2", "build": "0", "threads": 1, "pid": 7, "memory_bytes": 1}
READY = {"verified_stripes": 0, "fetched_bytes": 0, "weight_format": "fp9"}
PIECE_BYTES = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Shards of more than one frame, 3 in all."""
    return make_model(tmp_path_factory.mktemp("model"), num_experts=240, intermediate_size=40, layers=[2])


def whole_shards(cache: Path) -> int:
    return len(list(cache.glob("*.shard")))


@pytest.mark.parametrize("who", ["host", "worker"])
@pytest.mark.parametrize("point", [0.01, 0.4, 0.99])
def test_what_came_before_a_kill_is_kept(tmp_path: Path, model: Manifest, who: str, point: float) -> None:
    shard_bytes = model.num_experts * model.unit_bytes
    assert shard_bytes > PIECE_BYTES
    cache = tmp_path / "cache"
    flags = ("--cache-dir", str(cache))
    (plan,) = plan_for(model)
    with running_worker(tmp_path, *flags) as worker:
        with relay_to(worker.address) as relay:
            relay.cut_after = round(point * 3 * shard_bytes)
            if who == "worker":
                relay.on_cut = lambda: os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(WorkerUnavailableError):
                connect(relay.address, plan, share_folder=False)
        if who == "host":
            wait_for_log(worker)
            check_rest_comes(worker, model, cache)
        else:
            worker.process.wait(20)
    if who == "worker":
        with running_worker(tmp_path, *flags) as another:
            check_rest_comes(another, model, cache)


def check_rest_comes(worker: WorkerProcess, model: Manifest, cache: Path) -> None:
    """Shards that were whole are not sent again, and nothing else is left."""
    before = whole_shards(cache)
    (plan,) = plan_for(model)
    connection = connect(worker.address, plan, share_folder=False)
    connection.close()
    assert connection.fetched_bytes == (3 - before) * model.num_experts * model.unit_bytes
    assert whole_shards(cache) == 3
    assert not list(cache.glob(".*.partial"))


def wait_for_log(worker: WorkerProcess) -> None:
    """Waits until the worker has noticed that its host is gone."""
    deadline = time.monotonic() + 20
    while not worker.log():
        assert time.monotonic() < deadline
        time.sleep(0.02)


FETCH_FAULTS: list[tuple[object, str]] = [
    ([], "FETCH from .*: got a JSON list, expected an object"),
    ({}, "got {}, expected an object with shards"),
    ({"shards": []}, "expected an object with shards, a list of at least one layer"),
    ({"shards": [[2, [0]]], "more": 1}, "expected an object with shards"),
    ({"shards": [[2]]}, r"got \[2\], expected a layer and a list of its stripes"),
    ({"shards": [[2, []]]}, "expected a layer and a list of its stripes"),
    ({"shards": [[1, [0]]]}, "got 1, expected a layer of the plan"),
    ({"shards": [[True, [0]]]}, "got True, expected a layer of the plan"),
    ({"shards": [[2, [2]]]}, "got 2, expected a stripe of the plan, 0 to 1"),
    ({"shards": [[2, [-1]]]}, "got -1, expected a stripe of the plan, 0 to 1"),
    ({"shards": [[2, [1 << 80]]]}, "got 1208925819614629174706176, expected a stripe of the plan"),
    ({"shards": [[2, ["0"]]]}, "got '0', expected a stripe of the plan"),
    ({"shards": [[2, [0, 1, 0]]]}, r"got \[2, 0\], expected each layer and stripe once a session"),
    ({"shards": [[2, [0]], [2, [0]]]}, "expected each layer and stripe once a session"),
]


def prepare_with(answers: list[bytes], model: Manifest) -> None:
    """What a host says to a worker that answers its plan so."""
    hello = frame(FrameType.HELLO, json.dumps(FACTS).encode())
    plan = plan_for(model, 2)[0]
    with fake_worker(CHALLENGE, hello, *answers) as address:
        connection = Connection(address, None, 5.0)
        try:
            connection.send_plan(plan)
            connection.wait_ready(5.0)
        finally:
            connection.close()


def fetch(value: object) -> bytes:
    return frame(FrameType.FETCH, json.dumps(value).encode())


@pytest.mark.parametrize(("value", "words"), FETCH_FAULTS)
def test_a_worker_gets_what_is_in_its_plan_alone(model: Manifest, value: object, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        prepare_with([fetch(value)], model)


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (frame(FrameType.FETCH, b"{]"), ProtocolError, "FETCH from .*: got no valid JSON"),
        (frame(FrameType.HELLO, b"{}"), ProtocolError, "got HELLO, expected READY or FETCH"),
        (
            _native.encode_frame_header(FrameType.FETCH, 2)[:8] + (5 << 20).to_bytes(4, "little") + bytes(12),
            ProtocolError,
            "FETCH payload bytes: got 5242880, expected 2 to 4194304",
        ),
        (
            fetch({"shards": [[2, [0]]]}) + frame(FrameType.READY, json.dumps(READY).encode()),
            ProtocolError,
            "READY from .*: got it before it took what it asked for",
        ),
        (
            frame(FrameType.READY, json.dumps(READY | {"fetched_bytes": -1}).encode()),
            ProtocolError,
            "fetched_bytes from .*: got -1, expected a whole number from 0",
        ),
        (_native.encode_error_frame(ErrorCode.DISK_SPACE, "full"), DiskSpaceError, "worker .*: full"),
    ],
)
def test_other_answers_to_a_plan(model: Manifest, answer: bytes, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        prepare_with([answer], model)


def piece(stripe: int, offset: int, data: bytes, layer: int = 2) -> bytes:
    return frame(FrameType.SHARD, _native.encode_shard_header(layer, stripe, offset) + data)


def asks(worker: WorkerProcess, model: Manifest) -> socket.socket:
    """A raw host's connection on which the worker has just asked for its shards."""
    raw = raw_socket(worker.address)
    plan = {**plan_for(model)[0].to_json(), "folder": ""}
    for sent in (OPENING, frame(FrameType.HELLO, b"{}"), frame(FrameType.PREPARE, json.dumps(plan).encode())):
        raw.sendall(sent)
        got = read_frame(raw)
    assert got is not None
    assert got[0] == FrameType.FETCH
    assert json.loads(got[1]) == {"shards": [[2, [0, 1, 2]]]}
    return raw


SHARD_FAULTS: list[tuple[str, Callable[[int], bytes], int, str]] = [
    ("layer", lambda n: piece(0, 0, bytes(PIECE_BYTES), layer=3), 1, "stripe and offset (3, 0, 0), expected"),
    ("stripe", lambda n: piece(1, 0, bytes(PIECE_BYTES)), 1, "(2, 1, 0), expected (2, 0, 0)"),
    ("offset", lambda n: piece(0, 1 << 63, bytes(PIECE_BYTES)), 1, "expected (2, 0, 0)"),
    ("short", lambda n: piece(0, 0, bytes(5)), 1, "stripe 0: got a piece of 5 bytes, expected 1048576"),
    (
        "long",
        lambda n: piece(0, 0, bytes(PIECE_BYTES)) + piece(0, PIECE_BYTES, bytes(n - PIECE_BYTES + 1)),
        1,
        "bytes, expected ",
    ),
    (
        "content",
        lambda n: piece(0, 0, bytes(PIECE_BYTES)) + piece(0, PIECE_BYTES, bytes(n - PIECE_BYTES)),
        9,
        "the host sent layer 2, stripe 0 with SHA-256 ",
    ),
    ("too large", lambda n: _native.encode_frame_header(FrameType.CLOSE, 0)[:6] + b"\x0c\0" + b"\xff" * 4
     + bytes(12), 1, "SHARD payload bytes: got 4294967295, expected 17 to 1048592"),
    ("another frame", lambda n: frame(FrameType.CLOSE), 1, "got CLOSE, expected SHARD"),
]  # fmt: skip


def test_a_host_that_sends_something_else(tmp_path: Path, model: Manifest) -> None:
    cache = tmp_path / "cache"
    with running_worker(tmp_path, "--cache-dir", str(cache)) as worker:
        for name, data, code, words in SHARD_FAULTS:
            with asks(worker, model) as raw:
                sending = threading.Thread(target=send_quietly, args=(raw, data(240 * model.unit_bytes)))
                sending.start()
                error = read_error(raw)
                sending.join(20)
            assert error is not None, name
            assert error[0] == code, name
            assert words in error[1], name
        for cut in (3, 24, 30, 24 + 16 + 1000):  # a host that leaves in the middle of a frame
            with asks(worker, model) as raw:
                raw.sendall(piece(0, 0, bytes(PIECE_BYTES))[:cut])
        assert whole_shards(cache) == 0
        check_serves(worker, model)
        assert not list(cache.glob(".*.partial"))


def send_quietly(raw: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # refused before all of it was taken
        raw.sendall(data)
