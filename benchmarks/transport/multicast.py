"""Requests by multicast beside requests over connections, where the host's uplink is the limit.

    sudo python benchmarks/transport/multicast.py [--workers 4] [--gbit 1 2.5] [--mtu 1500 9000]
                                                  [--loss 0 0.001] [--tokens 1 4 64] [--rounds 15]
                                                  [--steps 40] [--all-links] [--reply-dtype f32] [--json FILE]

Needs root, for network namespaces, and the command ip. A step sends x of 7168 bf16 numbers a token to each
worker and gets as many in f32 back from each: 14 KiB out and 28 KiB back for one token. For each link speed,
MTU and loss the program

1. makes one namespace for the host and one for each worker, behind one bridge; the host's uplink is shaped by
   tbf (with ``--all-links`` every link, both ways), and each end of the workers' links loses packets by
   chance (classic BPF in the kernel), whatever they carry,
2. starts workers of ours there, the native step loop on the smallest expert there is: each has one process
   that gets its requests over its connection and one that gets them by multicast too,
3. verifies that both give the bits of the native experts, added in worker order,
4. measures both in turns, ``--steps`` steps each in ``--rounds`` rounds; what workers compute is taken from
   each step's time by their own clocks, the slowest's,
5. prints the medians, the 99th percentile, the bytes on the uplink for each step, the time that the requests
   take on the uplink alone (the ceiling), and the ratio of the two ways; in the end one JSON line.

Before them it prints what a datagram's tag costs. The namespaces are removed whatever happens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np
from transport_sides import HIDDEN_SIZE, LAYER, expert_settings, expert_units

from duckllm import _native
from duckllm.bench.machine import commit, cpu_name
from duckllm.cluster.address import Address
from duckllm.cluster.multicast import HostMulticast, join_group
from duckllm.cluster.plan import MulticastPlan
from duckllm.transport.transport import Transport

PREFIX = f"multicast-{os.getpid()}"
GROUP, PORT, TOKEN = "239.77.0.1:7400", 7300, "a benchmark's"
MAX_STEP_TOKENS, WARM_UP, ANSWER_TIMEOUT_S = 256, 5, 120
REQUEST_HEAD_BYTES = _native.FRAME_HEADER_BYTES + _native.STEP_HEADER_BYTES


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--gbit", type=float, nargs="+", default=[1, 2.5])
    parser.add_argument("--mtu", type=int, nargs="+", default=[1500, 9000])
    parser.add_argument("--loss", type=float, nargs="+", default=[0, 0.001])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 64], help=f"1 to {MAX_STEP_TOKENS}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--all-links", action="store_true", help="shape every link, both ways")
    parser.add_argument("--reply-dtype", default="f32", choices=["f32", "bf16"])
    parser.add_argument("--json", type=Path, help="append the JSON line to this file")
    return parser.parse_args()


def run(words: str) -> str:
    done = subprocess.run(words.split(), capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{words}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def namespaces(num_workers: int) -> Iterator[list[str]]:
    """The host's and the workers' namespaces, at 10.77.0.1 and on, behind a bridge in one of its own."""
    switch, ends = f"{PREFIX}-switch", [f"{PREFIX}-host", *(f"{PREFIX}-{i}" for i in range(num_workers))]
    try:
        run(f"ip netns add {switch}")
        run(f"ip -n {switch} link add bridge type bridge mcast_snooping 0")
        run(f"ip -n {switch} link set bridge mtu 9000 up")
        for number, name in enumerate(ends):
            run(f"ip netns add {name}")
            run(f"ip -n {name} link add uplink type veth peer name port{number} netns {switch}")
            run(f"ip -n {switch} link set port{number} master bridge mtu 9000 up")
            run(f"ip -n {name} addr add 10.77.0.{number + 1}/24 dev uplink")
            run(f"ip -n {name} link set lo up")
            run(f"ip -n {name} link set uplink up")
        yield ends
    finally:
        for name in (*ends, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def shape(ends: Sequence[str], gbit: float, mtu: int, loss: float, all_links: bool) -> None:
    """Sets what the links are from now on."""
    tbf = f"root tbf rate {1000 * gbit:.0f}mbit burst {max(10_000, 2 * mtu)} limit 2000000"
    # ld rand; jge #loss; ret ok; ret shot
    drop = f"4,32 0 0 4294963256,53 0 1 {round(loss * 2**32)},6 0 0 0,6 0 0 2"
    for number, name in enumerate(ends):
        port = f"ip netns exec {PREFIX}-switch tc qdisc"
        run(f"ip -n {name} link set uplink mtu {mtu}")
        for where, device in (
            *([(f"ip netns exec {name} tc qdisc", "uplink")] if number == 0 or all_links else []),
            *([(port, f"port{number}")] if all_links else []),
        ):
            run(f"{where} replace dev {device} {tbf}")
        if number > 0:
            for where, device in (
                (f"ip netns exec {name} tc", "uplink"),
                (f"ip netns exec {PREFIX}-switch tc", f"port{number}"),
            ):
                subprocess.run(f"{where} qdisc del dev {device} clsact".split(), capture_output=True)
                if loss > 0:
                    run(f"{where} qdisc add dev {device} clsact")
                    command = f"{where} filter add dev {device} ingress bpf da bytecode".split()
                    subprocess.run([*command, drop], check=True)


class Side:
    """A process of this program in a namespace, which is told things and answers, a line of JSON each."""

    def __init__(self, namespace: str, *words: object) -> None:
        command = ["ip", "netns", "exec", namespace, sys.executable, __file__, *map(str, words)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def answer(self) -> Any:
        """What it says next."""
        output: IO[bytes] | None = self.process.stdout
        assert output is not None
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            line = output.readline() if selector.select(ANSWER_TIMEOUT_S) else b""
        if not line:
            raise SystemExit("a process of this benchmark died or does not answer: nothing measured")
        return json.loads(line)

    def close(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def worker(port: int) -> None:
    """Serves one host after another: a line says the plan of its group, or null."""
    server = _native.StepServer(**expert_settings(), max_step_tokens=MAX_STEP_TOKENS)
    server.add_layer(LAYER, expert_units())
    with socket.create_server(("0.0.0.0", port)) as listener:
        print("true", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                with connection.makefile("rb") as lines:
                    plan = json.loads(lines.readline())
                ear, room_bytes = None, 0
                if plan is not None:
                    local = connection.getsockname()[0]
                    ear, room_bytes = join_group(MulticastPlan(**plan), local, TOKEN)
                connection.sendall(b"%20d" % room_bytes)
                server.serve(connection.fileno(), None, ear)


class Prepared:
    """What a transport takes of a connection to such a worker."""

    def __init__(self, connection: socket.socket, plan: MulticastPlan | None) -> None:
        connection.sendall(json.dumps(None if plan is None else asdict(plan)).encode() + b"\n")
        self.multicast_bytes = int(connection.recv(20, socket.MSG_WAITALL))
        self.address = Address(*connection.getpeername())
        self.detach_socket = connection.detach
        self.memory = None


def open_transport(num_workers: int, by_multicast: bool, reply_dtype: str) -> Transport:
    port = PORT + by_multicast
    sockets = [socket.create_connection((f"10.77.0.{number + 2}", port)) for number in range(num_workers)]
    local = [each.getsockname()[0] for each in sockets]
    multicast = HostMulticast(GROUP, local, TOKEN) if by_multicast else None
    connections = [Prepared(each, None if multicast is None else multicast.plan) for each in sockets]
    return Transport(
        connections,  # type: ignore[arg-type]
        HIDDEN_SIZE,
        1,
        max_step_tokens=MAX_STEP_TOKENS,
        wire_dtype="bf16",
        reply_dtype=reply_dtype,
        multicast=multicast,
    )


def step_inputs(num_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows that bf16 holds exactly, expert 0, and weights."""
    x = np.random.default_rng(num_tokens).integers(-8, 9, (num_tokens, HIDDEN_SIZE)).astype(np.float32)
    return x, np.zeros((num_tokens, 1), np.int32), np.full((num_tokens, 1), 0.5, np.float32)


