"""Another connection in a lost worker's place: what is sent again, what is used, and what is dropped."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

from duckllm.errors import ClusterError, WorkerLostError
from duckllm.transport.transport import Transport
from support.fake_workers import (
    HIDDEN_SIZE,
    TOP_K,
    FakeConnection,
    fake_workers,
    read_request,
    reply_frame,
    rows,
    submit,
)
from worker_harness import read_exactly, read_frame


def put_in_place(transport: Transport, worker: int, port: int = 99) -> socket.socket:
    """The other end of a new connection in a worker's place."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(20)
    transport.replace(worker, FakeConnection(port, ours))  # type: ignore[arg-type]
    return theirs


@pytest.mark.parametrize("wire_dtype", ["f32", "bf16"])
def test_what_is_in_flight_is_sent_again_byte_for_byte(wire_dtype: str) -> None:
    generator = np.random.default_rng(5)
    with fake_workers(2, wire_dtype=wire_dtype) as (transport, (first, second)):
        steps = []
        for lane in range(3):
            x = generator.standard_normal((lane + 1, HIDDEN_SIZE)).astype(np.float32)
            ids = generator.integers(0, 9, (lane + 1, TOP_K)).astype(np.int32)
            steps.append(transport.submit(4 + lane, x, ids, np.ones_like(ids, np.float32), lane=lane))
            x[:] = 0  # the caller's array may be used again
        asked = [read_request(second) for _ in steps]
        first.sendall(b"".join(reply_frame(s, rows(*[10.0 * s] * s), layer=3 + s, lane=s - 1) for s in steps))
        second.sendall(reply_frame(steps[0], rows(1), layer=4, lane=0))
        second.sendall(reply_frame(steps[1], rows(7, 7), layer=5, lane=1)[:60])
        second.close()
        with pytest.raises(WorkerLostError):
            transport.wait(steps[2])
        with put_in_place(transport, 1) as again:
            assert transport.lost() == ()
            assert transport.address(1) == "127.0.0.1:99"
            # The first step had been answered; half an answer is none.
            assert [read_request(again) for _ in range(2)] == asked[1:]
            again.sendall(reply_frame(steps[1], rows(2, 3), layer=5, lane=1))
            again.sendall(reply_frame(steps[2], rows(4, 5, 6), layer=6, lane=2))
            np.testing.assert_array_equal(transport.wait(steps[2]), rows(34, 35, 36))
            np.testing.assert_array_equal(transport.wait(steps[0]), rows(11))
            np.testing.assert_array_equal(transport.wait(steps[1]), rows(22, 23))
            # And the next step goes to it as to anybody.
            next_step = submit(transport)
            for worker, value in ((first, 1), (again, 2)):
                worker.sendall(reply_frame(next_step, rows(value)))
            np.testing.assert_array_equal(transport.wait(next_step), rows(3))


def test_an_answer_that_came_in_time_is_used_and_later_ones_are_not() -> None:
    with fake_workers(2) as (transport, (first, second)):
        one, two = submit(transport), submit(transport)
        first.sendall(reply_frame(one, rows(1)) + reply_frame(two, rows(2)))
        assert transport.wait_some(one, 0.01) == (1,)
        second.sendall(reply_frame(one, rows(10)))  # it lives after all, but its successor is there
        with put_in_place(transport, 1) as again:
            for _ in range(2):
                read_request(second)
            assert read_exactly(second, 1) == b""  # closed: nothing that it sends can arrive
            assert read_request(again)[1] == two
            again.sendall(reply_frame(one, rows(500)) + reply_frame(two, rows(20)))
            np.testing.assert_array_equal(transport.wait(one), rows(11))
            np.testing.assert_array_equal(transport.wait(two), rows(22))


def test_a_dropped_worker_and_what_it_sends() -> None:
    with fake_workers(2) as (transport, (first, second)):
        ticket = submit(transport)
        first.sendall(reply_frame(ticket, rows(1)))
        transport.drop(1, "it is known to be gone")
        transport.drop(1, "somebody else noticed too")
        for _ in range(2):
            with pytest.raises(WorkerLostError, match="lost at layer 5: it is known to be gone"):
                transport.wait(ticket)
        read_request(second)
        with pytest.raises(BrokenPipeError):
            second.sendall(reply_frame(ticket, rows(400)))
        with put_in_place(transport, 1) as again:
            again.sendall(reply_frame(ticket, rows(2)))
            np.testing.assert_array_equal(transport.wait(ticket), rows(3))


