"""Files that appear whole or not at all, hashes of files, and a lock on a folder.

Called by whatever writes files; knows nothing of weights.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from duckllm.errors import ModelNotFoundError
from duckllm.paths import replaced_file

LOCK_FILE = ".duck-lock"
PARTIAL_SUFFIX = ".partial"
_PARTIAL = re.compile(rf"\.[0-9a-f]{{12}}{re.escape(PARTIAL_SUFFIX)}")
_CHUNK_BYTES = 4 << 20


@contextmanager
def model_errors(path: Path) -> Iterator[None]:
    """Turns what the file system says of a model's folder or files into an error of ours.

    Raises:
        ModelNotFoundError: Names the path that cannot be read, and why.
    """
    try:
        yield
    except OSError as error:
        raise ModelNotFoundError(f"{path}: cannot be read ({error.strerror})") from error


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while got := file.readinto(buffer):
            digest.update(memoryview(buffer)[:got])
    return digest.hexdigest()


def free_bytes(folder: Path) -> int:
    """Bytes that this user can still write to the file system of a folder, existing or to be made."""
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


class AtomicFile:
    """A file written beside its final place under a short name, and renamed once it is on the disk.

    Leaving the ``with`` block without :meth:`commit` removes it. Only a regular file is replaced, through
    links to it, and what replaces it keeps its mode and, where this user may give it away, its owner.

    Args:
        path: The file, or a link to it, there or not.
        private: Whether a new file is its owner's alone.

    Raises:
        OSError: On entering, where something else than a regular file lies there, or none can be made.
    """

    def __init__(self, path: Path, *, private: bool = False) -> None:
        self.path, self._private = path, private
        self._digest = hashlib.sha256()

    def __enter__(self) -> AtomicFile:
        self._target, status = replaced_file(self.path)
        # Not after the file's own name, which may be as long as a name can be.
        self.partial = self._target.with_name(f".{secrets.token_hex(6)}{PARTIAL_SUFFIX}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(self.partial, flags, 0o600 if self._private or status is not None else 0o666)
        if status is not None:
            with contextlib.suppress(OSError):  # another user's file becomes ours
                os.fchown(descriptor, status.st_uid, status.st_gid)
            with contextlib.suppress(OSError):  # a file system without modes
                os.fchmod(descriptor, status.st_mode & 0o777)
        self._file = os.fdopen(descriptor, "wb", buffering=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self.partial.unlink(missing_ok=True)

    def write(self, data: bytes | memoryview, *, hashed: bool = True) -> None:
        """Appends bytes; ``hashed=False`` leaves them out of :meth:`sha256`, for files hashed otherwise."""
        if hashed:
            self._digest.update(data)
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[self._file.write(rest) :]

    def sha256(self) -> str:
        """SHA-256 of what was written, in hex."""
        return self._digest.hexdigest()

    def sync(self) -> None:
        """Waits until the bytes are on the disk."""
        os.fsync(self._file.fileno())

    def commit(self) -> None:
        """Gives the file its final name, durably."""
        self.sync()
        self.partial.replace(self._target)
        folder = os.open(self._target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def is_partial(name: str) -> bool:
    """Whether a file is what a killed process has left of an :class:`AtomicFile`, by its name."""
    return _PARTIAL.fullmatch(name) is not None


def write_atomically(path: Path, data: bytes, *, private: bool = False) -> None:
    """Replaces a file's content in one step; arguments and errors as of :class:`AtomicFile`."""
    with AtomicFile(path, private=private) as file:
        file.write(data)
        file.commit()


class FolderLock:
    """An exclusive lock on a folder, held by one process at a time, gone when its process is.

    Args:
        folder: An existing folder.
        on_wait: Called once if another process holds the lock.
    """

    def __init__(self, folder: Path, on_wait: Callable[[], object] = lambda: None) -> None:
        self._path = folder / LOCK_FILE
        self._on_wait = on_wait

    def __enter__(self) -> FolderLock:
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                self._acquire(descriptor)
                if self._still_there(descriptor):
                    self._descriptor = descriptor
                    return self
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Where somebody removed our file, what lies there is another holder's, whose lock it would break.
        if self._still_there(self._descriptor):
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _acquire(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)

    def _still_there(self, descriptor: int) -> bool:
        """Whether the locked file is the one in the folder: its last holder removes it."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False
