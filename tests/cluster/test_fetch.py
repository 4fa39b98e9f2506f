"""Workers that find the model nowhere get their slices from the host, once."""

from __future__ import annotations

import io
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from duckllm.cluster import fetch, open_cluster
from duckllm.cluster.connect import Connection
from duckllm.cluster.fetch import FetchProgress, wait_all_ready
from duckllm.cluster.plan import WorkerPlan
from duckllm.config import ClusterConfig
from duckllm.errors import (
    ConfigError,
    DiskSpaceError,
    ModelNotFoundError,
    WeightHashError,
    WorkerUnavailableError,
)
from duckllm.moe.placement import plan_slices
from duckllm.transport.flock import Flock
from duckllm.weights import console
from duckllm.weights.manifest import Manifest
from worker_harness import (
    WorkerProcess,
    connect,
    expected_sum,
    make_model,
    make_step,
    open_transport,
    plan_for,
    relay_to,
    running_worker,
    stop_process,
)


def shard_bytes(manifest: Manifest) -> int:
    return manifest.num_experts * manifest.unit_bytes


def check_step(
    manifest: Manifest, plans: Sequence[WorkerPlan], workers: Sequence[WorkerProcess]
) -> list[tuple[int, int]]:
    """A step over fetched weights is to the bit that of the files; what each worker fetched and verified."""
    connections = [
        connect(worker.address, plan, share_folder=False) for worker, plan in zip(workers, plans, strict=True)
    ]
    facts = [(connection.fetched_bytes, connection.verified_stripes) for connection in connections]
    step = make_step(manifest, 3, layer=max(manifest.expert_layers))
    with open_transport(connections) as transport:
        got = transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
    np.testing.assert_array_equal(got, expected_sum(manifest, plans, step))
    return facts


def shards_in(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in folder.iterdir() if path.suffix == ".shard"}


def test_a_second_start_moves_under_one_per_cent(tmp_path: Path) -> None:
    manifest = make_model(tmp_path / "model", num_experts=24)
    slice_bytes = 14 * shard_bytes(manifest)
    flags = ("--cache-dir", str(tmp_path / "cache"))
    plans = plan_for(manifest, 2)
    step = make_step(manifest, 2)
    moved = []
    for _ in range(2):  # the second time both workers are new processes
        with (
            running_worker(tmp_path, *flags, token="t") as first,
            running_worker(tmp_path, *flags, token="t") as second,
            relay_to(first.address) as one,
            relay_to(second.address) as two,
        ):
            config = ClusterConfig(
                addresses=(str(one.address), str(two.address)), share_folder=False, cluster_token="t"
            )
            with open_cluster(config) as cluster:
                connections = cluster.connect(plans)
                moved.append(one.total + two.total)
                fetched = sum(connection.fetched_bytes for connection in connections)
                assert fetched == (slice_bytes if len(moved) == 1 else 0)
                assert sum(connection.verified_stripes for connection in connections) == (
                    0 if len(moved) == 1 else 14
                )
                with open_transport(connections) as transport:
                    got = transport.wait(
                        transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights)
                    )
            np.testing.assert_array_equal(got, expected_sum(manifest, plans, step))
            assert f"mapped from the cache {tmp_path / 'cache'}" in first.log()
    assert slice_bytes < moved[0] < 1.05 * slice_bytes
    assert moved[1] < 0.01 * slice_bytes
    names = {name for layer in manifest.expert_layers.values() for name in layer.stripe_sha256}
    assert shards_in(tmp_path / "cache").keys() == names
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix == ".partial"]


def test_another_split_takes_what_is_there(tmp_path: Path) -> None:
    manifest = make_model(tmp_path / "model")
    size = shard_bytes(manifest)
    with running_worker(tmp_path) as worker:
        first, second = plan_for(manifest, 2, slices=plan_slices(manifest.num_stripes, 2, [5, 2]))
        assert check_step(manifest, [first], [worker]) == [(10 * size, 0)]
        assert check_step(manifest, [first], [worker]) == [(0, 0)]
        whole, end = plan_for(manifest)[0], plan_for(manifest, 3)[2]
        assert check_step(manifest, [end], [worker]) == [(4 * size, 0)]
        assert check_step(manifest, [whole], [worker]) == [(0, 0)]
        assert check_step(manifest, [second], [worker]) == [(0, 0)]
        # Where the host's folder may be opened it is.
        connection = connect(worker.address, whole)
        connection.close()
        assert connection.verified_stripes == 14
    assert f"mapped from {manifest.folder}" in worker.log()


def test_layers_that_a_node_has_are_not_fetched(tmp_path: Path) -> None:
    manifest = make_model(tmp_path / "model")
    shutil.copytree(manifest.folder, tmp_path / "own")
    (tmp_path / "own/experts-00003.safetensors").unlink()
    flags = ("--model", str(tmp_path / "own"), "--cache-dir", str(tmp_path / "cache"))
    with running_worker(tmp_path, *flags) as worker:
        plans = plan_for(manifest)
        assert check_step(manifest, plans, [worker]) == [(7 * shard_bytes(manifest), 7)]
        assert check_step(manifest, plans, [worker]) == [(0, 0)]
    assert f"mapped from {tmp_path / 'own'} and the cache {tmp_path / 'cache'}" in worker.log()


