"""The host's side of preparation: waits for every worker's READY, and sends the shards that they lack.

Called by :mod:`duckllm.cluster.base`; :mod:`duckllm.worker.fetch` is the other end. One thread serves all
workers in turns, a frame each. A worker gets what is in its plan and nothing else, each shard once a session.
"""

from __future__ import annotations

import os
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from duckllm import _native
from duckllm._native import FrameType
from duckllm.cluster.plan import LayerPlan, WorkerPlan
from duckllm.errors import (
    CheckpointError,
    ModelNotFoundError,
    ProtocolError,
    WorkerUnavailableError,
    show_value,
)
from duckllm.weights.reader import find_units

if TYPE_CHECKING:
    from duckllm.cluster.connect import Connection
    from duckllm.weights.console import ConsoleProgress

_RECEIVE_BYTES = 1 << 16
_SHOW_AFTER_S = 2.0

# Bytes sent and bytes asked for, over all workers.
Progress = Callable[[int, int], object]


def wait_all_ready(
    connections: Sequence[Connection], timeout_s: float, progress: Progress = lambda done, total: None
) -> None:
    """Waits until every worker has prepared; sends the shards that they ask for meanwhile.

    Args:
        connections: Workers that have their plan.
        timeout_s: Limit for a worker to give a sign of life, seconds: a frame, or bytes that it takes.
        progress: Called with what was sent, and with what was asked for so far.

    Raises:
        WorkerUnavailableError: A worker is gone, or silent for too long.
        ModelError: A worker cannot use its weights, or this host lacks the file of a shard.
        ProtocolError: A worker does not follow docs/wire-format.md.
    """
    files = _LayerFiles()
    workers = [_Preparing(connection, files, timeout_s) for connection in connections]
    try:
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                worker.connection.channel.connection.setblocking(False)
                selector.register(worker.connection.channel.connection, selectors.EVENT_READ, worker)
            _serve(selector, workers, progress)
    finally:
        files.close()


def _serve(selector: selectors.BaseSelector, workers: Sequence[_Preparing], progress: Progress) -> None:
    while waiting := [worker for worker in workers if worker.ready is None]:
        left_s = min(worker.deadline for worker in waiting) - time.monotonic()
        for key, events in selector.select(max(0.0, left_s)):
            worker: _Preparing = key.data
            with worker.connection.socket_errors():
                if events & selectors.EVENT_READ:
                    worker.read()
                if events & selectors.EVENT_WRITE:
                    worker.write()
            if worker.ready is not None:
                selector.unregister(key.fileobj)
                worker.connection.set_ready(worker.ready)
                continue
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.is_sending else 0)
            if wanted != key.events:
                selector.modify(key.fileobj, wanted, worker)
        if any(worker.asked_bytes for worker in workers):
            progress(sum(each.sent_bytes for each in workers), sum(each.asked_bytes for each in workers))
        for worker in waiting:
            if worker.ready is None and time.monotonic() >= worker.deadline:
                raise WorkerUnavailableError(
                    f"worker {worker.connection.address} did not answer within {worker.timeout_s:g} s"
                )


