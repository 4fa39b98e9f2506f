"""The processes of round_trip.py: a worker of ours, and both ends of each peer.

Called by round_trip.py as a program, a peer's in an environment of its own; imports only what one end needs.

    transport_sides.py duckllm FD SPIN_US CORE [MEMORY BELL BELL]
    transport_sides.py gloo|zmq|mpi OUT_BYTES BACK_BYTES [worker ADDRESS]

A peer's host end reads numbers of steps, one a line, and answers each with a JSON list of nanoseconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

HIDDEN_SIZE, LAYER, WARM_UP, MAX_STEP_TOKENS = 7168, 0, 20, 4


def keep_core(number: int) -> None:
    """Stays on one core: the host's end on the first, workers on the next ones, as if on other machines.

    Where the system may choose it now puts both on one core, where waking costs little, and now does not.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


def sample(step: Callable[[], None], count: int) -> list[int]:
    """Nanoseconds of each of so many steps, after a few that do not count."""
    times = []
    for number in range(-WARM_UP, count):
        start = time.perf_counter_ns()
        step()
        if number >= 0:
            times.append(time.perf_counter_ns() - start)
    return times


def answer_samples(step: Callable[[], None]) -> None:
    """The host end of a peer."""
    print('"ready"', flush=True)
    for line in sys.stdin:
        print(json.dumps(sample(step, int(line))), flush=True)


def expert_settings() -> dict[str, Any]:
    """One expert of one stripe: the least that a worker can compute."""
    return {
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 16,
        "num_experts": 1,
        "top_k": 1,
        "first_stripe": 0,
        "num_stripes": 1,
        "num_threads": 1,
        "format": "fp8",
    }


def expert_units() -> Any:
    """Its weights, [1, 1, unit_bytes] u8: every scale is 1/64."""
    import numpy as np

    from duckllm.weights.formats import unit_bytes

    num_scales = 3 * HIDDEN_SIZE // 128
    units = np.zeros((1, 1, unit_bytes(HIDDEN_SIZE, "fp8", "block")), np.uint8)
    units[..., 4 * num_scales :] = np.random.default_rng(0).integers(
        0x20, 0x40, units.shape[2] - 4 * num_scales
    )
    units[..., : 4 * num_scales] = np.full(num_scales, 1 / 64, np.float32).view(np.uint8)
    return units


def duckllm(descriptor: int, spin_us: int, shared: list[int]) -> None:
    """Our worker: the native step loop as worker processes run it."""
    from duckllm import _native
    from duckllm.cluster.shared_memory import worker_end

    server = _native.StepServer(**expert_settings(), max_step_tokens=MAX_STEP_TOKENS, spin_us=spin_us)
    server.add_layer(LAYER, expert_units())
    memory = worker_end(shared) if shared else None
    if memory is not None:
        memory.reset()
    print(flush=True)
    server.serve(descriptor, memory)


def gloo(out_bytes: int, back_bytes: int, address: str | None) -> None:
    """The calls send and recv of torch.distributed; a broadcast and a reduction take longer."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    is_worker = address is not None
    if address is None:
        address = tempfile.mktemp()
        start_worker("gloo", out_bytes, back_bytes, address)
    keep_core(int(is_worker))
    dist.init_process_group("gloo", init_method=f"file://{address}", rank=int(is_worker), world_size=2)
    out, back = (torch.zeros(size, dtype=torch.uint8) for size in (out_bytes, back_bytes))

    def step() -> None:
        dist.send(out, 1)
        dist.recv(back, 1)

    if not is_worker:
        return answer_samples(step)
    while True:
        dist.recv(out, 0)
        dist.send(back, 0)


def zmq(out_bytes: int, back_bytes: int, address: str | None) -> None:
    """DEALER and ROUTER of ZeroMQ over TCP."""
    import zmq as zeromq

    context = zeromq.Context()
    out, back = bytes(out_bytes), bytes(back_bytes)
    if address is not None:
        keep_core(1)
        socket = context.socket(zeromq.DEALER)
        socket.connect(address)
        socket.send(b"")
        while True:
            socket.recv()
            socket.send(back, copy=False)
    socket = context.socket(zeromq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    start_worker("zmq", out_bytes, back_bytes, f"tcp://127.0.0.1:{port}")
    keep_core(0)
    name, _ = socket.recv_multipart()

    def step() -> None:
        socket.send_multipart([name, out], copy=False)
        _, got = socket.recv_multipart(copy=False)
        assert len(got) == back_bytes

    answer_samples(step)


def mpi(out_bytes: int, back_bytes: int, address: str | None) -> None:
    """Send and Recv of mpi4py; mpirun starts both ends."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    keep_core(world.Get_rank())
    out, back = bytearray(out_bytes), bytearray(back_bytes)

    def step() -> None:
        world.Send(out, 1)
        world.Recv(back, 1)

    if world.Get_rank() == 0:
        return answer_samples(step)
    while True:
        world.Recv(out, 0)
        world.Send(back, 0)


def start_worker(peer: str, out_bytes: int, back_bytes: int, address: str) -> None:
    """The other end, in the same process group: it is stopped and killed with this one."""
    words = [peer, str(out_bytes), str(back_bytes), "worker", address]
    subprocess.Popen([sys.executable, __file__, *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    kind, first, second = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if kind == "duckllm":
        keep_core(int(sys.argv[4]))
        duckllm(first, second, [int(word) for word in sys.argv[5:]])
    else:
        {"gloo": gloo, "zmq": zmq, "mpi": mpi}[kind](first, second, sys.argv[5] if sys.argv[5:] else None)
