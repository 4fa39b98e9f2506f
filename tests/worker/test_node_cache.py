"""The node cache: what is kept, what goes, and what is left of the dead."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from duckllm import _native
from duckllm._native import FrameType
from duckllm.errors import ConfigError, DiskSpaceError
from duckllm.worker import fetch, node_cache
from duckllm.worker.config import WorkerConfig
from duckllm.worker.node_cache import NodeCache
from duckllm.worker.session import Sessions
from worker_harness import frame, make_model, plan_for, read_frame, worker_channel

SIZE = 1000
DATA = {hashlib.sha256(bytes([n]) * SIZE).hexdigest(): bytes([n]) * SIZE for n in range(6)}
NAMES = list(DATA)


def need(*numbers: int) -> dict[str, int]:
    return {NAMES[number]: SIZE for number in numbers}


def put(cache: NodeCache, number: int) -> None:
    with cache.writer(NAMES[number], SIZE) as writer:
        writer.write(DATA[NAMES[number]][:300])
        writer.write(memoryview(DATA[NAMES[number]])[300:])
        os.close(writer.commit())


def is_there(cache: NodeCache, number: int) -> bool:
    descriptor = cache.open_shard(NAMES[number], SIZE)
    if descriptor is None:
        return False
    try:
        return os.pread(descriptor, SIZE + 1, 0) == DATA[NAMES[number]]
    finally:
        os.close(descriptor)


def there(folder: Path) -> set[int]:
    return {NAMES.index(path.stem) for path in folder.glob("*.shard")}


def test_the_longest_unused_goes_first_and_what_is_needed_never(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, 4 * SIZE)
    cache.reserve(need(0, 1, 2, 3))
    for number in range(4):
        put(cache, number)
        os.utime(tmp_path / f"{NAMES[number]}.shard", (1000 + number, 7))
    descriptor = cache.open_shard(NAMES[0], SIZE)  # used now, and not read, which the kernel might note
    assert descriptor is not None
    os.close(descriptor)
    assert (tmp_path / f"{NAMES[0]}.shard").stat().st_mtime == 7  # the file is the same one
    cache.reserve(need(1, 4))  # 1 is the oldest
    assert there(tmp_path) == {0, 1, 3}
    put(cache, 4)
    cache.reserve(need(4, 5, 2))
    assert there(tmp_path) == {0, 4}
    assert not is_there(cache, 3)


def test_what_does_not_fit_is_refused_and_removes_nothing(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, 3 * SIZE)
    cache.reserve(need(0, 1))
    put(cache, 0)
    with pytest.raises(DiskSpaceError) as caught:
        cache.reserve(need(1, 2, 3, 4))
    assert str(caught.value) == (
        f"cache_dir {tmp_path}: got 3,000 bytes (--cache-bytes), expected 4,000 for this worker's slice"
    )
    assert there(tmp_path) == {0}


def test_two_workers_share_a_folder(tmp_path: Path) -> None:
    first, second = NodeCache(tmp_path, 5 * SIZE), NodeCache(tmp_path, 5 * SIZE)
    first.reserve(need(0, 1, 2))
    put(first, 0)
    # Room for what the other is about to write is taken.
    with pytest.raises(DiskSpaceError, match=r"5,000 bytes \(--cache-bytes, 3,000 of it for other workers\)"):
        second.reserve(need(3, 4, 5))
    second.reserve(need(2, 3, 4))
    for number in (2, 3, 4):
        put(second, number)
    assert is_there(first, 2)
    with pytest.raises(DiskSpaceError):
        first.reserve(need(5, 0, 1))
    first.reserve(need(0, 2))
    second.close()  # needs nothing any more
    first.reserve(need(0, 1, 5))
    assert 0 in there(tmp_path)
    assert len(there(tmp_path)) == 3  # and 1 and 5 are to come


def test_what_the_dead_left_is_removed_and_what_the_living_write_is_not(tmp_path: Path) -> None:
    living = NodeCache(tmp_path, None)
    living.reserve(need(0))
    (tmp_path / f".{NAMES[1]}.00.partial").write_bytes(b"half")
    (tmp_path / ".needed-dead").write_text("{")
    with living.writer(NAMES[0], SIZE) as writer:
        writer.write(bytes(SIZE))
        NodeCache(tmp_path, None)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert len(names) == 2
        assert names[0].startswith(f".{NAMES[0]}.")
        assert names[1].startswith(".needed-")
    assert len(list(tmp_path.iterdir())) == 1  # an unfinished one is gone with its writer


def test_a_shard_of_another_length_is_none(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, None)
    put(cache, 0)
    os.truncate(tmp_path / f"{NAMES[0]}.shard", SIZE - 1)
    assert cache.open_shard(NAMES[0], SIZE) is None
    cache.reserve(need(0))
    assert there(tmp_path) == set()
    assert cache.identity(NAMES[0]) is None


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = NodeCache(tmp_path, None)
    put(cache, 0)
    monkeypatch.setattr(node_cache, "free_bytes", lambda folder: 1999)
    with pytest.raises(DiskSpaceError, match=r"got 2,999 bytes \(what the disk has room for\), expected 4,0"):
        cache.reserve(need(1, 2, 3, 4))
    assert there(tmp_path) == {0}
    cache.reserve(need(1, 2))
    assert there(tmp_path) == set()

    def no_space(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    # Others may have taken it since.
    monkeypatch.setattr(os, "pwrite", no_space)
    no_room = pytest.raises(DiskSpaceError, match="no space left on the device")
    with cache.writer(NAMES[1], SIZE) as writer, no_room:
        writer.write(bytes(SIZE))
    assert not list(tmp_path.glob(".*.partial"))


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cache_dir: got .*/file, expected a folder that can be .*exists"):
        NodeCache(tmp_path / "file", None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cache": 1}, "cache: got 1, expected True or False"),
        ({"cache_dir": "x"}, "cache_dir: got 'x', expected a path"),
        ({"cache_bytes": 0}, "cache_bytes: got 0, expected a whole number from 1"),
        ({"cache": False, "cache_bytes": 1}, "cache_bytes: got 1, expected nothing without a cache"),
    ],
)
def test_options_are_checked(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        WorkerConfig(**fields)  # type: ignore[arg-type]


def test_a_host_that_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "FETCH_TIMEOUT_S", 0.05)
    ours, theirs = socket.socketpair()
    shard = fetch.Shard(3, 5, NAMES[0])
    taken: list[bytes] = []
    with ours, theirs:
        channel = worker_channel(theirs)
        fetch.request_shards(channel, [shard, replace(shard, stripe=6), replace(shard, layer=4)])
        got = read_frame(ours)
        assert got is not None
        assert json.loads(got[1]) == {"shards": [[3, [5, 6]], [4, [5]]]}
        piece = frame(FrameType.SHARD, _native.encode_shard_header(3, 5, 0) + DATA[NAMES[0]])
        ours.sendall(piece + piece[:-1])
        fetch.receive_shard(channel, shard, SIZE, fetch.new_buffer(), lambda data: taken.append(bytes(data)))
        assert taken == [DATA[NAMES[0]]]
        with pytest.raises(TimeoutError, match=r"no whole piece of layer 3, stripe 5 within 0\.05 s"):
            fetch.receive_shard(channel, shard, SIZE, fetch.new_buffer(), taken.append)
    assert len(taken) == 1


@pytest.mark.parametrize("cached", [True, False])
def test_a_plan_that_was_fetched_is_not_prepared_again(tmp_path: Path, cached: bool) -> None:
    manifest = make_model(tmp_path / "model", layers=[1])
    plan = replace(plan_for(manifest)[0], folder="")
    units = np.fromfile(manifest.folder / manifest.expert_layers[1].file, np.uint8)[4096:]
    units = units.reshape(manifest.num_experts, plan.total_stripes, plan.unit_bytes)
    shards = [
        frame(FrameType.SHARD, _native.encode_shard_header(1, stripe, 0) + units[:, stripe].tobytes())
        for stripe in range(plan.num_stripes)
    ]
    folder = tmp_path / "cache" if cached else None
    sessions = Sessions(WorkerConfig(threads=1, cache=cached, cache_dir=folder), print)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        ours.sendall(b"".join(shards))
        experts, verified, fetched = sessions._prepare(plan, worker_channel(theirs))
        assert (verified, fetched) == (0, units.nbytes)
        assert sessions._prepare(plan, worker_channel(theirs)) == (experts, 0, 0)
