"""Who of those that announce themselves is taken in, waits, is gone or is refused: without a network."""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from duckllm.cluster import discovery as discovery_module
from duckllm.cluster import discovery_cluster
from duckllm.cluster.address import Address
from duckllm.cluster.base import Cluster
from duckllm.cluster.connect import WorkerInfo
from duckllm.cluster.discovery import BUSY, GONE, NEW, REFUSED, WAITING, Discovery
from duckllm.cluster.discovery_announcement import Announcement
from duckllm.cluster.discovery_cluster import DiscoveredCluster, nodes_needed
from duckllm.config import ClusterConfig
from duckllm.errors import (
    AuthenticationError,
    ConfigError,
    MissingPackageError,
    ProtocolVersionError,
    WorkerUnavailableError,
)
from duckllm.llm import LLM
from duckllm.weights.manifest import Manifest
from worker_harness import plan_for, running_worker

NETWORKS = [ipaddress.IPv4Interface("10.0.0.1/24")]
Ask = Callable[[Address], WorkerInfo]


def at(number: int) -> Address:
    return Address(f"10.0.0.{number}", 7411)


def node(name: str, number: int, time_us: int = 1) -> Announcement:
    return Announcement("node", name, (at(number),), "avx2", 1 << 33, 20.0, time_us)


def info(address: Address, name: str = "") -> WorkerInfo:
    return WorkerInfo(str(address), "avx2", "0.1.0", 4, 1, 1 << 34, read_gb_per_s=35.0, name=name)


class Nodes:
    """Nodes that answer, or say why not."""

    def __init__(self) -> None:
        self.problems: dict[Address, Exception] = {}
        self.asked: list[Address] = []
        self.busy: set[Address] = set()
        self.guard = threading.Lock()

    def __call__(self, address: Address) -> WorkerInfo:
        with self.guard:
            self.asked.append(address)
            problem = self.problems.get(address)
        if problem is not None:
            raise problem
        return dataclasses.replace(info(address), is_busy=address in self.busy)


class Silence:
    """A network on which nothing is heard."""

    def __init__(self, *_: Any) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


@contextmanager
def searching(ask: Ask) -> Iterator[Discovery]:
    found = Discovery("swan", start=Silence, ask=ask, networks=NETWORKS)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    monkeypatch.setattr(discovery_module, "_SOON_S", 0.01)
    return Nodes()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def states(found: Discovery) -> dict[str, str]:
    return {each.name: each.state for each in found.nodes()}


def test_nodes_are_taken_in_the_order_of_their_names(nodes: Nodes) -> None:
    with searching(nodes) as found:
        for name, number in (("duck-10", 3), ("duck-9", 4), ("drake", 5), ("duck-9", 2)):
            found.take(f"{name}-{number}", node(name, number))
        taken = found.wait(4, 20, 0.05)
    assert [(each.name, each.address) for each in taken] == [
        ("drake", at(5)),
        ("duck-9", at(2)),
        ("duck-9", at(4)),
        ("duck-10", at(3)),
    ]
    # What counts is what they said on a connection, not what was announced.
    assert {(each.memory_bytes, each.read_gb_per_s) for each in taken} == {(1 << 34, 35.0)}


def test_a_start_waits_until_no_more_come(nodes: Nodes) -> None:
    with searching(nodes) as found:
        found.take("a", node("a", 2))
        until(lambda: states(found) == {"a": WAITING})
        late = threading.Timer(0.1, lambda: found.take("b", node("b", 3)))
        late.start()
        taken = found.wait(1, 60, 1.0)
        late.join()
    assert [each.name for each in taken] == ["a", "b"]


