"""Replies that go on with the same tokens while a worker is killed, stopped, restarted or cut off.

Faults come at the n-th step that the host hands to its workers; each step is one layer of one lane, so that
the first ones are a prompt's and the later ones its reply's.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from duckllm import LLM, SamplingParams
from duckllm.errors import WorkerLostError
from support.moments import DECODE, IDLE, PREFILL, AtStep
from worker_harness import WorkerProcess, running_worker, stop_process

GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=16)
SEEDED = SamplingParams(temperature=1.0, seed=7, ignore_eos=True, max_tokens=16)
QUICK: dict[str, Any] = {"worker_silence_s": 0.25, "max_model_len": 256, "shares": "even"}
BOTH_WAYS: dict[str, Any] = {"lanes": "on", "draft": "on"}


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


class Prompts:
    """Questions, each asked once, so that none is found in the KV cache, and their undisturbed replies."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._number = llm, 1000

    def next(self, params: SamplingParams) -> tuple[str, tuple[int, ...]]:
        self._number += 1
        prompt = f"{self._number} {self._number * 7} Is {self._number} prime? What is a duck?"
        return prompt, reply(self._llm, prompt, params)


def reply(llm: LLM, prompt: str, params: SamplingParams) -> tuple[int, ...]:
    return tuple(llm.generate(prompt, params)[0].outputs[0].token_ids)


@pytest.fixture(scope="module")
def prompts(demo_folder: Path) -> Iterator[Prompts]:
    with LLM(demo_folder, workers=2, max_model_len=256, lanes="off", draft="off") as llm:
        yield Prompts(llm)


@pytest.mark.parametrize("options", [{"lanes": "off", "draft": "off"}, {**BOTH_WAYS, "spares": 1}])
@pytest.mark.parametrize("fault", [kill, stop_process])
def test_local_workers(
    demo_folder: Path,
    prompts: Prompts,
    at_step: AtStep,
    options: dict[str, Any],
    fault: Callable[[int], None],
) -> None:
    before = children()
    with LLM(demo_folder, workers=2, **QUICK, **options) as llm:
        count = len(children() - before)
        for moment, victim, params in ((PREFILL, 0, GREEDY), (DECODE, 1, SEEDED), (IDLE, 0, SEEDED)):
            prompt, expected = prompts.next(params)
            info = llm.cluster_info()
            done = at_step(moment, lambda pids=info.pids, v=victim: fault(pids[v]))  # type: ignore[misc]
            assert reply(llm, prompt, params) == expected
            assert done == [1]
            now = llm.cluster_info()
            assert now.pids[victim] != info.pids[victim]
            assert now.pids[1 - victim] == info.pids[1 - victim]
            assert not psutil.pid_exists(info.pids[victim])
            assert len(children() - before) == count
    assert children() == before


def test_both_workers_at_once_and_many_requests(demo_folder: Path, prompts: Prompts, at_step: AtStep) -> None:
    asked = [prompts.next(GREEDY) for _ in range(4)]
    with LLM(demo_folder, workers=2, **QUICK, **BOTH_WAYS) as llm:
        at_step(30, lambda: [kill(pid) for pid in llm.cluster_info().pids])
        outputs = llm.generate([prompt for prompt, _ in asked], GREEDY)
    assert [tuple(output.outputs[0].token_ids) for output in outputs] == [tokens for _, tokens in asked]


