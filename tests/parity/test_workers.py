"""Random tiny models through worker processes, against transformers: f32 on the wire, and bf16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from duckllm.cluster.address import Address
from parity.test_deepseek_v32 import SPECS, MakeCase
from support.families import Case
from support.models import TOLERANCE, all_logits, build_model, difference, remote_experts
from worker_harness import running_worker


@pytest.fixture(params=list(SPECS))
def case(request: pytest.FixtureRequest, make_case: MakeCase) -> Case:
    return make_case(SPECS[request.param])


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Address]]:
    """Three, which serve one host after the other."""
    folder = tmp_path_factory.mktemp("workers")
    with ExitStack() as stack:
        yield [stack.enter_context(running_worker(folder)).address for _ in range(3)]


def test_logits_equal_the_reference_through_workers(case: Case, workers: list[Address]) -> None:
    """Three workers; every case's number of stripes (3, 4, 5 or 13) but one is split unevenly."""
    with remote_experts(case.folder, workers) as experts:
        model = build_model(case.folder, experts)
        for step_tokens in (96, 7):
            got = difference(all_logits(model, case.token_ids, step_tokens), case.logits)
            assert got <= TOLERANCE, f"{case.spec.name}: logits differ by {got}"


def test_one_worker_gives_the_bits_of_this_process(case: Case, workers: list[Address]) -> None:
    here = all_logits(build_model(case.folder), case.token_ids, 7)
    with remote_experts(case.folder, workers[:1]) as experts:
        there = all_logits(build_model(case.folder, experts), case.token_ids, 7)
    assert torch.equal(here, there)


def test_bf16_on_the_wire_stays_close(
    case: Case, workers: list[Address], record_property: pytest.RecordProperty
) -> None:
    """Rounded activations move the logits by a hundredth of their spread or so, more where routing flips."""
    with remote_experts(case.folder, workers[:2], wire_dtype="bf16") as experts:
        logits = all_logits(build_model(case.folder, experts), case.token_ids, 96)
    got = difference(logits, case.logits)
    median = float((logits - case.logits).abs().amax(-1).median())
    record_property("max_abs_logits_difference", got)
    print(f"bf16 wire, {case.spec.name}: largest {got:.3g}, median of positions {median:.3g}")
    assert got > TOLERANCE, "bf16 on the wire must be seen, else it was not used"
    assert median < 0.1 * float(case.logits.std())
