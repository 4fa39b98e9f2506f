from __future__ import annotations

import math

import pytest
import torch

from duckllm.engine.sampler import Sampler
from duckllm.errors import ConfigError, ModelError
from duckllm.sampling_params import SamplingParams

LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15]))


def probabilities(**params: float) -> list[float]:
    return Sampler(SamplingParams(**params)).probabilities(LOGITS).tolist()


def test_temperature_sharpens() -> None:
    squares = [0.05**2, 0.4**2, 0.1**2, 0.3**2, 0.15**2]
    assert probabilities(temperature=0.5) == pytest.approx([s / sum(squares) for s in squares], rel=1e-5)


def test_top_k_keeps_the_likeliest() -> None:
    assert probabilities(top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7, 0], rel=1e-5)


@pytest.mark.parametrize("top_k", [0, -1, 5, 99])
def test_top_k_of_none_or_all_keeps_all(top_k: int) -> None:
    assert probabilities(top_k=top_k) == pytest.approx([0.05, 0.4, 0.1, 0.3, 0.15], rel=1e-5)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1.0, {0, 1, 2, 3, 4}), (0.96, {0, 1, 2, 3, 4}), (0.8, {1, 3, 4}), (0.69, {1, 3}), (0.01, {1})],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    got = probabilities(top_p=top_p)
    assert {i for i, p in enumerate(got) if p > 0} == kept
    assert sum(got) == pytest.approx(1)


@pytest.mark.parametrize(("min_p", "kept"), [(0.2, {1, 2, 3, 4}), (0.5, {1, 3}), (1.0, {1})])
def test_min_p_is_a_share_of_the_likeliest(min_p: float, kept: set[int]) -> None:
    assert {i for i, p in enumerate(probabilities(min_p=min_p)) if p > 0} == kept


def test_the_order_is_temperature_min_p_top_k_top_p() -> None:
    # At temperature 1, min_p 0.6 keeps {1, 3}; at 0.5 it keeps 1 alone, as 0.3^2 / 0.4^2 = 0.5625.
    assert probabilities(min_p=0.6)[3] > 0
    assert probabilities(temperature=0.5, min_p=0.6)[3] == 0
    # After top_k the two left have 0.571 and 0.429: top_p 0.5 keeps one; of the whole it would keep two.
    assert probabilities(top_k=2, top_p=0.5) == pytest.approx([0, 1, 0, 0, 0])
    assert probabilities(top_p=0.5)[3] > 0


def test_samples_follow_the_distribution() -> None:
    sampler = Sampler(SamplingParams(seed=0, top_k=3))
    counts = [0] * 5
    for _ in range(4000):
        counts[sampler.sample(LOGITS)] += 1
    assert counts[0] == counts[2] == 0
    for token, share in ((1, 0.4 / 0.85), (3, 0.3 / 0.85), (4, 0.15 / 0.85)):
        assert counts[token] / 4000 == pytest.approx(share, abs=5 * math.sqrt(share / 4000))


def test_a_seed_repeats_and_another_one_differs() -> None:
    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed))
        return [sampler.sample(LOGITS) for _ in range(40)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert draw(None) != draw(None)


def test_samplers_do_not_share_a_generator() -> None:
    alone = Sampler(SamplingParams(seed=1))
    expected = [alone.sample(LOGITS) for _ in range(20)]
    first, second = Sampler(SamplingParams(seed=1)), Sampler(SamplingParams(seed=2))
    got = []
    for _ in range(20):
        got.append(first.sample(LOGITS))
        second.sample(LOGITS)
        torch.rand(3)
    assert got == expected


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_greedy_takes_the_lowest_of_equals(temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature))
    assert sampler.sample(torch.tensor([1.0, 3.0, 2.0, 3.0])) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error(bad: float, temperature: float) -> None:
    with pytest.raises(ModelError, match="logits: got"):
        Sampler(SamplingParams(temperature=temperature)).sample(torch.tensor([0.0, bad, 1.0]))


def test_the_logits_are_not_changed() -> None:
    before = LOGITS.clone()
    Sampler(SamplingParams(temperature=0.7, top_k=3, top_p=0.9, min_p=0.1)).sample(LOGITS)
    assert torch.equal(before, LOGITS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", 1_000_001),
        ("temperature", 10**400),
        ("top_p", 10**400),
        ("min_p", float("nan")),
        ("temperature", True),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 1.0),
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("ignore_eos", 1),
    ],
)
def test_a_bad_value_is_an_error_that_names_field_and_value(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{field: value})
    shown = repr(value)[:38]
    assert str(caught.value).startswith(f"{field}: got {shown}")
    assert ", expected " in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1_000_000])
def test_no_temperature_overflows(temperature: float) -> None:
    logits = torch.tensor([3e38, -3e38, 3e38, 1e30])
    sampler = Sampler(SamplingParams(temperature=temperature))
    assert sampler.probabilities(logits).tolist() == [0.5, 0.0, 0.5, 0.0]


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)


def test_defaults_come_from_the_generation_config() -> None:
    assert SamplingParams.from_generation_config({"do_sample": False, "temperature": 0.6}).greedy
    assert SamplingParams.from_generation_config({}).greedy
    sampled = SamplingParams.from_generation_config(
        {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": None, "eos_token_id": 1}
    )
    assert sampled == SamplingParams(temperature=0.6, top_p=0.95)
