"""A node's cache of shards: files named by their SHA-256, bounded, the longest unused removed first.

Called by :mod:`duckllm.worker.weights`; knows no models and no network. Any number of workers of one machine
may share a folder. A file appears whole or not at all; whoever opens one checks its hash before it is used.
What a worker needs it writes into a file of its own that it keeps locked, so that no other removes it; a
worker that is killed holds no lock any more.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from duckllm.errors import ConfigError, DiskSpaceError, InWords
from duckllm.weights.files import FolderLock, free_bytes
from duckllm.weights.json_values import is_sha256

_SHARD_SUFFIX = ".shard"
_PARTIAL_SUFFIX = ".partial"
_NEEDED_PREFIX = ".needed-"

FileIdentity = tuple[int, int, int, int]


def file_identity(status: os.stat_result) -> FileIdentity:
    """What tells whether a file is still the same one."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class NodeCache:
    """A folder of shards, made if it is missing; what killed workers left behind is removed.

    Args:
        folder: The folder.
        limit_bytes: Most bytes of all shards in it; None for what the file system has room for.

    Raises:
        ConfigError: The folder cannot be made or used.
    """

    def __init__(self, folder: Path, limit_bytes: int | None) -> None:
        self.folder, self._limit_bytes = folder, limit_bytes
        self._needed_file: int | None = None
        with self._errors():
            folder.mkdir(parents=True, exist_ok=True)
            with FolderLock(folder):
                self._others_needs()
                for path in folder.glob(f".*{_PARTIAL_SUFFIX}"):
                    _remove_unless_locked(path)

    def open_shard(self, sha256: str, num_bytes: int) -> int | None:
        """A descriptor of a shard that lies here and is of that length, noted as used; None without one."""
        path = self._path(sha256)
        with self._errors():
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            status = os.fstat(descriptor)
            if status.st_size != num_bytes:
                os.close(descriptor)
                return None
            with contextlib.suppress(OSError):  # another user's file: whoever owns it notes its use
                os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))
            return descriptor

    def identity(self, sha256: str) -> FileIdentity | None:
        """What tells whether a shard's file is still the same; None where it is gone."""
        try:
            return file_identity(self._path(sha256).stat())
        except OSError:
            return None

    def remove(self, sha256: str) -> None:
        """Removes a shard whose content is not what its name says."""
        with self._errors():
            self._path(sha256).unlink(missing_ok=True)

    def reserve(self, needed: Mapping[str, int]) -> None:
        """Keeps what this worker needs from being removed, and makes room for what of it is not here.

        Replaces what was needed before.

        Args:
            needed: Bytes of each shard, by SHA-256.

        Raises:
            DiskSpaceError: It does not fit; nothing was removed then.
        """
        with self._errors(), FolderLock(self.folder):
            self._write_needed(needed)
            # Others' shards count, those too that they are only about to write.
            wanted = self._others_needs() | dict(needed)
            present = {path.stem: path.stat() for path in self.folder.glob(f"*{_SHARD_SUFFIX}")}
            for name in [name for name in needed if name in present]:
                if present[name].st_size != needed[name]:  # cut short: it would not count as here
                    self._path(name).unlink()
                    del present[name]
            missing = sum(size for name, size in wanted.items() if name not in present)
            used = sum(status.st_size for status in present.values())
            spare = sorted(
                (status.st_atime_ns, name, status.st_size)
                for name, status in present.items()
                if name not in wanted
            )
            have = free_bytes(self.folder)
            excess = missing - have
            if self._limit_bytes is not None:
                excess = max(excess, used + missing - self._limit_bytes)
            if excess > sum(size for _, _, size in spare):
                others = sum(size for name, size in wanted.items() if name not in needed)
                self._refuse(needed, have + used, others)
            for _, name, size in spare:
                if excess <= 0:
                    break
                self._path(name).unlink()
                excess -= size

    def writer(self, sha256: str, num_bytes: int) -> ShardWriter:
        """Writes a shard; a context manager."""
        return ShardWriter(self, sha256, num_bytes)

    def close(self) -> None:
        """Needs nothing any more."""
        if self._needed_file is not None:
            os.close(self._needed_file)
            self._needed_file = None

    def _refuse(self, needed: Mapping[str, int], have: int, others: int) -> None:
        limit = "what the disk has room for"
        if self._limit_bytes is not None and self._limit_bytes < have:
            have, limit = self._limit_bytes, "--cache-bytes"
        taken = f", {others:,} of it for other workers" if others else ""
        self._write_needed({})
        raise DiskSpaceError(
            f"cache_dir {self.folder}: got {have:,} bytes ({limit}{taken}), "
            f"expected {sum(needed.values()):,} for this worker's slice"
        )

    def _path(self, sha256: str) -> Path:
        return self.folder / f"{sha256}{_SHARD_SUFFIX}"

    def _write_needed(self, needed: Mapping[str, int]) -> None:
        if self._needed_file is None:
            path = self.folder / f"{_NEEDED_PREFIX}{secrets.token_hex(8)}"
            self._needed_file = _create_locked(path)
        os.ftruncate(self._needed_file, 0)
        _write_at(self._needed_file, json.dumps(dict(needed)).encode(), 0)

    def _others_needs(self) -> dict[str, int]:
        """What live workers need; the lists of others are removed. Under the folder's lock."""
        found: dict[str, int] = {}
        own = None if self._needed_file is None else os.fstat(self._needed_file)
        for path in self.folder.glob(f"{_NEEDED_PREFIX}*"):
            if own is not None and os.path.samestat(path.stat(), own):
                continue
            if _remove_unless_locked(path):
                continue
            with contextlib.suppress(OSError, ValueError, AttributeError):  # no list of ours
                entries = json.loads(path.read_bytes()).items()
                found |= {name: size for name, size in entries if is_sha256(name) and type(size) is int}
        return found

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns what the file system says of the folder into an error of ours."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskSpaceError(f"cache_dir {self.folder}: no space left on the device") from error
            expected = f"a folder that can be read and written ({error.strerror or error})"
            raise ConfigError("cache_dir", InWords(self.folder), expected) from error


class ShardWriter:
    """A shard on its way into the cache; leaving the ``with`` block without :meth:`commit` removes it."""

    def __init__(self, cache: NodeCache, sha256: str, num_bytes: int) -> None:
        self._cache, self._sha256 = cache, sha256
        self._num_bytes, self._written = num_bytes, 0
        self._partial = cache.folder / f".{sha256}.{secrets.token_hex(4)}{_PARTIAL_SUFFIX}"

    def __enter__(self) -> ShardWriter:
        with self._cache._errors(), FolderLock(self._cache.folder):  # else a cleaner may lock it first
            self._file = _create_locked(self._partial)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes.

        Raises:
            DiskSpaceError: The disk is full.
            ConfigError: They cannot be written for another reason.
        """
        with self._cache._errors():
            self._written = _write_at(self._file, data, self._written)

    def commit(self) -> int:
        """Gives the file its name; its descriptor, which is the caller's then.

        Nothing waits for the disk: a file that a failing machine lost in part is found by its hash.
        """
        assert self._written == self._num_bytes
        with self._cache._errors():
            self._partial.replace(self._cache._path(self._sha256))
            return os.dup(self._file)


def _create_locked(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _write_at(descriptor: int, data: bytes | memoryview, offset: int) -> int:
    """Writes all of it; the offset behind it."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written
    return offset


def _remove_unless_locked(path: Path) -> bool:
    """Removes a file that no living worker holds; whether it did."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True  # gone by itself
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
