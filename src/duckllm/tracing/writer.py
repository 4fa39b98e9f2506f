"""The trace file of a run: Chrome trace events in JSON, whole at any moment, the newest where it is long.

Called by :mod:`duckllm.llm` and, between two steps, by the engine's statistics. The transport notes moments
natively (csrc/transport/step_trace.h); here they are drained and written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from duckllm import _native
from duckllm.errors import ConfigError
from duckllm.paths import check_replaceable

DEFAULT_TRACE_BYTES = 256 << 20
LEAST_TRACE_BYTES = 1 << 20
MAGIC = b'{"displayTimeUnit":"ms","otherData":{"duckllm":'
EARLIER = ".earlier"
HOST_PID, FIRST_WORKER_PID = 1, 2
ENGINE_TID = 0
MAX_LANES = 2
_END = b"\n]}\n"
_BUFFER_BYTES = 4 << 20
_DRAIN_BYTES = 64 << 10  # what stays in a core's cache, with the text that it becomes
_DRAIN_EVERY_S = 0.25
_log = logging.getLogger("duckllm")


class Times(Protocol):
    """Seconds of a step by part, as :class:`duckllm.models.step_times.StepTimes`."""

    attention_s: float
    dense_s: float
    dispatch_s: float
    wait_s: float
    combine_s: float
    head_s: float
    sampling_s: float
    device_s: float
    draft_s: float


class EngineStep(Protocol):
    """What the engine says of a step, as :class:`duckllm.engine.stats.StepRecord`."""

    @property
    def seconds(self) -> float:
        """From scheduling to the end."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens computed of which the next one was known."""

    @property
    def num_decode_tokens(self) -> int:
        """Tokens computed at the end of a request."""

    @property
    def num_new_tokens(self) -> int:
        """Tokens chosen."""

    @property
    def times(self) -> Times:
        """Seconds by part."""


def check_trace(path: Path) -> None:
    """Finds out before anything is loaded whether a trace can be written there.

    Raises:
        ConfigError: Its folder does not exist, it or its earlier part is no regular file, may not be written,
            is written by another run, or is a file of something else, which is not overwritten.
    """
    with _refusing(path):
        is_file = not path.is_dir() and path.parent.is_dir()
    if not is_file:
        raise ConfigError("trace", str(path), "a file in a folder that exists")
    path = check_replaceable("trace", path)
    for part in (path, earlier_part(path)):
        target = check_replaceable("trace", part)
        existed = target.exists()
        with _refusing(part), part.open("ab+") as file:
            _lock(file.fileno())
            file.seek(0)
            head = file.read(len(MAGIC))
        if not existed:
            target.unlink(missing_ok=True)
        if head not in (b"", MAGIC):
            raise ConfigError("trace", str(part), "a new file, or an earlier trace to be written over")


def earlier_part(path: Path) -> Path:
    """Where the part before the newest of a large trace lies."""
    return path.with_name(path.stem + EARLIER + path.suffix)