class Nodes:
    """Workers at addresses, which a test can kill and start again at the same one."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.workers: list[WorkerProcess] = []

    def start(self, count: int, **variables: str) -> None:
        for _ in range(count):
            self.workers.append(self._stack.enter_context(running_worker(self._folder, **variables)))

    @property
    def addresses(self) -> list[str]:
        return [str(worker.address) for worker in self.workers]

    def kill(self, index: int) -> None:
        kill(self.workers[index].pid)
        self.workers[index].process.wait()

    def start_again(self, index: int) -> None:
        at = str(self.workers[index].address)
        self.workers[index] = self._stack.enter_context(running_worker(self._folder, "--listen", at))

    def restart(self, index: int) -> None:
        """As a service manager does: it comes back a moment after its end."""
        self.kill(index)
        timer = threading.Timer(0.3, self.start_again, (index,))
        timer.start()
        self._stack.callback(timer.join)

    def stop_for(self, index: int, seconds: float) -> None:
        stop_process(self.workers[index].pid)
        timer = threading.Timer(seconds, os.kill, (self.workers[index].pid, signal.SIGCONT))
        timer.start()
        self._stack.callback(timer.join)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path, stack)


def test_workers_at_addresses_that_come_back(
    demo_folder: Path,
    prompts: Prompts,
    nodes: Nodes,
    at_step: AtStep,
) -> None:
    nodes.start(2)
    with LLM(demo_folder, workers=nodes.addresses, **QUICK, **BOTH_WAYS) as llm:
        for action, moment, params in (
            (lambda: nodes.restart(0), PREFILL, SEEDED),
            (lambda: nodes.restart(1), DECODE, GREEDY),
            (lambda: nodes.stop_for(1, 1.2), PREFILL, GREEDY),
            (lambda: nodes.stop_for(0, 1.2), DECODE, SEEDED),
            (lambda: nodes.stop_for(0, 0.05), DECODE, SEEDED),
            (lambda: nodes.restart(1), IDLE, GREEDY),
            (lambda: nodes.stop_for(0, 1.2), IDLE, SEEDED),
        ):
            prompt, expected = prompts.next(params)
            done = at_step(moment, action)
            assert reply(llm, prompt, params) == expected
            assert done == [1]
            assert list(llm.cluster_info().addresses) == nodes.addresses
        assert list(llm.cluster_info().pids) == [worker.pid for worker in nodes.workers]
    # Stopped workers kept their weights: they were prepared again without a stripe verified anew.
    assert "0 verified now" in nodes.workers[0].log()


def test_spares_at_addresses(
    demo_folder: Path,
    prompts: Prompts,
    nodes: Nodes,
    at_step: AtStep,
) -> None:
    nodes.start(3)
    a, b, c = nodes.addresses
    patient = QUICK | {"worker_silence_s": 1.0}  # a busy machine must not make the spare take a place
    with LLM(demo_folder, workers=nodes.addresses, spares=1, **patient, **BOTH_WAYS) as llm:
        assert llm.cluster_info().addresses == (a, b)
        prompt, expected = prompts.next(GREEDY)
        at_step(DECODE, lambda: nodes.kill(0))
        assert reply(llm, prompt, GREEDY) == expected
        assert llm.cluster_info().addresses == (c, b)
        # The one that was lost is a spare once it is back.
        nodes.start_again(0)
        prompt, expected = prompts.next(SEEDED)
        at_step(PREFILL, lambda: stop_process(nodes.workers[1].pid))
        assert reply(llm, prompt, SEEDED) == expected
        assert llm.cluster_info().addresses == (c, a)
        os.kill(nodes.workers[1].pid, signal.SIGCONT)


def test_a_spare_with_another_instruction_set_says_so(
    demo_folder: Path, nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.start(1)
    nodes.start(1, DUCK_FORCE_ISA="scalar")
    with LLM(demo_folder, workers=nodes.addresses, spares=1, **QUICK) as llm:
        usual = llm.cluster_info().isas[0]
        llm.generate("Is 1001 prime?", GREEDY)
        nodes.kill(0)
        with caplog.at_level(logging.WARNING, "duckllm"):
            llm.generate("Is 1003 prime?", GREEDY)
        assert llm.cluster_info().isas == ("scalar",)
    said = f"computes with scalar where {nodes.addresses[0]} computed with {usual}: sums may differ"
    assert (said in caplog.text) == (usual != "scalar")


def test_a_worker_that_stays_away_fails_a_request_and_not_the_next(
    demo_folder: Path, prompts: Prompts, nodes: Nodes
) -> None:
    nodes.start(2)
    with LLM(demo_folder, workers=nodes.addresses, worker_timeout_s=0.4, **QUICK) as llm:
        prompt, expected = prompts.next(GREEDY)
        stream = llm.stream(prompt, GREEDY)
        got = [next(stream).token_ids[0] for _ in range(4)]
        nodes.kill(1)
        with pytest.raises(WorkerLostError) as caught:
            list(stream)
        away = f"worker {nodes.addresses[1]} is not available: Connection refused"
        assert caught.value.address == nodes.addresses[1]
        assert caught.value.reason.endswith(f"nothing took its place in time: {away}")
        with pytest.raises(WorkerLostError):
            llm.generate(prompt, GREEDY)
        nodes.start_again(1)
        assert reply(llm, prompt, GREEDY) == expected
        assert tuple(got) == expected[:4]


def test_ctrl_c_while_a_worker_is_away(demo_folder: Path, prompts: Prompts, nodes: Nodes) -> None:
    nodes.start(2)
    with LLM(demo_folder, workers=nodes.addresses, **QUICK) as llm:
        prompt, expected = prompts.next(GREEDY)
        nodes.kill(0)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the interrupt comes within one of these
            timer.start()
            llm.generate(prompt, GREEDY)
            time.sleep(20)
        timer.join()
        nodes.start_again(0)
        assert reply(llm, prompt, GREEDY) == expected


@contextmanager
def node_behind_a_link(name: str) -> Iterator[tuple[str, Callable[[str], None]]]:
    """A network namespace with one link: the address inside, and what sets its end ``"up"`` or ``"down"``."""

    def run(command: str) -> None:
        assert os.system(f"{command} >/dev/null 2>&1") == 0, command

    host, inside = f"{name}h", f"{name}n"
    try:
        run(f"ip netns add {name}")
    except AssertionError:
        pytest.skip("network namespaces cannot be made here: not root, or no ip command")
    try:
        run(f"ip link add {host} type veth peer name {inside} netns {name}")
        run(f"ip addr add 10.213.77.1/30 dev {host}")
        run(f"ip link set {host} up")
        run(f"ip -n {name} addr add 10.213.77.2/30 dev {inside}")
        run(f"ip -n {name} link set {inside} up")
        yield "10.213.77.2", lambda state: run(f"ip -n {name} link set {inside} {state}")
    finally:
        os.system(f"ip netns del {name}")


@pytest.mark.multi_node
def test_a_link_that_is_down_for_a_while_and_one_that_stays_so(
    demo_folder: Path,
    prompts: Prompts,
    nodes: Nodes,
    tmp_path: Path,
    at_step: AtStep,
) -> None:
    token, name = "a secret", f"duck{os.getpid()}"
    with node_behind_a_link(name) as (address, set_link), ExitStack() as stack:
        within = ("ip", "netns", "exec", name)
        far = stack.enter_context(
            running_worker(tmp_path, "--listen", f"{address}:0", token=token, within=within)
        )
        near, spare = (stack.enter_context(running_worker(tmp_path, token=token)) for _ in range(2))
        far_address = f"{address}:{far.address.port}"
        workers = [str(near.address), far_address, str(spare.address)]

        def cut(seconds: float | None) -> None:
            set_link("down")
            if seconds is not None:
                timer = threading.Timer(seconds, set_link, ("up",))
                timer.start()
                stack.callback(timer.join)

        with LLM(demo_folder, workers=workers[:2], cluster_token=token, **QUICK, **BOTH_WAYS) as llm:
            for moment, params in ((PREFILL, SEEDED), (DECODE, GREEDY), (IDLE, SEEDED)):
                prompt, expected = prompts.next(params)
                done = at_step(moment, lambda: cut(1.0))
                assert reply(llm, prompt, params) == expected
                assert done == [1]
            assert llm.cluster_info().addresses == tuple(workers[:2])
        with LLM(demo_folder, workers=workers, spares=1, cluster_token=token, **QUICK) as llm:
            prompt, expected = prompts.next(GREEDY)
            at_step(DECODE, lambda: cut(None))
            assert reply(llm, prompt, GREEDY) == expected
            assert llm.cluster_info().addresses == (workers[0], workers[2])
        set_link("up")