class _Preparing:
    """A worker between its plan and its READY."""

    def __init__(self, connection: Connection, files: _LayerFiles, timeout_s: float) -> None:
        assert connection.plan is not None
        self.connection, self.plan, self.timeout_s = connection, connection.plan, timeout_s
        self.ready: dict[str, Any] | None = None
        self.asked_bytes = self.sent_bytes = 0
        self._files = files
        self._received = bytearray()
        self._layers = {layer.layer: layer for layer in self.plan.layers}
        self._asked: set[tuple[int, int]] = set()
        self._queue: deque[tuple[LayerPlan, int]] = deque()
        self._offset = 0  # of what is to be sent next, in the first shard of the queue
        self._frame = memoryview(b"")
        self._live()

    @property
    def is_sending(self) -> bool:
        """Whether there is something to send."""
        return bool(self._frame or self._queue)

    def read(self) -> None:
        """Takes what has arrived.

        Raises:
            DuckError: What the worker reports, or a frame that does not fit.
            OSError: The connection ended or failed.
        """
        channel = self.connection.channel
        try:
            chunk = channel.connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            raise channel.closed("READY")
        self._received += chunk
        while (frame := channel.take_frame(self._received, (FrameType.READY, FrameType.FETCH))) is not None:
            kind, payload = frame
            value = channel.parse_json(kind, payload)
            self._live()
            if kind == FrameType.FETCH:
                self._add(value)
                continue
            if self.is_sending or self._received:
                raise ProtocolError(f"READY from {channel.peer}: got it before it took what it asked for")
            self.ready = value
            return

    def write(self) -> None:
        """Sends as much as the connection takes at once, of one frame at most.

        Raises:
            OSError: The connection failed.
            ModelError: The shard's file is missing or malformed.
        """
        if not self._frame:
            if not self._queue:
                return
            self._frame = self._next_frame()
        try:
            sent = self.connection.channel.connection.send(self._frame)
        except BlockingIOError:
            return
        self._frame = self._frame[sent:]
        self.sent_bytes = min(self.asked_bytes, self.sent_bytes + sent)
        self._live()

    def _live(self) -> None:
        self.deadline = time.monotonic() + self.timeout_s

    def _add(self, value: dict[str, Any]) -> None:
        """Checks a FETCH and queues what it asks for."""
        shards = value.get("shards")
        if value.keys() != {"shards"} or not isinstance(shards, list) or not shards:
            self._refuse(value, "an object with shards, a list of at least one layer")
        for entry in shards:
            if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list) and entry[1]):
                self._refuse(entry, "a layer and a list of its stripes")
            layer = self._layers.get(entry[0]) if type(entry[0]) is int else None
            if layer is None:
                self._refuse(entry[0], "a layer of the plan")
            for stripe in entry[1]:
                last = self.plan.first_stripe + self.plan.num_stripes - 1
                if type(stripe) is not int or not self.plan.first_stripe <= stripe <= last:
                    self._refuse(stripe, f"a stripe of the plan, {self.plan.first_stripe} to {last}")
                if (layer.layer, stripe) in self._asked:
                    self._refuse([layer.layer, stripe], "each layer and stripe once a session")
                self._asked.add((layer.layer, stripe))
                self._queue.append((layer, stripe))
                self.asked_bytes += self.plan.num_experts * self.plan.unit_bytes_of(layer)

    def _refuse(self, got: object, expected: str) -> NoReturn:
        peer = self.connection.channel.peer
        raise ProtocolError(f"FETCH from {peer}: got {show_value(got)}, expected {expected}")

    def _next_frame(self) -> memoryview:
        layer, stripe = self._queue[0]
        total = self.plan.num_experts * self.plan.unit_bytes_of(layer)
        length = min(_native.MAX_SHARD_PIECE_BYTES, total - self._offset)
        head = _native.encode_frame_header(FrameType.SHARD, _native.SHARD_HEADER_BYTES + length)
        head += _native.encode_shard_header(layer.layer, stripe, self._offset)
        frame = bytearray(len(head) + length)
        frame[: len(head)] = head
        self._files.read(self.plan, layer, stripe, self._offset, memoryview(frame)[len(head) :])
        self._offset += length
        if self._offset == total:
            self._queue.popleft()
            self._offset = 0
        return memoryview(frame)


class _LayerFiles:
    """The expert files that shards are read from, opened when they are needed."""

    def __init__(self) -> None:
        self._files: dict[Path, tuple[int, int]] = {}

    def read(self, plan: WorkerPlan, layer: LayerPlan, stripe: int, offset: int, out: memoryview) -> None:
        """Fills ``out`` with a shard's bytes from ``offset`` on.

        Raises:
            ModelNotFoundError: There is no such file.
            CheckpointError: It is of another shape, or too short.
        """
        path = Path(plan.folder) / layer.file
        descriptor, data_offset = self._open(path, plan, layer)
        filled, unit_bytes = 0, plan.unit_bytes_of(layer)
        while filled < len(out):
            expert, start = divmod(offset + filled, unit_bytes)
            length = min(unit_bytes - start, len(out) - filled)
            unit = expert * plan.total_stripes + stripe
            position = data_offset + unit * unit_bytes + start
            try:
                got = os.preadv(descriptor, [out[filled : filled + length]], position)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
            if got == 0:
                raise CheckpointError(f"{path}: truncated, layer {layer.layer} ends at byte {position}")
            filled += got

    def close(self) -> None:
        """Closes them."""
        files, self._files = self._files, {}
        for descriptor, _ in files.values():
            os.close(descriptor)

    def _open(self, path: Path, plan: WorkerPlan, layer: LayerPlan) -> tuple[int, int]:
        if path not in self._files:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except (OSError, ValueError) as error:
                raise ModelNotFoundError(
                    f"{layer.file} of layer {layer.layer}: got no such file in {plan.folder}"
                ) from error
            self._files[path] = (descriptor, 0)  # to be closed whatever is found in it
            shape = (plan.num_experts, plan.total_stripes, plan.unit_bytes_of(layer))
            self._files[path] = (descriptor, find_units(path, shape))
        return self._files[path]


class FetchProgress:
    """Shows how far the workers' weights are, on stderr, where that takes longer than a moment.

    A context manager, to be called as :data:`Progress`.

    Args:
        num_workers: W.
    """

    def __init__(self, num_workers: int) -> None:
        self._stage = "1 worker" if num_workers == 1 else f"{num_workers} workers"
        self._first_s: float | None = None
        self._shown: ConsoleProgress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown is not None:
            self._shown.__exit__(kind, error, trace)

    def __call__(self, done: int, total: int) -> None:
        """Shows that ``done`` of ``total`` bytes were sent."""
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
        if self._shown is None:
            if now_s - self._first_s < _SHOW_AFTER_S or done == total:
                return
            from duckllm.weights.console import ConsoleProgress

            self._shown = ConsoleProgress("Sending weights")
        self._shown(self._stage, done, total)
