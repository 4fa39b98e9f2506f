"""The host's end: what it sends, how it adds, and what it makes of workers that misbehave."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest

from duckllm import _native
from duckllm._native import ErrorCode, FrameType
from duckllm.errors import ClusterError, WorkerLostError
from support.fake_workers import (
    HIDDEN_SIZE,
    TOP_K,
    FakeConnection,
    as_bf16,
    fake_workers,
    read_request,
    reply_frame,
    rows,
    submit,
)
from worker_harness import read_exactly, read_frame

BIG, SMALL = np.float32(1e8), np.float32(1)


def test_a_request_on_the_wire() -> None:
    x = np.arange(12, dtype=np.float32).reshape(2, HIDDEN_SIZE) / 7
    ids = np.array([[3, 1], [0, 2]], np.int32)
    weights = np.array([[0.5, 0.25], [1.5, -2.0]], np.float32)
    with fake_workers(2) as (transport, workers):
        assert transport.submit(0x0102, x, ids, weights, lane=9) == 1
        head = "4455434b 0400 0800 60000000 00000000 0100000000000000 02010000 02000000 0200 0900 00 00 0000"
        expected = bytes.fromhex(head) + ids.tobytes() + weights.tobytes() + x.tobytes()
        for worker in workers:
            assert read_exactly(worker, len(expected)) == expected


def test_activations_are_rounded_to_nearest_even_bf16() -> None:
    generator = np.random.default_rng(3)
    x = generator.standard_normal((4, HIDDEN_SIZE)).astype(np.float32)
    x[0] = [1.00390625, 1.01171875, -1.00390625, 3.0e38, 1e-40, -0.0]  # ties, large, subnormal, minus zero
    ids, weights = np.zeros((4, TOP_K), np.int32), np.ones((4, TOP_K), np.float32)
    with fake_workers(1, wire_dtype="bf16", reply_dtype="bf16") as (transport, (worker,)):
        transport.submit(1, x, ids, weights)
        payload, _ = read_request(worker)
        assert payload[12:14] == b"\1\1"
        got = np.frombuffer(payload[16 + 64 :], np.uint16).reshape(4, HIDDEN_SIZE)
        np.testing.assert_array_equal(got, as_bf16(x))
        assert got[0, :4].tolist() == [0x3F80, 0x3F82, 0xBF80, as_bf16(x)[0, 3]]


def test_nan_and_infinity_stay_so_in_bf16() -> None:
    bits = np.array([[0x7F800001, 0xFF800001, 0x7FFFFFFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF]], np.uint32)
    with fake_workers(1, wire_dtype="bf16") as (transport, (worker,)):
        transport.submit(1, bits.view(np.float32), np.zeros((1, 2), np.int32), np.ones((1, 2), np.float32))
        payload, _ = read_request(worker)
        got = np.frombuffer(payload[16 + 16 :], np.uint16)
        assert got.tolist() == [0x7FC0, 0xFFC0, 0x7FFF, 0x7F80, 0xFF80, 0x7F80]


def test_bf16_replies_are_widened_exactly() -> None:
    halves = np.arange(2 * HIDDEN_SIZE, dtype=np.uint16).reshape(2, HIDDEN_SIZE) * 517 + 0x3C01
    with fake_workers(1, reply_dtype="bf16") as (transport, (worker,)):
        ticket = submit(transport, 2)
        payload = _native.encode_step_reply_header(5, 2, 0, 0, True) + halves.tobytes()
        worker.sendall(_native.encode_frame_header(FrameType.STEP_REPLY, len(payload), ticket) + payload)
        expected = (halves.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(transport.wait(ticket), expected)


# In f32 (1e8 + 1) - 1e8 is 0 and (1e8 - 1e8) + 1 is 1; adding the last two first tells on each of them.
@pytest.mark.parametrize("values", [(BIG, SMALL, -BIG), (BIG, -BIG, SMALL), (SMALL, BIG, -BIG)])
@pytest.mark.parametrize("arrival", list(permutations(range(3))))
def test_partial_sums_are_added_in_worker_order(
    arrival: tuple[int, ...], values: tuple[np.float32, np.float32, np.float32]
) -> None:
    assert len({float((a + b) + c) for a, b, c in permutations(values)}) == 2
    with fake_workers(3) as (transport, workers):
        ticket = submit(transport)
        for worker in arrival:
            workers[worker].sendall(reply_frame(ticket, rows(values[worker]), compute_us=worker + 7))
        expected = (values[0] + values[1]) + values[2]
        np.testing.assert_array_equal(transport.wait(ticket), rows(expected))
        assert transport.last_compute_us() == (7, 8, 9)


def test_minus_zero_of_a_single_worker_stays() -> None:
    with fake_workers(1) as (transport, (worker,)):
        ticket = submit(transport)
        worker.sendall(reply_frame(ticket, rows(-0.0)))
        assert np.signbit(transport.wait(ticket)).all()


def test_tickets_may_be_waited_for_in_any_order() -> None:
    with fake_workers(2) as (transport, workers):
        tickets = [submit(transport, tokens, lane=tokens) for tokens in (1, 2, 3)]
        assert tickets == [1, 2, 3]
        for index, worker in enumerate(workers):
            for tokens, ticket in enumerate(tickets, 1):
                y = rows(*[100.0 * index + 10 * tokens + row for row in range(tokens)])
                worker.sendall(reply_frame(ticket, y, lane=tokens))
        for tokens in (3, 1, 2):
            expected = rows(*[100.0 + 20 * tokens + 2 * row for row in range(tokens)])
            np.testing.assert_array_equal(transport.wait(tokens), expected)
        with pytest.raises(ValueError, match="ticket: got 2, expected one that is in flight"):
            transport.wait(2)


def test_wait_writes_where_it_is_told() -> None:
    with fake_workers(1) as (transport, (worker,)):
        out = np.zeros((2, HIDDEN_SIZE), np.float32)
        ticket = submit(transport, 2)
        with pytest.raises(ValueError, match=r"out: got shape \[1, 6\], expected \[2, 6\]"):
            transport.wait(ticket, out[:1])
        worker.sendall(reply_frame(ticket, rows(1, 2)))
        assert transport.wait(ticket, out) is out
        np.testing.assert_array_equal(out, rows(1, 2))


def test_late_and_duplicate_replies_are_dropped() -> None:
    with fake_workers(2) as (transport, (first, second)):
        one = submit(transport)
        first.sendall(reply_frame(one, rows(1)) + reply_frame(one, rows(50)))
        second.sendall(reply_frame(one, rows(2)))
        np.testing.assert_array_equal(transport.wait(one), rows(3))
        two, three = submit(transport), submit(transport, 2)
        # An answer to the step that is over; then this one's, again, and the next.
        first.sendall(reply_frame(one, rows(60, 60, 60)) + reply_frame(two, rows(4)))
        first.sendall(reply_frame(two, rows(70)) + reply_frame(three, rows(8, 9)))
        second.sendall(reply_frame(two, rows(5)) + reply_frame(three, rows(1, 1)))
        np.testing.assert_array_equal(transport.wait(three), rows(9, 10))
        np.testing.assert_array_equal(transport.wait(two), rows(9))


@pytest.mark.parametrize("cut", [10, 30, 50])
@pytest.mark.parametrize("reply_dtype", ["f32", "bf16"])
def test_the_oldest_of_too_many_steps_is_forgotten(cut: int, reply_dtype: str) -> None:
    def reply(sequence: int, y: np.ndarray) -> bytes:
        if reply_dtype == "f32":
            return reply_frame(sequence, y)
        payload = _native.encode_step_reply_header(5, len(y), 0, 0, True) + as_bf16(y).tobytes()
        return _native.encode_frame_header(FrameType.STEP_REPLY, len(payload), sequence) + payload

    tokens = 40_000
    with fake_workers(1, reply_dtype=reply_dtype, max_step_tokens=tokens) as (transport, (worker,)):
        first = submit(transport)
        half = reply(first, rows(1))
        worker.sendall(half[:cut])

        def read_later() -> None:
            time.sleep(0.2)
            for _ in range(2):
                read_request(worker)

        # A step that fills the socket's buffer: half of the first reply is received while it is being sent.
        reader = threading.Thread(target=read_later)
        reader.start()
        large = submit(transport, tokens)
        reader.join()
        later = [submit(transport) for _ in range(63)]
        with pytest.raises(ValueError, match=f"ticket: got {first}"):
            transport.wait(first)
        worker.sendall(half[cut:])
        threading.Thread(target=worker.sendall, args=(reply(large, rows(*range(tokens))),)).start()
        rounded = as_bf16(rows(*range(tokens))).astype(np.uint32) << 16
        expected = rows(*range(tokens)) if reply_dtype == "f32" else rounded.view(np.float32)
        np.testing.assert_array_equal(transport.wait(large), expected)
        for ticket in later:
            worker.sendall(reply(ticket, rows(ticket)))
            np.testing.assert_array_equal(transport.wait(ticket), rows(ticket))


def test_a_worker_that_answers_and_leaves_has_answered() -> None:
    with fake_workers(2) as (transport, (first, second)):
        ticket = submit(transport)
        for worker in (first, second):
            read_request(worker)
            worker.sendall(reply_frame(ticket, rows(3)))
            worker.close()
        np.testing.assert_array_equal(transport.wait(ticket), rows(6))
        with pytest.raises(WorkerLostError):
            transport.wait(submit(transport))


@pytest.mark.parametrize("size", [1, 7, 24, 39, 41])
def test_replies_in_small_pieces(size: int) -> None:
    with fake_workers(1) as (transport, (worker,)):
        ticket = submit(transport, 3)
        data = reply_frame(ticket, rows(1, 2, 3))

        def trickle() -> None:
            for start in range(0, len(data), size):
                worker.sendall(data[start : start + size])

        thread = threading.Thread(target=trickle)
        thread.start()
        np.testing.assert_array_equal(transport.wait(ticket), rows(1, 2, 3))
        thread.join()


def test_steps_larger_than_the_socket_buffers_do_not_deadlock() -> None:
    """The worker answers each step before it reads the next, so the host must take replies while it sends."""
    tokens, steps = 4000, 6
    with fake_workers(2, max_step_tokens=tokens) as (transport, workers):

        def serve(worker: socket.socket) -> None:
            worker.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            for _ in range(steps):
                _, sequence = read_request(worker)
                worker.sendall(reply_frame(sequence, np.full((tokens, HIDDEN_SIZE), sequence, np.float32)))

        threads = [threading.Thread(target=serve, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        tickets = [submit(transport, tokens) for _ in range(steps)]
        for ticket in reversed(tickets):
            np.testing.assert_array_equal(transport.wait(ticket), np.full((tokens, HIDDEN_SIZE), 2 * ticket))
        for thread in threads:
            thread.join()


def test_close_says_so_and_later_calls_are_refused() -> None:
    with fake_workers(2) as (transport, workers):
        ticket = submit(transport)
        for worker in workers:
            read_request(worker)
        transport.close()
        for worker in workers:
            assert read_frame(worker) == (FrameType.CLOSE, b"", ticket)
            assert read_exactly(worker, 1) == b""
        for call in (lambda: submit(transport), lambda: transport.wait(ticket)):
            with pytest.raises(ClusterError, match="transport: got a step after close"):
                call()
        transport.close()


@pytest.mark.parametrize(
    ("x", "ids", "weights", "sentence"),
    [
        ((0, 6), (0, 2), (0, 2), "step tokens: got 0, expected 1 to 4"),
        ((5, 6), (5, 2), (5, 2), "step tokens: got 5, expected 1 to 4"),
        ((1, 6), (1, 3), (1, 3), "step top_k: got 3, expected 1 to 2"),
        ((1, 5), (1, 2), (1, 2), r"x: got shape \[1, 5\], expected \[1, 6\]"),
        ((2, 6), (1, 2), (2, 2), r"topk_ids: got shape \[1, 2\], expected \[2, 2\]"),
        ((2, 6), (2, 2), (2, 1), r"topk_weights: got shape \[2, 1\], expected \[2, 2\]"),
    ],
)
def test_wrong_shapes_are_refused_and_nothing_is_sent(
    x: tuple[int, int], ids: tuple[int, int], weights: tuple[int, int], sentence: str
) -> None:
    with fake_workers(1) as (transport, (worker,)):
        with pytest.raises(ValueError, match=sentence):
            transport.submit(1, np.ones(x, np.float32), np.ones(ids, np.int32), np.ones(weights, np.float32))
        ticket = submit(transport)
        assert read_request(worker)[1] == ticket
        worker.sendall(reply_frame(ticket, rows(3)))
        np.testing.assert_array_equal(transport.wait(ticket), rows(3))


def _header(payload_bytes: int, sequence: int = 1) -> bytes:
    return _native.encode_frame_header(FrameType.STEP_REPLY, payload_bytes, sequence)


GOOD = reply_frame(1, rows(1))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"X" + GOOD[1:], "magic: got"),
        (GOOD[:4] + b"\7" + GOOD[5:], "protocol version: got 7, expected 4"),
        (_native.encode_frame_header(FrameType.CLOSE, 0), "frame type: got CLOSE, expected STEP_REPLY"),
        (reply_frame(2, rows(1)), "reply sequence: got 2, expected at most 1"),
        (reply_frame(1, rows(1), layer=6), "reply layer: got 6, expected 5"),
        (reply_frame(1, rows(1), lane=3), "reply lane: got 3, expected 0"),
        (reply_frame(1, rows(1, 1)), "reply tokens: got 2, expected 1"),
        (_header(65) + GOOD[24:] + b"\0", "STEP_REPLY payload bytes: got 65, expected 64"),
        (_header(39), "STEP_REPLY payload bytes: got 39, expected 40 to"),
        (GOOD[:38] + b"\1" + GOOD[39:], "reply dtype: got 1, expected 0"),
        (GOOD[:39] + b"\1" + GOOD[40:], "step status: got 1, expected 0"),
        (_native.encode_error_frame(ErrorCode.PROTOCOL, "a sentence"), "it ended the session: a sentence"),
    ],
)
def test_a_wrong_reply_is_an_error_with_address_and_layer(data: bytes, reason: str) -> None:
    with fake_workers(2) as (transport, (first, second)):
        ticket = submit(transport)
        first.sendall(GOOD)
        second.sendall(data)
        with pytest.raises(WorkerLostError) as caught:
            transport.wait(ticket)
        error = caught.value
        assert (error.address, error.layer) == ("127.0.0.1:2", 5)
        assert reason in error.reason
        assert str(error).startswith("worker 127.0.0.1:2 is lost at layer 5: ")


LOSSES: list[tuple[str, Callable[[socket.socket], None], str]] = [
    ("closed", lambda worker: worker.shutdown(socket.SHUT_WR), "it closed the connection"),
    (
        "half",
        lambda worker: (worker.sendall(GOOD[:40]), worker.shutdown(socket.SHUT_WR))[1],
        "it closed the connection",
    ),
    ("silent", lambda _: None, "no answer within 200 ms"),
    ("half and silent", lambda worker: worker.sendall(GOOD[:30]), "no answer within 200 ms"),
]


@pytest.mark.parametrize(
    ("act", "reason"), [entry[1:] for entry in LOSSES], ids=[entry[0] for entry in LOSSES]
)
def test_a_lost_worker_is_named_and_the_others_stay(
    act: Callable[[socket.socket], None], reason: str
) -> None:
    with fake_workers(3, step_timeout_s=0.2) as (transport, workers):
        ticket, other = submit(transport), submit(transport)
        for worker in (workers[0], workers[2]):
            worker.sendall(reply_frame(ticket, rows(1)))
        act(workers[1])
        with pytest.raises(WorkerLostError) as caught:
            transport.wait(ticket)
        assert (caught.value.address, caught.value.layer) == ("127.0.0.1:2", 5)
        assert reason in caught.value.reason
        assert transport.lost() == (1,)
        # Every later call says why; what is submitted goes to the others.
        for call in (lambda: transport.wait(submit(transport, layer=8)), lambda: transport.wait(other)):
            with pytest.raises(WorkerLostError) as again:
                call()
            assert (again.value.address, again.value.reason) == ("127.0.0.1:2", caught.value.reason)
        for worker in (workers[0], workers[2]):
            assert [read_request(worker)[1] for _ in range(3)] == [ticket, other, other + 1]


def test_ctrl_c_ends_a_wait_and_the_transport_goes_on() -> None:
    with fake_workers(1, step_timeout_s=60) as (transport, [worker]):
        stuck = submit(transport)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            transport.wait(stuck)
        timer.join()
        with pytest.raises(ValueError, match="expected one that is in flight"):
            transport.wait(stuck)
        ticket = submit(transport)
        worker.sendall(reply_frame(stuck, rows(7)) + reply_frame(ticket, rows(1)))
        np.testing.assert_array_equal(transport.wait(ticket), rows(1))


def test_a_worker_that_takes_nothing_is_lost() -> None:
    limits = {"step_timeout_s": 1.0, "submit_timeout_s": 0.05, "max_step_tokens": 40000}
    with fake_workers(2, **limits) as (transport, (first, _)):

        def serve() -> None:
            _, sequence = read_request(first)
            first.sendall(reply_frame(sequence, np.zeros((40000, HIDDEN_SIZE), np.float32)))

        reader = threading.Thread(target=serve)
        reader.start()
        ticket = submit(transport, 40000)
        with pytest.raises(WorkerLostError, match="no answer within 1000 ms") as caught:
            transport.wait(ticket)
        assert (caught.value.address, caught.value.layer) == ("127.0.0.1:2", 5)
        reader.join(20)


def test_what_a_worker_said_before_it_closed_is_told() -> None:
    with fake_workers(1) as (transport, (worker,)):
        worker.sendall(_native.encode_error_frame(ErrorCode.TIMEOUT, "too slow"))
        worker.close()
        ticket = submit(transport)
        with pytest.raises(WorkerLostError, match="lost at layer 5: it ended the session: too slow"):
            transport.wait(ticket)


def test_no_worker_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="workers: got 0"):
        _native.Transport([], hidden_size=1, top_k=1, max_step_tokens=1)
    ours, theirs = socket.socketpair()
    with theirs:
        with pytest.raises(ValueError, match="max_step_tokens: got 100000000, expected steps under 1 GiB"):
            _native.Transport([ours.detach()], hidden_size=7168, top_k=8, max_step_tokens=100000000)
        assert read_exactly(theirs, 1) == b""  # it had taken the socket over


def test_times_are_means_over_the_last_steps_and_can_be_read_while_one_is_waited_for() -> None:
    with fake_workers(2) as (transport, ends):

        def take_step(layer: int, compute_us: tuple[int, int], num_tokens: int = 1) -> None:
            ticket = submit(transport, num_tokens, layer=layer)
            for end, us in zip(ends, compute_us, strict=True):
                _, sequence = read_request(end)
                y = np.ones((num_tokens, HIDDEN_SIZE), np.float32)
                end.sendall(reply_frame(sequence, y, layer=layer, compute_us=us))
            transport.wait(ticket)

        assert transport.step_times() == ()
        take_step(7, (100, 1000))
        take_step(5, (9, 9))
        take_step(7, (300, 3000), num_tokens=4)
        times = {each.layer: each for each in transport.step_times()}
        assert {layer: each.num_steps for layer, each in times.items()} == {7: 2, 5: 1}
        assert (times[7].compute_us, times[7].tokens) == ([200.0, 2000.0], 2.5)
        assert times[5].compute_us == [9.0, 9.0]
        for each in times.values():
            for trip_us, wait_us in zip(each.round_trip_us, each.wait_us, strict=True):
                assert 0 < wait_us < trip_us
        for _ in range(1000):
            take_step(5, (137, 0))
        (five,) = (each for each in transport.step_times() if each.layer == 5)
        np.testing.assert_allclose(five.compute_us, [137, 0], rtol=1e-4, atol=1e-4)

        ticket = submit(transport, layer=5)
        waiting = threading.Thread(target=transport.wait, args=(ticket,))
        waiting.start()
        assert [each.num_steps for each in transport.step_times()] == [2, 1001]
        assert waiting.is_alive()
        for end in ends:
            _, sequence = read_request(end)
            end.sendall(reply_frame(sequence, rows(1), layer=5))
        waiting.join(20)
        assert [each.num_steps for each in transport.step_times()] == [2, 1002]


def test_a_step_that_was_sent_again_is_in_no_mean() -> None:
    with fake_workers(1) as (transport, _):
        ticket = submit(transport)
        ours, theirs = socket.socketpair()
        with theirs:
            transport.replace(0, FakeConnection(9, ours))  # type: ignore[arg-type]
            _, sequence = read_request(theirs)
            theirs.sendall(reply_frame(sequence, rows(1), compute_us=5))
            transport.wait(ticket)
            assert transport.last_compute_us() == (5,)
            assert transport.step_times() == ()
