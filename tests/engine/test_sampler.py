from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duckllm.engine import sampler as sampler_module
from duckllm.engine.sampler import Sampler
from duckllm.errors import ModelError
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
    for place in range(4000):
        counts[sampler.sample(LOGITS, range(place))] += 1
    assert counts[0] == counts[2] == 0
    for token, share in ((1, 0.4 / 0.85), (3, 0.3 / 0.85), (4, 0.15 / 0.85)):
        assert counts[token] / 4000 == pytest.approx(share, abs=5 * math.sqrt(share / 4000))


def test_a_seed_repeats_and_another_one_differs() -> None:
    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed))
        return [sampler.sample(LOGITS, range(place)) for place in range(40)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert draw(None) != draw(None)


def test_samplers_do_not_share_a_generator() -> None:
    alone = Sampler(SamplingParams(seed=1))
    expected = [alone.sample(LOGITS, range(place)) for place in range(20)]
    first, second = Sampler(SamplingParams(seed=1)), Sampler(SamplingParams(seed=2))
    got = []
    for place in range(20):
        got.append(first.sample(LOGITS, range(place)))
        second.sample(LOGITS, range(place))
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


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1_000_000])
def test_no_temperature_overflows(temperature: float) -> None:
    logits = torch.tensor([3e38, -3e38, 3e38, 1e30])
    sampler = Sampler(SamplingParams(temperature=temperature))
    assert sampler.probabilities(logits).tolist() == [0.5, 0.0, 0.5, 0.0]


VOCAB = 12
TOKENS = st.integers(0, VOCAB - 1)
VALUES = st.floats(-30, 30, width=32)
PENALTIES = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.5, 1e6]),
        "frequency_penalty": st.sampled_from([0.0, 0.7, -2.0]),
        "presence_penalty": st.sampled_from([0.0, 1.1, -0.3]),
        "logit_bias": st.none() | st.dictionaries(TOKENS, st.floats(-100, 100), max_size=4),
        "min_tokens": st.sampled_from([0, 3]),
    }
)


def adjusted_by_loops(
    logits: list[float], params: SamplingParams, prompt: list[int], reply: list[int], ends: list[int]
) -> list[float]:
    """The slow twin of :meth:`Sampler.adjusted`, a token at a time, in f64."""
    result = []
    for token, logit in enumerate(logits):
        value = float(np.float32(logit) + np.float32((params.logit_bias or {}).get(token, 0.0)))
        if token in prompt or token in reply:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * reply.count(token)
        value -= params.presence_penalty * (token in reply)
        if token in ends and len(reply) < params.min_tokens:
            value = -math.inf
        result.append(float(np.float32(value)))
    return result


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(VALUES, min_size=VOCAB, max_size=VOCAB),
    fields=PENALTIES,
    prompt=st.lists(TOKENS, max_size=8),
    reply=st.lists(TOKENS, max_size=8),
    ends=st.lists(TOKENS, max_size=3, unique=True),
)
def test_adjusted_logits_are_those_of_plain_loops(
    logits: list[float], fields: dict[str, object], prompt: list[int], reply: list[int], ends: list[int]
) -> None:
    params = SamplingParams(temperature=0, **fields)
    given_logits = torch.tensor(logits)
    sampler = Sampler(params, len(prompt), end_token_ids=ends)
    for length in range(len(reply) + 1):
        expected = adjusted_by_loops(logits, params, prompt, reply[:length], ends)
        tokens = prompt + reply[:length]
        assert sampler.adjusted(given_logits, tokens).tolist() == expected
        assert sampler.sample(given_logits, tokens) == int(np.argmax(expected))
    assert given_logits.tolist() == logits


def test_many_distinct_tokens_are_counted_at_once_and_one_by_one() -> None:
    logits = torch.linspace(-5, 5, 1000)
    params = SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=0.25)
    prompt = list(range(0, 1000, 3))
    reply = [*range(0, 900, 2), *range(0, 900, 4)]
    grown = Sampler(params, len(prompt))
    for length in range(0, len(reply) + 1, 7):
        grown.adjusted(logits, prompt + reply[:length])
    expected = adjusted_by_loops(logits.tolist(), params, prompt, reply, [])
    assert grown.adjusted(logits, prompt + reply).tolist() == expected
    assert Sampler(params, len(prompt)).adjusted(logits, prompt + reply).tolist() == expected


def test_a_penalty_cannot_overflow() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=1e-300)
    adjusted = Sampler(params, 2).adjusted(torch.tensor([1.0, -1.0, 5.0]), [0, 1])
    assert torch.isfinite(adjusted).all()
    assert int(adjusted.argmax()) == 0


def test_the_order_is_bias_penalties_temperature() -> None:
    logits = torch.tensor([-1.0, 0.5, 0.0, -9.0])
    # With its bias the first logit is positive, and so divided: 3 / 2 - 0.5; else it were -1 * 2 + 4 - 0.5.
    params = SamplingParams(
        temperature=0.5, logit_bias={0: 4.0}, repetition_penalty=2.0, presence_penalty=0.5, seed=0
    )
    sampler = Sampler(params)
    adjusted = sampler.adjusted(logits, [0])
    assert adjusted.tolist() == [1.0, 0.5, 0.0, -9.0]
    weights = [math.exp(value / 0.5) for value in adjusted.tolist()]
    assert sampler.probabilities(adjusted).tolist() == pytest.approx([w / sum(weights) for w in weights])


def test_broken_logits_are_an_error_behind_any_mask() -> None:
    for params in (SamplingParams(min_tokens=2), SamplingParams(repetition_penalty=2.0)):
        with pytest.raises(ModelError, match="logits: got nan"):
            Sampler(params, 1, end_token_ids=[1]).sample(torch.tensor([0.0, float("nan"), 1.0]), [1])