@pytest.mark.parametrize("flag", ["--no-cache", "--copy"])
def test_in_memory_of_its_own(tmp_path: Path, flag: str) -> None:
    """Shards of several frames, into memory or copied there, and the other format from them."""
    manifest = make_model(tmp_path / "model", num_experts=240, intermediate_size=40, layers=[2])
    size = shard_bytes(manifest)
    assert size > 1 << 20
    with running_worker(tmp_path, flag) as worker:
        plans = plan_for(manifest)
        assert check_step(manifest, plans, [worker]) == [(3 * size, 0)]
        assert check_step(manifest, plans, [worker]) == [(0, 0)]
        recoded = [replace(plans[0], weight_format="fp8")]
        again = 3 * size if flag == "--no-cache" else 0
        assert check_step(manifest, recoded, [worker]) == [(again, 0)]
    first, second, third = worker.log().splitlines()[::2]
    fetched = f", {3 * size:,} bytes fetched from the host now"
    assert " of 4 MB of its own memory in huge pages" in first
    assert first.endswith(fetched)
    assert "fetched" not in second
    assert (fetched in third) == (flag == "--no-cache")
    assert ("copied from the cache" in first) == (flag == "--copy")


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "gone"])
def test_a_damaged_shard_alone_is_fetched_again(tmp_path: Path, damage: str) -> None:
    manifest = make_model(tmp_path / "model")
    plans = plan_for(manifest)
    cache = tmp_path / "cache"
    with running_worker(tmp_path, "--cache-dir", str(cache)) as worker:
        check_step(manifest, plans, [worker])
        path = shards_in(cache)[manifest.expert_layers[3].stripe_sha256[5]]
        content = path.read_bytes()
        path.unlink()  # the worker has the old one mapped
        if damage == "flipped":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        elif damage != "gone":
            path.write_bytes(content[: 5000 if damage == "truncated" else 0])
        expected = [(shard_bytes(manifest), int(damage == "flipped"))]
        assert check_step(manifest, plans, [worker]) == expected
        assert path.read_bytes() == content
        assert check_step(manifest, plans, [worker]) == [(0, 0)]


def test_a_model_that_is_damaged_at_the_host(tmp_path: Path) -> None:
    manifest = make_model(tmp_path / "model", num_experts=2, top_k=2, layers=[1])
    path = manifest.folder / "experts-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (plan,) = plan_for(manifest)
    cache = tmp_path / "cache"
    with running_worker(tmp_path, "--cache-dir", str(cache)) as worker:
        with pytest.raises(WeightHashError) as caught:
            connect(worker.address, plan, share_folder=False)
        assert f"worker {worker.address}: the host sent layer 1, stripe 6 with SHA-256 " in str(caught.value)
        assert set(shards_in(cache)) == set(manifest.expert_layers[1].stripe_sha256[:6])
        path.unlink()
        with pytest.raises(ModelNotFoundError, match=r"experts-00001\.safetensors of layer 1: got no such"):
            connect(worker.address, plan, share_folder=False)


def test_no_room_is_said_before_anything_is_fetched(tmp_path: Path) -> None:
    manifest = make_model(tmp_path / "model")
    need = 14 * shard_bytes(manifest)
    (plan,) = plan_for(manifest)
    flags = ("--cache-dir", str(tmp_path / "cache"), "--cache-bytes", str(need - 1))
    with running_worker(tmp_path, *flags) as worker, relay_to(worker.address) as relay:
        words = f"got {need - 1:,} bytes .--cache-bytes., expected {need:,}"
        with pytest.raises(DiskSpaceError, match=words):
            connect(relay.address, plan, share_folder=False)
        assert relay.to_worker < 10_000
        assert not shards_in(tmp_path / "cache")
        first, _ = plan_for(manifest, 2)
        check_step(manifest, [first], [worker])


def test_all_workers_are_served_at_once(tmp_path: Path) -> None:
    """One that takes nothing does not hold the others up, and is a time-out in the end."""
    manifest = make_model(tmp_path / "model", num_experts=240, layers=[1])
    plans = plan_for(manifest, 2)
    flags = ("--cache-dir", str(tmp_path / "cache"))
    with running_worker(tmp_path, "--no-cache") as first, running_worker(tmp_path, *flags) as second:
        addresses = (str(first.address), str(second.address))
        config = ClusterConfig(addresses=addresses, share_folder=False, prepare_timeout_s=1.0)
        with open_cluster(config) as cluster:
            cluster.begin(plans)
            stop_process(first.pid)
            with pytest.raises(WorkerUnavailableError, match=rf"{first.address} did not answer within 1 s"):
                cluster.wait_ready()
        first.process.send_signal(signal.SIGCONT)
    wanted = manifest.expert_layers[1].stripe_sha256[plans[1].first_stripe :]
    assert set(wanted) <= set(shards_in(tmp_path / "cache"))


