"""Requests by multicast: the same bits and tokens as over connections, whatever becomes of the datagrams."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duckllm import LLM, SamplingParams, _native
from duckllm import assembly_experts as assembly_module
from duckllm.cluster import base as base_module
from duckllm.cluster.local import LocalCluster
from duckllm.cluster.multicast import HostMulticast, native_session
from duckllm.cluster.plan import MulticastPlan, WorkerPlan
from duckllm.cluster.static import StaticCluster
from duckllm.config import ClusterConfig, MulticastGroup, parse_multicast
from duckllm.errors import ConfigError, ProtocolError
from duckllm.transport.flock import Flock
from duckllm.transport.transport import Transport
from duckllm.weights.manifest import Manifest
from worker_harness import WorkerProcess, expected_sum, make_step, open_transport, plan_for, running_worker

# Of this process alone; a datagram of another session would be refused anyway.
GROUP, PORT = f"239.77.{os.getpid() // 250 % 250}.{os.getpid() % 250 + 1}", 20_000 + os.getpid() % 20_000
ADDRESS = f"{GROUP}:{PORT}"
TOKEN = "a secret"


def member() -> socket.socket:
    """A socket that hears the group on loopback."""
    ear = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    ear.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    ear.bind((GROUP, PORT))
    membership = socket.inet_aton(GROUP) + socket.inet_aton("127.0.0.1")
    ear.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
    ear.settimeout(1.0)
    return ear


def speaker() -> socket.socket:
    """A socket that speaks to the group on loopback."""
    mouth = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    mouth.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
    mouth.connect((GROUP, PORT))
    return mouth


@pytest.fixture(scope="module")
def _loopback() -> None:
    """Skips where loopback carries no multicast, as some containers have it."""
    try:
        with member() as ear, speaker() as mouth:
            mouth.send(b"duck")
            assert ear.recv(9) == b"duck"
    except OSError as error:
        pytest.skip(f"multicast on loopback does not work here: {error}")


needs_multicast = pytest.mark.usefixtures("_loopback")


class Relay:
    """What the host sends goes to the group by way of this: some of it lost, doubled or late, by a seed."""

    def __init__(self, seed: int) -> None:
        self.dropped = self.doubled = self.passed_on = 0
        self._random = random.Random(seed)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.address = self._socket.getsockname()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        held: list[bytes] = []
        with speaker() as mouth:
            while data := self._socket.recv(1 << 16):
                luck = self._random.random()
                if luck < 0.05:
                    self.dropped += 1
                    continue
                held.append(data)
                if luck < 0.1:
                    self.doubled += 1
                    held.append(data)
                if luck < 0.3 and len(held) < 4:
                    continue
                for each in reversed(held):
                    mouth.send(each)
                self.passed_on += len(held)
                held.clear()

    def close(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            end.sendto(b"", self.address)
        self._thread.join(20)
        self._socket.close()
        assert not self._thread.is_alive()


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    """Between hosts and the group; fragments are small, so that a step has several."""
    relay = Relay(7)

    class Relayed(HostMulticast):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.plan = replace(self.plan, fragment_bytes=256)
            self.session = native_session(self.plan, arguments[2])
            self._socket.connect(relay.address)

    monkeypatch.setattr(base_module, "HostMulticast", Relayed)
    yield relay
    relay.close()


@pytest.fixture
def transports(monkeypatch: pytest.MonkeyPatch) -> list[Transport]:
    """Those that models are given."""
    made: list[Transport] = []

    def make(*arguments: Any, **options: Any) -> Transport:
        made.append(Transport(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(assembly_module, "Transport", make)
    return made


@contextmanager
def flock_of(
    tmp_path: Path, count: int, model: Manifest, **options: Any
) -> Iterator[tuple[Transport, StaticCluster, tuple[WorkerPlan, ...], list[WorkerProcess]]]:
    """Workers with a token, and a transport to them by multicast."""
    with ExitStack() as stack:
        workers = [stack.enter_context(running_worker(tmp_path, token=TOKEN)) for _ in range(count)]
        config = ClusterConfig(
            addresses=tuple(str(worker.address) for worker in workers),
            multicast=ADDRESS,
            cluster_token=TOKEN,
            **options,
        )
        cluster = stack.enter_context(StaticCluster(config))
        plans = plan_for(model, count)
        connections = cluster.connect(plans)
        transport = stack.enter_context(open_transport(connections, multicast=cluster.multicast))
        yield transport, cluster, plans, workers


def check_steps(transport: Any, model: Manifest, plans: tuple[WorkerPlan, ...], seeds: range) -> None:
    """Two steps at a time have the bits that connections give."""
    for seed in seeds:
        steps = [make_step(model, 1 + (seed + lane) % 8, layer=(1, 3)[lane], seed=seed) for lane in (0, 1)]
        tickets = [
            transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights, lane=lane)
            for lane, step in enumerate(steps)
        ]
        for ticket, step in zip(tickets, steps, strict=True):
            np.testing.assert_array_equal(transport.wait(ticket), expected_sum(model, plans, step))


def counts_in(log: str) -> list[int]:
    """Of the last session: steps by multicast, datagrams taken, refused, had already, fragments asked for."""
    return [
        int(number) for number in re.findall(r"(\d+) (?:steps by|datag|refu|had|frag)", log.split(";")[-1])
    ]


@needs_multicast
@pytest.mark.parametrize("spin_us", [0, 200])
def test_steps_have_the_bits_that_connections_give(model: Manifest, spin_us: int) -> None:
    plans = plan_for(model, 3)
    options: dict[str, Any] = {"threads_per_worker": 1, "shared_memory": False, "spin_us": spin_us}
    with LocalCluster(ClusterConfig(workers=3, multicast=ADDRESS, **options)) as cluster:
        for _ in range(2):  # a second session is another one to the workers too
            connections = cluster.connect(plans)
            assert all(connection.multicast_bytes > 0 for connection in connections)
            with open_transport(connections, multicast=cluster.multicast, spin_us=spin_us) as transport:
                check_steps(transport, model, plans, range(8))
                for words in transport.describe():
                    by = rf"TCP, .*; requests by multicast to {ADDRESS}, datagrams of \d+ bytes handed over"
                    assert re.fullmatch(by + " by (UDP GSO|sendmmsg)", words)
                counts = transport.multicast_counts()
                assert counts.num_datagrams == 16  # of three workers, each step once
                assert counts.is_reached == [True] * 3


@needs_multicast
def test_a_conversation_through_loss_has_the_tokens_of_connections(
    demo_folder: Path, tmp_path: Path, relay: Relay, transports: list[Transport]
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)
    asked = [("Is 1001 prime?", greedy), ("What is a duck? Say it in many words.", seeded)]
    replies = []
    with ExitStack() as stack:
        workers = [stack.enter_context(running_worker(tmp_path, token=TOKEN)) for _ in range(2)]
        for multicast in ("off", ADDRESS):
            with LLM(
                demo_folder,
                workers=[str(worker.address) for worker in workers],
                cluster_token=TOKEN,
                max_model_len=256,
                shares="even",
                lanes="on",
                multicast=multicast,
            ) as llm:
                replies.append([llm.generate(*each)[0].outputs[0].token_ids for each in asked])
                counts = transports[-1].multicast_counts()
    assert replies[0] == replies[1]
    assert [len(tokens) for tokens in replies[0]] == [24, 24]
    assert relay.dropped > 20
    assert relay.doubled > 20
    assert counts.is_reached == [True, True]
    assert 10 * relay.dropped < counts.num_datagrams
    for worker, num_asked in zip(workers, counts.num_asked, strict=True):
        assert num_asked >= relay.dropped
        steps, taken, refused, surplus, asked_again = counts_in(worker.log())
        assert steps > 100
        assert 0 < surplus <= relay.passed_on - taken
        assert (refused, asked_again) == (0, num_asked)


@needs_multicast
def test_hostile_datagrams_change_nothing(model: Manifest, tmp_path: Path) -> None:
    refused = replayed = 0
    with flock_of(tmp_path, 2, model) as (transport, cluster, plans, workers):
        with member() as ear, speaker() as mouth:
            check_steps(transport, model, plans, range(2))
            said = [ear.recv(1 << 16) for _ in range(4)]
            assert cluster.multicast is not None
            plan = cluster.multicast.plan
            stranger = native_session(replace(plan, session="0123456789abcdef"), TOKEN)
            without_token = native_session(plan, "a guess")
            request = bytes(range(250)) * 2
            for seed in range(2, 12):
                for bad in (
                    b"",
                    os.urandom(30),
                    os.urandom(500),
                    said[0][:-1],
                    said[0] + b"\0",
                    said[0] + bytes(50_000),
                    said[1][:60] + bytes([said[1][60] ^ 1]) + said[1][61:],
                    stranger.encode_datagram(1000 + seed, request, 0),
                    without_token.encode_datagram(2 * seed + 1, request, 0),
                ):
                    mouth.send(bad)
                    refused += 1
                for good in said:
                    mouth.send(good)
                    replayed += 1
                check_steps(transport, model, plans, range(seed, seed + 1))
        assert transport.multicast_counts().num_asked == [0, 0]
        transport.close()
        deadline = time.monotonic() + 20
        while not all("closed after 24 steps" in worker.log() for worker in workers):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    for worker in workers:
        assert counts_in(worker.log()) == [24, 24, refused, replayed, 0]


@needs_multicast
def test_a_worker_out_of_reach_gets_its_requests_over_its_connection(
    model: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Elsewhere(HostMulticast):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._socket.connect((GROUP, PORT + 1))

    monkeypatch.setattr(base_module, "HostMulticast", Elsewhere)
    with flock_of(tmp_path, 2, model) as (transport, _, plans, workers):
        check_steps(transport, model, plans, range(6))
        counts = transport.multicast_counts()
        assert counts.is_reached == [False, False]
        # One fragment a step, in eight steps, and in what was under way when the eighth was asked for.
        assert all(8 <= asked <= 9 for asked in counts.num_asked)
        assert counts.num_datagrams <= 10
        assert not any("multicast" in words for words in transport.describe())
    told = [record.message for record in caplog.records if "multicast" in record.message]
    assert sorted(told) == sorted(
        f"multicast does not reach worker {worker.address}: it gets requests over its connection from now on"
        for worker in workers
    )


@needs_multicast
def test_a_lost_worker_is_replaced_and_hears_again(model: Manifest) -> None:
    plans = plan_for(model, 2)
    config = ClusterConfig(workers=2, threads_per_worker=1, shared_memory=False, multicast=ADDRESS)
    with LocalCluster(config) as cluster:
        connections = cluster.connect(plans)
        with open_transport(connections, multicast=cluster.multicast) as transport:
            flock = Flock(transport, cluster, 0.25, 20.0)
            check_steps(flock, model, plans, range(2))
            os.kill(cluster.pids[1], signal.SIGKILL)
            check_steps(flock, model, plans, range(2, 6))
            assert transport.multicast_counts().is_reached == [True, True]
            sent = transport.multicast_counts().num_datagrams
            check_steps(flock, model, plans, range(6, 8))
            assert transport.multicast_counts().num_datagrams == sent + 4


@needs_multicast
def test_a_worker_that_cannot_join_says_why(
    model: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Taken(HostMulticast):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.plan = replace(self.plan, port=occupied)

    monkeypatch.setattr(base_module, "HostMulticast", Taken)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other, caplog.at_level(logging.WARNING):
        other.bind((GROUP, 0))  # without SO_REUSEADDR
        occupied = other.getsockname()[1]
        with flock_of(tmp_path, 1, model) as (transport, _, plans, (worker,)):
            check_steps(transport, model, plans, range(2))
            assert transport.multicast_counts().num_datagrams == 0
    expected = f"worker {worker.address} takes no requests by multicast: Address already in use"
    assert [record.message for record in caplog.records] == [expected]


def test_groups() -> None:
    assert parse_multicast("off") is None
    assert parse_multicast("239.77.0.1:7400") == MulticastGroup("239.77.0.1", 7400, None)
    assert parse_multicast("239.77.0.1:1@192.168.1.2") == MulticastGroup("239.77.0.1", 1, "192.168.1.2")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        *(
            (bad, "expected off, or an IPv4 group: 239.77.0.1:7400")
            for bad in (
                *("", "on", "239.77.0.1", "239.77.0.1:0", "239.77.0.1:65536", "192.168.1.1:7400", None, True),
                *("[ff15::1]:7400", "239.77.0.1:7400@", "239.77.0.1:7400@lo", "239.77.0.1:74a", "239.77.0:1"),
            )
        ),
        ("224.0.0.251:7400", "expected a group outside 224.0.0.0/24"),
        (ADDRESS, "expected off with workers started here, which get their steps through shared memory"),
    ],
)
def test_what_is_no_group_is_refused(value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=r"multicast: got ") as caught:
        ClusterConfig(multicast=value)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_no_workers_hear_no_group(demo_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"multicast: got .*, expected off where there are no workers"):
        LLM(demo_folder, workers=0, multicast=ADDRESS, shared_memory=False)


@pytest.mark.parametrize(
    ("local", "text", "words"),
    [
        (
            ["192.0.2.1", "192.0.2.2"],
            ADDRESS,
            "got workers reached from 192.0.2.1, 192.0.2.2, expected .*@INTER",
        ),
        (["192.0.2.1"], ADDRESS, "expected a group that 192.0.2.1, an address of this host, can send to"),
        (["127.0.0.1"], f"{ADDRESS}@192.0.2.7", "expected a group that 192.0.2.7, an address of this host"),
        (["::1"], ADDRESS, "expected off with workers at IPv6 addresses"),
    ],
)
def test_interfaces_that_do_not_fit_are_refused(local: list[str], text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"multicast: .*{words}"):
        HostMulticast(text, local, None)


def test_each_session_and_token_has_its_own_key() -> None:
    first, second = (HostMulticast(ADDRESS, ["127.0.0.1"], TOKEN) for _ in range(2))
    assert first.plan.session != second.plan.session
    datagram = first.session.encode_datagram(1, bytes(100), 0)
    assert native_session(first.plan, TOKEN).decode_datagram(datagram) == (1, 100, 0)
    for plan, token in ((second.plan, TOKEN), (first.plan, "another"), (first.plan, None)):
        assert (
            native_session(replace(plan, session=first.plan.session), token).decode_datagram(datagram) is None
        )
    first.close()
    second.close()


GOOD = MulticastPlan("239.77.0.1", 7400, "0123456789abcdef", "0" * 64, 1432)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"group": "192.168.1.1"}, "an IPv4 group and a port"),
        ({"group": "239.77.0.1:1@1.2.3.4"}, "an IPv4 group and a port"),
        ({"port": 0}, "an IPv4 group and a port"),
        ({"port": "7400"}, "an IPv4 group and a port"),
        ({"session": "0123456789ABCDEF"}, "16 hexadecimal digits"),
        ({"session": 5}, "16 hexadecimal digits"),
        ({"nonce": "0" * 63}, "64 hexadecimal digits"),
        ({"fragment_bytes": 63}, "a whole number from 64 to 65467"),
        ({"fragment_bytes": 65468}, "a whole number from 64 to 65467"),
        ({"fragment_bytes": True}, "a whole number from 64 to 65467"),
        ({"more": 1}, "null, or an object with"),
    ],
)
def test_a_plan_with_a_wrong_group_is_refused(model: Manifest, change: dict[str, Any], words: str) -> None:
    (plan,) = plan_for(model)
    message = replace(plan, multicast=GOOD).to_json()
    message["layers"] = [
        {**layer, "stripe_sha256": list(layer["stripe_sha256"])} for layer in message["layers"]
    ]
    assert WorkerPlan.from_json(message) == replace(plan, multicast=GOOD)
    with pytest.raises(ProtocolError, match=f"plan .*{words}"):
        WorkerPlan.from_json({**message, "multicast": {**asdict(GOOD), **change}})
    with pytest.raises(ProtocolError, match="plan multicast: got 5, expected null"):
        WorkerPlan.from_json({**message, "multicast": 5})


def test_fragments_fit_the_interface() -> None:
    host = HostMulticast(ADDRESS, ["127.0.0.1"], None)
    assert host.plan.fragment_bytes == 8928  # of loopback's 65536, as of 9000; a multiple of 8
    assert host.plan.fragment_bytes + _native.DATAGRAM_HEADER_BYTES + 28 <= 9000
    host.close()
