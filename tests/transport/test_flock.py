"""Steps that go on while workers are lost and replaced, at every moment; the test plays both ends."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from duckllm.errors import WorkerLostError, WorkerUnavailableError
from duckllm.transport.flock import Flock
from duckllm.transport.transport import Transport
from support.fake_workers import HIDDEN_SIZE, TOP_K, FakeConnection, fake_workers, reply_frame
from worker_harness import read_frame

MOMENTS = ("before the request", "after the request", "within the reply", "after the reply")


def answer(worker: int, payload: bytes) -> np.ndarray:
    """What a worker owes: sums of three of them depend on their order."""
    tokens = int.from_bytes(payload[4:8], "little")
    x = np.frombuffer(payload, np.float32, offset=16 + 8 * tokens * TOP_K).reshape(tokens, HIDDEN_SIZE)
    return np.asarray(x * np.float32((1e7, 1, -1e7)[worker]))


def serve(worker: int, connection: socket.socket, lose_at: tuple[int, str] | None = None) -> None:
    """Answers steps until the connection ends, or until it is lost at a moment of its n-th step."""
    with connection:
        for number in range(1 << 30):
            moment = lose_at[1] if lose_at is not None and lose_at[0] == number else ""
            if moment == "before the request" or (got := read_frame(connection)) is None:
                return
            _, payload, sequence = got
            if moment == "after the request" or len(payload) < 16:
                return
            layer, lane = int.from_bytes(payload[:4], "little"), int.from_bytes(payload[10:12], "little")
            reply = reply_frame(sequence, answer(worker, payload), layer=layer, lane=lane)
            connection.sendall(reply[: len(reply) // 2] if moment == "within the reply" else reply)
            if moment in ("within the reply", "after the reply"):
                return


class FakeCluster:
    """Brings workers back as threads."""

    def __init__(self) -> None:
        self.silent: Callable[[Sequence[int]], list[int]] = lambda workers: []
        self.lose_next: list[tuple[int, str]] = []
        self.replaced: list[int] = []
        self.were_silent: list[bool] = []
        self.problem: BaseException | None = None
        self.threads: list[threading.Thread] = []

    def start(self, worker: int, connection: socket.socket, lose_at: tuple[int, str] | None = None) -> None:
        self.threads.append(threading.Thread(target=serve, args=(worker, connection, lose_at)))
        self.threads[-1].start()

    def find_silent(self, workers: Sequence[int], timeout_s: float) -> list[int]:
        assert timeout_s > 0
        return self.silent(workers)

    def replace(self, worker: int, deadline: float, *, is_silent: bool) -> FakeConnection:
        self.were_silent.append(is_silent)
        if self.problem is not None:
            raise self.problem
        self.replaced.append(worker)
        ours, theirs = socket.socketpair()
        self.start(worker, theirs, self.lose_next.pop(0) if self.lose_next else None)
        return FakeConnection(100 + len(self.replaced), ours)


@contextmanager
def flock_of_three(
    *, silence_s: float = 20.0, timeout_s: float = 20.0, **lose_at: tuple[int, str]
) -> Iterator[tuple[Flock, FakeCluster, Transport, list[socket.socket]]]:
    """Three workers: ``worker1=(step, moment)`` is lost then, ``worker1=(-1, "")`` says nothing."""
    cluster = FakeCluster()
    with fake_workers(3) as (transport, ends):
        for worker, end in enumerate(ends):
            moment = lose_at.get(f"worker{worker}")
            if moment != (-1, ""):
                cluster.start(worker, end.dup(), moment)
        for worker, end in enumerate(ends):
            if lose_at.get(f"worker{worker}") != (-1, ""):
                end.close()
        yield Flock(transport, cluster, silence_s, timeout_s), cluster, transport, ends  # type: ignore[arg-type]
    for thread in cluster.threads:
        thread.join(20)
        assert not thread.is_alive()


def run_two_lanes(flock: Flock, steps: int = 4) -> list[bytes]:
    """The results of some layers of two lanes, both in flight at a time."""
    generator = np.random.default_rng(0)
    results = []
    for layer in range(steps):
        tickets = []
        for lane in range(2):
            x = generator.standard_normal((1 + lane, HIDDEN_SIZE)).astype(np.float32)
            ids = np.zeros((1 + lane, TOP_K), np.int32)
            tickets.append(flock.submit(layer, x, ids, ids.astype(np.float32), lane=lane))
        results += [flock.wait(ticket).tobytes() for ticket in tickets]
    return results


@pytest.fixture(scope="module")
def undisturbed() -> list[bytes]:
    with flock_of_three() as (flock, cluster, _, _):
        results = run_two_lanes(flock)
        assert cluster.replaced == []
    assert len(set(results)) == len(results)
    return results


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("worker", [0, 1, 2])
def test_a_worker_lost_at_any_step_changes_no_bit(undisturbed: list[bytes], worker: int, moment: str) -> None:
    for step in range(8):
        with flock_of_three(**{f"worker{worker}": (step, moment)}) as (flock, cluster, transport, _):  # type: ignore[arg-type]
            assert run_two_lanes(flock) == undisturbed
            is_noticed = step < 7 or moment != "after the reply"
            assert cluster.replaced == [worker] * is_noticed
            times = flock.times()
            expected = tuple(int(is_noticed and each == worker) for each in range(3))
            assert times.num_losses == times.num_replacements == expected
            assert times.is_lost == (False,) * 3
            assert (times.addresses[worker] == "127.0.0.1:101") is is_noticed
            assert transport.lost() == ()


def test_several_workers_lost_at_once_and_again(undisturbed: list[bytes]) -> None:
    moments = {"worker0": (2, MOMENTS[1]), "worker1": (2, MOMENTS[2]), "worker2": (3, MOMENTS[0])}
    with flock_of_three(**moments) as (flock, cluster, _, _):  # type: ignore[arg-type]
        cluster.lose_next = [(0, MOMENTS[2]), (1, MOMENTS[1])]
        assert run_two_lanes(flock) == undisturbed
        assert len(cluster.replaced) == 5


def test_a_silent_worker_that_lives_is_waited_for_and_one_that_does_not_is_replaced(
    undisturbed: list[bytes],
) -> None:
    with flock_of_three(silence_s=0.02, worker1=(-1, "")) as (flock, cluster, _, ends):
        asked = []

        def find(workers: Sequence[int]) -> list[int]:
            asked.append(tuple(workers))
            if len(asked) == 3:
                cluster.start(1, ends[1].dup())
            return []

        cluster.silent = find
        assert run_two_lanes(flock) == undisturbed
        assert asked[:3] == [(1,)] * 3
        assert cluster.replaced == []
    with flock_of_three(silence_s=0.02, worker1=(-1, "")) as (flock, cluster, _, ends):
        cluster.silent = lambda workers: [1] if 1 in workers and not cluster.replaced else []
        cluster.lose_next = [(3, MOMENTS[1])]
        assert run_two_lanes(flock) == undisturbed
        assert (cluster.replaced, cluster.were_silent) == ([1, 1], [True, False])


def test_who_does_not_come_back_fails_the_step_and_nothing_after_it(undisturbed: list[bytes]) -> None:
    with flock_of_three(worker2=(3, MOMENTS[1])) as (flock, cluster, transport, _):
        cluster.problem = WorkerUnavailableError("worker 127.0.0.1:3 is not available: gone fishing")
        with pytest.raises(WorkerLostError) as caught:
            run_two_lanes(flock)
        assert (caught.value.address, caught.value.layer) == ("127.0.0.1:3", 1)
        assert caught.value.reason.endswith(
            "nothing took its place in time: worker 127.0.0.1:3 is not available: gone fishing"
        )
        for ticket in (3, 4):  # of the lane that waited, and of the other one
            with pytest.raises(ValueError, match="expected one that is in flight"):
                transport.wait(ticket)
        with pytest.raises(WorkerLostError) as again:
            run_two_lanes(flock)
        assert again.value.layer == 0
        times = flock.times()
        assert (times.is_lost, times.num_losses) == ((False, False, True), (0, 0, 1))
        assert times.num_replacements == (0, 0, 0)
        cluster.problem = None
        assert run_two_lanes(flock) == undisturbed
        assert cluster.replaced == [2]
        times = flock.times()
        assert (times.is_lost, times.num_replacements) == ((False,) * 3, (0, 0, 1))


def test_a_worker_that_dies_of_a_step_ends_it_in_time() -> None:
    with flock_of_three(worker0=(2, MOMENTS[1]), timeout_s=0.5) as (flock, cluster, _, _):
        cluster.lose_next = [(0, MOMENTS[1])] * 100
        with pytest.raises(WorkerLostError, match="the last one that took its place was lost again"):
            run_two_lanes(flock)
        assert 1 <= len(cluster.replaced) <= 4  # with growing pauses


def test_ctrl_c_while_a_worker_is_brought_back(undisturbed: list[bytes]) -> None:
    with flock_of_three(worker1=(3, MOMENTS[2])) as (flock, cluster, _, _):
        cluster.problem = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            run_two_lanes(flock)
        cluster.problem = None
        assert run_two_lanes(flock) == undisturbed


def test_ctrl_c_while_a_step_is_waited_for(undisturbed: list[bytes]) -> None:
    with flock_of_three(silence_s=0.05, worker1=(-1, "")) as (flock, cluster, _, ends):
        # Not by the clock: on a busy machine that may be before the wait, or before this test's own care.
        threads = [threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT))]

        def interrupt_soon(workers: Sequence[int]) -> list[int]:
            if threads[0].ident is None:
                threads[0].start()
            return []

        cluster.silent = interrupt_soon
        with pytest.raises(KeyboardInterrupt):
            run_two_lanes(flock)
        threads[0].join()
        cluster.start(1, ends[1].dup())
        assert run_two_lanes(flock) == undisturbed
        assert cluster.replaced == []


def test_who_goes_while_nothing_is_computed_is_noticed_and_brought_back(undisturbed: list[bytes]) -> None:
    with flock_of_three(worker1=(2, MOMENTS[3])) as (flock, cluster, _, _):
        run_two_lanes(flock, 1)
        flock.attend()
        assert cluster.replaced == []
        ids = np.zeros((1, TOP_K), np.int32)
        flock.wait(flock.submit(0, np.zeros((1, HIDDEN_SIZE), np.float32), ids, ids.astype(np.float32)))
        cluster.threads[1].join(20)  # behind that answer it leaves
        cluster.problem = WorkerUnavailableError("worker 127.0.0.1:2 is not available: gone fishing")
        for _ in range(3):
            flock.attend()
            times = flock.times()
            assert (times.is_lost, times.num_losses) == ((False, True, False), (0, 1, 0))
        assert len(cluster.were_silent) == 1  # it is not tried at every look
        cluster.problem = None
        flock._idle_until = 0.0
        flock.attend()
        times = flock.times()
        assert (times.is_lost, times.num_losses, times.num_replacements) == (
            (False,) * 3,
            (0, 1, 0),
            (0, 1, 0),
        )
        assert cluster.replaced == [1]
        assert run_two_lanes(flock) == undisturbed
