"""KL divergence, agreement and perplexity against plain loops over probabilities in float64."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from duckllm.quality.divergence import Divergence, kl_divergence, log_softmax


def probabilities(logits: np.ndarray) -> list[float]:
    """Softmax of one row, in Python's own floats, the sum exact."""
    top = max(map(float, logits))
    weights = [math.exp(float(each) - top) for each in logits]
    total = float(sum(map(Fraction, weights)))
    return [weight / total for weight in weights]


@pytest.fixture
def logits() -> tuple[np.ndarray, np.ndarray]:
    """Two sets of logits that differ a little, [40, 50] f32: some rows agree in their likeliest token."""
    generator = np.random.default_rng(3)
    reference = (3 * generator.standard_normal((40, 50))).astype(np.float32)
    return reference, (reference + generator.standard_normal((40, 50))).astype(np.float32)


def test_every_number_against_plain_loops(logits: tuple[np.ndarray, np.ndarray]) -> None:
    reference, other = logits
    next_ids = np.arange(40) % 50
    got = Divergence()
    got.add(reference[:17], other[:17], next_ids[:17])
    got.add(reference[17:], other[17:], next_ids[17:])
    kls, agrees, surprise = [], [], 0.0
    for row, (before, behind) in enumerate(zip(reference, other, strict=True)):
        p, q = probabilities(before), probabilities(behind)
        kls.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
        agrees.append(p.index(max(p)) == q.index(max(q)))
        surprise -= math.log(q[next_ids[row]])
    assert 0 < sum(agrees) < 40, "rows must differ in this"
    assert got.num_tokens == 40
    assert got.kl == pytest.approx(kls, rel=1e-12, abs=1e-14)
    assert got.kl_mean == pytest.approx(sum(kls) / 40, rel=1e-12)
    assert got.kl_max == pytest.approx(max(kls), rel=1e-12)
    low, high = sorted(kls)[38:]  # the 99th percentile of 40 lies at 38.61
    assert got.kl_p99 == pytest.approx(low + 0.61 * (high - low), rel=1e-9)
    assert got.agreement == sum(agrees) / 40
    assert got.perplexity == pytest.approx(math.exp(surprise / 40), rel=1e-12)


def test_the_same_logits_are_no_divergence_at_all(logits: tuple[np.ndarray, np.ndarray]) -> None:
    reference, other = logits
    got = Divergence()
    got.add(reference, reference.copy(), np.zeros(40, np.int64))
    assert set(got.kl) == {0.0}
    assert got.agreement == 1.0
    # One bit more or less in one logit is seen.
    other = reference.copy()
    other[5, 7] = np.nextafter(other[5, 7], np.float32(100))
    changed = Divergence()
    changed.add(reference, other, np.zeros(40, np.int64))
    assert [row for row, kl in enumerate(changed.kl) if kl] in ([5], [])
    assert changed.surprise[5] != got.surprise[5]


def test_it_is_not_symmetric_and_takes_the_reference_first() -> None:
    sure, unsure = np.float32([[9, 0]]), np.float32([[0, 0]])
    p = 1 / (1 + math.exp(-9))
    forward = p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p))
    backward = -0.5 * math.log(4 * p * (1 - p))
    assert kl_divergence(log_softmax(sure), log_softmax(unsure))[0] == pytest.approx(forward, rel=1e-12)
    assert kl_divergence(log_softmax(unsure), log_softmax(sure))[0] == pytest.approx(backward, rel=1e-12)


def test_large_logits_and_tokens_without_a_chance_are_no_trouble() -> None:
    first = np.float32([[300.0, 299.0, -np.inf]])
    second = np.float32([[-300.0, -301.0, -np.inf]])
    assert kl_divergence(log_softmax(first), log_softmax(second))[0] == pytest.approx(0, abs=1e-12)
    lost = np.float32([[300.0, -np.inf, 299.0]])
    assert kl_divergence(log_softmax(first), log_softmax(lost))[0] == np.inf


def test_of_equally_likely_tokens_the_first_one_counts() -> None:
    got = Divergence()
    got.add(np.float32([[1, 1, 0]]), np.float32([[1, 0, 1]]), np.array([0]))
    got.add(np.float32([[0, 1, 1]]), np.float32([[0, 0, 1]]), np.array([0]))
    assert got.agrees == [True, False]
