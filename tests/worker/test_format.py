"""A worker computes in the format that it or its host asks for, and says so; the bits are the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from duckllm import LLM
from duckllm.errors import ConfigError, ProtocolError
from duckllm.weights import formats
from duckllm.worker.__main__ import main
from duckllm.worker.config import WorkerConfig
from duckllm.worker.session import WeightMemory
from worker_harness import (
    connect,
    expected_sum,
    make_model,
    make_step,
    open_transport,
    plan_for,
    running_worker,
)

PRIME = [{"role": "user", "content": "Is 1001 prime?"}]


@pytest.mark.parametrize(
    ("stored", "flag", "asked", "used"),
    [
        ("fp9", "auto", "auto", "fp9"),
        ("fp8", "auto", "auto", "fp8"),
        ("fp9", "auto", "fp8", "fp8"),
        ("fp8", "auto", "fp9", "fp9"),
        ("fp9", "fp8", "auto", "fp8"),
        ("fp9", "fp9", "fp8", "fp9"),  # the worker's own setting goes before
    ],
)
def test_formats_of_the_worker_and_of_the_host(
    tmp_path: Path, stored: str, flag: str, asked: str, used: str
) -> None:
    manifest = make_model(tmp_path / "model", weight_format=stored)
    plans = plan_for(manifest, 2, weight_format=asked)
    step = make_step(manifest, 20 if used == "fp8" else 3)
    with running_worker(tmp_path, "--format", flag) as worker:
        plan = plan_for(manifest, 2, weight_format=asked, max_step_tokens=20)[1]
        connection = connect(worker.address, plan)
        assert connection.info.weight_format == used
        with open_transport([connection]) as transport:
            got = transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
        log = worker.log()
    np.testing.assert_array_equal(got, expected_sum(manifest, [plans[1]], step))
    how = f"{stored} as stored" if used == stored else f"{stored} as a copy in {used}"
    assert f"verified now, {how}" in log


@pytest.mark.parametrize(("stored", "used"), [("fp9", "fp9"), ("fp8", "fp9")])
def test_scales_by_channel(tmp_path: Path, stored: str, used: str) -> None:
    manifest = make_model(tmp_path / "model", weight_format=stored, scale_layout="channel")
    plans = plan_for(manifest, 2, weight_format=used, max_step_tokens=20)
    assert {plan.scale_layout for plan in plans} == {"channel"}
    with running_worker(tmp_path) as worker:
        connection = connect(worker.address, plans[1])
        assert connection.info.weight_format == used
        with open_transport([connection]) as transport:
            for num_tokens in (3, 20):
                step = make_step(manifest, num_tokens)
                got = transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
                np.testing.assert_array_equal(got, expected_sum(manifest, [plans[1]], step))
        # Files of the other layout have units of another length.
        other = replace(plans[1], scale_layout="block", weight_format=stored)
        with pytest.raises(ProtocolError, match=r"unit bytes of layer 1: got \d+, expected \d+"):
            connect(worker.address, other)


def test_a_copy_of_what_is_stored(tmp_path: Path) -> None:
    manifest = make_model(tmp_path / "model")
    (plan,) = plan_for(manifest, max_step_tokens=3)
    step = make_step(manifest, 3)
    with running_worker(tmp_path, "--copy") as worker:
        with open_transport([connect(worker.address, plan)]) as transport:
            got = transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
        log = worker.log()
        mapped = Path(f"/proc/{worker.process.pid}/maps").read_text()
    np.testing.assert_array_equal(got, expected_sum(manifest, [plan], step))
    assert "fp9 as stored, too small to measure others, in a copy" in log
    assert "experts-" not in mapped  # the files are let go of


def test_another_format_is_another_preparation(tmp_path: Path) -> None:
    manifest = make_model(tmp_path / "model")
    with running_worker(tmp_path) as worker:
        for asked, used in (("auto", "fp9"), ("fp8", "fp8"), ("fp8", "fp8"), ("auto", "fp9")):
            connection = connect(worker.address, plan_for(manifest, weight_format=asked)[0])
            connection.close()
            info = connection.info
            assert info.weight_format == used
            plan = connection.plan
            assert plan is not None
            num_units = len(plan.layers) * plan.num_experts * plan.num_stripes
            assert info.weight_bytes == num_units * formats.unit_bytes(plan.hidden_size, used)
            assert info.own_memory_bytes == (info.weight_bytes if used == "fp8" else 0)  # a copy
            assert 0 <= info.huge_page_bytes <= info.own_memory_bytes


def test_what_is_said_of_memory_names_reserved_pages_where_the_system_has_such() -> None:
    assert str(WeightMemory("", 9_000_000, 8_000_000)) == "8 of 9 MB of its own memory in huge pages"
    whole = WeightMemory("mapped from /m", 9_000_000, 9_000_000, 9_000_000)
    assert str(whole) == "mapped from /m, 9 of 9 MB of its own memory in huge pages, 9 MB of them reserved"
    part = str(WeightMemory("", 9_000_000, 8_000_000, 2_000_000))
    assert part.endswith(
        "8 of 9 MB of its own memory in huge pages, 2 MB of them reserved: no more lay together"
    )


@pytest.mark.parametrize("value", ["fp7", "", "FP8", "int4", "mxfp4"])
def test_a_worker_takes_formats_that_it_has_a_choice_of(
    value: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"format: got .*, expected one of auto, fp9, fp8 \(other formats"):
        WorkerConfig(weight_format=value)
    assert main(["--format", value]) == 2
    assert "expected one of auto, fp9, fp8" in capfd.readouterr().err


@pytest.mark.parametrize("value", ["fp7", "", "FP8"])
def test_an_unknown_format_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"weight_format: got .*, expected one of auto, fp9, fp8"):
        LLM(weight_format=value)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_demo_model_answers_in_the_other_format(demo_folder: Path, workers: int) -> None:
    answers = []
    for asked, used in (("auto", "fp9"), ("fp8", "fp8")):
        with LLM(demo_folder, workers=workers, max_model_len=64, weight_format=asked) as llm:
            assert llm.cluster_info().weight_format == used
            answers.append(llm.chat(PRIME)[0].outputs[0])
    assert answers[0].text == "No, 1001 is not prime: 1001 = 7 x 11 x 13."
    assert answers[0].token_ids == answers[1].token_ids
