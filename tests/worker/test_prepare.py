"""What a worker checks before it says that it is ready."""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duckllm.cluster.connect import Connection
from duckllm.cluster.plan import WorkerPlan
from duckllm.errors import (
    CheckpointError,
    ModelNotFoundError,
    ProtocolError,
    WeightHashError,
    WorkerLostError,
    WorkerUnavailableError,
)
from duckllm.weights.manifest import Manifest
from duckllm.worker.config import WorkerConfig
from duckllm.worker.session import Sessions
from worker_harness import (
    WorkerProcess,
    check_serves,
    connect,
    expected_sum,
    make_model,
    make_step,
    open_transport,
    plan_for,
    running_worker,
    worker_channel,
)


def flip_byte(manifest: Manifest, layer: int, stripe: int) -> None:
    """Changes one byte of a stripe's last expert."""
    path = manifest.folder / manifest.expert_layers[layer].file
    units = (manifest.num_experts - 1) * manifest.num_stripes + stripe
    data_bytes = manifest.num_experts * manifest.num_stripes * manifest.unit_bytes
    offset = path.stat().st_size - data_bytes + units * manifest.unit_bytes + 1000
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


def test_a_wrong_stripe_is_named(worker: WorkerProcess, tmp_path: Path) -> None:
    manifest = make_model(tmp_path / "model")
    flip_byte(manifest, 3, 5)
    (whole,) = plan_for(manifest)
    with pytest.raises(WeightHashError) as caught:
        connect(worker.address, whole)
    for part in (f"worker {worker.address}", "experts-00003.safetensors", "layer 3", "stripe 5: got SHA-256"):
        assert part in str(caught.value)
    # A slice without that stripe is fine: only the slice is read.
    first, second = plan_for(manifest, 2)
    connect(worker.address, first).close()
    with pytest.raises(WeightHashError, match="stripe 5"):
        connect(worker.address, second)


def test_a_repaired_file_is_read_again(worker: WorkerProcess, tmp_path: Path) -> None:
    manifest = make_model(tmp_path / "model")
    (plan,) = plan_for(manifest)
    flip_byte(manifest, 1, 0)
    with pytest.raises(WeightHashError, match="layer 1, stripe 0"):
        connect(worker.address, plan)
    flip_byte(manifest, 1, 0)
    check_serves(worker, manifest)


def test_weights_are_verified_once(tmp_path: Path) -> None:
    manifest = make_model(tmp_path / "model")  # 7 stripes, 2 layers
    (whole,) = plan_for(manifest)
    first, second = plan_for(manifest, 2)
    with running_worker(tmp_path) as worker:

        def verified(plan: object) -> int:
            connection = connect(worker.address, plan)  # type: ignore[arg-type]
            connection.close()
            return connection.verified_stripes

        assert verified(first) == 8
        assert verified(first) == 0
        assert verified(whole) == 6  # only what was not in the first slice
        assert verified(second) == 0
        assert verified(replace(whole, max_step_tokens=5)) == 0
        check_serves(worker, manifest)
        path = manifest.folder / "experts-00001.safetensors"
        os.utime(path, ns=(1, 1))  # the file may have changed
        assert verified(whole) == 7
        flip_byte(manifest, 1, 6)
        with pytest.raises(WeightHashError, match="layer 1, stripe 6"):
            connect(worker.address, whole)


def test_missing_file(worker: WorkerProcess, tmp_path: Path) -> None:
    manifest = make_model(tmp_path / "model")
    (plan,) = plan_for(manifest)
    (manifest.folder / "experts-00003.safetensors").unlink()
    with pytest.raises(ModelNotFoundError) as caught:
        connect(worker.address, plan)
    for part in ("experts-00003.safetensors of layer 3", str(manifest.folder)):
        assert part in str(caught.value)


def test_truncated_file(worker: WorkerProcess, tmp_path: Path) -> None:
    manifest = make_model(tmp_path / "model")
    (plan,) = plan_for(manifest)
    path = manifest.folder / "experts-00003.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"experts-00003\.safetensors: truncated"):
        connect(worker.address, plan)


