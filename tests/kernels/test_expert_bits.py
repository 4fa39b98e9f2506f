"""A row's result depends on that row alone: the same bits in any batch and on any number of threads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from expert_reference import Layer, assert_same_bits, pack, random_step

from duckllm import _native

NewExperts = Callable[..., _native.Experts]


@pytest.mark.parametrize(("hidden", "intermediate"), [(33, 17), (200, 100), (1100, 136)])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 64, 150])
def test_rows_together_and_one_at_a_time(
    new_experts: NewExperts, hidden: int, intermediate: int, num_tokens: int
) -> None:
    layer = Layer.random(5, hidden, intermediate)
    units = pack(layer)
    x, topk_ids, topk_weights = random_step(layer, num_tokens, top_k=8)
    experts = new_experts(layer)
    together = experts.run(units, x, topk_ids, topk_weights)
    assert len(np.unique(together)) > 0.9 * together.size
    for row in range(num_tokens):
        one = slice(row, row + 1)
        assert_same_bits(experts.run(units, x[one], topk_ids[one], topk_weights[one]), together[one])


@pytest.mark.parametrize("num_threads", [2, 3, 7])
def test_any_number_of_threads(new_experts: NewExperts, num_threads: int) -> None:
    layer = Layer.random(5, 200, 100)
    units = pack(layer)
    one_thread = new_experts(layer)
    many = new_experts(layer, num_threads=num_threads)
    assert many.num_threads == num_threads
    for num_tokens in (1, 5, 30):
        x, topk_ids, topk_weights = random_step(layer, num_tokens, top_k=4)
        y = one_thread.run(units, x, topk_ids, topk_weights)
        for _ in range(5):
            assert_same_bits(many.run(units, x, topk_ids, topk_weights), y)


def test_more_threads_than_work(new_experts: NewExperts) -> None:
    layer = Layer.random(2, 5, 3)
    units = pack(layer)
    x, topk_ids, topk_weights = random_step(layer, 1, top_k=1)
    y = new_experts(layer).run(units, x, topk_ids, topk_weights)
    assert_same_bits(new_experts(layer, num_threads=9).run(units, x, topk_ids, topk_weights), y)


def test_order_of_rows_does_not_matter(new_experts: NewExperts) -> None:
    layer = Layer.random(5, 100, 48)
    units = pack(layer)
    x, topk_ids, topk_weights = random_step(layer, 20, top_k=4)
    experts = new_experts(layer)
    y = experts.run(units, x, topk_ids, topk_weights)
    order = np.random.default_rng(3).permutation(20)
    assert_same_bits(experts.run(units, x[order], topk_ids[order], topk_weights[order]), y[order])


def test_no_rows(new_experts: NewExperts) -> None:
    layer = Layer.random(2, 40, 16)
    empty = new_experts(layer).run(
        pack(layer), np.zeros((0, 40), np.float32), np.zeros((0, 2), np.int32), np.zeros((0, 2), np.float32)
    )
    assert empty.shape == (0, 40)


def test_order_of_summation(new_experts: NewExperts) -> None:
    """Experts in ascending id, their stripes in order; an id named twice counts once."""
    layer = Layer.random(4, 40, 48)
    units = pack(layer)
    x, _, topk_weights = random_step(layer, 6, top_k=7)
    topk_ids = np.array([[2, 0, 2, 3, 2, 0, 1]] * 6, np.int32)
    total = np.zeros_like(x)
    for expert in range(4):
        weights = np.zeros((6, 1), np.float32)
        for k in np.flatnonzero(topk_ids[0] == expert):
            weights[:, 0] += topk_weights[:, k]
        for stripe in range(3):
            part = new_experts(layer, first_stripe=stripe, num_stripes=1)
            total += part.run(units, x, np.full((6, 1), expert, np.int32), weights)
    assert_same_bits(new_experts(layer).run(units, x, topk_ids, topk_weights), total)


@pytest.mark.parametrize(("hidden", "intermediate"), [(33, 17), (576, 100), (1100, 40), (2100, 136)])
@pytest.mark.parametrize("num_tokens", [1, 3, 30])
def test_both_formats_give_the_same_bits(
    new_experts: NewExperts, hidden: int, intermediate: int, num_tokens: int
) -> None:
    layer = Layer.random(3, hidden, intermediate)
    x, topk_ids, topk_weights = random_step(layer, num_tokens, top_k=3)
    fp9 = new_experts(layer).run(pack(layer), x, topk_ids, topk_weights)
    assert len(np.unique(fp9)) > 0.9 * fp9.size
    units = pack(layer, "fp8")
    for decoded_as in ("fp8", "fp8-normal"):  # the latter is what fp8 is on a CPU that is slow with denormals
        fp8 = new_experts(layer, format=decoded_as).run(units, x, topk_ids, topk_weights)
        assert_same_bits(fp9, fp8)
