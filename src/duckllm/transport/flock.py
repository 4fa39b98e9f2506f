"""Steps through workers of which any may be lost at any moment: the step goes on with who comes back.

Called by :mod:`duckllm.moe.dispatch`; calls the transport, and the cluster for what a transport cannot know:
whether a silent worker lives, and who takes a lost one's place.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from duckllm.errors import ClusterError, DiskSpaceError, ModelError, WorkerLostError
from duckllm.outputs import WorkerTimes
from duckllm.transport.transport import Transport

if TYPE_CHECKING:
    from duckllm.cluster.base import Cluster

_FIRST_PAUSE_S = 0.1  # before a worker that was lost again in one step is replaced again
# While nothing is computed: how long it may take to bring a worker back, and the longest time until it is
# tried again. A request that comes meanwhile waits for it.
_IDLE_RETURN_S = 5.0
_LONGEST_IDLE_PAUSE_S = 60.0
_log = logging.getLogger("duckllm")
_T = TypeVar("_T")


class Flock:
    """A transport and the cluster that it belongs to.

    Args:
        transport: Connections to the cluster's workers, in worker order.
        cluster: Brings workers back.
        silence_s: A worker that has not answered a step for so long is asked whether it lives, and is lost if
            it says nothing for as long again, seconds.
        timeout_s: How long a step waits for lost workers to come back, or for others in their place, seconds.

    Threading: one thread at a time, but for :meth:`times` and :attr:`links`.
    """

    def __init__(self, transport: Transport, cluster: Cluster, silence_s: float, timeout_s: float) -> None:
        self._transport, self._cluster = transport, cluster
        self._silence_s, self._timeout_s = silence_s, timeout_s
        self._silent: set[int] = set()  # lost workers that gave no sign of life
        num_workers = len(transport.addresses)
        self._num_losses, self._num_replacements = [0] * num_workers, [0] * num_workers
        self._is_lost = [False] * num_workers
        self._idle_pause_s = self._idle_until = 0.0
        # Asked for once and at each replacement: the transport answers only between two steps.
        self.links = transport.describe()

    def submit(self, layer: int, x: Any, topk_ids: Any, topk_weights: Any, *, lane: int = 0) -> int:
        """As :meth:`Transport.submit`; a worker that is lost is no error before :meth:`wait`."""
        return self._transport.submit(layer, x, topk_ids, topk_weights, lane=lane)

    def wait(self, ticket: int) -> npt.NDArray[np.float32]:
        """As :meth:`Transport.wait`, with lost workers brought back meanwhile, and the same sum.

        After any exception no step is in flight, and the next one may be submitted.

        Raises:
            WorkerLostError: A worker is lost, and nothing took its place within ``timeout_s``.
            ClusterError: The transport is closed.
            KeyboardInterrupt: Ctrl-C, while it waits or while a worker is brought back.
        """

        def attempt(silence_s: float) -> npt.NDArray[np.float32]:
            # Computing may take any time, so silence alone proves nothing.
            while late := self._transport.wait_some(ticket, silence_s):
                self.drop_silent(late, silence_s)
            return self._transport.wait(ticket)

        return self.persist(attempt)

    def persist(self, attempt: Callable[[float], _T]) -> _T:
        """What ``attempt`` gives, tried again as long as workers are lost in it and brought back meanwhile.

        Args:
            attempt: Computes something on the workers; it is given how long they may be silent until
                :meth:`drop_silent` is to be asked about them, seconds.

        Raises: as :meth:`wait`, and what ``attempt`` does. No step is in flight then.
        """
        num_losses, deadline = 0, 0.0
        try:
            while True:
                try:
                    return attempt(self._silence_s * 2.0**num_losses)
                except WorkerLostError as error:
                    deadline = deadline or time.monotonic() + self._timeout_s
                    if num_losses > 0:
                        self._pause(_FIRST_PAUSE_S * 2.0**num_losses, deadline, error)
                    num_losses += 1
                    _log.warning("%s; waiting for it or a spare", error)
                    lost = self._transport.lost()
                    self._note_lost(lost)
                    for worker in lost:
                        self._bring_back(worker, error, deadline)
        except BaseException:
            self._transport.give_up()
            raise

    def drop_silent(self, late: Sequence[int], silence_s: float) -> None:
        """Drops those of the workers that do not live.

        They are asked on a connection of its own, where a worker answers while it computes.
        """
        for worker in self._cluster.find_silent(late, silence_s):
            self._silent.add(worker)
            self._transport.drop(worker, f"it gave no sign of life for {2000 * silence_s:.0f} ms")

    def attend(self) -> None:
        """Notices who has gone while nothing was computed, and brings it back where that does not take long.

        Between two steps, in their thread. Who does not come back is tried again after a while, and by the
        next step.
        """
        lost = self._transport.look()
        for worker in self._note_lost(lost):
            _log.warning("worker %s has gone while nothing was computed", self._transport.address(worker))
        if not lost:
            self._idle_pause_s = 0.0
            return
        if time.monotonic() < self._idle_until:
            return
        try:
            for worker in lost:
                error = WorkerLostError(self._transport.address(worker), "it has gone", None)
                self._bring_back(worker, error, time.monotonic() + min(self._timeout_s, _IDLE_RETURN_S))
        except WorkerLostError as error:
            self._idle_pause_s = min(2 * self._idle_pause_s + 1, _LONGEST_IDLE_PAUSE_S)
            self._idle_until = time.monotonic() + self._idle_pause_s
            _log.warning("%s; it is looked for again in %g s", error, self._idle_pause_s)

    def _note_lost(self, workers: Sequence[int]) -> list[int]:
        """Counts a loss of each worker that was not known to be lost; who these are."""
        new = [worker for worker in workers if not self._is_lost[worker]]
        for worker in new:
            self._num_losses[worker] += 1
            self._is_lost[worker] = True
        return new

    def times(self) -> WorkerTimes:
        """Where the time of steps goes, and how often workers were lost.

        Threading: any thread, while a step is under way too.
        """
        layers = sorted(self._transport.step_times(), key=lambda each: each.layer)
        return WorkerTimes(
            self._transport.addresses,
            tuple(each.layer for each in layers),
            tuple(each.num_steps for each in layers),
            tuple(each.tokens for each in layers),
            tuple(tuple(each.compute_us) for each in layers),
            tuple(tuple(each.round_trip_us) for each in layers),
            tuple(tuple(each.wait_us) for each in layers),
            tuple(self._num_losses),
            tuple(self._num_replacements),
            tuple(self._is_lost),
        )

    def _bring_back(self, worker: int, error: WorkerLostError, deadline: float) -> None:
        lost, started = self._transport.address(worker), time.monotonic()
        try:
            connection = self._cluster.replace(worker, deadline, is_silent=worker in self._silent)
        except (ClusterError, DiskSpaceError, ModelError) as problem:
            raise self._final(error, f"{problem}") from problem
        self._transport.replace(worker, connection)
        self._silent.discard(worker)
        self._is_lost[worker] = False
        self._num_replacements[worker] += 1
        self.links = self._transport.describe()
        passed_s = time.monotonic() - started
        _log.warning("worker %s goes on in place of %s after %.1f s", connection.address, lost, passed_s)

    def _pause(self, pause_s: float, deadline: float, error: WorkerLostError) -> None:
        if time.monotonic() + pause_s >= deadline:
            raise self._final(error, "the last one that took its place was lost again")
        time.sleep(pause_s)

    def _final(self, error: WorkerLostError, problem: str) -> WorkerLostError:
        reason = f"{error.reason}; nothing took its place in time: {problem}"
        return WorkerLostError(error.address, reason, error.layer)
