"""fp8 and fp9 hold the same weights: the same bits come out of them, wherever they are computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from duckllm.moe.local import LocalExperts
from duckllm.weights.convert import convert
from duckllm.weights.manifest import Manifest
from support.models import all_logits, build_model, remote_experts
from worker_harness import (
    connect,
    expected_sum,
    make_model,
    make_step,
    open_transport,
    plan_for,
    running_worker,
)

TOKENS = [1, *range(20, 60)]


@pytest.fixture(scope="module")
def fp8_folder(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path) -> Path:
    """The demo model in fp8."""
    folder = tmp_path_factory.mktemp("fp8") / "demo"
    convert(demo_checkpoint, folder, weight_format="fp8")
    return folder


@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_compute_the_same_bits(
    demo_folder: Path, fp8_folder: Path, num_workers: int, tmp_path: Path
) -> None:
    sums = []
    for folder in (demo_folder, fp8_folder):
        manifest = Manifest.load(folder)
        plans = plan_for(manifest, num_workers, max_step_tokens=40)
        assert {plan.format for plan in plans} == {manifest.format}
        for plan in plans:
            with running_worker(tmp_path) as worker:
                for num_tokens in (1, 40):
                    step = make_step(manifest, num_tokens, layer=4)
                    with open_transport([connect(worker.address, plan)]) as transport:
                        ticket = transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights)
                        sums.append(transport.wait(ticket))
                    np.testing.assert_array_equal(sums[-1], expected_sum(manifest, [plan], step))
    half = len(sums) // 2
    assert half == 2 * num_workers
    for nine, eight in zip(sums[:half], sums[half:], strict=True):
        assert len(np.unique(nine)) > 0.9 * nine.size
        np.testing.assert_array_equal(nine.view(np.uint32), eight.view(np.uint32))


def test_the_demo_model_has_the_same_logits_and_tokens(demo_folder: Path, fp8_folder: Path) -> None:
    assert (Manifest.load(demo_folder).format, Manifest.load(fp8_folder).format) == ("fp9", "fp8")
    nine = all_logits(build_model(demo_folder), TOKENS, 16)
    eight = all_logits(build_model(fp8_folder), TOKENS, 16)
    assert nine.std() > 1
    assert torch.equal(nine, eight)
    with remote_experts(fp8_folder, 2) as experts:
        remote = build_model(fp8_folder, experts)
        with remote_experts(demo_folder, 2) as other:
            assert torch.equal(
                all_logits(remote, TOKENS, 16), all_logits(build_model(demo_folder, other), TOKENS, 16)
            )


def test_local_experts_with_scales_by_channel(tmp_path: Path) -> None:
    manifest = make_model(tmp_path / "model", scale_layout="channel")
    step = make_step(manifest, 5)
    arrays = [torch.from_numpy(array) for array in (step.x, step.topk_ids, step.topk_weights)]
    expected = expected_sum(manifest, plan_for(manifest), step)
    for weight_format in ("auto", "fp8"):
        experts = LocalExperts(Manifest.load(manifest.folder), weight_format=weight_format)
        got = experts.submit(step.layer, *arrays).wait()
        np.testing.assert_array_equal(got.numpy(), expected)


def test_local_experts_use_the_format_of_their_folder(demo_folder: Path, fp8_folder: Path) -> None:
    step = make_step(Manifest.load(demo_folder), 5)
    arrays = [torch.from_numpy(array) for array in (step.x, step.topk_ids, step.topk_weights)]
    results = [
        LocalExperts(Manifest.load(folder)).submit(step.layer, *arrays).wait()
        for folder in (demo_folder, fp8_folder)
    ]
    assert results[0].abs().max() > 1e-3
    assert torch.equal(*results)