def _lock(file: int) -> None:
    """Keeps a file for this run until it is closed; a file system that knows no locks is taken as it is."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(errno.EAGAIN, "another run writes it") from None
    except OSError:
        pass


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError("trace", str(path), f"a file that can be written ({reason})") from error


class TraceWriter:
    """Writes a trace; a failing disk ends the trace and nothing else.

    The file ends like a whole one after each piece, and the next piece begins over that end, so it can be
    read after any exit, and while it is written. When it has half of ``limit_bytes``, it becomes the earlier
    part (``trace.earlier.json``), in place of the one before, and a new one begins.

    Args:
        path: The file, as :func:`check_trace` wants it.
        limit_bytes: Most bytes of both parts.
        facts: Of the run, for whoever reads the trace.
        worker_names: In worker order.

    Raises:
        ConfigError: The file cannot be written.

    Threading: one thread at a time.
    """

    def __init__(
        self,
        path: Path,
        limit_bytes: int,
        facts: Mapping[str, Any],
        worker_names: tuple[str, ...],
    ) -> None:
        self.path, self._limit_bytes = path, limit_bytes
        self._facts, self._worker_names = dict(facts), worker_names
        self.steps = _native.StepTrace(_BUFFER_BYTES)
        self._origin_ns = time.monotonic_ns()
        self._start_unix_s = time.time()
        self._num_dropped = 0
        self._file = -1
        self._end_bytes = 0
        self._drain_at = time.perf_counter() + _DRAIN_EVERY_S
        self.on_end: Callable[[], None] = lambda: None
        # Links to the file stay: it is the file itself that becomes the earlier part.
        self._target = check_replaceable("trace", path)
        self._mode: int | None = None
        try:
            with _refusing(path):
                self._begin()
                earlier_part(self._target).unlink(missing_ok=True)
        except ConfigError:
            self._end()
            raise

    def step(self, step: EngineStep) -> None:
        """Notes a step of the engine that has just ended, and writes what has come together now and then."""
        parts = step.times
        pending_bytes = self.steps.record_engine(
            time.monotonic_ns(),
            step.seconds,
            step.num_prompt_tokens,
            step.num_decode_tokens,
            step.num_new_tokens,
            parts.attention_s,
            parts.dense_s,
            parts.dispatch_s,
            parts.wait_s,
            parts.combine_s,
            parts.head_s,
            parts.sampling_s,
            parts.device_s,
            parts.draft_s,
        )
        if pending_bytes > _DRAIN_BYTES or time.perf_counter() >= self._drain_at:
            self.flush()

    def flush(self) -> None:
        """Writes what has come together."""
        self._drain_at = time.perf_counter() + _DRAIN_EVERY_S
        if self._file < 0:
            return
        data = self.steps.drain(self._origin_ns)
        if (dropped := self.steps.num_dropped) > self._num_dropped:
            at_us = (time.monotonic_ns() - self._origin_ns) / 1000
            missing = (
                f',\n{{"name":"dropped","ph":"i","s":"g","pid":{HOST_PID},"tid":{ENGINE_TID},"ts":{at_us:.3f},'
                f'"args":{{"steps":{dropped - self._num_dropped}}}}}'
            )
            data += missing.encode()
            self._num_dropped = dropped
        if not data:
            return
        try:
            if self._end_bytes + len(data) > self._limit_bytes // 2:
                self._turn_over()
            self._write(data)
        except OSError as error:
            _log.warning("trace %s: %s; the trace ends here", self.path, error.strerror or error)
            self._end()

    def close(self) -> None:
        """Writes the rest. Idempotent."""
        self.flush()
        self._end()

    def _end(self) -> None:
        self.on_end()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _turn_over(self) -> None:
        self._mode = os.fstat(self._file).st_mode & 0o777
        os.close(self._file)
        self._file = -1
        self._target.replace(earlier_part(self._target))
        self._begin()

    def _begin(self) -> None:
        is_new = not self._target.exists()
        self._file = os.open(self._target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _lock(self._file)
        if self._mode is not None:  # that of the part before
            with contextlib.suppress(OSError):
                os.fchmod(self._file, self._mode)
        os.ftruncate(self._file, 0)
        facts = {"start_unix_s": self._start_unix_s, **self._facts, "workers": list(self._worker_names)}
        names = [_name("process_name", HOST_PID, None, "host"), _sort(HOST_PID)]
        names.append(_name("thread_name", HOST_PID, ENGINE_TID, "engine steps"))
        for pid, name in enumerate(self._worker_names, FIRST_WORKER_PID):
            label = f"worker {pid - FIRST_WORKER_PID}: {name}"
            names += [_name("process_name", pid, None, label), _sort(pid)]
        names += [
            _name("thread_name", pid, lane + 1, f"lane {lane}")
            for pid in range(HOST_PID, FIRST_WORKER_PID + len(self._worker_names))
            for lane in range(MAX_LANES)
        ]
        head = MAGIC + json.dumps(facts).encode() + b'},"traceEvents":[\n'
        self._end_bytes = 0
        try:
            self._write(head + ",\n".join(names).encode())
        except OSError:
            if is_new:  # nothing is better than an empty file
                self._target.unlink(missing_ok=True)
            raise

    def _write(self, data: bytes) -> None:
        """Appends events, and an end behind them that the next ones begin over; all of them, or none.

        Raises:
            OSError: The disk fails; the file ends as it did before.
        """
        try:
            self._put(data + _END, self._end_bytes)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end_bytes)
                if self._end_bytes:
                    self._put(_END, self._end_bytes)
            raise
        self._end_bytes += len(data)

    def _put(self, data: bytes, at: int) -> None:
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self._file, rest, at)
            rest, at = rest[written:], at + written


def _name(kind: str, pid: int, tid: int | None, name: str) -> str:
    event: dict[str, Any] = {"name": kind, "ph": "M", "pid": pid}
    if tid is not None:
        event["tid"] = tid
    return json.dumps(event | {"args": {"name": name}}, separators=(",", ":"))


def _sort(pid: int) -> str:
    event = {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}
    return json.dumps(event, separators=(",", ":"))
