"""The router's choice against a stable sort, each row alone, with ties, infinities and NaN."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from rowwise_reference import UNIT_ROUNDOFF, assert_same_bits, sigmoid

from duckllm import _native

Routed = tuple[np.ndarray, np.ndarray]
ROUTES: dict[str, Callable[[np.ndarray, str], Routed]] = {
    "sigmoid": lambda logits, isa: by_sigmoid(logits, isa=isa),
    "groups": lambda logits, isa: by_sigmoid(logits, num_groups=4, topk_group=2, isa=isa),
    "softmax": lambda logits, isa: _native.route_by_softmax(logits, 5, True, isa),
}


def by_sigmoid(logits: np.ndarray, **changes: object) -> Routed:
    arguments: dict[str, object] = {
        "correction_bias": np.random.default_rng(7).uniform(-0.3, 0.3, logits.shape[1]).astype(np.float32),
        "top_k": 5,
        "num_groups": 1,
        "topk_group": 1,
        "normalize": True,
        "scaling_factor": 2.5,
    }
    return _native.route_by_sigmoid(logits, **(arguments | changes))


def random_logits(num_rows: int, num_experts: int, seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal((num_rows, num_experts))).astype(np.float32)


def best(values: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-values, axis=-1, kind="stable")[..., :count]


@pytest.mark.parametrize("num_experts", [6, 8, 60, 129, 256])
@pytest.mark.parametrize("top_k", [1, 5, 6])
def test_softmax_shares_of_the_best(isa: str, num_experts: int, top_k: int) -> None:
    logits = random_logits(40, num_experts)
    exact = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    shares = exact / exact.sum(-1, keepdims=True)
    ids, weights = _native.route_by_softmax(logits, top_k, False, isa)
    assert (ids.dtype, weights.dtype) == (np.int32, np.float32)
    np.testing.assert_array_equal(ids, best(logits, top_k))
    far = logits.max(-1, keepdims=True) - np.take_along_axis(logits, ids, -1)
    chosen = np.take_along_axis(shares, ids, -1)
    assert (abs(weights - chosen) <= (4 + far) * UNIT_ROUNDOFF * chosen).all()
    _, normal = _native.route_by_softmax(logits, top_k, True, isa)
    np.testing.assert_allclose(normal, chosen / chosen.sum(-1, keepdims=True), rtol=3e-6)


@pytest.mark.parametrize(("num_groups", "topk_group"), [(1, 1), (4, 1), (4, 3), (32, 5), (64, 9)])
@pytest.mark.parametrize("normalize", [True, False])
def test_sigmoid_scores_of_the_best_groups(
    isa: str, num_groups: int, topk_group: int, normalize: bool
) -> None:
    logits = random_logits(40, 64)
    bias = np.random.default_rng(1).uniform(-0.5, 0.5, 64).astype(np.float32)
    ids, weights = by_sigmoid(
        logits,
        correction_bias=bias,
        num_groups=num_groups,
        topk_group=topk_group,
        normalize=normalize,
        isa=isa,
    )
    scores = sigmoid(logits)
    choice = (scores + bias).reshape(40, num_groups, -1)
    group_scores = np.sort(choice, axis=-1)[..., -2:].sum(-1)
    allowed = np.zeros((40, num_groups), bool)
    np.put_along_axis(allowed, best(group_scores, topk_group), True, -1)
    expected = best(np.where(allowed[..., None], choice, -np.inf).reshape(40, 64), 5)
    np.testing.assert_array_equal(ids, expected)
    chosen = np.take_along_axis(scores, ids, -1)
    total = chosen.sum(-1, keepdims=True) if normalize else 1.0
    np.testing.assert_allclose(weights, 2.5 * chosen / total, rtol=2e-6)


@pytest.mark.parametrize("route", ROUTES)
def test_every_isa_gives_the_same_bits(route: str) -> None:
    logits = random_logits(60, 72)
    first, *others = [ROUTES[route](logits, isa) for isa in _native.available_isas()]
    for ids, weights in others:
        np.testing.assert_array_equal(ids, first[0])
        assert_same_bits(weights, first[1])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("num_experts", [8, 60, 72])
def test_a_row_is_the_same_in_any_company(isa: str, route: str, num_experts: int) -> None:
    logits = random_logits(33, num_experts)
    alone = [ROUTES[route](row[None], isa) for row in logits]
    for num_rows in (2, 5, 33):
        ids, weights = ROUTES[route](logits[-num_rows:].copy(), isa)
        for row in range(num_rows):
            np.testing.assert_array_equal(ids[row], alone[row - num_rows][0][0])
            assert_same_bits(weights[row], alone[row - num_rows][1][0])


@pytest.mark.parametrize("route", ROUTES)
def test_equal_scores_go_to_the_lowest_numbers(isa: str, route: str) -> None:
    logits = np.zeros((2, 12), np.float32)
    logits[1, 3:] = 1
    if route == "softmax":
        ids, weights = _native.route_by_softmax(logits, 5, True, isa)
    else:
        groups = (4, 2) if route == "groups" else (1, 1)
        ids, weights = by_sigmoid(
            logits,
            correction_bias=np.zeros(12, np.float32),
            num_groups=groups[0],
            topk_group=groups[1],
            scaling_factor=1.0,
            isa=isa,
        )
    assert ids.tolist() == [[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]]
    np.testing.assert_allclose(weights, 0.2, rtol=1e-6)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_row_harms_no_other_and_names_real_experts(isa: str, route: str, value: float) -> None:
    logits = random_logits(4, 8)
    good = ROUTES[route](logits, isa)
    for columns in (slice(None), slice(3, 4)):
        bad = logits.copy()
        bad[1, columns] = value
        ids, weights = ROUTES[route](bad, isa)
        assert len(set(ids[1].tolist())) == 5
        assert set(ids[1].tolist()) <= set(range(8))
        assert np.isnan(weights[1]).any() or not np.isnan(value)  # it is not left out in silence
        others = np.arange(4) != 1
        np.testing.assert_array_equal(ids[others], good[0][others])
        assert_same_bits(weights[others], good[1][others])


def test_more_experts_than_the_best_groups_have_are_filled_up_in_order(isa: str) -> None:
    logits = np.arange(12, dtype=np.float32)[None]
    ids, _ = by_sigmoid(
        logits, correction_bias=np.zeros(12, np.float32), num_groups=4, topk_group=1, top_k=5, isa=isa
    )
    assert ids.tolist() == [[11, 10, 9, 0, 1]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: _native.route_by_softmax(x, 9, True), "top_k: got 9, expected 1 to 8"),
        (lambda x: _native.route_by_softmax(x, 0, True), "top_k: got 0, expected 1 to 8"),
        (lambda x: _native.route_by_softmax(x[0], 1, True), "logits: got shape [8], expected shape [T, E]"),
        (lambda x: _native.route_by_softmax(x[:, ::2], 1, True), "logits: got strides that skip elements"),
        (lambda x: by_sigmoid(x, num_groups=3), "num_groups: got 3, expected a divisor of 8"),
        (lambda x: by_sigmoid(x, num_groups=0), "num_groups: got 0, expected 1 to"),
        (lambda x: by_sigmoid(x, num_groups=4, topk_group=5), "topk_group: got 5, expected 1 to 4"),
        (
            lambda x: by_sigmoid(x, correction_bias=np.zeros(7, np.float32)),
            "correction_bias: got shape [7], expected shape [8]",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[np.ndarray], object], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        call(np.zeros((2, 8), np.float32))
