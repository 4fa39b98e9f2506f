from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duckllm.engine.logprobs import TokenLogprob, token_logprobs


def in_f64(logits: torch.Tensor, token_id: int, num_top: int) -> list[TokenLogprob]:
    """The slow twin: every token sorted, log-softmax in f64."""
    values = logits.double().numpy()
    logprobs = values - values.max()
    logprobs = logprobs - np.log(np.exp(logprobs).sum())
    order = np.argsort(-values, kind="stable").tolist()
    wanted = [token_id, *(token for token in order[:num_top] if token != token_id)]
    return [TokenLogprob(token, float(logprobs[token]), order.index(token) + 1) for token in wanted]


def check(logits: torch.Tensor, token_id: int, num_top: int) -> None:
    got, expected = token_logprobs(logits, token_id, num_top), in_f64(logits, token_id, num_top)
    assert [(each.token_id, each.rank) for each in got] == [(each.token_id, each.rank) for each in expected]
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, rel=1e-6, abs=2e-6)


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.integers(-3, 3), min_size=1, max_size=30),
    token=st.integers(0, 29),
    num_top=st.integers(0, 20),
)
def test_they_are_those_of_f64_with_equals_in_order(values: list[int], token: int, num_top: int) -> None:
    check(torch.tensor(values, dtype=torch.float32) * 1.1, token % len(values), num_top)


@pytest.mark.parametrize("scale", [0.01, 3.0, 100.0])
def test_they_are_those_of_f64_over_a_whole_vocabulary(scale: float) -> None:
    logits = torch.randn(129280, generator=torch.Generator().manual_seed(1)) * scale + 7
    before = logits.clone()
    for token in (0, 77777, int(logits.argmax()), int(logits.argmin())):
        check(logits, token, 20)
    assert torch.equal(logits, before)


def test_the_chosen_token_comes_first_and_once() -> None:
    logits = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))
    ids = {token: [each.token_id for each in token_logprobs(logits, token, 2)] for token in range(4)}
    assert ids == {0: [0, 1, 3], 1: [1, 3], 2: [2, 1, 3], 3: [3, 1]}
    assert [each.token_id for each in token_logprobs(logits, 2, 0)] == [2]
    assert len(token_logprobs(logits, 2, 20)) == 4