def test_too_few(nodes: Nodes) -> None:
    nodes.problems[at(3)] = WorkerUnavailableError("worker 10.0.0.3:7411 is not available: no route")
    with searching(nodes) as found:
        with pytest.raises(
            WorkerUnavailableError, match=r"found none within 0\.05 s, expected 1 node; on each"
        ):
            found.wait(1, 0.05)
        found.take("a", node("a", 2))
        found.take("b", node("b", 3))
        found.refuse("odd", "cluster_token: it has another one than this side")
        until(lambda: states(found) == {"a": WAITING, "b": GONE})
        with pytest.raises(WorkerUnavailableError) as caught:
            found.wait(2, 0.05)
    words = str(caught.value)
    assert "found a (10.0.0.2:7411) within 0.05 s, expected 2 nodes" in words
    assert "b (10.0.0.3:7411): worker 10.0.0.3:7411 is not available: no route" in words
    assert "odd: cluster_token: it has another one than this side" in words


def test_who_does_not_prove_itself_when_asked_is_refused(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.problems[at(2)] = AuthenticationError("cluster_token: worker a has another one than this host")
    nodes.problems[at(3)] = ProtocolVersionError("protocol version: worker b speaks 3, this host speaks 4")
    with searching(nodes) as found:
        found.take("a", node("a", 2))
        found.take("b", node("b", 3))
        until(lambda: set(states(found).values()) == {REFUSED})
        assert found.waiting() == []
        assert len(found.refused()) == 2
        with pytest.raises(WorkerUnavailableError, match=r"found none .* has another one than this host"):
            found.wait(1, 0.05)
    assert "node a (10.0.0.2:7411) is not taken in: cluster_token" in caplog.text


def test_what_was_heard_before_changes_nothing(nodes: Nodes) -> None:
    with searching(nodes) as found:
        found.take("a", node("a", 2, time_us=5))
        until(lambda: states(found) == {"a": WAITING})
        num_asked = len(nodes.asked)
        # Recorded, and sent again by somebody: the same, and an older one under a name that it had.
        found.take("y", node("y", 2, time_us=5))
        found.take("x", node("x", 2, time_us=4))
        assert states(found) == {"a": WAITING}
        assert len(nodes.asked) == num_asked
        found.take("a", node("b", 2, time_us=6))
        assert set(states(found)) == {"b"}


def test_a_node_that_is_back_with_an_earlier_clock_is_asked_soon(nodes: Nodes) -> None:
    nodes.problems[at(2)] = WorkerUnavailableError("worker 10.0.0.2:7411 is not available: no route")
    with searching(nodes) as found:
        found.take("a", node("a", 2, time_us=5))
        until(lambda: states(found) == {"a": GONE})
        num_asked = len(nodes.asked)
        found.take("x", node("x", 2, time_us=4))
        until(lambda: len(nodes.asked) > num_asked)
        nodes.problems.clear()
        found.take("a", node("a", 2, time_us=1))
        until(lambda: states(found) == {"a": WAITING})


def test_a_replayed_place_comes_no_further_than_a_question(nodes: Nodes) -> None:
    nodes.problems[at(9)] = WorkerUnavailableError("worker 10.0.0.9:7411 is not available: no route")
    with searching(nodes) as found:
        found.take("a", node("a", 2, time_us=5))
        found.take("a-old", node("a", 9, time_us=1))
        until(lambda: {each.state for each in found.nodes()} == {WAITING, GONE})
        assert [each.address for each in found.wait(1, 20, 0.05)] == [at(2)]


def test_addresses_elsewhere_are_not_even_asked(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    with searching(nodes) as found:
        found.take("a", Announcement("node", "a", (Address("169.254.169.254", 80),), time_us=1))
        assert found.nodes() == []
        assert [each.problem for each in found.refused()] == [
            "its address: got 169.254.169.254:80, expected one in this host's networks"
        ]
    assert nodes.asked == []
    assert "node a is not taken in: its address" in caplog.text


def test_a_goodbye_takes_nobody_out(nodes: Nodes) -> None:
    with searching(nodes) as found:
        found.take("a", node("a", 2))
        until(lambda: states(found) == {"a": WAITING})
        num_asked = len(nodes.asked)
        found.forget("a")
        until(lambda: len(nodes.asked) > num_asked)
        assert states(found) == {"a": WAITING}
        found.forget("b")
        # Where nobody answers any more it is believed; and taken back when the node announces itself again.
        nodes.problems[at(2)] = WorkerUnavailableError("worker a is not available: refused")
        found.forget("a")
        until(lambda: states(found) == {"a": GONE})
        del nodes.problems[at(2)]
        found.take("a", node("a", 2, time_us=2))
        until(lambda: states(found) == {"a": WAITING})


def test_a_start_waits_for_those_that_are_being_asked() -> None:
    answered = threading.Event()

    def ask(address: Address) -> WorkerInfo:
        if address == at(3):
            assert answered.wait(20)
        return info(address)

    with searching(ask) as found:
        found.take("a", node("a", 2))
        until(lambda: states(found) == {"a": WAITING})
        found.take("b", node("b", 3))
        timer = threading.Timer(0.4, answered.set)
        timer.start()
        assert [each.name for each in found.wait(1, 60, 0.02)] == ["a", "b"]
        timer.join()


def test_a_node_that_is_still_starting_is_asked_again(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_module, "_SOON_S", 0.3)
    nodes.problems[at(2)] = WorkerUnavailableError("worker a is not available: refused")
    with searching(nodes) as found:
        found.take("a", node("a", 2))
        until(lambda: len(nodes.asked) >= 2)
        assert states(found) == {"a": NEW}
        del nodes.problems[at(2)]
        assert [each.name for each in found.wait(1, 20, 0.05)] == ["a"]


def test_those_that_compute_are_not_asked(nodes: Nodes) -> None:
    with searching(nodes) as found:
        found.take("a", node("a", 2))
        until(lambda: states(found) == {"a": WAITING})
        found.in_use = lambda: [at(2)]
        assert found.waiting() == []
        num_asked = len(nodes.asked)
        found.forget("a")
        found.take("b", node("b", 3))
        until(lambda: states(found) == {"a": WAITING, "b": WAITING})
        assert nodes.asked[num_asked:] == [at(3)]


def test_a_flood_is_bounded(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(discovery_module, "MAX_WORKERS", 3)
    for number in (2, 3, 4):
        nodes.problems[at(number)] = WorkerUnavailableError("gone")
    with searching(nodes) as found:
        for number in (2, 3, 4):
            found.take(str(number), node(f"n{number}", number))
        until(lambda: set(states(found).values()) == {GONE})
        for number in (5, 6, 7):
            found.take(str(number), node(f"n{number}", number))
        until(lambda: set(states(found).values()) == {WAITING})
        found.take("8", node("n8", 8))  # those that wait make no room
        assert set(states(found)) == {"n5", "n6", "n7"}
        for number in range(500):
            found.refuse(f"odd-{number}", "cluster_token: it has another one")
        assert len(found.refused()) == 64
    assert len([record for record in caplog.records if "odd" in record.message]) == 64


def test_a_closed_search_ends_what_it_started(nodes: Nodes) -> None:
    network = Silence()
    found = Discovery("swan", start=lambda *_: network, ask=nodes, networks=NETWORKS)
    found.close()
    found.close()
    assert network.is_closed
    assert not [each for each in threading.enumerate() if each.name.startswith("duckllm-")]


def test_a_system_that_lets_nobody_listen() -> None:
    def fail(*_: Any) -> Silence:
        raise OSError(1, "Operation not permitted")

    with pytest.raises(WorkerUnavailableError, match="cannot listen for nodes: Operation not permitted"):
        Discovery("swan", start=fail)


def chosen(nodes: Nodes, count: int, **options: Any) -> tuple[list[str], list[str]]:
    """Which of so many nodes compute, and which wait."""
    config = ClusterConfig(cluster="discover", cluster_token="swan", discover_wait_s=20, **options)
    found = Discovery("swan", start=Silence, ask=nodes, networks=NETWORKS)
    for number in range(2, 2 + count):
        found.take(str(number), node(f"n{number}", number))
    wait = found.wait
    found.wait = lambda count, limit_s: wait(count, limit_s, 0.02)  # type: ignore[method-assign]
    with DiscoveredCluster(config, found) as cluster:
        others = [each.name for each in cluster.other_nodes if each.state == WAITING]
        return [address.name.rpartition(".")[2] for address in cluster.addresses], others


def test_how_many_compute(nodes: Nodes) -> None:
    assert chosen(nodes, 3, workers=0) == (["2", "3", "4"], [])
    assert chosen(nodes, 3, workers=0, spares=1) == (["2", "3"], ["n4"])
    assert chosen(nodes, 3, workers=1) == (["2"], ["n3", "n4"])
    assert chosen(nodes, 3, workers=2, spares=1) == (["2", "3"], ["n4"])


def test_a_busy_node_is_passed_over_until_it_is_free(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    nodes.busy = {at(2), at(4)}
    assert chosen(nodes, 3, workers=1) == (["3"], [])
    assert "node n2 (10.0.0.2:7411) is passed over: it serves another host" in caplog.text
    with searching(nodes) as found:
        for number in (2, 3):
            found.take(str(number), node(f"n{number}", number))
        until(lambda: states(found) == {"n2": BUSY, "n3": WAITING})
        expected = (
            r"found n3 \(.*\) within .* s, expected 2 nodes; n2 \(10\.0\.0\.2:7411\): it serves another host"
        )
        with pytest.raises(WorkerUnavailableError, match=expected):
            found.wait(2, 0.05)
        # For those who only look, free ones come first.
        assert [each.name for each in found.wait(2, 20, 0.01, with_busy=True)] == ["n3", "n2"]
        nodes.busy.clear()
        assert [each.name for each in found.wait(2, 20, 0.01)] == ["n2", "n3"]


def test_a_node_that_another_host_has_taken_since_is_left_to_it(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ClusterConfig(cluster="discover", cluster_token="swan", discover_wait_s=20, workers=2)
    with searching(nodes) as found:
        for number in (2, 3, 4):
            found.take(str(number), node(f"n{number}", number))
        wait = found.wait
        monkeypatch.setattr(found, "wait", lambda count, limit_s: wait(count, limit_s, 0.02))
        monkeypatch.setattr(discovery_cluster, "_LONGEST_RETREAT_S", 0.02)
        cluster = DiscoveredCluster(config, found)
        assert cluster.addresses == (at(2), at(3))
        nodes.busy = {at(3)}
        closed: list[Address] = []

        def greet(_: object, address: Address, *__: object) -> object:
            return types.SimpleNamespace(info=nodes(address), close=lambda: closed.append(address))

        monkeypatch.setattr(Cluster, "_greet", greet)
        infos = cluster.greet()
        assert [each.address for each in infos] == [str(at(2)), str(at(4))]
        assert cluster.addresses == (at(2), at(4))
        assert sorted(closed, key=str) == [at(2), at(3)]  # of the first attempt
        [other] = cluster.other_nodes
        assert (other.name, other.state, other.problem) == ("n3", "busy", "it serves another host")
        cluster.close()


def test_nodes_that_are_wanted_are_asked_more_often(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_module, "_NUM_ASKED_SOON", 1)
    monkeypatch.setattr(discovery_module, "_WANTED_S", 0.01)
    nodes.busy = {at(2)}
    nodes.problems[at(3)] = WorkerUnavailableError("worker 10.0.0.3:7411 is not available: no route")
    with searching(nodes) as found:
        for number in (2, 3):
            found.take(str(number), node(f"n{number}", number))
        until(lambda: states(found) == {"n2": BUSY, "n3": GONE})
        num_asked = len(nodes.asked)
        with pytest.raises(WorkerUnavailableError, match="found none"):
            found.wait(1, 0.2, 0.01)
        assert {at(2), at(3)} <= set(nodes.asked[num_asked:])
        freed = threading.Timer(0.1, nodes.busy.clear)
        freed.start()
        assert [each.name for each in found.wait(1, 20, 0.01)] == ["n2"]
        freed.join()


def test_two_hosts_that_start_together_part_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Manifest
) -> None:
    """Both choose the first node, and either may come first; each ends with one of its own."""
    monkeypatch.setattr(discovery_module, "_SOON_S", 0.05)
    monkeypatch.setattr(discovery_cluster, "_LONGEST_RETREAT_S", 0.1)
    config = ClusterConfig(cluster="discover", cluster_token="swan", discover_wait_s=30, workers=1)
    loopback = [ipaddress.IPv4Interface("127.0.0.1/8")]
    with ExitStack() as stack:
        workers = [stack.enter_context(running_worker(tmp_path, token="swan")) for _ in range(2)]
        clusters = []
        for _ in range(2):
            found = Discovery("swan", start=Silence, networks=loopback)
            for number, worker in enumerate(workers):
                found.take(str(number), Announcement("node", f"n{number}", (worker.address,), time_us=1))
            monkeypatch.setattr(
                found, "wait", lambda count, limit_s, wait=found.wait: wait(count, limit_s, 0.05)
            )
            clusters.append(stack.enter_context(DiscoveredCluster(config, found)))
        assert [each.addresses for each in clusters] == [(workers[0].address,)] * 2
        together = threading.Barrier(2)

        def begin(cluster: DiscoveredCluster) -> None:
            together.wait(20)
            cluster.greet()
            cluster.begin(plan_for(model))
            for connection in cluster.wait_ready():
                stack.callback(connection.close)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(begin, clusters))
        assert {each.addresses[0] for each in clusters} == {each.address for each in workers}


def test_how_many_are_waited_for() -> None:
    needed = {
        (0, 1, 0): 1,
        (0, 3, 0): 3,
        (0, 3, 2): 5,
        (4, 1, 0): 4,
        (4, 2, 1): 5,
    }
    for (workers, min_workers, spares), count in needed.items():
        config = ClusterConfig(cluster="discover", workers=workers, min_workers=min_workers, spares=spares)
        assert nodes_needed(config) == count


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"cluster": "discover:eth0"},
            r"cluster: got 'discover:eth0', expected local, static, ray, discover",
        ),
        ({"cluster": "discover", "addresses": ("a:1",)}, r"workers: got .* a number, with cluster discover"),
        (
            {"cluster": "discover", "workers": 2, "min_workers": 3},
            r"min_workers: got 3, expected at most the 2",
        ),
        ({"min_workers": 2}, r"min_workers: got 2, expected nothing without cluster discover"),
        ({"discover_wait_s": 2.0}, r"discover_wait_s: got 2\.0, expected nothing without"),
        ({"cluster": "discover", "discover_wait_s": 0}, r"discover_wait_s: got 0, expected a number above 0"),
        ({"cluster": "discover", "min_workers": 0}, r"min_workers: got 0, expected a whole number from 1"),
        (
            {"cluster": "discover", "threads_per_worker": 2},
            r"threads_per_worker: got 2, expected nothing with",
        ),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ClusterConfig(**options)


def test_what_is_missing_is_said_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cluster_token: got None, expected a token, by which this host"):
        LLM(cluster="discover")
    with pytest.raises(
        ConfigError, match=r"cluster: got 'discover:203\.0\.113\.9', expected one of this host"
    ):
        LLM(cluster="discover:203.0.113.9", cluster_token="swan")
    with pytest.raises(ConfigError, match="workers: got 0, expected at least 1 with cluster discover"):
        LLM(cluster="discover", cluster_token="swan", workers=0)
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "zeroconf" else find_spec(name)
    )
    with pytest.raises(MissingPackageError, match=r"cluster: zeroconf is not installed.*duckllm\[discover\]"):
        LLM(cluster="discover", cluster_token="swan")
