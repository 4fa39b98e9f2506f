"""Thin typed face of the native transport: arrays in, the sum of the workers' partial sums out.

Called by :mod:`duckllm.moe`. The workers' order is that of the connections; sums are taken in that order, so
that runs repeat bit for bit. NumPy arrays and CPU tensors alike are read in place.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from duckllm import _native
from duckllm.cluster.connect import Connection
from duckllm.cluster.frames import safe_text
from duckllm.cluster.multicast import HostMulticast
from duckllm.errors import ClusterError, WorkerLostError

_log = logging.getLogger("duckllm")


@dataclass(frozen=True)
class MulticastCounts:
    """What requests by multicast came to.

    Args:
        num_datagrams: Sent, each once for all workers.
        num_asked: Fragments that each worker asked for again, in worker order.
        is_reached: Whether requests still go to it by multicast.
    """

    num_datagrams: int
    num_asked: Sequence[int]
    is_reached: Sequence[bool]


class Transport:
    """Prepared workers, for steps; a context manager.

    Args:
        connections: Prepared connections, in worker order; the transport takes their sockets over.
        hidden_size: H.
        top_k: K, most experts per token.
        max_step_tokens: Most tokens in one step, as in the workers' plans.
        wire_dtype: Activations on the wire, ``"f32"`` or ``"bf16"`` (rounded to nearest-even).
        reply_dtype: Partial sums on the wire, ``"f32"`` or ``"bf16"``.
        step_timeout_s: Limit for one step's answers, counted from the first :meth:`wait`, seconds.
        submit_timeout_s: How long :meth:`submit` waits for workers to take a step, seconds; what is left is
            sent while it is waited for.
        spin_us: How long :meth:`wait` reads without sleeping, microseconds.
        multicast: The group that workers were told of in their plans, for requests to go to all of them at
            once; the transport takes its socket over. None sends to each over its connection.

    Threading: calls from several threads take turns.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        hidden_size: int,
        top_k: int,
        *,
        max_step_tokens: int,
        wire_dtype: str = "f32",
        reply_dtype: str = "f32",
        step_timeout_s: float = 30.0,
        submit_timeout_s: float = 0.4,
        spin_us: int = 0,
        multicast: HostMulticast | None = None,
    ) -> None:
        self._addresses = [str(connection.address) for connection in connections]
        self.hidden_size = hidden_size
        self.max_step_tokens = max_step_tokens
        self._closed = False
        self._has_multicast = multicast is not None
        self._native = _native.Transport(
            [connection.detach_socket() for connection in connections],
            memories=[connection.memory for connection in connections],
            hidden_size=hidden_size,
            top_k=top_k,
            max_step_tokens=max_step_tokens,
            x_bf16=wire_dtype == "bf16",
            reply_bf16=reply_dtype == "bf16",
            step_timeout_ms=_milliseconds(step_timeout_s),
            submit_timeout_ms=_milliseconds(submit_timeout_s),
            spin_us=spin_us,
            multicast_socket=-1 if multicast is None else multicast.detach_socket(),
            multicast_session=None if multicast is None else multicast.session,
            multicast_group="" if multicast is None else f"{multicast.plan.group}:{multicast.plan.port}",
            multicast_bytes=[connection.multicast_bytes for connection in connections],
        )

    def submit(self, layer: int, x: Any, topk_ids: Any, topk_weights: Any, *, lane: int = 0) -> int:
        """Sends one step to every worker that is not lost; the ticket for :meth:`wait`.

        Several steps may be in flight. All arrays may be reused once this returns.

        Args:
            layer: The layer.
            x: Activations.
            topk_ids: Experts of each token.
            topk_weights: Their weights.
            lane: Which micro-batch this is.

        Shapes:
            x: [T, H] f32, cpu. topk_ids: [T, K] int32, cpu. topk_weights: [T, K] f32, cpu.

        Raises:
            ClusterError: The transport is closed.
            ValueError: Shapes that do not fit; nothing was sent.
        """
        with self.typed_errors():
            return self._native.submit(
                layer,
                np.ascontiguousarray(x, np.float32),
                np.ascontiguousarray(topk_ids, np.int32),
                np.ascontiguousarray(topk_weights, np.float32),
                lane,
            )

    def wait(self, ticket: int, out: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
        """The sum over all workers, ``((y_0 + y_1) + y_2) + ...``, once every one of them has answered.

        Args:
            ticket: From :meth:`submit`; each may be waited for once, in any order.
            out: Where to write the sum; a new array if None.

        Shapes: result: [T, H] f32.

        Raises:
            WorkerLostError: A worker that has not answered is gone, answers wrongly or not in time. The step
                stays in flight, to be waited for again after :meth:`replace`.
            ClusterError: The transport is closed.
            ValueError: No such ticket is in flight.
            KeyboardInterrupt: Ctrl-C, at once; the step is given up, the transport stays usable.
        """
        with self.typed_errors():
            if out is None:
                out = np.empty((self._native.ticket_tokens(ticket), self.hidden_size), np.float32)
            self._native.wait(ticket, out)
        self.note_unreached()
        return out

    def note_unreached(self) -> None:
        """Says which workers multicast was found not to reach since the last call."""
        if not self._has_multicast:
            return
        for worker in self._native.take_unreached():
            _log.warning(
                "multicast does not reach worker %s: it gets requests over its connection from now on",
                self._addresses[worker],
            )

    def server(self) -> _native.LaneServer:
        """These workers, for an exchange with a GPU."""
        return _native.transport_server(self._native)

    def wait_some(self, ticket: int, timeout_s: float) -> tuple[int, ...]:
        """Waits at most ``timeout_s`` seconds; the workers that have not answered the step by then.

        Raises:
            WorkerLostError: As :meth:`wait`.
            ClusterError: As :meth:`wait`.
            ValueError: As :meth:`wait`.
            KeyboardInterrupt: As :meth:`wait`.
        """
        with self.typed_errors():
            return tuple(self._native.wait_some(ticket, _milliseconds(timeout_s)))

    def drop(self, worker: int, reason: str) -> None:
        """Closes the connection of a worker that is known to be lost."""
        self._native.drop(worker, reason)

    def address(self, worker: int) -> str:
        """Where a worker is, or was."""
        return self._addresses[worker]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where each worker is, or was, in worker order."""
        return tuple(self._addresses)

    def lost(self) -> tuple[int, ...]:
        """The workers that are lost, in worker order."""
        return tuple(self._native.lost())

    def look(self) -> tuple[int, ...]:
        """The workers that are lost, those included that have closed their connection since the last step."""
        self._native.look()
        return self.lost()

    def replace(self, worker: int, connection: Connection) -> None:
        """Gives a worker's place to another connection, prepared with the same slice.

        What is in flight is sent to it, unless the lost one had answered it. Nothing that the lost one sends
        later can arrive.

        Raises:
            ClusterError: The transport is closed.
        """
        address = str(connection.address)
        with self.typed_errors():
            self._native.replace(
                worker, connection.detach_socket(), connection.memory, connection.multicast_bytes
            )
        self._addresses[worker] = address

    def describe(self) -> tuple[str, ...]:
        """How each worker is spoken with, in worker order: shared memory, or TCP and what is set of it."""
        return tuple(self._native.describe())

    def multicast_counts(self) -> MulticastCounts:
        """What multicast did so far."""
        return MulticastCounts(*self._native.multicast_counts())

    def give_up(self) -> None:
        """Gives every step in flight up; replies to them are dropped."""
        self._native.give_up()

    def last_compute_us(self) -> tuple[int, ...]:
        """Each worker's own time for the step last waited for, microseconds, in worker order."""
        return tuple(self._native.last_compute_us())

    def step_times(self) -> tuple[_native.LayerTimes, ...]:
        """Means over each layer's last steps; does not wait for a step that is under way."""
        return tuple(self._native.step_times())

    def measure_host_time(self, on: bool) -> None:
        """Measures from now on what the host's own work costs, from zero; or stops to."""
        self._native.measure_host_time(on)

    def host_time(self) -> tuple[tuple[int, int, int], ...]:
        """CPU ns, wall ns and times of packing, sending, sleeping, receiving and combining since then.

        csrc/transport/host_time.h says what each is. CPU time is that of the thread that submits and waits.
        """
        return tuple(self._native.host_time())

    def set_trace(self, trace: _native.StepTrace | None) -> None:
        """Has the moments of every step noted from now on; None ends it."""
        self._native.set_trace(trace)

    def close(self) -> None:
        """Tells every worker that the session is over. Idempotent."""
        self._closed = True
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def typed_errors(self) -> Iterator[None]:
        """Errors of the native transport within, as this class raises them."""
        try:
            yield
        except _native.TransportError as error:
            if self._closed:
                raise ClusterError("transport: got a step after close(), expected an open one") from error
            worker, layer, reason = error.args
            raise WorkerLostError(self._addresses[worker], safe_text(reason), layer) from error


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