def test_a_file_of_another_shape(worker: WorkerProcess, tmp_path: Path) -> None:
    (plan,) = plan_for(make_model(tmp_path / "model"))
    make_model(tmp_path / "model", num_experts=4)
    with pytest.raises(CheckpointError, match=r"units: got U8 \[4, 7, "):
        connect(worker.address, plan)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"intermediate_size": 16}, "first_stripe"),
        ({"max_step_tokens": 10_000_000}, "plan max_step_tokens: got 10000000, expected at most "),
        ({"hidden_size": 1 << 30}, "plan max_step_tokens: got 8, expected at most 0, "),
        ({"folder": "x" * 300}, "layer 1: got no such file in xxx"),
        ({"folder": "\ud800"}, "layer 1: got no such file in "),
        ({"hidden_size": 40}, "unit bytes of layer 1: got"),
    ],
)
def test_a_plan_that_makes_no_sense(
    worker: WorkerProcess, model: Manifest, fields: dict[str, Any], sentence: str
) -> None:
    (plan,) = plan_for(model)
    with pytest.raises((ProtocolError, ModelNotFoundError), match=sentence):
        connect(worker.address, replace(plan, **fields))
    check_serves(worker, model)


def test_the_workers_own_folder_comes_first(tmp_path: Path) -> None:
    manifest = make_model(tmp_path / "model")
    shutil.copytree(manifest.folder, tmp_path / "own")
    plans = plan_for(manifest)
    step = make_step(manifest, 2)
    expected = expected_sum(manifest, plans, step)
    with running_worker(tmp_path, "--model", str(tmp_path / "own")) as worker:
        shutil.rmtree(manifest.folder)
        with open_transport([connect(worker.address, plans[0])]) as transport:
            got = transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
    np.testing.assert_array_equal(got, expected)


def test_a_folder_of_another_model_is_not_used(tmp_path: Path) -> None:
    manifest = make_model(tmp_path / "model", seed=1)
    make_model(tmp_path / "other", seed=2)
    with running_worker(tmp_path, "--model", str(tmp_path / "other")) as worker:
        check_serves(worker, manifest)


def test_busy_while_a_session_is_active(worker: WorkerProcess, model: Manifest) -> None:
    (plan,) = plan_for(model)
    step = make_step(model, 1)
    with open_transport([connect(worker.address, plan)]) as transport:
        with pytest.raises(WorkerUnavailableError, match="busy: this worker serves") as caught:
            connect(worker.address, plan)
        assert str(worker.address) in str(caught.value)
        got = transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
        np.testing.assert_array_equal(got, expected_sum(model, [plan], step))
    check_serves(worker, model)


def test_a_host_that_comes_again_ends_its_older_visit(tmp_path: Path, model: Manifest) -> None:
    (plan,) = plan_for(model)
    step = make_step(model, 1)
    with running_worker(tmp_path) as worker:
        # Neither closes its connection, as if a link were down.
        visits = [Connection(worker.address, None, 20, "one host") for _ in range(2)]
        for visit in visits:
            visit.send_plan(plan)
            visit.wait_ready(20)
        with open_transport(visits[:1]) as lost, open_transport(visits[1:]) as transport:
            for _ in range(2):
                got = transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
                np.testing.assert_array_equal(got, expected_sum(model, [plan], step))
            with pytest.raises(WorkerLostError):
                lost.wait(lost.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
            # Another host, or one that does not say who it is, does not.
            for session in ("another host", ""):
                stranger = Connection(worker.address, None, 20, session)
                stranger.send_plan(plan)
                with pytest.raises(WorkerUnavailableError, match="busy: this worker serves"):
                    stranger.wait_ready(20)
                stranger.close()
            got = transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
            np.testing.assert_array_equal(got, expected_sum(model, [plan], step))


def test_a_host_that_leaves_without_close_frees_the_worker(worker: WorkerProcess, model: Manifest) -> None:
    for seed in range(3):
        connect(worker.address, plan_for(model)[0]).close()
        check_serves(worker, model, seed=seed)


def test_files_are_checked_before_memory_is_set_aside(
    model: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory_yet(**sizes: int) -> None:
        raise AssertionError

    monkeypatch.setattr("duckllm._native.StepServer", no_memory_yet)
    (plan,) = plan_for(model)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(CheckpointError, match=r"units: got U8 \[6, 7, "):
        Sessions(WorkerConfig(threads=1), print)._prepare(
            replace(plan, num_experts=1 << 30), worker_channel(theirs)
        )


def test_unknown_fields_of_a_plan_are_shown_in_part(model: Manifest) -> None:
    (plan,) = plan_for(model)
    with pytest.raises(ProtocolError, match=r"unknown fields \['xxx") as caught:
        WorkerPlan.from_json({**plan.to_json(), "x" * 100_000: 1})
    assert len(str(caught.value)) < 600
