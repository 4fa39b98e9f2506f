"""Workers that Ray places on nodes: three nodes on this machine, of which two take workers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from duckllm import LLM, SamplingParams
from duckllm.cluster import open_cluster, ray_cluster, ray_driver
from duckllm.cluster.address import parse_address
from duckllm.cluster.ray_cluster import RayCluster, find_ray
from duckllm.config import ClusterConfig
from duckllm.errors import ConfigError, MissingPackageError, WorkerUnavailableError
from duckllm.transport.flock import Flock
from duckllm.weights.manifest import Manifest
from support.moments import DECODE, IDLE, PREFILL, AtStep
from support.ray_nodes import RayNodes, ray_nodes
from worker_harness import Step, expected_sum, make_step, open_transport, plan_for, stop_process

SEEDED = SamplingParams(temperature=1.0, seed=7, ignore_eos=True, max_tokens=16)
QUICK: dict[str, Any] = {"worker_silence_s": 0.5, "worker_timeout_s": 60.0}


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """Ray with its files and its token in a folder of its own; short, for its sockets' names."""
    folder = tempfile.mkdtemp(prefix="duck-")
    with pytest.MonkeyPatch.context() as patch:
        token = Path(folder, "token")
        token.write_text("0" * 64)
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.delenv("RAY_ADDRESS", raising=False)
        try:
            with ray_nodes() as running:
                yield running
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def actor_of(pid: int) -> psutil.Process:
    parent = psutil.Process(pid).parent()
    assert parent is not None
    return parent


def raylet_of(pid: int) -> psutil.Process:
    return actor_of(actor_of(pid).pid)


def check_step(cluster: RayCluster, flock: Flock, model: Manifest, step: Step) -> None:
    plans = plan_for(model, cluster.num_workers)
    got = flock.wait(flock.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
    np.testing.assert_array_equal(got, expected_sum(model, plans, step))


@contextlib.contextmanager
def open_flock(cluster: RayCluster, model: Manifest) -> Iterator[Flock]:
    connections = cluster.connect(plan_for(model, cluster.num_workers))
    with open_transport(connections) as transport:
        yield Flock(transport, cluster, 0.2, 60.0)


@pytest.mark.slow
def test_the_same_tokens_whatever_is_lost(nodes: RayNodes, demo_folder: Path, at_step: AtStep) -> None:
    prompts = [f"{number} Is {number} prime? What is a duck?" for number in range(1001, 1009)]
    with LLM(demo_folder, workers=3, max_model_len=256) as llm:
        expected = [reply.outputs[0].token_ids for reply in llm.generate(prompts, SEEDED)]
    with LLM(demo_folder, cluster=f"ray:{nodes.address}", max_model_len=256, **QUICK) as llm:
        info = llm.cluster_info()
        assert info.num_workers == 3  # as many as nodes have room for
        assert len({raylet_of(pid) for pid in info.pids}) == 2
        assert len(nodes.actors()) == 3
        for actor in nodes.actors():
            assert "--token" not in " ".join(psutil.Process(actor.children()[0].pid).cmdline())

        def kill_actor(worker: int) -> None:
            actor_of(llm.cluster_info().pids[worker]).kill()

        def stop_worker_and_kill_actor(worker: int) -> None:
            stop_process(llm.cluster_info().pids[worker])
            kill_actor(worker)

        def kill_worker(worker: int) -> None:
            os.kill(llm.cluster_info().pids[worker], signal.SIGKILL)

        def stop_worker(worker: int) -> None:
            stop_process(llm.cluster_info().pids[worker])

        for number, ((fault, moment), prompt, tokens) in enumerate(
            zip(
                (
                    *((kill_worker, moment) for moment in (PREFILL, DECODE, IDLE)),
                    *((stop_worker, moment) for moment in (PREFILL, DECODE, IDLE)),
                    (kill_actor, DECODE),
                    (stop_worker_and_kill_actor, DECODE),
                ),
                prompts,
                expected,
                strict=True,
            )
        ):
            worker, before = number % 3, llm.cluster_info().pids
            done = at_step(moment, lambda fault=fault, worker=worker: fault(worker))  # type: ignore[misc]
            [reply] = llm.generate(prompt, SEEDED)
            assert done == [1]
            assert reply.outputs[0].token_ids == tokens
            after = llm.cluster_info().pids
            assert [old == new for old, new in zip(before, after, strict=True)] == [
                index != worker for index in range(3)
            ]
            wait_for(lambda pid=before[worker]: not is_running(pid))
        info = llm.cluster_info()
        assert len(nodes.actors()) == 3
    # Nothing is left.
    wait_for(lambda: not nodes.actors())
    assert not any(is_running(pid) for pid in info.pids)
    for address in map(parse_address, info.addresses):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address.name, address.port), 5).close()


