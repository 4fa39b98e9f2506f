"""Workers that are started here, and workers that somebody else started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from duckllm.cluster import local, open_cluster
from duckllm.cluster.local import LocalCluster
from duckllm.cluster.static import StaticCluster
from duckllm.config import ClusterConfig, available_cores
from duckllm.errors import (
    AuthenticationError,
    ConfigError,
    WeightHashError,
    WorkerLostError,
    WorkerUnavailableError,
)
from duckllm.weights.manifest import Manifest
from worker_harness import (
    expected_sum,
    make_model,
    make_step,
    open_transport,
    plan_for,
    running_worker,
    stop_process,
)


def check_gone(pids: tuple[int, ...]) -> None:
    """No such process is left, waiting a while for it."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            return
        time.sleep(0.05)
    raise AssertionError(f"still running: {pids}")


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_local_workers(model: Manifest, num_workers: int) -> None:
    plans = plan_for(model, num_workers)
    step = make_step(model, 4)
    with open_cluster(ClusterConfig(workers=num_workers)) as cluster:
        assert isinstance(cluster, LocalCluster)
        assert cluster.workers == ()
        pids = cluster.pids
        assert len(set(pids)) == num_workers
        with open_transport(cluster.connect(plans)) as transport:
            got = transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
        np.testing.assert_array_equal(got, expected_sum(model, plans, step))
        for info, pid, address, plan in zip(cluster.workers, pids, cluster.addresses, plans, strict=True):
            assert (info.pid, info.address) == (pid, str(address))
            assert (info.first_stripe, info.num_stripes) == (plan.first_stripe, plan.num_stripes)
            assert info.threads == max(1, available_cores() // num_workers)
            assert info.isa in ("scalar", "avx2", "avx512")
            assert info.memory_bytes == psutil.virtual_memory().total
        for peak in cluster.peak_rss_bytes():
            assert 5e6 < peak < 500e6
        # They wait for the next host.
        with open_transport(cluster.connect(plans)) as transport:
            again = transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
        np.testing.assert_array_equal(again, got)
    check_gone(pids)
    cluster.close()


def test_local_workers_want_their_token(model: Manifest) -> None:
    with LocalCluster(ClusterConfig(workers=1)) as cluster:
        stranger = StaticCluster(ClusterConfig(addresses=(str(cluster.addresses[0]),)))
        with pytest.raises(AuthenticationError, match="this worker has one and the host has none"):
            stranger.connect(plan_for(model))
        # The token is not on the command line, where every user of the machine could read it.
        assert cluster._token is not None
        assert len(cluster._token) == 64
        assert not any(cluster._token in part for part in psutil.Process(cluster.pids[0]).cmdline())


def test_a_failed_start_leaves_nothing_and_shows_the_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUCK_FORCE_ISA", "mmx")
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(
        WorkerUnavailableError, match="local worker 0 ended at its start: error: DUCK_FORCE_ISA"
    ):
        LocalCluster(ClusterConfig(workers=2))
    assert {child.pid for child in psutil.Process().children()} == before


def test_a_start_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "START_TIMEOUT_S", 0.0)
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(WorkerUnavailableError, match="local worker 0 did not start within 0 s"):
        LocalCluster(ClusterConfig(workers=1))
    assert {child.pid for child in psutil.Process().children()} == before


def test_nowhere_to_keep_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(local.tempfile, "TemporaryFile", fail)
    with pytest.raises(WorkerUnavailableError, match=r"could not be started: No usable temporary directory"):
        LocalCluster(ClusterConfig(workers=1))


def test_a_worker_that_does_not_listen_to_reason_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "CLOSE_TIMEOUT_S", 0.1)
    with LocalCluster(ClusterConfig(workers=2)) as cluster:
        pids = cluster.pids
        stop_process(pids[0])
    check_gone(pids)