def test_end_tokens_wait_for_min_tokens() -> None:
    logits = torch.tensor([0.0, 5.0, 4.0, 3.0])
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, min_tokens=2, seed=0, top_k=1)
        sampler = Sampler(params, 3, end_token_ids=[1, 2])
        assert [sampler.sample(logits, [0] * length) for length in (3, 4, 5, 6)] == [3, 3, 1, 1]


def kept_by_loops(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """The slow twin of :meth:`Sampler.probabilities`: tokens with their shares, in f64."""

    def shares(kept: list[int]) -> dict[int, float]:
        top = max(logits)
        weights = {token: math.exp((logits[token] - top) / params.temperature) for token in kept}
        return {token: weight / sum(weights.values()) for token, weight in weights.items()}

    found = shares(list(range(len(logits))))
    found = shares([t for t, share in found.items() if share >= params.min_p * max(found.values())])
    ordered = sorted(found, key=lambda token: -found[token])
    if params.top_k > 0:
        ordered = ordered[: params.top_k]
    found, total, kept = shares(ordered), 0.0, []
    for token in ordered:
        if params.top_p == 1 or total < params.top_p:  # else rounding may lose the last ones
            kept.append(token)
        total += found[token]
    return shares(kept)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 7, 40]),
    top_p=st.sampled_from([0.1, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
)
def test_probabilities_are_those_of_plain_loops(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = torch.randn(40, generator=torch.Generator().manual_seed(seed)) * 2
    expected = kept_by_loops(logits.tolist(), params)
    got = Sampler(params).probabilities(logits).tolist()
    assert {token for token, share in enumerate(got) if share > 0} == set(expected)
    assert got == pytest.approx([expected.get(token, 0.0) for token in range(40)], rel=1e-4, abs=1e-7)


def test_of_equally_likely_tokens_top_p_keeps_the_lowest() -> None:
    logits = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    got = Sampler(SamplingParams(top_p=0.4)).probabilities(logits).tolist()
    assert got == pytest.approx([0, 0.5, 0, 0.5, 0, 0])


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.1, "temperature": 0.8},
        {"repetition_penalty": 2.0, "presence_penalty": 1.0, "top_p": 0.9},
    ],
)
def test_seeded_samples_pass_a_chi_square_test(filters: dict[str, float]) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(5)) * 1.5
    params, tokens, draws = SamplingParams(seed=3, **filters), [4, 9, 9, 30], 4000
    sampler = Sampler(params, 2)
    expected = Sampler(params, 2).probabilities(sampler.adjusted(logits, tokens)).numpy() * draws
    # Each seed is one independent draw: the tokens seen so far have to stay as they are.
    samplers = (Sampler(replace(params, seed=seed), 2) for seed in range(draws))
    counts = np.bincount([each.sample(logits, tokens) for each in samplers], minlength=50)
    assert counts[expected == 0].sum() == 0
    rare = expected < 8  # together in one class, as the test wants several in each
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    assert freedom >= 5
    chi_square = float(((observed - wanted) ** 2 / wanted).sum())
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("numbers", "token"), [([0, 2, 0, 1, 0], 3), ([0, 0, 0, 0, 0], 1), ([9, 1, 9, 8, 9], 1)]
)
def test_a_token_without_probability_is_never_drawn(numbers: list[float], token: int) -> None:
    probabilities = np.array([0, 0.3, 0, 0.7, 0], np.float32)
    assert sampler_module._winner(np.array(numbers, np.float64), probabilities) == token


def test_a_draw_depends_on_the_seed_and_the_place_alone() -> None:
    """Not on what was drawn before: a repeated or a guessed token takes the same numbers."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    first, second = Sampler(SamplingParams(seed=8)), Sampler(SamplingParams(seed=8))
    drawn = [first.sample(row, range(place)) for place, row in enumerate(logits)]
    again = [second.sample(logits[place], range(place)) for place in (2, 0, 1, 0)]
    assert again == [drawn[2], drawn[0], drawn[1], drawn[0]]
    assert len({first.sample(logits[0], range(place)) for place in range(40)}) > 5


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"seed": 5}, {"seed": 5, "top_k": 7, "temperature": 2}]
)
def test_a_draft_from_the_same_logits_is_what_is_sampled(options: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(1)
    sampler = Sampler(SamplingParams(logit_bias={3: 2.0}, **options), 2)
    for place in range(2, 60):
        logits, ahead = torch.randn(40, generator=generator), place % 2
        guess = sampler.draft(logits, [1] * (place - ahead), ahead)
        assert guess == sampler.sample(logits, [1] * place)


def test_drafts_from_logits_that_are_alike_agree_nearly_as_often_as_any_could() -> None:
    generator = torch.Generator().manual_seed(4)
    agreed = bound = 0.0
    draws = 2000
    sampler = Sampler(SamplingParams(seed=1))
    for place in range(draws):
        logits = torch.randn(30, generator=generator)
        other = logits + 0.4 * torch.randn(30, generator=generator)
        agreed += sampler.draft(other, [0] * place, 0) == sampler.sample(logits, [0] * place)
        distance = float((logits.softmax(0) - other.softmax(0)).abs().sum() / 2)
        bound += (1 - distance) / (1 + distance)
    assert agreed / draws > bound / draws - 0.03
    assert agreed / draws < 0.97


def test_the_replies_of_a_seed_are_those_of_the_next_seeds() -> None:
    def draw(seed: int, index: int) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed), index=index)
        return [sampler.sample(LOGITS, range(place)) for place in range(30)]

    assert draw(5, 0) != draw(5, 1)
    assert draw(5, 1) == draw(6, 0)
    assert draw(2**63 - 1, 1) == draw(0, 0)
