"""Workers that announce themselves by multicast DNS, found over real sockets."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from duckllm import LLM, SamplingParams
from duckllm.cli.main import app
from duckllm.cluster.address import Address
from duckllm.cluster.discovery import WAITING, Discovery
from duckllm.cluster.discovery_announcement import Announcement, sign
from duckllm.cluster.discovery_cluster import DiscoveredCluster, look_around
from duckllm.cluster.discovery_mdns import Listener, open_zeroconf, service_info
from duckllm.config import ClusterConfig
from duckllm.doctor import examine as examine_module
from duckllm.doctor.machine_facts import gather_machine
from duckllm.errors import ConfigError
from duckllm.weights.manifest import Manifest
from support.moments import DECODE, AtStep
from worker_harness import (
    WorkerProcess,
    expected_sum,
    make_step,
    open_transport,
    plan_for,
    running_worker,
)

zeroconf = pytest.importorskip("zeroconf")
LOOPBACK = "127.0.0.1"
GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=16)
SUBNET = "10.213.78"


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module", autouse=True)
def _multicast_on_loopback() -> None:
    """Skips where the system delivers no multicast on loopback."""
    token, heard = secrets.token_hex(8), []
    try:
        listener = Listener("host", token, [LOOPBACK], lambda label, _: heard.append(label), lambda *_: None)
        sender = open_zeroconf([LOOPBACK])
    except OSError as error:
        pytest.skip(f"no multicast DNS on loopback here: {error}")
    info = service_info(Announcement("host", "probe", time_us=7), [LOOPBACK], token)
    sender.register_service(info, cooperating_responders=True)
    with suppress(AssertionError):
        until(lambda: heard, 10)
    sender.close()
    listener.close()
    if not heard:
        pytest.skip("no multicast DNS on loopback here: what was sent did not come")


@pytest.fixture
def token() -> str:
    """One of this test's own: others on this machine may announce workers too."""
    return secrets.token_hex(16)


def config_of(token: str, interface: str = LOOPBACK, **options: Any) -> ClusterConfig:
    return ClusterConfig(
        cluster=f"discover:{interface}",
        cluster_token=token,
        worker_silence_s=0.25,
        **{"workers": 0, **options},
    )


@contextmanager
def announced(
    folder: Path, token: str, name: str, *flags: str, within: tuple[str, ...] = ()
) -> Iterator[WorkerProcess]:
    """A worker that announces itself."""
    with running_worker(
        folder, "--announce", "--node-name", name, *flags, token=token, within=within
    ) as worker:
        yield worker