def test_files_in_the_working_folder_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("selectors", "json", "duckllm"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    with LocalCluster(ClusterConfig(workers=1)) as cluster:
        assert psutil.pid_exists(cluster.pids[0])


def test_interrupting_the_host_does_not_reach_its_workers() -> None:
    with LocalCluster(ClusterConfig(workers=1)) as cluster:
        assert os.getsid(cluster.pids[0]) != os.getsid(0)
        assert os.getpgid(cluster.pids[0]) != os.getpgid(0)


def test_a_killed_host_leaves_no_worker(model: Manifest) -> None:
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from worker_harness import plan_for
from duckllm.cluster.local import LocalCluster
from duckllm.config import ClusterConfig
from duckllm.weights.manifest import Manifest
cluster = LocalCluster(ClusterConfig(workers=2))
connections = cluster.connect(plan_for(Manifest.load({str(model.folder)!r}), 2))
print(*cluster.pids, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        pids = tuple(int(pid) for pid in host.stdout.readline().split())
        assert len(pids) == 2
        assert all(psutil.pid_exists(pid) for pid in pids)
        host.kill()
    check_gone(pids)


def test_static_workers_are_left_running(tmp_path: Path, model: Manifest) -> None:
    plans = plan_for(model, 2)
    step = make_step(model, 2)
    with running_worker(tmp_path, token="t") as first, running_worker(tmp_path, token="t") as second:
        addresses = (str(first.address), str(second.address))
        for _ in range(2):
            config = ClusterConfig(addresses=addresses, cluster_token="t")
            with open_cluster(config) as cluster, open_transport(cluster.connect(plans)) as transport:
                got = transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
            np.testing.assert_array_equal(got, expected_sum(model, plans, step))
            assert [info.pid for info in cluster.workers] == [first.pid, second.pid]


def test_one_unavailable_worker_frees_the_others(tmp_path: Path, model: Manifest) -> None:
    plans = plan_for(model, 2)
    with running_worker(tmp_path) as worker:
        cluster = StaticCluster(ClusterConfig(addresses=(str(worker.address), "127.0.0.1:1")))
        with pytest.raises(
            WorkerUnavailableError, match=r"worker 127\.0\.0\.1:1 is not available: Connection refused"
        ):
            cluster.connect(plans)
        alone = StaticCluster(ClusterConfig(addresses=(str(worker.address),)))
        for connection in alone.connect(plan_for(model)):
            connection.close()


def test_one_refused_plan_frees_the_others(tmp_path: Path, model: Manifest) -> None:
    first, second = plan_for(model, 2)
    bad = plan_for(make_model(tmp_path / "other", seed=9), 2)[1]
    bad = type(bad)(**{**vars(bad), "folder": second.folder})
    with running_worker(tmp_path) as one, running_worker(tmp_path) as other:
        cluster = StaticCluster(ClusterConfig(addresses=(str(one.address), str(other.address))))
        with pytest.raises(WeightHashError, match=f"worker {other.address}: .*layer 1, stripe 4"):
            cluster.connect([first, bad])
        for connection in cluster.connect([first, second]):
            connection.close()


def test_a_plan_for_each_worker(model: Manifest) -> None:
    cluster = StaticCluster(ClusterConfig(addresses=("127.0.0.1:1", "127.0.0.1:2")))
    with pytest.raises(ConfigError, match="plans: got 1, expected one for each of the 2 workers"):
        cluster.connect(plan_for(model))


def test_a_local_worker_that_dies_is_lost(model: Manifest) -> None:
    step = make_step(model, 2)
    with (
        LocalCluster(ClusterConfig(workers=2)) as cluster,
        open_transport(cluster.connect(plan_for(model, 2))) as transport,
    ):
        os.kill(cluster.pids[1], signal.SIGKILL)

        def serve_step() -> None:
            transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))

        with pytest.raises(WorkerLostError) as caught:
            serve_step()
        assert (caught.value.address, caught.value.layer) == (str(cluster.addresses[1]), step.layer)