def verify(transports: dict[str, Transport], num_tokens: int, reply_dtype: str) -> None:
    """Both ways give the bits of the native experts in this process, added in worker order."""
    x, ids, weights = step_inputs(num_tokens)
    experts = _native.Experts(**expert_settings(), max_tokens=MAX_STEP_TOKENS, spin_us=0)
    alone = experts.run(expert_units(), x, ids, weights)
    if reply_dtype == "bf16":
        bits = alone.view(np.uint32)
        alone = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
    for name, transport in transports.items():
        expected = alone.copy()
        for _ in transport.multicast_counts().is_reached[1:]:
            expected += alone
        for _ in range(3):
            got = transport.wait(transport.submit(LAYER, x, ids, weights))
            if not np.array_equal(got, expected) or not np.abs(expected).max() > 0:
                raise SystemExit(f"{name}: the sum differs from the native experts': nothing measured")


def sent_bytes() -> int:
    return int(Path("/sys/class/net/uplink/statistics/tx_bytes").read_text())


def host(num_workers: int, reply_dtype: str, rounds: int, steps: int, *tokens: int) -> None:
    """Measures; one line of JSON for each number of tokens, and one before them that says how it is sent."""
    ways = {"TCP": False, "multicast": True}
    transports = {name: open_transport(num_workers, way, reply_dtype) for name, way in ways.items()}
    print(json.dumps(transports["multicast"].describe()[0]), flush=True)
    for num_tokens in tokens:
        verify(transports, num_tokens, reply_dtype)
        x, ids, weights = step_inputs(num_tokens)
        times: dict[str, list[float]] = {name: [] for name in ways}
        uplink = dict.fromkeys(ways, 0)
        asked_before = sum(transports["multicast"].multicast_counts().num_asked)
        num_steps = max(3, steps // (1 + num_tokens // 8))
        for _ in range(rounds):
            for name, transport in transports.items():
                for number in range(-WARM_UP, num_steps):
                    if number == 0:
                        before = sent_bytes()
                    start = time.perf_counter_ns()
                    transport.wait(transport.submit(LAYER, x, ids, weights))
                    passed_us = (time.perf_counter_ns() - start) / 1000
                    if number >= 0:
                        times[name].append(passed_us - max(transport.last_compute_us()))
                uplink[name] += sent_bytes() - before
        counts = transports["multicast"].multicast_counts()
        taken = rounds * (num_steps + WARM_UP)
        figures: dict[str, Any] = {
            name: {
                "p50_us": round(statistics.median(values), 1),
                "p99_us": round(statistics.quantiles(values, n=100)[98], 1),
                "mean_us": round(statistics.fmean(values), 1),
                "uplink_bytes": round(uplink[name] / (rounds * num_steps)),
            }
            for name, values in times.items()
        }
        figures["asked_per_step"] = round((sum(counts.num_asked) - asked_before) / taken, 3)
        figures["is_reached"] = all(counts.is_reached)
        print(json.dumps(figures), flush=True)
    for transport in transports.values():
        transport.close()


def tag_ns_per_kib() -> float:
    """What making a datagram with its tag costs, nanoseconds a KiB; Python's own call is taken off."""
    session = _native.MulticastSession(1, bytes(16), 1432)
    times = []
    for frame in (bytes(8), bytes(1432)):
        best = []
        for _ in range(200):
            start = time.perf_counter_ns()
            session.encode_datagram(1, frame, 0)
            best.append(time.perf_counter_ns() - start)
        times.append(statistics.median(best))
    return (times[1] - times[0]) / (1424 / 1024)


def report(figures: dict[str, Any], num_tokens: int, gbit: float, num_workers: int) -> None:
    request_bytes = REQUEST_HEAD_BYTES + num_tokens * (8 + 2 * HIDDEN_SIZE)
    for name, copies in (("TCP", num_workers), ("multicast", 1)):
        each = figures[name]
        wire_us = copies * request_bytes * 8 / (1000 * gbit)
        print(
            f"  {num_tokens:3d} tokens {name:9s} p50 {each['p50_us']:9.1f} us  p99 {each['p99_us']:9.1f}  "
            f"uplink {each['uplink_bytes']:9,d} bytes a step, at least {wire_us:8.1f} us",
            flush=True,
        )
    ratio = figures["TCP"]["p50_us"] / figures["multicast"]["p50_us"]
    fewer = figures["TCP"]["uplink_bytes"] / figures["multicast"]["uplink_bytes"]
    lost = "" if figures["is_reached"] else ", NOT REACHED"
    print(
        f"             TCP takes {ratio:.2f} times as long and {fewer:.2f} times the bytes; "
        f"{figures['asked_per_step']} fragments a step asked for again{lost}",
        flush=True,
    )


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        return worker(int(sys.argv[2]))
    if sys.argv[1:2] == ["host"]:
        return host(int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
    arguments = parse_arguments()
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root: nothing measured")
    tag_ns = tag_ns_per_kib()
    print(f"a tag takes {tag_ns:.0f} ns a KiB, {1024 / tag_ns:.2f} GB/s")
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        ends = stack.enter_context(namespaces(arguments.workers))
        for mtu in arguments.mtu:
            for gbit in arguments.gbit:
                for loss in arguments.loss:
                    shape(ends, gbit, mtu, loss, arguments.all_links)
                    name = f"{gbit:g} Gbit/s, MTU {mtu}, loss {loss:g}"
                    results[name] = measure(ends, arguments, name, gbit)
    line = json.dumps(
        {
            "benchmark": "multicast",
            "commit": commit(),
            "cpu": cpu_name(),
            "workers": arguments.workers,
            "all_links": arguments.all_links,
            "reply_dtype": arguments.reply_dtype,
            "tag_ns_per_kib": round(tag_ns),
            **results,
        }
    )
    print(line)
    if arguments.json is not None:
        with arguments.json.open("a") as file:
            file.write(line + "\n")


def measure(ends: Sequence[str], arguments: argparse.Namespace, name: str, gbit: float) -> dict[str, Any]:
    """One kind of links."""
    results = {}
    with ExitStack() as stack:
        for end in ends[1:]:
            for port in (PORT, PORT + 1):
                side = stack.enter_context(contextlib.closing(Side(end, "worker", port)))
                side.answer()
        words = [len(ends) - 1, arguments.reply_dtype, arguments.rounds, arguments.steps, *arguments.tokens]
        side = stack.enter_context(contextlib.closing(Side(ends[0], "host", *words)))
        print(f"{name}: {side.answer()}", flush=True)
        for num_tokens in arguments.tokens:
            figures = side.answer()
            report(figures, num_tokens, gbit, len(ends) - 1)
            results[f"{num_tokens} tokens"] = figures
    return results


if __name__ == "__main__":
    main()