def test_replacements_are_lost_as_well() -> None:
    with fake_workers(1) as (transport, (worker,)):
        ticket = submit(transport)
        for _ in range(5):
            read_request(worker)
            worker.close()
            with pytest.raises(WorkerLostError, match="it closed the connection"):
                transport.wait(ticket)
            worker = put_in_place(transport, 0)
        worker.sendall(reply_frame(ticket, rows(3)))
        np.testing.assert_array_equal(transport.wait(ticket), rows(3))
        worker.close()


def test_steps_larger_than_the_buffers_are_sent_again_while_answers_are_taken() -> None:
    tokens, steps = 40_000, 3
    with fake_workers(2, max_step_tokens=tokens, submit_timeout_s=0.05) as (transport, (first, second)):

        def serve(worker: socket.socket, value: float) -> None:
            for _ in range(steps):
                _, sequence = read_request(worker)
                y = np.full((tokens, HIDDEN_SIZE), value * sequence, np.float32)
                worker.sendall(reply_frame(sequence, y))

        threads = [threading.Thread(target=serve, args=(first, 1))]
        threads[0].start()
        tickets = [submit(transport, tokens) for _ in range(steps)]
        read_exactly(second, 100_000)  # lost in the middle of the first request
        second.close()
        with pytest.raises(WorkerLostError):
            transport.wait(tickets[0])
        with put_in_place(transport, 1) as again:
            threads.append(threading.Thread(target=serve, args=(again, 2)))
            threads[1].start()
            for ticket in reversed(tickets):
                np.testing.assert_array_equal(transport.wait(ticket), np.full((tokens, 6), 3.0 * ticket))
            for thread in threads:
                thread.join()


def test_steps_that_are_given_up_leave_whole_frames_behind() -> None:
    tokens = 40_000
    with fake_workers(1, max_step_tokens=tokens, submit_timeout_s=0.05) as (transport, (worker,)):
        large, larger = submit(transport, tokens - 1), submit(transport, tokens)  # neither leaves whole
        transport.give_up()
        for ticket in (large, larger):
            with pytest.raises(ValueError, match="expected one that is in flight"):
                transport.wait(ticket)
        seen = []

        def serve() -> None:
            while not seen or seen[-1] < larger + 1:
                _, sequence = read_request(worker)
                seen.append(sequence)
                y = rows(8) if sequence > larger else np.ones((tokens - 1, HIDDEN_SIZE), np.float32)
                worker.sendall(reply_frame(sequence, y))

        thread = threading.Thread(target=serve)
        thread.start()
        np.testing.assert_array_equal(transport.wait(submit(transport)), rows(8))
        thread.join()
        assert seen == [large, larger + 1]  # what was not begun is not sent at all


def test_given_up_steps_are_not_sent_to_a_replacement() -> None:
    with fake_workers(1) as (transport, (worker,)):
        submit(transport)
        submit(transport)
        worker.close()
        transport.give_up()
        with put_in_place(transport, 0) as again:
            ticket = submit(transport)
            assert read_request(again)[1] == ticket
            again.sendall(reply_frame(ticket, rows(1)))
            np.testing.assert_array_equal(transport.wait(ticket), rows(1))


def test_a_worker_lost_between_steps_costs_none_of_those_answered() -> None:
    with fake_workers(2) as (transport, workers):
        ticket = submit(transport)
        for worker in workers:
            read_request(worker)
            worker.sendall(reply_frame(ticket, rows(1)))
        assert transport.wait_some(ticket, 20) == ()
        transport.drop(0, "gone")
        np.testing.assert_array_equal(transport.wait(ticket), rows(2))


def test_nothing_is_replaced_in_a_closed_transport() -> None:
    with fake_workers(1) as (transport, _):
        transport.close()
        ours, theirs = socket.socketpair()
        with theirs:
            with pytest.raises(ClusterError, match="got a step after close"):
                transport.replace(0, FakeConnection(1, ours))  # type: ignore[arg-type]
            assert read_frame(theirs) is None  # it had taken the socket over
