"""Workers of several speeds, sizes and instruction sets in one flock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from duckllm import LLM, _native
from duckllm.assembly import place_experts
from duckllm.cluster import open_cluster
from duckllm.cluster.connect import THIS_MACHINE, WorkerInfo
from duckllm.config import ClusterConfig
from duckllm.errors import ConfigError, PlacementError
from duckllm.moe.fit import nodes_of, words_on_repeats
from duckllm.moe.placement import plan_workers
from duckllm.sampling_params import SamplingParams
from duckllm.weights.formats import LayerFormat
from duckllm.weights.manifest import Manifest
from worker_harness import expected_sum, make_model, make_step, open_transport, running_worker

ANY_LAYER = 1 << 20
PARAMS = SamplingParams(temperature=0, max_tokens=8)
QUESTION = [{"role": "user", "content": "What is a swan?"}]

GIB = 1 << 30


@contextmanager
def flock(folder: Path, speeds: Sequence[float], *isas: str) -> Iterator[tuple[str, ...]]:
    """Addresses of workers that claim these speeds; of these instruction sets, if any are named."""
    with ExitStack() as stack:
        variables = [{"DUCK_FORCE_ISA": isa} for isa in isas] or [{} for _ in speeds]
        workers = [
            stack.enter_context(running_worker(folder, "--speed", str(speed), **forced))
            for speed, forced in zip(speeds, variables, strict=True)
        ]
        yield tuple(str(worker.address) for worker in workers)


def worker_info(address: str, speed: float | None, available_bytes: int | None = 8 * GIB) -> WorkerInfo:
    return WorkerInfo(address, "avx2", "0.1.0", 2, 7, 16 * GIB, available_bytes, speed)


def stripes(manifest: Manifest, workers: Sequence[WorkerInfo], shares: object = "auto") -> list[int]:
    config = ClusterConfig(shares=shares)  # type: ignore[arg-type]
    return [part.num_stripes for part in place_experts(manifest, workers, config, ANY_LAYER)]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """A tiny model whose experts have 29 stripes, a number that nothing divides."""
    return make_model(tmp_path_factory.mktemp("wide"), intermediate_size=29 * 16 - 5, layers=(1,))


def test_steps_of_uneven_workers_are_those_of_their_slices(tmp_path: Path, wide: Manifest) -> None:
    speeds = (10, 20, 40, 10, 20, 40, 10)
    step = make_step(wide, 3)
    with flock(tmp_path, speeds) as addresses, open_cluster(ClusterConfig(addresses=addresses)) as cluster:
        slices = place_experts(wide, cluster.greet(), cluster.config, ANY_LAYER)
        assert [part.num_stripes for part in slices] == [2, 4, 8, 2, 4, 8, 1]
        plans = plan_workers(wide, len(speeds), max_step_tokens=8, slices=slices)
        with open_transport(cluster.connect(plans)) as transport:
            got = transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
        assert [info.read_gb_per_s for info in cluster.workers] == [float(speed) for speed in speeds]
        assert {info.machine for info in cluster.workers} == {THIS_MACHINE}
    np.testing.assert_array_equal(got, expected_sum(wide, plans, step))


def test_the_same_words_from_one_worker_and_from_three_speeds(tmp_path: Path, demo_folder: Path) -> None:
    """Shares of 1:2:4, by what workers say of their speed and by numbers, within a stripe of that."""
    with LLM(demo_folder, workers=1, max_model_len=128) as llm:
        [alone] = llm.chat(QUESTION, PARAMS)
    with flock(tmp_path, (10, 20, 40)) as addresses:
        for shares in ("auto", [1, 2, 4]):
            with LLM(demo_folder, workers=addresses, max_model_len=128, shares=shares) as llm:
                info = llm.cluster_info()
                [shared] = llm.chat(QUESTION, PARAMS)
            assert info.stripes == (1, 2, 5)
            planned = [share / 7 for share in (1, 2, 4)]
            assert all(abs(got - want) < 1 / 8 for got, want in zip(info.shares, planned, strict=True))
            assert shared.outputs[0].token_ids == alone.outputs[0].token_ids
        with LLM(demo_folder, workers=addresses, max_model_len=128, shares=[2, 1, 1]) as llm:
            assert llm.cluster_info().stripes == (4, 2, 2)


@pytest.mark.skipif(len(_native.available_isas()) < 2, reason="this CPU has one instruction set")
def test_two_instruction_sets_in_one_flock(tmp_path: Path, demo_folder: Path) -> None:
    isas = _native.available_isas()[-2:]
    answers = []
    with flock(tmp_path, (20, 20), *isas) as addresses:
        for _ in range(2):
            with LLM(demo_folder, workers=addresses, max_model_len=128) as llm:
                assert llm.cluster_info().isas == tuple(isas)
                assert llm.cluster_info().stripes == (4, 4)
                params = replace(PARAMS, logprobs=1)
                [output] = llm.chat(QUESTION, params)
                answers.append((output.outputs[0].token_ids, output.outputs[0].cumulative_logprob))
    assert answers[0] == answers[1]  # the same assignment, the same bits
    assert f"{min(isas)} and {max(isas)}, which round differently" in words_on_repeats(isas)
    assert words_on_repeats(["avx2", "avx2+x", ""]) == ""


def test_shares_follow_speeds_beyond_noise(wide: Manifest) -> None:
    assert stripes(wide, [worker_info("a:1", 10), worker_info("b:1", 11.4)]) == [15, 14]
    assert stripes(wide, [worker_info("a:1", 10), worker_info("b:1", 12)]) == [13, 16]
    assert stripes(wide, [worker_info("a:1", 10), worker_info("b:1", None)]) == [15, 14]
    assert stripes(wide, [worker_info("a:1", 10), worker_info("b:1", 30)], "even") == [15, 14]
    assert stripes(wide, [worker_info("a:1", 10), worker_info("b:1", 30)], (1, 28)) == [1, 28]
    with pytest.raises(ConfigError, match=r"shares: got \[1, 2, 3\], expected 2 numbers above 0"):
        stripes(wide, [worker_info("a:1", 10), worker_info("b:1", 30)], (1, 2, 3))


def test_memory_bounds_shares_and_what_fits_nowhere_is_refused(wide: Manifest) -> None:
    from duckllm.moe.fit import ExpertSizes

    layers = {LayerFormat("fp9", "block"): 1}
    sizes = ExpertSizes(wide.hidden_size, wide.moe_intermediate_size, wide.num_experts, 3, 29, layers, 256)
    six, ten = sizes.need_bytes(6), sizes.need_bytes(10)
    assert (sizes.most_stripes(six), sizes.most_stripes(six - 1)) == (6, 5)
    fast, slow = worker_info("a:1", 30, six), worker_info("b:1", 10)
    assert stripes(wide, [fast, slow]) == [6, 23]
    # Two workers of one machine have its memory once.
    neighbours = [worker_info("a:1", 10, 2 * six), worker_info("a:2", 10, 2 * six), slow]
    assert stripes(wide, neighbours) == [6, 6, 17]
    # So have two at addresses of one machine: both of this one, or both by the same connection's end.
    for reached_at in (THIS_MACHINE, "10.0.0.7"):
        elsewhere = [replace(each, reached_at=reached_at) for each in neighbours[:2]]
        elsewhere[1] = replace(elsewhere[1], address="c:1")
        assert stripes(wide, [*elsewhere, slow]) == [6, 6, 17]
        assert [node.gb_per_s for node in nodes_of([*elsewhere, slow])] == [5, 5, 10]
    with pytest.raises(PlacementError) as caught:
        stripes(wide, [fast, replace(slow, available_bytes=ten)])
    assert "all nodes together hold 16 of 29 stripes" in str(caught.value)
    rows = caught.value.table.splitlines()
    assert [row.split()[:2] for row in rows[1:]] == [["a:1", "22"], ["b:1", "7"]]
    assert [row.endswith("too little") for row in rows[1:]] == [True, False]
    with pytest.raises(PlacementError, match="shares auto moves them to where they fit"):
        stripes(wide, [fast, slow], "even")
    with pytest.raises(PlacementError, match="a node that holds none must be left out"):
        stripes(wide, [replace(fast, available_bytes=0), slow])


@pytest.mark.parametrize("shares", ["some", 3, [1, 2], (1, 0), (1, float("nan")), (True, 1), (1, "2")])
def test_shares_that_are_none(shares: object) -> None:
    with pytest.raises(ConfigError, match="shares: got"):
        ClusterConfig(shares=shares)  # type: ignore[arg-type]