def test_two_nodes_and_strangers(tmp_path: Path, token: str) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(announced(tmp_path, token, "duck-1", "--speed", "35"))
        stranger = stack.enter_context(announced(tmp_path, "another", "gull"))
        second = stack.enter_context(announced(tmp_path, token, "duck-2"))
        # It has the wrong token, and the right node's name and place; its proof is not that of its words.
        false = open_zeroconf([LOOPBACK])
        stack.callback(false.close)
        forged = Announcement("node", "duck-1", (first.address,), time_us=time.time_ns() // 1000)
        info = service_info(forged, [LOOPBACK], "another")
        label, kind = info.get_name(), info.type
        info.name = f"false-{label}.{kind}"
        false.register_service(info, cooperating_responders=True)
        discovery = stack.enter_context(Discovery(token, LOOPBACK))
        found = discovery.wait(2, 30)
        assert [(each.name, each.address) for each in found] == [
            ("duck-1", first.address),
            ("duck-2", second.address),
        ]
        speeds = [each.read_gb_per_s for each in found]
        assert speeds == [35.0, None]
        assert all(each.memory_bytes > 0 for each in found)
        why = "cluster_token: it has another one than this side"
        gull = Announcement("node", "gull", (stranger.address,)).label
        # Others on this machine may announce themselves too.
        until(
            lambda: (
                {(gull, why), (f"false-{label}", why)}
                <= {(each.name, each.problem) for each in discovery.refused()}
            )
        )
        # Under the very label of the node, which stays.
        false.register_service(service_info(forged, [LOOPBACK], "another"), cooperating_responders=True)
        until(lambda: (label, why) in [(each.name, each.problem) for each in discovery.refused()])
        assert [each.address for each in discovery.waiting()] == [first.address, second.address]
        until(lambda: f"looks for nodes and does not take this one in: {why}" in stranger.stderr.read_text())
        until(lambda: "looks for nodes, with this node's cluster token" in first.stderr.read_text())


@pytest.mark.parametrize(
    "change",
    [
        {"form": "9"},
        {"name": "x" * 200},
        {"proof": "0" * 64},
        {f"more-{number}": "y" * 200 for number in range(20)},
        {"at": b"\xff\xfe".decode("latin1")},
    ],
)
def test_hostile_records_harm_nobody(tmp_path: Path, token: str, change: dict[str, str]) -> None:
    entries: dict[Any, Any] = {
        **sign(Announcement("node", "evil", (Address(LOOPBACK, 9),)), token),
        **change,
    }
    info = zeroconf.ServiceInfo(
        "_duckllm._tcp.local.",
        f"evil-{token[:8]}._duckllm._tcp.local.",
        port=9,
        properties={name.encode(): value.encode("latin1") for name, value in entries.items()},
        server=f"evil-{token[:8]}.local.",
        parsed_addresses=[LOOPBACK],
    )
    evil = open_zeroconf([LOOPBACK])
    try:
        evil.register_service(info, cooperating_responders=True)
        with announced(tmp_path, token, "duck-1"), Discovery(token, LOOPBACK) as discovery:
            found = discovery.wait(1, 30)
            # Others on this machine may announce themselves too.
            until(lambda: f"evil-{token[:8]}" in [each.name for each in discovery.refused()])
            (refused,) = (each for each in discovery.refused() if each.name == f"evil-{token[:8]}")
    finally:
        evil.close()
    assert [each.name for each in found] == ["duck-1"]
    assert refused.problem.startswith(("its ", "cluster_token: it has"))


def test_a_replayed_announcement(tmp_path: Path, token: str) -> None:
    """A worker that is gone, whose records somebody sends again; and another that listens there now."""
    with (
        announced(tmp_path, token, "duck-1") as gone,
        announced(tmp_path, token, "duck-2") as there,
        Discovery(token, LOOPBACK) as discovery,
    ):
        discovery.wait(2, 20)
    replayed = Announcement("node", "duck-1", (gone.address,), "avx2", 1, 9999.0, time.time_ns() // 1000)
    sender = open_zeroconf([LOOPBACK])
    try:
        sender.register_service(service_info(replayed, [LOOPBACK], token), cooperating_responders=True)
        with (
            running_worker(tmp_path, "--listen", str(gone.address), token="another"),
            announced(tmp_path, token, "duck-2"),
        ):
            found, others = look_around(config_of(token))
    finally:
        sender.close()
    assert there.address not in [each.address for each in found]
    assert [each.name for each in found] == ["duck-2"]
    problems = [each.problem for each in others if each.address == gone.address]
    assert len(problems) == 1
    assert "another one" in problems[0]


def test_a_node_lost_in_mid_answer_and_one_that_comes_later(
    demo_folder: Path, tmp_path: Path, token: str, at_step: AtStep
) -> None:
    options: dict[str, Any] = {"max_model_len": 256, "worker_silence_s": 0.25, "draft": "off"}
    prompt = "What is a duck?"
    with LLM(demo_folder, workers=2, shares="even", **options) as llm:
        expected = llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
    with ExitStack() as stack:
        first = stack.enter_context(announced(tmp_path, token, "duck-1"))
        second = stack.enter_context(announced(tmp_path, token, "duck-2"))
        config = {"cluster": f"discover:{LOOPBACK}", "cluster_token": token, "min_workers": 2}
        with LLM(demo_folder, shares="even", **config, **options) as llm:
            info = llm.cluster_info()
            assert info.addresses == (str(first.address), str(second.address))
            assert info.names == ("duck-1", "duck-2")
            assert info.other_nodes == ()
            third = stack.enter_context(announced(tmp_path, token, "duck-3", "--speed", "20"))
            until(lambda: [each.state for each in llm.cluster_info().other_nodes] == [WAITING])
            (waiting,) = llm.cluster_info().other_nodes
            assert (waiting.name, waiting.address) == ("duck-3", str(third.address))
            assert waiting.read_gb_per_s == 20.0
            at_step(DECODE, first.process.kill)
            assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == expected
            assert llm.cluster_info().names == ("duck-3", "duck-2")
            # It is back, elsewhere: it waits, as its slice is another's now.
            again = stack.enter_context(announced(tmp_path, token, "duck-1"))
            until(lambda: str(again.address) in [each.address for each in llm.cluster_info().other_nodes])
            until(
                lambda: (
                    WAITING
                    in [
                        each.state
                        for each in llm.cluster_info().other_nodes
                        if each.address == str(again.address)
                    ]
                )
            )
            at_step(DECODE, second.process.kill)
            assert llm.generate(f"{prompt} ", GREEDY)[0].outputs[0].token_ids
            assert llm.cluster_info().names == ("duck-3", "duck-1")


def test_plan_and_doctor_find_them_too(
    demo_folder: Path, tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUCKLLM_CLUSTER_TOKEN", token)
    where = ["--cluster", f"discover:{LOOPBACK}", "--min-workers", "2"]
    with (
        announced(tmp_path, token, "duck-1", "--speed", "35") as first,
        announced(tmp_path, token, "duck-2", "--speed", "70") as second,
    ):
        done = CliRunner().invoke(app, ["plan", str(demo_folder), *where, "--json"])
        assert done.exit_code == 0, done.output
        workers = json.loads(done.stdout)["workers"]
        names = [f"duck-1 ({first.address})", f"duck-2 ({second.address})"]
        assert [each["node"] for each in workers] == names
        assert [each["read_gb_per_s"] for each in workers] == [17.5, 35.0]  # of one machine
        machine = gather_machine(measure=lambda threads: 50.0)
        monkeypatch.setattr(examine_module, "gather_machine", lambda: machine)
        done = CliRunner().invoke(app, ["doctor", *where, "--json"])
        findings = json.loads(done.stdout)["findings"]
        ports = {each["where"]: each["found"] for each in findings if each["check"] == "port"}
        assert ports == dict.fromkeys(names, "a worker answers")
        speeds = {each["where"]: each["found"] for each in findings if each["check"] == "speed"}
        assert "70.0 GB/s" in speeds[names[1]]
        [said] = [each for each in findings if each["check"] == "said speed"]
        assert said["status"] == "warning"
        assert said["found"] == "workers here say 70.0 and 35.0 GB/s, but 50.0 are measured now"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", "ray"], "cluster: got 'ray', expected discover or discover:10.0.0.1"),
        (["--cluster", "discover"], "cluster_token: got None, expected a token"),
        (["--cluster", "discover", "--workers", "a:1"], "workers: got 'a:1', expected a number"),
        (["--min-workers", "2"], "min_workers: got 2, expected nothing without cluster discover"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "doctor"])
def test_what_plan_and_doctor_refuse(
    verb: str, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DUCKLLM_CLUSTER_TOKEN", raising=False)
    done = CliRunner().invoke(app, [verb, *arguments])
    assert isinstance(done.exception, ConfigError)
    assert words in str(done.exception)


@contextmanager
def nodes_on_a_switch(count: int) -> Iterator[list[str]]:
    """Network namespaces with a link each to a bridge of this one, which has ``SUBNET.1``: their names."""
    prefix = f"dk{os.getpid() % 100000}"

    def run(command: str) -> None:
        assert os.system(f"{command} >/dev/null 2>&1") == 0, command

    names = [f"{prefix}n{number}" for number in range(count)]
    made: list[str] = []
    try:
        for name in names:
            if os.system(f"ip netns add {name} >/dev/null 2>&1") != 0:
                pytest.skip("network namespaces cannot be made here: not root, or no ip command")
            made.append(name)
        run(f"ip link add {prefix}b type bridge")
        run(f"ip addr add {SUBNET}.1/24 dev {prefix}b")
        run(f"ip link set {prefix}b up")
        for number, name in enumerate(names):
            run(f"ip link add {prefix}v{number} type veth peer name eth0 netns {name}")
            run(f"ip link set {prefix}v{number} master {prefix}b up")
            run(f"ip -n {name} addr add {SUBNET}.{number + 2}/24 dev eth0")
            run(f"ip -n {name} link set eth0 up")
        yield names
    finally:
        os.system(f"ip link del {prefix}b >/dev/null 2>&1")
        for name in made:
            os.system(f"ip netns del {name}")


@pytest.mark.multi_node
def test_nodes_on_a_network_of_their_own(model: Manifest, tmp_path: Path, token: str) -> None:
    plans, step = plan_for(model, 2), make_step(model, 4)
    with nodes_on_a_switch(2) as names, ExitStack() as stack:
        within = [("ip", "netns", "exec", name) for name in names]
        listen = ("--listen", "0.0.0.0:7411")
        workers = [
            stack.enter_context(announced(tmp_path, token, f"duck-{number}", *listen, within=how))
            for number, how in enumerate(within)
        ]
        config = config_of(token, f"{SUBNET}.1", min_workers=2)
        cluster = stack.enter_context(DiscoveredCluster(config))
        assert [str(each) for each in cluster.addresses] == [f"{SUBNET}.2:7411", f"{SUBNET}.3:7411"]
        with open_transport(cluster.connect(plans)) as transport:
            got = transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
            assert (got == expected_sum(model, plans, step)).all()
            assert [each.name for each in cluster.workers] == ["duck-0", "duck-1"]
            # Restarted with another address, as a lease may give it: found by its name, with the same slice.
            workers[1].process.kill()
            os.system(f"ip -n {names[1]} addr del {SUBNET}.3/24 dev eth0")
            os.system(f"ip -n {names[1]} addr add {SUBNET}.9/24 dev eth0")
            stack.enter_context(announced(tmp_path, token, "duck-1", *listen, within=within[1]))
            connection = cluster.replace(1, time.monotonic() + 30, is_silent=True)
            connection.close()
        assert str(cluster.addresses[1]) == f"{SUBNET}.9:7411"
        assert cluster.workers[1].name == "duck-1"
        assert cluster.workers[1].first_stripe == plans[1].first_stripe
        # A running one whose address changes announces itself again.
        os.system(f"ip -n {names[0]} addr del {SUBNET}.2/24 dev eth0")
        os.system(f"ip -n {names[0]} addr add {SUBNET}.8/24 dev eth0")
        until(lambda: f"{SUBNET}.8:7411" in [each.address for each in cluster.other_nodes])