@pytest.mark.slow
def test_a_ray_of_its_own(model: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tempfile.mkdtemp(prefix="duck-")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    step = make_step(model, 3)
    try:
        with (
            RayCluster(ClusterConfig(cluster="ray", workers=1)) as cluster,
            open_flock(cluster, model) as flock,
        ):
            check_step(cluster, flock, model, step)
            assert cluster.num_here == 1
            assert cluster._driver is not None
            started = psutil.Process(cluster._driver.child.process.pid).children(recursive=True)
            assert "raylet" in {process.name() for process in started}
        wait_for(lambda: not any(is_running(process.pid) for process in started))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_an_actor_that_hangs_and_a_driver_that_dies(nodes: RayNodes, model: Manifest) -> None:
    step = make_step(model, 3)
    with RayCluster(ClusterConfig(cluster=f"ray:{nodes.address}", workers=2, **QUICK)) as cluster:
        with open_flock(cluster, model) as flock:
            check_step(cluster, flock, model, step)
            hung = cluster.workers[1].pid
            actor = actor_of(hung)
            stop_process(actor.pid)
            stop_process(hung)
            check_step(cluster, flock, model, step)
            assert cluster.workers[1].pid != hung
            wait_for(lambda: not is_running(hung) and not actor.is_running())
            # Without its driver Ray ends the actors, and another driver starts them anew.
            pids = [worker.pid for worker in cluster.workers]
            assert cluster._driver is not None
            cluster._driver.child.process.kill()
            wait_for(lambda: not any(is_running(pid) for pid in pids))
            check_step(cluster, flock, model, step)
        last = [worker.pid for worker in cluster.workers]
        assert not set(pids) & set(last)
    wait_for(lambda: not nodes.actors())
    assert not any(is_running(pid) for pid in last)


@pytest.mark.slow
def test_too_little_room_is_refused_in_time(nodes: RayNodes) -> None:
    config = ClusterConfig(cluster=f"ray:{nodes.address}", workers=4, connect_timeout_s=1.0)
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(ConfigError) as caught:
        open_cluster(config)
    assert str(caught.value) == (
        f"workers: got 4, expected at most 3 on Ray {nodes.address} "
        "(of 3 duckllm_worker on 3 nodes, 3 were free within 1 s)"
    )
    assert {child.pid for child in psutil.Process().children()} == before


HOST = """
import sys, time
from duckllm.cluster.ray_cluster import RayCluster
from duckllm.config import ClusterConfig
with RayCluster(ClusterConfig(cluster="ray", workers=2)) as cluster:
    print(*cluster.addresses, flush=True)
    time.sleep(100)
"""


@pytest.mark.slow
def test_a_host_that_is_killed_leaves_nothing(nodes: RayNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        addresses = [parse_address(text) for text in host.stdout.readline().split()]
        assert len(addresses) == 2
        actors = nodes.actors()
        [driver] = psutil.Process(host.pid).children()
        workers = [child for actor in actors for child in actor.children()]
        assert len(actors) == len(workers) == 2
        host.kill()
    wait_for(lambda: not any(is_running(process.pid) for process in (driver, *actors, *workers)))


@pytest.mark.slow
def test_a_worker_whose_node_dies_goes_on_on_another(nodes: RayNodes, model: Manifest) -> None:
    """The last of these tests that needs all nodes."""
    step = make_step(model, 3)
    config = ClusterConfig(cluster=f"ray:{nodes.address}", workers=2, **QUICK)
    with RayCluster(config) as cluster, open_flock(cluster, model) as flock:
        check_step(cluster, flock, model, step)
        raylets = [raylet_of(worker.pid) for worker in cluster.workers]
        assert len(set(raylets)) == 2
        nodes.end_node(0)
        wait_for(lambda: sum(is_running(raylet.pid) for raylet in raylets) == 1)
        [lost] = [worker for worker in range(2) if not is_running(raylets[worker].pid)]
        pid = cluster.workers[lost].pid
        wait_for(lambda: not is_running(pid))
        check_step(cluster, flock, model, step)
        assert raylet_of(cluster.workers[lost].pid) == raylets[1 - lost]
    wait_for(lambda: not nodes.actors())


def test_no_ray_at_an_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(WorkerUnavailableError, match=f"no Ray at 127.0.0.1:{port}: Connection refused"):
        open_cluster(ClusterConfig(cluster=f"ray:127.0.0.1:{port}", workers=2))


def test_a_driver_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "CONNECT_TIMEOUT_S", 0.0)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(WorkerUnavailableError, match="Ray local: Ray's driver: no answer within 0 s"):
        open_cluster(ClusterConfig(cluster="ray", workers=2))
    assert {child.pid for child in psutil.Process().children()} == before


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Version mismatch: a has\n  Ray 2\n  and b 3.\n", "Version mismatch: a has Ray 2 and b 3"),
        ("It died because of an error in its creation task\n  File x\nKeyError: 1", "KeyError: 1"),
        ("One. " + 99 * "two " + "three.", "One"),
        ("", "RuntimeError"),
    ],
)
def test_what_ray_says_becomes_a_sentence(text: str, sentence: str) -> None:
    assert ray_driver._first_sentences(RuntimeError(text)) == sentence


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find_spec(name))
    with pytest.raises(MissingPackageError, match=r"ray is not installed; .*duckllm\[ray\]"):
        LLM(cluster="ray")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cluster": "kubernetes"},
            r"cluster: got 'kubernetes', expected local, static, ray, discover, ray:name:port or discover:10",
        ),
        ({"cluster": 1}, r"cluster: got 1, expected local"),
        (
            {"cluster": "static"},
            r"workers: got 2, expected addresses, name:port,name:port, with cluster static",
        ),
        (
            {"cluster": "local", "addresses": ("a:1",)},
            r"workers: got \['a:1'\], expected a number, with cluster local",
        ),
        (
            {"cluster": "ray", "addresses": ("a:1",)},
            r"workers: got \['a:1'\], expected a number, with cluster ray",
        ),
        ({"cluster": "ray", "spares": 1}, r"spares: got 1, expected 0 with Ray"),
        ({"workers": 0}, r"workers: got 0, expected a whole number from 1"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterConfig(**options)


def test_kinds_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ClusterConfig().kind == ClusterConfig(cluster="local").kind == "local"
    assert ClusterConfig(addresses=("a:1",)).kind == ClusterConfig(addresses=("a:1",), cluster="static").kind
    assert ClusterConfig(cluster="ray:head:6379", workers=0).kind == "ray"
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert find_ray(ClusterConfig(cluster="ray")) == "auto"
    assert find_ray(ClusterConfig(cluster="ray:[::1]:6379")) == "[::1]:6379"
    with pytest.raises(ConfigError, match="cluster: got 'head', expected name:port"):
        find_ray(ClusterConfig(cluster="ray:head"))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.10:6379")
    assert find_ray(ClusterConfig(cluster="ray")) == "10.0.0.10:6379"
    assert find_ray(ClusterConfig(cluster="ray:10.0.0.11:6379")) == "10.0.0.11:6379"
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.10:10001")
    with pytest.raises(ConfigError, match="RAY_ADDRESS: got"):
        find_ray(ClusterConfig(cluster="ray"))
    with pytest.raises(ConfigError, match="workers: got 0, expected at least 1 with cluster ray"):
        LLM(workers=0, cluster="ray")
