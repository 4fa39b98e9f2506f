"""Workers started here take their steps from shared memory: the same bits, and nothing left of it."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from duckllm import _native
from duckllm.cluster.local import LocalCluster
from duckllm.cluster.shared_memory import SharedChannel
from duckllm.config import ClusterConfig
from duckllm.errors import WorkerLostError
from worker_harness import expected_sum, make_model, make_step, open_transport, plan_for


def shared_mappings(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:duckllm")


@pytest.mark.parametrize("spin_us", [0, 200])
def test_steps_have_the_bits_that_a_connection_gives(tmp_path: Path, spin_us: int) -> None:
    model = make_model(tmp_path / "model")
    plans = plan_for(model, 2)
    steps = [make_step(model, 1 + seed % 8, layer=(1, 3)[seed % 2], seed=seed) for seed in range(8)]
    for shared in (True, False):
        config = ClusterConfig(workers=2, threads_per_worker=1, shared_memory=shared, spin_us=spin_us)
        with LocalCluster(config) as cluster:
            for _ in range(2):  # a second visit finds the memory empty
                with open_transport(cluster.connect(plans), spin_us=spin_us) as transport:
                    expected = ("shared memory",) * 2 if shared else ("TCP, ",) * 2
                    for words, start in zip(transport.describe(), expected, strict=True):
                        assert words.startswith(start)
                    assert [shared_mappings(pid) for pid in cluster.pids] == [int(shared)] * 2
                    tickets = [transport.submit(s.layer, s.x, s.topk_ids, s.topk_weights) for s in steps]
                    for ticket, step in reversed(list(zip(tickets, steps, strict=True))):
                        np.testing.assert_array_equal(
                            transport.wait(ticket), expected_sum(model, plans, step)
                        )
                    unanswered = steps[0]
                    transport.submit(1, unanswered.x, unanswered.topk_ids, unanswered.topk_weights)
    assert shared_mappings(os.getpid()) == 0


def test_a_killed_worker_is_lost_and_another_takes_its_place(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    plans = plan_for(model, 2)
    step = make_step(model, 3)
    arguments = (step.layer, step.x, step.topk_ids, step.topk_weights)
    with LocalCluster(ClusterConfig(workers=2, threads_per_worker=1)) as cluster:
        with open_transport(cluster.connect(plans)) as transport:
            os.kill(cluster.pids[1], signal.SIGKILL)
            with pytest.raises(WorkerLostError, match=r"closed the connection|connection failed"):
                transport.wait(ticket := transport.submit(*arguments))
            transport.replace(1, cluster.replace(1, time.monotonic() + 20))
            assert transport.describe() == ("shared memory",) * 2
            np.testing.assert_array_equal(transport.wait(ticket), expected_sum(model, plans, step))
        # The memory of the lost one went with it.
        assert shared_mappings(os.getpid()) == 0


def test_memory_has_no_name_and_nobody_else_may_open_it() -> None:
    before = set(os.listdir("/dev/shm"))
    channel = SharedChannel()
    memory, *bells = channel.descriptors
    assert set(os.listdir("/dev/shm")) == before
    assert os.fstat(memory).st_nlink == 0
    assert not any(os.get_inheritable(each) for each in (memory, *bells))
    with pytest.raises(PermissionError):
        os.ftruncate(memory, 4096)  # an end that it is taken from would die of SIGBUS
    channel.close()
    channel.close()


def test_what_is_no_such_memory_is_refused() -> None:
    plain = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    try:
        with pytest.raises(ValueError, match="shared memory: got 0 bytes, expected 33558528, sealed"):
            _native.SharedMemory(is_host=True, memory_fd=plain, my_bell_fd=plain, their_bell_fd=plain)
    finally:
        os.close(plain)
    with pytest.raises(RuntimeError, match="shared memory"):
        _native.SharedMemory(is_host=True, memory_fd=-1, my_bell_fd=-1, their_bell_fd=-1)


def test_a_tcp_connection_says_what_is_set_of_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with theirs:
        watched = ours.dup()
        transport = _native.Transport([ours.detach()], hidden_size=1, top_k=1, max_step_tokens=1)
        with watched:
            assert watched.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            assert watched.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
            name = watched.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
        (words,) = transport.describe()
        assert words.startswith(f"TCP, {name}, ")
        transport.close()
        assert transport.describe() == ["lost"]
