"""The whole path over a network: one host and four workers in namespaces of their own, links of 2.5 Gbit/s.

    sudo python benchmarks/transport/namespaces.py [--rounds 5] [--steps 200] [--questions 24] [--seed 0]
                                                   [--json FILE]

Needs root, ``ip`` and ``tc`` (iproute2) and ``cc``. namespaces_network.py makes the network; it is removed in
the end. The program

1. verifies the network: what share of datagrams is lost, without loss and with,
2. asks the demo model ``--questions`` of its questions, drawn with ``--seed``, on workers of this machine,
   then over the network in every condition: every answer has to be the same tokens,
3. measures in turns, for each MTU and loss: tokens a second of a reply of 128 tokens and of prompts of 240,
   the round trip of a step of 14 KiB out and 28 KiB back without compute (round_trip.py) with one worker and
   with four, and the C ping-pong of the same bytes with one,
4. with loss, everything again as on a kernel that lets no socket set TCP's minimum time to retransmit, which
   then is 200 ms (older_kernel.c),
5. prints each round trip beside the time that its bytes take on the host's link, and the C ping-pong; one
   JSON line.

All machines share the cores of this one: where they are few, they and not the links are what is measured;
believe the ratios to the C of the same condition.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from namespaces_network import HOST, Network, burst_bytes, check_rights, inside
from namespaces_sockets import describe
from result_line import print_result
from round_trip import HERE, Ends, bare_c, message_bytes, our_samplers, our_workers, verify

from duckllm import LLM, SamplingParams
from duckllm.cluster.token import TOKEN_VARIABLE
from duckllm.demo import load_questions
from duckllm.models.registry import open_model

NUM_WORKERS, MBIT_PER_S, LOSS = 4, 2500, 0.001
STALL_US = 100_000  # no step takes so long but one that waits for TCP to send something again
REPLY_TOKENS, PROMPT_TOKENS, PROMPTS = 128, 240, 4
TCP_BYTES, FRAME_BYTES = 20 + 32, 14  # of each packet: IPv4 and TCP with time stamps; Ethernet as tc counts
SCRATCH_VARIABLE, OLDER_VARIABLE = "NAMESPACES_SCRATCH", "OLDER_KERNEL"
Answers = list[tuple[int, ...]]


@dataclass(frozen=True)
class Condition:
    """What is set of the network, and of TCP."""

    mtu: int
    loss: float
    older_kernel: bool

    def __str__(self) -> str:
        words = f"MTU {self.mtu}, loss {100 * self.loss:g} %"
        return words + (", older kernel" if self.older_kernel else "")


CONDITIONS = tuple(
    Condition(mtu, loss, older_kernel)
    for mtu in (1500, 9000)
    for loss, older_kernel in ((0.0, False), (LOSS, False), (LOSS, True))
)


@dataclass
class Samples:
    """What was measured in one condition."""

    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    trips_us: dict[str, list[float]] = field(default_factory=dict)
    retransmitted: int = 0
    tcp: str = ""


def wire_us(num_bytes: Sequence[int], mtu: int, num_workers: int) -> float:
    """Least time of a request to so many workers and their replies on the host's link, microseconds."""
    total_bytes = 0
    for each in num_bytes:
        packets = -(-each // (mtu - TCP_BYTES))
        total_bytes += num_workers * (each + packets * (TCP_BYTES + FRAME_BYTES)) - burst_bytes(mtu)
    return total_bytes * 8 / MBIT_PER_S


def load_older_kernel() -> Path:
    """Starts this program again with older_kernel.c loaded, unless it is; its folder for what is compiled."""
    if SCRATCH_VARIABLE not in os.environ:
        scratch = tempfile.mkdtemp()
        library, source = f"{scratch}/older_kernel.so", str(HERE / "older_kernel.c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        environment = {**os.environ, "LD_PRELOAD": library, SCRATCH_VARIABLE: scratch}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    return Path(os.environ[SCRATCH_VARIABLE])


@contextmanager
def as_on(older_kernel: bool) -> Iterator[None]:
    """What this process, and those that it starts, may set of sockets."""
    switch = ctypes.c_int.in_dll(ctypes.CDLL(None), "older_kernel")
    switch.value, os.environ[OLDER_VARIABLE] = older_kernel, str(int(older_kernel))
    try:
        yield
    finally:
        switch.value, os.environ[OLDER_VARIABLE] = False, "0"


@contextmanager
def workers_of(network: Network, folder: Path, token: str) -> Iterator[list[str]]:
    """The addresses of worker processes, one on each machine but the host."""
    processes: list[subprocess.Popen[bytes]] = []
    addresses = []
    try:
        for machine in network.workers:
            words = ["-m", "duckllm.worker", "--json", "--exit-with-stdin", "--threads", "1", "--speed", "0"]
            words += ["--model", str(folder), "--listen", f"{network.address(machine)}:0"]
            with inside(machine):
                process = subprocess.Popen(
                    [sys.executable, *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={**os.environ, TOKEN_VARIABLE: token},
                )
            processes.append(process)
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                words = process.communicate()[1].decode(errors="replace").strip().splitlines()
                raise SystemExit(f"the worker on {machine} did not start: {words[-1:]}: nothing measured")
            addresses.append(json.loads(line)["address"])
        yield addresses
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ask(llm: LLM, questions: Sequence[str]) -> Answers:
    """The tokens of the greedy answers."""
    params = SamplingParams(temperature=0, max_tokens=400)
    asked = [[{"role": "user", "content": question}] for question in questions]
    return [llm.chat(messages, params)[0].outputs[0].token_ids for messages in asked]


def measure_rates(llm: LLM, samples: Samples, seed: int) -> None:
    """Adds tokens a second of a reply, and of prompts that nobody has computed before."""
    generator = random.Random(seed)
    params = SamplingParams(temperature=0, max_tokens=REPLY_TOKENS, ignore_eos=True)
    [reply] = llm.generate("A duck is", params)
    assert reply.metrics.decode_tokens_per_s is not None
    samples.decode.append(reply.metrics.decode_tokens_per_s)
    prompts = [[generator.randrange(300, 8000) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    start = time.perf_counter()
    for prompt in prompts:
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1))
    samples.prefill.append(PROMPTS * PROMPT_TOKENS / (time.perf_counter() - start))


class Bench:
    """The network with its workers, and what is measured of it."""

    def __init__(self, network: Network, program: Path, folder: Path, steps: int) -> None:
        self._network, self._steps, self._folder = network, steps, folder
        self._token = secrets.token_hex(16)
        self.samples = {condition: Samples() for condition in CONDITIONS}
        first = network.workers[0]
        where = (f"/run/netns/{first}", network.address(first))
        self._bare_c = bare_c(program, "block", *message_bytes(1), *where)

    def run(self, condition: Condition, round_number: int, questions: Sequence[str]) -> Answers:
        """Measures one condition once; the answers to the questions."""
        self._network.set_mtu(condition.mtu)
        samples = self.samples[condition]
        with as_on(condition.older_kernel):
            answers = self._measure_replies(condition, samples, round_number, questions)
            self._measure_trips(condition, samples)
        return answers

    @contextmanager
    def _losing(self, condition: Condition) -> Iterator[None]:
        self._network.set_loss(condition.loss)
        try:
            yield
        finally:
            self._network.set_loss(0)

    def _measure_replies(
        self, condition: Condition, samples: Samples, seed: int, questions: Sequence[str]
    ) -> Answers:
        with workers_of(self._network, self._folder, self._token) as addresses, inside(HOST):
            options = {"draft": "off", "lanes": "off", "cluster_token": self._token}
            with LLM(self._folder, workers=addresses, **options) as llm, self._losing(condition):
                answers = ask(llm, questions)
                measure_rates(llm, samples, seed)
                samples.tcp, retransmitted = describe([os.getpid(), *llm.cluster_info().pids])
                samples.retransmitted += retransmitted
        return answers

    def _measure_trips(self, condition: Condition, samples: Samples) -> None:
        for count in (1, NUM_WORKERS):
            with our_workers(count, 0, False, self._dial) as transport:
                verify(transport, count, 1)
                with self._losing(condition):
                    trips = samples.trips_us.setdefault(f"{count} of ours", [])
                    trips += our_samplers(transport, 1)["ours"](self._steps)
        with self._losing(condition), inside(HOST):
            samples.trips_us.setdefault("C", []).extend(self._bare_c(self._steps))

    def _dial(self, number: int) -> Ends:
        """A connection between the host and a worker's machine."""
        machine = self._network.workers[number]
        with inside(machine):
            listener = socket.create_server((self._network.address(machine), 0))
        with listener, inside(HOST):
            ours = socket.create_connection(listener.getsockname())
            return ours, listener.accept()[0]


def report(condition: Condition, samples: Samples) -> dict[str, object]:
    """Prints what was measured in a condition; the figures for programs."""
    decode, prefill = statistics.median(samples.decode), statistics.median(samples.prefill)
    print(f"{condition}: {decode:.1f} tok/s of replies, {prefill:.0f} tok/s of prompts")
    print(f"    {samples.tcp}; {samples.retransmitted} packets sent again")
    figures: dict[str, object] = {"decode_tok_s": round(decode, 1), "prefill_tok_s": round(prefill)}
    c_us = statistics.median(samples.trips_us["C"])
    for name, values in samples.trips_us.items():
        count = NUM_WORKERS if name.startswith(str(NUM_WORKERS)) else 1
        bound_us = wire_us(message_bytes(1), condition.mtu, count)
        p50, p99 = statistics.median(values), statistics.quantiles(values, n=100)[98]
        mean, stalled = statistics.fmean(values), sum(value > STALL_US for value in values)
        print(
            f"    {name:9s} p50 {p50:7.0f} us  p99 {p99:8.0f}  mean {mean:7.0f}  {stalled} of {len(values)} "
            f"over 0.1 s  {p50 / bound_us:5.2f} x the wire's {bound_us:.0f} us  {p50 / c_us:5.2f} x C"
        )
        of = {"p50_us": p50, "p99_us": p99, "mean_us": mean, "wire_us": bound_us, "over_100_ms": stalled}
        figures[name] = {key: round(value) for key, value in of.items()}
    return figures | {"tcp": samples.tcp, "retransmitted": samples.retransmitted}


def verify_loss(network: Network) -> None:
    """The network loses what it is told to."""
    network.set_mtu(1500)
    for share in (0.0, LOSS, 0.05):
        network.set_loss(share)
        got = network.measure_loss()
        print(f"loss {100 * share:g} %: {100 * got:.3f} % of datagrams were lost")
        if not 0.5 * share <= got <= 1.7 * share:
            raise SystemExit("the network does not lose what it is to lose: nothing measured")
    network.set_loss(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="append the JSON line to this file")
    arguments = parser.parse_args()
    check_rights()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # namespaces are removed then too
    scratch = load_older_kernel()
    folder = open_model(None).path
    texts = [each.question for each in load_questions()]
    questions = random.Random(arguments.seed).sample(texts, min(arguments.questions, len(texts)))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, scratch)
        program = scratch / "ping_pong"
        subprocess.run(["cc", "-O2", "-o", str(program), str(HERE / "ping_pong.c")], check=True)
        with LLM(folder, workers=NUM_WORKERS, draft="off", lanes="off") as llm:
            expected = ask(llm, questions)
        network = stack.enter_context(Network(NUM_WORKERS, MBIT_PER_S))
        verify_loss(network)
        bench = Bench(network, program, folder, arguments.steps)
        for number in range(arguments.rounds):
            for condition in CONDITIONS:
                answers = bench.run(condition, number, questions if number == 0 else [])
                if number == 0 and answers != expected:
                    raise SystemExit(f"{condition}: answers differ from those of workers of this machine")
    print(f"{len(questions)} answers in each condition: the same tokens as on workers of this machine")
    figures = {str(condition): report(condition, samples) for condition, samples in bench.samples.items()}
    settings = {"workers": NUM_WORKERS, "mbit_per_s": MBIT_PER_S, "bytes": message_bytes(1)}
    settings |= {"questions": len(questions), "rounds": arguments.rounds, "steps": arguments.steps}
    print_result("namespaces", {**settings, **figures}, arguments.json)


if __name__ == "__main__":
    main()
