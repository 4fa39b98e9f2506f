"""Requests by multicast beside requests over connections, where the host's uplink is the limit.

    sudo python benchmarks/transport/multicast.py [--workers 4] [--mbit 1000 2500] [--mtu 1500 9000]
                                                  [--loss 0 0.001] [--tokens 1 4 64] [--rounds 15]
                                                  [--steps 40] [--all-links] [--json FILE]

Needs root, and ``ip`` and ``tc`` (iproute2). A step sends x of 7168 bf16 numbers a token to each worker and
gets as many in f32 back from each: 14 KiB out and 28 KiB back for one token. namespaces_network.py makes the
network, a host and workers behind one switch, whose only slow link is the host's uplink (with
``--all-links`` every link, both ways); it is removed in the end. For each speed, MTU and loss the program

1. starts workers of ours, the native step loop on the smallest expert there is: on each machine one that gets
   its requests over its connection, and one that gets them by multicast too,
2. verifies that both ways give the bits of the native experts, added in worker order,
3. measures both in turns, ``--steps`` steps each (fewer of many tokens) in ``--rounds`` rounds; what workers
   compute is taken from each step's time by their own clocks, the slowest's,
4. prints the medians, the 99th percentile, the bytes on the uplink for each step, the time that the requests
   take there alone (the ceiling), and the ratio of the two ways; in the end one JSON line.

First of all it prints what a datagram's tag costs. All machines share the cores of this one: believe the
ratios, and the bytes.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from namespaces_network import HOST, Network, check_rights, inside, run
from result_line import print_result
from round_trip import HEADER_BYTES, Prepared, Sampler, our_samplers, verify
from transport_sides import HIDDEN_SIZE, LAYER, WARM_UP, expert_settings, expert_units, keep_core

from duckllm import _native
from duckllm.cluster.multicast import HostMulticast, join_group
from duckllm.cluster.plan import MulticastPlan
from duckllm.transport.transport import Transport

GROUP, TOKEN = "239.77.0.1:7400", "a benchmark's"
MAX_STEP_TOKENS, MANY_TOKENS = 256, 8
WAYS = ("TCP", "multicast")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--mbit", type=int, nargs="+", default=[1000, 2500])
    parser.add_argument("--mtu", type=int, nargs="+", default=[1500, 9000])
    parser.add_argument("--loss", type=float, nargs="+", default=[0, 0.001])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 64], help=f"1 to {MAX_STEP_TOKENS}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--all-links", action="store_true", help="slow every link down, both ways")
    parser.add_argument("--json", type=Path, help="append the JSON line to this file")
    return parser.parse_args()


def worker(descriptor: int, core: int, plan: str) -> None:
    """A worker's process: the native step loop, with an ear to a group where there is a plan of one."""
    keep_core(core)
    server = _native.StepServer(**expert_settings(), max_step_tokens=MAX_STEP_TOKENS)
    server.add_layer(LAYER, expert_units())
    ear, room_bytes = None, 0
    if fields := json.loads(plan):
        with socket.socket(fileno=descriptor) as connection:
            ear, room_bytes = join_group(MulticastPlan(**fields), connection.getsockname()[0], TOKEN)
            connection.detach()
    print(room_bytes, flush=True)
    server.serve(descriptor, None, ear)


@contextmanager
def workers_over(network: Network, way: str) -> Iterator[Transport]:
    """A transport to workers in processes of their own, one on each machine but the host."""
    ours, theirs = [], []
    for machine in network.workers:
        with inside(machine):
            listener = socket.create_server((network.address(machine), 0))
        with listener, inside(HOST):
            ours.append(socket.create_connection(listener.getsockname()))
            theirs.append(listener.accept()[0])
    multicast = None
    if way == "multicast":
        with inside(HOST):
            multicast = HostMulticast(GROUP, [each.getsockname()[0] for each in ours], TOKEN)
    plan = json.dumps(None if multicast is None else asdict(multicast.plan))
    connections, processes = [], []
    for number, (machine, mine, its) in enumerate(zip(network.workers, ours, theirs, strict=True)):
        words = [sys.executable, __file__, "worker", str(its.fileno()), str(number + 1), plan]
        with its, inside(machine):
            process = subprocess.Popen(words, stdout=subprocess.PIPE, pass_fds=[its.fileno()])
        processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("a worker did not start: nothing measured")
        connections.append(Prepared(mine, None))
        connections[-1].multicast_bytes = int(line)
    transport = Transport(
        connections,  # type: ignore[arg-type]
        HIDDEN_SIZE,
        1,
        max_step_tokens=MAX_STEP_TOKENS,
        wire_dtype="bf16",
        multicast=multicast,
    )
    try:
        yield transport
    finally:
        transport.close()
        for process in processes:
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()


