"""The Python API with worker processes: what is left behind, and what happens when one dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from duckllm import LLM, SamplingParams
from duckllm.cluster import local
from duckllm.cluster.local import LocalCluster
from duckllm.config import ClusterConfig, available_cores
from duckllm.errors import ConfigError, RequestError, WorkerLostError, WorkerUnavailableError
from duckllm.weights.manifest import Manifest

PRIME = [{"role": "user", "content": "Is 1001 prime?"}]
PRIME_ANSWER = "No, 1001 is not prime: 1001 = 7 x 11 x 13."
LONG = SamplingParams(temperature=0, ignore_eos=True)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_leaving_the_context_leaves_no_process(demo_folder: Path) -> None:
    before = children()
    with LLM(demo_folder, workers=2, max_model_len=128) as llm:
        info = llm.cluster_info()
        assert (info.num_workers, info.weight_format, len(info.addresses)) == (2, "fp9", 2)
        assert set(info.pids) == children() - before
        assert llm.worker_times().addresses == info.addresses
        assert llm.worker_times().layers == ()
        assert llm.chat(PRIME)[0].outputs[0].text == PRIME_ANSWER
        check_facts(demo_folder, llm)
    assert children() == before


def check_facts(demo_folder: Path, llm: LLM) -> None:
    """What is said of two workers here after a reply, and of their steps."""
    info, times, manifest = llm.cluster_info(), llm.worker_times(), Manifest.load(demo_folder)
    assert sum(info.shares) == 1
    assert info.shares == tuple(stripes / manifest.num_stripes for stripes in info.stripes)
    stored = sum(entry.bytes for entry in manifest.expert_layers.values())
    assert stored - 4096 * len(manifest.expert_layers) <= sum(info.weight_bytes) <= stored
    assert info.weight_formats == ("fp9", "fp9")
    assert info.threads == (max(1, available_cores() // 2),) * 2
    assert info.links == ("shared memory",) * 2
    assert info.own_memory_bytes == info.huge_page_bytes == (0, 0)  # mapped from files
    assert times.layers == tuple(manifest.expert_layers)
    assert len(set(times.num_steps[:-1])) == 1  # the last one guesses, and not in every step
    assert times.num_steps[0] > 10
    assert times.num_steps[0] >= times.num_steps[-1] > 0
    assert times.num_losses == times.num_replacements == (0, 0)
    assert times.is_lost == (False, False)
    for table in (times.compute_us, times.wait_us, times.round_trip_us):
        assert [len(row) for row in table] == [2] * len(times.layers)
    for computed, trip in zip(times.compute_us, times.round_trip_us, strict=True):
        assert all(0 < us <= total_us for us, total_us in zip(computed, trip, strict=True))


def test_an_error_inside_the_context_leaves_no_process(demo_folder: Path) -> None:
    before = children()
    with pytest.raises(ZeroDivisionError), LLM(demo_folder, workers=1, max_model_len=128):
        raise ZeroDivisionError
    assert children() == before


def test_a_failing_start_leaves_no_process(demo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    monkeypatch.setattr("duckllm.assembly.load_model", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LLM(demo_folder, workers=1)
    assert children() == before


def test_forgetting_to_close_leaves_no_process_at_exit(demo_folder: Path) -> None:
    code = (
        "import sys; from duckllm import LLM\n"
        "llm = LLM(sys.argv[1], workers=2, max_model_len=64)\n"
        "print(*llm.cluster_info().pids)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(demo_folder)], check=True, capture_output=True, text=True
    )
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert result.stderr == ""


def test_workers_at_addresses_serve_and_stay(demo_folder: Path) -> None:
    with LocalCluster(ClusterConfig(workers=2)) as cluster:
        addresses = [str(address) for address in cluster.addresses]
        token = cluster._token
        for workers in (addresses, ",".join(addresses)):
            with LLM(demo_folder, workers=workers, cluster_token=token, max_model_len=128) as llm:
                assert list(llm.cluster_info().addresses) == addresses
                assert all(link.startswith("TCP, ") for link in llm.cluster_info().links)
                assert llm.chat(PRIME)[0].outputs[0].text == PRIME_ANSWER
            assert all(psutil.pid_exists(pid) for pid in cluster.pids)


def test_no_worker_at_an_address_is_an_error(demo_folder: Path) -> None:
    with pytest.raises(WorkerUnavailableError, match=r"127\.0\.0\.1:1 "):
        LLM(demo_folder, workers="127.0.0.1:1", connect_timeout_s=5)


def test_a_start_that_fails_while_workers_prepare_lets_go_of_them(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalCluster(ClusterConfig(workers=1)) as cluster:
        at = {"workers": [str(cluster.addresses[0])], "cluster_token": cluster._token}
        with monkeypatch.context() as patch:
            patch.setattr("duckllm.assembly.load_config", lambda folder: 1 / 0)
            with pytest.raises(ZeroDivisionError) as caught:
                LLM(demo_folder, **at)
        # The traceback still holds every object of the failed start: nothing was closed by being forgotten.
        assert caught.value.__traceback__ is not None
        with LLM(demo_folder, **at, max_model_len=128) as llm:
            assert llm.chat(PRIME)[0].outputs[0].text == PRIME_ANSWER


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_does_not_come_back_is_a_typed_error(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    before = children()
    with LLM(demo_folder, workers=2, max_model_len=512, worker_timeout_s=0.3) as llm:
        info = llm.cluster_info()
        stream = llm.stream(PRIME, LONG)
        for _ in range(5):
            next(stream)
        with monkeypatch.context() as patch:
            patch.setattr(local, "_spawn", no_more_processes)
            os.kill(info.pids[victim], signal.SIGKILL)
            with pytest.raises(WorkerLostError, match="nothing took its place in time: no more") as caught:
                list(stream)
            assert caught.value.address == info.addresses[victim]
            with pytest.raises(WorkerLostError):
                llm.chat(PRIME)
        # Its start may take longer than a request waits; the next request finds it further on.
        for _ in range(100):
            try:
                text = llm.chat(PRIME)[0].outputs[0].text
                break
            except WorkerLostError:
                assert len(children() - before) == 2
        assert text == PRIME_ANSWER
        now = llm.cluster_info()
        assert now.pids[1 - victim] == info.pids[1 - victim]
        assert set(now.pids) == children() - before
    assert children() == before


def no_more_processes(*_: object) -> None:
    raise WorkerUnavailableError("no more processes")


def test_an_interrupt_in_the_middle_leaves_the_llm_usable(demo_folder: Path) -> None:
    with LLM(demo_folder, workers=2, max_model_len=1024) as llm:
        for delay_s in (0.05, 0.11, 0.17):
            timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the interrupt may come at any of these
                timer.start()
                for _ in llm.stream(PRIME, LONG):
                    pass
                time.sleep(5)
            timer.join()
            assert llm.chat(PRIME)[0].outputs[0].text == PRIME_ANSWER


def test_bf16_on_the_wire_answers_the_same(demo_folder: Path) -> None:
    with LLM(demo_folder, workers=2, wire_dtype="bf16", reply_dtype="bf16", max_model_len=128) as llm:
        assert llm.chat(PRIME)[0].outputs[0].text == PRIME_ANSWER


def test_a_prompt_longer_than_a_step_goes_in_several(demo_folder: Path) -> None:
    messages = [PRIME[0], {"role": "assistant", "content": PRIME_ANSWER}] * 6
    question = {"role": "user", "content": "What was my first question?"}
    with LLM(demo_folder, workers=2, max_step_tokens=16, max_model_len=512) as llm:
        [output] = llm.chat([*messages, question])
    assert output.metrics.num_prompt_tokens > 160
    assert output.outputs[0].text == PRIME[0]["content"]


def test_more_workers_than_stripes_start_no_process(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duckllm.assembly.open_cluster", lambda config: 1 / 0)
    with pytest.raises(ConfigError, match="workers: got 1000, expected 1 to "):
        LLM(demo_folder, workers=1000, max_model_len=64)


def output_of(code: str, folder: Path) -> str:
    """What a program with a model's folder as its argument prints, once it has ended well."""
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_child_that_ends_leaves_its_parents_workers(demo_folder: Path) -> None:
    """However it lets go of the LLM: by its exit, or before; with threads that did not go along."""
    code = (
        "import gc, os, sys; from duckllm import LLM, SamplingParams\n"
        "for workers in (1, 0):\n"
        "    threads = dict(threads_per_worker=2, host_threads=2)\n"
        "    llm = LLM(sys.argv[1], workers=workers, max_model_len=128, **threads)\n"
        "    params = SamplingParams(temperature=0, max_tokens=4)\n"
        "    expected = llm.generate('What?', params)[0].outputs[0].token_ids\n"
        "    for frees in (False, True):\n"
        "        child = os.fork()\n"
        "        if child == 0:\n"
        "            if frees:\n"
        "                del llm\n"
        "                gc.collect()\n"
        "            sys.exit(0)\n"
        "        assert os.waitpid(child, 0)[1] == 0\n"
        "        assert llm.generate('What?', params)[0].outputs[0].token_ids == expected\n"
        "    print(llm.worker_times().num_losses)\n"
        "    llm.close()\n"
    )
    assert output_of(code, demo_folder).split() == ["(0,)", "()"]


def test_a_forked_child_neither_uses_nor_closes_its_parents_session(demo_folder: Path) -> None:
    code = (
        "import os, sys; from duckllm import LLM; from duckllm.errors import RequestError\n"
        "with LLM(sys.argv[1], workers=1, max_model_len=128) as llm:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        try:\n"
        "            llm.generate('What?')\n"
        "        except RequestError as error:\n"
        "            os.write(1, f'{error}\\n'.encode())\n"
        "        llm.close()\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    print(llm.chat([{'role': 'user', 'content': 'Is 1001 prime?'}])[0].outputs[0].text)\n"
    )
    refused, answer = output_of(code, demo_folder).splitlines()
    assert answer == PRIME_ANSWER
    assert re.fullmatch(
        r"LLM: got a request in process \d+, forked from \d+, which made this LLM and its workers, "
        "expected one there: make an LLM in each process",
        refused,
    )


def test_a_closed_llm_looks_for_no_lost_workers(demo_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(demo_folder, workers=1, max_model_len=64)
    llm.close()
    with pytest.raises(RequestError, match="this LLM is closed, expected one that is open"):
        llm.attend_workers()
    assert caplog.text == ""