def test_who_takes_a_lost_workers_place_gets_its_weights(tmp_path: Path) -> None:
    manifest = make_model(tmp_path / "model")
    (plan,) = plan_for(manifest)
    size = 14 * shard_bytes(manifest)
    with (
        running_worker(tmp_path, "--no-cache") as own,
        running_worker(tmp_path, "--cache-bytes", str(size - 1)) as small,
        running_worker(tmp_path, "--no-cache") as spare,
    ):
        addresses = tuple(str(each.address) for each in (own, small, spare))
        config = ClusterConfig(addresses=addresses, spares=2, share_folder=False)
        with open_cluster(config) as cluster:
            (connection,) = cluster.connect([plan])
            for expected in (own.address, spare.address):  # one that has it still, one that has none
                connection.close()
                connection = cluster.replace(0, time.monotonic() + 20)
                assert connection.address == expected
                assert connection.fetched_bytes == (0 if expected == own.address else size)
                own.process.kill()
                own.process.wait()
            connection.close()
            spare.process.kill()
            spare.process.wait()
            with pytest.raises(WorkerUnavailableError):  # not that the last one has no room
                cluster.replace(0, time.monotonic())


def test_taking_bytes_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A transfer may take many times the time-out as long as it moves."""
    manifest = make_model(tmp_path / "model", num_experts=2, top_k=2, layers=[1])
    (plan,) = plan_for(manifest)
    clock = 0.0

    class Time:
        @staticmethod
        def monotonic() -> float:
            return clock

    monkeypatch.setattr(fetch, "time", Time)
    with running_worker(tmp_path) as worker:
        connection = Connection(worker.address, None, 20.0)
        connection.send_plan(plan, share_folder=False)

        def progress(done: int, total: int) -> None:
            nonlocal clock
            clock += 0.9

        wait_all_ready([connection], 1.0, progress)
        connection.close()
    assert clock > 5
    assert connection.fetched_bytes == 7 * shard_bytes(manifest)


def test_progress_is_shown_only_where_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    written = io.StringIO()

    class Time:
        @staticmethod
        def monotonic() -> float:
            return clock

    monkeypatch.setattr(fetch, "time", Time)
    monkeypatch.setattr(console, "time", Time)
    monkeypatch.setattr(console, "Console", lambda file: Console(file=written, width=100))
    with FetchProgress(3) as progress:
        progress(0, 4_000_000_000)
        clock = 1.9
        progress(4_000_000_000, 4_000_000_000)
    assert written.getvalue() == ""
    with FetchProgress(3) as progress:
        for now, done in ((2.0, 0), (5.0, 1_000_000_000), (15.5, 2_000_000_000)):
            clock = now
            progress(done, 4_000_000_000)
    assert written.getvalue().splitlines() == [
        "Sending weights",
        "Sending weights: 2.00 of 4.00 GB, 21 s left (3 workers)",
    ]


def test_share_folder_is_checked() -> None:
    with pytest.raises(ConfigError, match="share_folder: got 1, expected True or False"):
        ClusterConfig(share_folder=1)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of each test begin with an empty cache."""
    monkeypatch.setenv("DUCKLLM_CACHE_DIR", str(tmp_path / "caches"))


def test_a_spare_with_a_warm_cache_takes_over_without_a_transfer(tmp_path: Path) -> None:
    """Once it has served each slice, in a new process too; one that has not fetches what it lacks."""
    manifest = make_model(tmp_path / "model")
    plans, step = plan_for(manifest, 2), make_step(manifest, 2)
    warm = ("--cache-dir", str(tmp_path / "warm"))
    with running_worker(tmp_path, *warm) as earlier:
        for plan in plans:
            connect(earlier.address, plan, share_folder=False).close()
    for flags, fetched_stripes in ((warm, 0), (("--cache-dir", str(tmp_path / "cold")), 6)):
        with (
            running_worker(tmp_path, "--no-cache") as first,
            running_worker(tmp_path, "--no-cache") as second,
            running_worker(tmp_path, *flags) as spare,
            relay_to(spare.address) as way,
        ):
            addresses = (str(first.address), str(second.address), str(way.address))
            config = ClusterConfig(addresses=addresses, spares=1, share_folder=False)
            with open_cluster(config) as cluster, open_transport(cluster.connect(plans)) as transport:
                flock = Flock(transport, cluster, 5.0, 20.0)
                second.process.kill()
                second.process.wait()
                before = way.total
                got = flock.wait(flock.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
                np.testing.assert_array_equal(got, expected_sum(manifest, plans, step))
                assert cluster.addresses[1] == way.address
            stripes = sum(len(layer.stripe_sha256) for layer in plans[1].layers)
            moved = fetched_stripes * shard_bytes(manifest)
            assert stripes == 6
            assert ("bytes fetched from the host now" in spare.log()) == (moved > 0)
            assert moved <= way.total - before < moved + 10_000  # the plan and a step