def uplink_bytes() -> int:
    """What the host has sent so far, frames of Ethernet."""
    (link,) = json.loads(run("ip", "-n", HOST, "-j", "-s", "link", "show", "eth0"))
    return int(link["stats64"]["tx"]["bytes"])


def measure(transports: dict[str, Transport], num_tokens: int, rounds: int, steps: int) -> dict[str, Any]:
    """Both ways in turns."""
    samplers: dict[str, Sampler] = {}
    for way, transport in transports.items():
        verify(transport, len(transport.describe()), num_tokens)
        samplers[way] = our_samplers(transport, num_tokens)["ours"]
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    sent = dict.fromkeys(WAYS, 0)
    count = max(3, steps * MANY_TOKENS // (MANY_TOKENS + num_tokens) if num_tokens > MANY_TOKENS else steps)
    asked_before = sum(transports["multicast"].multicast_counts().num_asked)
    for _ in range(rounds):
        for way, sampler in samplers.items():
            before = uplink_bytes()
            times[way] += sampler(count)
            sent[way] += uplink_bytes() - before
    counts, num_steps = transports["multicast"].multicast_counts(), rounds * (count + WARM_UP)
    figures: dict[str, Any] = {
        way: {
            "p50_us": round(statistics.median(times[way]), 1),
            "mean_us": round(statistics.fmean(times[way]), 1),
            "p99_us": round(statistics.quantiles(times[way], n=100)[98], 1),
            "uplink_bytes": round(sent[way] / num_steps),
        }
        for way in WAYS
    }
    figures["asked_per_step"] = round((sum(counts.num_asked) - asked_before) / num_steps, 3)
    figures["is_reached"] = all(counts.is_reached)
    return figures


def report(figures: dict[str, Any], num_tokens: int, mbit_per_s: int, num_workers: int) -> None:
    request_bytes = HEADER_BYTES + num_tokens * (8 + 2 * HIDDEN_SIZE)
    for way, copies in zip(WAYS, (num_workers, 1), strict=True):
        each, wire_us = figures[way], copies * request_bytes * 8 / mbit_per_s
        print(
            f"  {num_tokens:3d} tokens {way:9s} p50 {each['p50_us']:9.1f} us  p99 {each['p99_us']:9.1f}  "
            f"uplink {each['uplink_bytes']:9,d} bytes a step, requests at least {wire_us:8.1f} us",
            flush=True,
        )
    tcp, multicast = (figures[way] for way in WAYS)
    print(
        f"             TCP takes {tcp['p50_us'] / multicast['p50_us']:.2f} times as long and "
        f"{tcp['uplink_bytes'] / multicast['uplink_bytes']:.2f} times the bytes; "
        f"{figures['asked_per_step']} fragments a step asked for again"
        + ("" if figures["is_reached"] else "; NOT EVERY WORKER REACHED"),
        flush=True,
    )


def tag_ns_per_kib() -> float:
    """What making a datagram with its tag costs, nanoseconds a KiB; Python's own call is taken off."""
    session = _native.MulticastSession(1, bytes(16), 1432)
    medians = []
    for frame in (bytes(8), bytes(1432)):
        times = []
        for _ in range(200):
            start = time.perf_counter_ns()
            session.encode_datagram(1, frame, 0)
            times.append(time.perf_counter_ns() - start)
        medians.append(statistics.median(times))
    return (medians[1] - medians[0]) / (1424 / 1024)


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        return worker(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    arguments = parse_arguments()
    check_rights()
    tag_ns = tag_ns_per_kib()
    print(f"a tag takes {tag_ns:.0f} ns a KiB, {1024 / tag_ns:.2f} GB/s")
    results: dict[str, Any] = {}
    for mbit_per_s in arguments.mbit:
        with Network(arguments.workers, mbit_per_s, uplink_only=not arguments.all_links) as network:
            for mtu in arguments.mtu:
                network.set_loss(0)
                network.set_mtu(mtu)
                with ExitStack() as stack:
                    transports = {way: stack.enter_context(workers_over(network, way)) for way in WAYS}
                    print(f"MTU {mtu}: {transports['multicast'].describe()[0]}")
                    for loss in arguments.loss:
                        network.set_loss(loss)
                        name = f"{mbit_per_s} Mbit/s, MTU {mtu}, loss {100 * loss:g} %"
                        print(name)
                        results[name] = {}
                        for num_tokens in arguments.tokens:
                            rounds, steps = arguments.rounds, arguments.steps
                            figures = measure(transports, num_tokens, rounds, steps)
                            report(figures, num_tokens, mbit_per_s, arguments.workers)
                            results[name][f"{num_tokens} tokens"] = figures
    settings = {
        "workers": arguments.workers,
        "all_links": arguments.all_links,
        "tag_ns_per_kib": round(tag_ns),
    }
    print_result("multicast", {**settings, **results}, arguments.json)


if __name__ == "__main__":
    main()
