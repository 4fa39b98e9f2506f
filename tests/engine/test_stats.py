"""Counts, rates and percentiles of steps and requests, with times that the test makes."""

from __future__ import annotations

import pytest

from duckllm.engine.engine import Drafting
from duckllm.engine.request import Request
from duckllm.engine.stats import WINDOW_STEPS, EngineStats, StepRecord
from duckllm.models.step_times import StepTimes
from duckllm.outputs import percentile
from duckllm.sampling_params import SamplingParams
from support.drafting import GROUPED, make_engine, make_model


def record(seconds: float, prompt: int, decode: int, new: int, drafts: int = 0, right: int = 0) -> StepRecord:
    return StepRecord(seconds, prompt, decode, new, drafts, right, StepTimes(wait_s=seconds / 2))


def test_nothing_yet() -> None:
    metrics = EngineStats().metrics()
    assert (metrics.num_steps, metrics.step_s, metrics.window_steps) == (0, 0.0, 0)
    assert metrics.prefill_tokens_per_s is metrics.decode_tokens_per_s is metrics.acceptance is None
    assert metrics.time_to_first_token_p50_s is metrics.inter_token_p99_s is None


def test_a_steps_time_is_divided_by_its_tokens() -> None:
    stats = EngineStats()
    stats.record(record(2.0, prompt=30, decode=10, new=8, drafts=4, right=3))  # 1.5 s and 0.5 s
    stats.record(record(1.0, prompt=0, decode=4, new=4))
    metrics = stats.metrics()
    assert metrics.prefill_tokens_per_s == pytest.approx(30 / 1.5)
    assert metrics.decode_tokens_per_s == pytest.approx(12 / 1.5)
    assert metrics.acceptance == 0.75
    assert (metrics.num_prompt_tokens, metrics.num_generated_tokens) == (30, 12)
    assert (metrics.num_draft_tokens, metrics.num_accepted_tokens) == (4, 3)
    assert metrics.step_s == pytest.approx(1.5)
    assert metrics.step_parts_s["wait_s"] == pytest.approx(0.75)
    assert metrics.step_parts_s["head_s"] == 0


def test_rates_are_those_of_the_window_and_counts_are_of_all() -> None:
    stats = EngineStats()
    for _ in range(10):
        stats.record(record(9.0, prompt=0, decode=1, new=1))
    for _ in range(WINDOW_STEPS):
        stats.record(record(0.5, prompt=0, decode=1, new=1))
    metrics = stats.metrics()
    assert metrics.window_steps == WINDOW_STEPS
    assert metrics.num_steps == metrics.num_generated_tokens == WINDOW_STEPS + 10
    assert metrics.decode_tokens_per_s == pytest.approx(2.0)
    seconds = 10 * 9.0 + WINDOW_STEPS * 0.5
    assert (metrics.total_step_s, metrics.total_step_parts_s["wait_s"]) == (seconds, seconds / 2)


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(200, 0, -1)]
    assert [percentile(values, percent) for percent in (0, 50, 99, 100)] == [1.0, 100.0, 198.0, 200.0]
    assert percentile([], 50) is None
    assert percentile([3.0], 99) == 3.0


def test_times_between_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(
        "0", [1, 2], SamplingParams(max_tokens=4), vocab_size=9, max_model_len=99, eos_token_ids=frozenset()
    )
    times = iter([10.0, 10.5, 10.7, 10.7, 11.3])
    monkeypatch.setattr("duckllm.engine.request.time.perf_counter", lambda: next(times))
    request.start_clock()
    for token in (3, 4, 5):
        request.append(token)
    metrics = request.metrics()
    assert metrics.time_to_first_token_s == 0.5
    assert metrics.prefill_tokens_per_s == 4
    assert metrics.inter_token_p50_s is None  # not whole yet
    request.append(6)
    stats = EngineStats()
    for _ in range(3):
        stats.record_end(request)
    assert stats.metrics().inter_token_p50_s is None  # of nine values a percentile says nothing
    stats.record_end(request)
    assert stats.metrics().time_to_first_token_p50_s is None
    for _ in range(6):
        stats.record_end(request)
    assert request.inter_token_s() == pytest.approx([0.2, 0.0, 0.6])
    for metrics in (request.metrics(), stats.metrics()):
        assert metrics.inter_token_p50_s == pytest.approx(0.2)
        assert metrics.inter_token_p99_s == pytest.approx(0.6)
    assert stats.metrics().time_to_first_token_p50_s == 0.5
    assert request.metrics().decode_tokens_per_s == pytest.approx(3 / 0.8)


def test_the_engine_counts_what_it_does(tmp_path_factory: pytest.TempPathFactory) -> None:
    model, _ = make_model(tmp_path_factory.mktemp("model"), GROUPED, 64)
    engine = make_engine(model)
    for first in (1, 2):
        engine.add(engine.new_request([first, *range(20)], SamplingParams(temperature=0, max_tokens=6)))
    for _ in range(9):
        engine.step()  # the last three have nothing to do
    metrics = engine.stats.metrics()
    assert (metrics.num_steps, metrics.num_generated_tokens) == (6, 12)
    assert metrics.num_prompt_tokens == 2 * 20  # the last token of each is where a reply begins
    assert metrics.inter_token_p50_s is not None
    parts = metrics.step_parts_s
    assert set(parts) == set(vars(StepTimes())) - {"_last_s"}
    assert 0 < sum(parts.values()) <= metrics.step_s
    assert parts["draft_s"] == 0
    assert min(parts[part] for part in ("attention_s", "dispatch_s", "wait_s", "head_s", "sampling_s")) > 0


@pytest.mark.parametrize(("step", "num_requests"), [(64, 3), (8, 5), (7, 3)])
def test_what_guesses_take_is_learned_with_room_for_all_of_them_or_for_some(
    tmp_path_factory: pytest.TempPathFactory, step: int, num_requests: int
) -> None:
    """Else a measured choice would never come to its second way."""
    model, mtp = make_model(tmp_path_factory.mktemp("model"), GROUPED, 64)
    engine = make_engine(model, Drafting(mtp, 2, "auto"), step=step)
    learned: list[bool] = []
    engine.choices.record = lambda what, kind, used, *_: learned.append(used) if what == "drafts" else None  # type: ignore[method-assign]
    requests = [
        engine.new_request([first, 5], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        for first in range(1, num_requests + 1)
    ]
    for request in requests:
        engine.add(request)
    for _ in range(7):
        engine.step()
    assert learned.count(True) >= 3
    assert min(request.num_output_tokens for request in requests) >= 6
