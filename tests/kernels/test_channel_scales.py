"""Experts with a scale for each row of a matrix: against float64, the block layout, and themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from expert_reference import Layer, assert_same_bits, expert_sums, pack, random_step

from duckllm import _native

NewExperts = Callable[..., _native.Experts]

FORMATS = ("fp9", "fp8", "fp8-normal")
# Odd hidden sizes, stripes that are not whole, several scale blocks and several parts of a dot product.
SIZES = [(1, 1), (31, 15), (33, 17), (200, 200), (257, 129), (1100, 40)]


def spread_layer(num_experts: int, hidden: int, intermediate: int) -> Layer:
    """Scales of neighbours are up to 2^20 apart, and a few are zero."""
    layer = Layer.random(num_experts, hidden, intermediate, scale_layout="channel")
    rng = np.random.default_rng(7)
    for name in ("gate_scale", "up_scale", "down_scale"):
        scales = getattr(layer, name)
        factors = np.exp2(rng.integers(-20, 1, scales.shape)) * (rng.random(scales.shape) >= 0.05)
        factors[:, 0] = 1.0
        scales *= factors.astype(np.float32)
        assert len(np.unique(scales)) > 0.8 * scales.size
    return layer


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 30])
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_matches_float64(new_experts: NewExperts, hidden: int, intermediate: int, num_tokens: int) -> None:
    layer = spread_layer(2, hidden, intermediate)
    x, topk_ids, topk_weights = random_step(layer, num_tokens, top_k=2)
    exact, bound = expert_sums(layer, x, topk_ids, topk_weights)
    y = new_experts(layer).run(pack(layer), x, topk_ids, topk_weights)
    assert np.all(abs(y - exact) <= bound)
    # The bound is for the worst case. Outputs are compared as if their scales were one, which are far apart.
    scales = layer.down_scale.astype(np.float64).max(0)[:, 0]
    assert not np.any(y[:, scales == 0])
    error, size = abs(y - exact)[:, scales > 0], abs(exact)[:, scales > 0]
    assert np.all(error / scales[scales > 0] <= 2e-6 * (size / scales[scales > 0]).max())


def test_a_scale_is_its_rows_alone(new_experts: NewExperts) -> None:
    """Doubling an up or a down scale doubles that channel or output, exactly, and nothing else."""
    layer = Layer.random(1, 70, 40, scale_layout="channel")
    layer.down[:] = 0
    layer.down[0, np.arange(40), np.arange(40)] = 0x38  # output c is channel c's activation
    for num_rows in (3, 12):
        x, ids, weights = random_step(layer, num_rows, top_k=1)
        y = new_experts(layer).run(pack(layer), x, ids, weights)
        assert np.all(y[:, :40] != 0)
        for name, row in (("up", 0), ("up", 17), ("up", 39), ("down", 16), ("down", 38), ("down", 15)):
            scales = getattr(layer, f"{name}_scale").copy()
            scales[0, row] *= 2
            doubled = replace(layer, **{f"{name}_scale": scales})
            expected = y.copy()
            expected[:, row] *= 2
            assert_same_bits(new_experts(layer).run(pack(doubled), x, ids, weights), expected)


def test_powers_of_two_give_the_bits_of_blocks(new_experts: NewExperts) -> None:
    """Scales that are one power of two everywhere come to the same in either layout."""
    for num_tokens in (1, 3, 30):
        layer = Layer.random(3, 1100, 136)
        channel = Layer.random(3, 1100, 136, scale_layout="channel")
        for each in (layer, channel):
            each.gate_scale[:], each.up_scale[:], each.down_scale[:] = 2.0**-9, 2.0**-8, 2.0**-7
        x, topk_ids, topk_weights = random_step(layer, num_tokens, top_k=3)
        y = new_experts(layer).run(pack(layer), x, topk_ids, topk_weights)
        assert len(np.unique(y)) > 0.9 * y.size
        assert_same_bits(new_experts(channel).run(pack(channel), x, topk_ids, topk_weights), y)


@pytest.mark.parametrize(("hidden", "intermediate"), [(33, 17), (1100, 136)])
def test_formats_rows_and_threads_give_the_same_bits(
    new_experts: NewExperts, hidden: int, intermediate: int
) -> None:
    layer = Layer.random(3, hidden, intermediate, scale_layout="channel")
    x, topk_ids, topk_weights = random_step(layer, 64, top_k=3)
    y = new_experts(layer).run(pack(layer), x, topk_ids, topk_weights)
    assert len(np.unique(y)) > 0.9 * y.size
    for weight_format in FORMATS:
        units = pack(layer, weight_format)
        for num_threads, sizes in ((1, (1, 2, 3, 4, 5, 8, 9, 30)), (3, (1, 5, 64))):
            experts = new_experts(layer, format=weight_format, num_threads=num_threads)
            for num_tokens in sizes:
                part = slice(0, num_tokens)
                assert_same_bits(experts.run(units, x[part], topk_ids[part], topk_weights[part]), y[part])


def test_slices_sum_to_the_whole(new_experts: NewExperts) -> None:
    layer = spread_layer(2, 200, 200)
    units = pack(layer)
    for num_tokens in (4, 30):
        x, topk_ids, topk_weights = random_step(layer, num_tokens, top_k=1)
        total = np.zeros_like(x)
        for stripe in range(layer.num_stripes):
            part = new_experts(layer, first_stripe=stripe, num_stripes=1)
            total += part.run(units, x, topk_ids, topk_weights)
        assert_same_bits(total, new_experts(layer).run(units, x, topk_ids, topk_weights))


@pytest.mark.parametrize(("hidden", "intermediate"), [(1, 1), (33, 17), (200, 40)])
def test_padding_of_scales_is_never_used(new_experts: NewExperts, hidden: int, intermediate: int) -> None:
    layer = Layer.random(2, hidden, intermediate, scale_layout="channel")
    units = pack(layer)
    poisoned = units.copy()
    scales = poisoned[:, :, : 4 * (32 + -(-hidden // 32) * 32)].view(np.float32)
    scales[:, :, 32 + hidden :] = np.nan
    channels = intermediate - 16 * (layer.num_stripes - 1)
    scales[:, -1, channels:16] = scales[:, -1, 16 + channels : 32] = np.nan
    assert np.any(poisoned != units)
    experts = new_experts(layer)
    for num_tokens in (1, 4, 20):
        step = random_step(layer, num_tokens, top_k=2)
        y = experts.run(units, *step)
        assert np.all(np.isfinite(y))
        assert_same_bits(experts.run(poisoned, *step), y)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_finite_x_comes_out_in_its_row_alone(new_experts: NewExperts, bad: float) -> None:
    layer = Layer.random(2, 200, 40, scale_layout="channel")
    units = pack(layer)
    for num_tokens in (6, 30):
        x, topk_ids, topk_weights = random_step(layer, num_tokens, top_k=2)
        experts = new_experts(layer)
        clean = experts.run(units, x, topk_ids, topk_weights)
        x[2, 57] = bad
        y = experts.run(units, x, topk_ids, topk_weights)
        assert not np.any(np.isfinite(y[2]))
        others = np.arange(num_tokens) != 2
        assert_same_bits(y[others], clean[others])


@pytest.mark.parametrize("x_exponent", [-40, 46])
def test_x_over_its_whole_range(new_experts: NewExperts, x_exponent: int) -> None:
    layer = Layer.random(2, 200, 40, scale_layout="channel")
    layer.gate_scale[:] *= 2.0**-x_exponent
    layer.up_scale[:] *= 2.0**-x_exponent
    x, topk_ids, topk_weights = random_step(layer, num_tokens=12, top_k=2)
    x = np.ldexp(np.clip(abs(x), 1.0, 1.99) * np.sign(x), x_exponent).astype(np.float32)
    exact, bound = expert_sums(layer, x, topk_ids, topk_weights)
    for weight_format in FORMATS:
        y = new_experts(layer, format=weight_format).run(
            pack(layer, weight_format), x, topk_ids, topk_weights
        )
        assert np.all(abs(y - exact) <= bound)
        assert abs(y - exact).max() <= 3e-6 * abs(exact).max()


def test_isas_agree() -> None:
    layer = spread_layer(2, 300, 100)
    for num_tokens in (1, 3, 7, 30):
        x, topk_ids, topk_weights = random_step(layer, num_tokens, top_k=2)
        _, bound = expert_sums(layer, x, topk_ids, topk_weights)
        results = {
            isa: _native.Experts(300, 100, 2, 2, 0, 7, 30, 2, 0, isa, scale_layout="channel").run(
                pack(layer), x, topk_ids, topk_weights
            )
            for isa in _native.available_isas()
        }
        for y in results.values():
            assert np.all(abs(y - results["scalar"]) <= 2 * bound)
        if {"avx2", "avx512"} <= results.keys():  # the same operations in the same order
            assert_same_bits(results["avx512"], results["avx2"])


def test_units_of_the_other_layout_are_refused(new_experts: NewExperts) -> None:
    block, channel = (Layer.random(1, 40, 20, scale_layout=name) for name in ("block", "channel"))
    step = random_step(block, 1, 1)
    with pytest.raises(
        ValueError, match=r"^units: got shape \[1, 2, 3520\], expected shape \[1, stripes, 3840"
    ):
        new_experts(channel).run(pack(block), *step)
    with pytest.raises(
        ValueError, match=r"^units: got shape \[1, 2, 3840\], expected shape \[1, stripes, 3520"
    ):
        new_experts(block).run(pack(channel), *step)
    with pytest.raises(ValueError, match=r"^scale_layout: got 'row', expected block, channel or group$"):
        new_experts(block, scale_layout="row")
