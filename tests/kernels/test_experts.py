"""The native experts against float64, on every ISA: sizes, slices, ranges, and what is not finite."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from expert_reference import (
    Layer,
    assert_same_bits,
    expert_sums,
    pack,
    random_step,
)

from duckllm import _native

NewExperts = Callable[..., _native.Experts]

# Edges of records (32), scale blocks (128) and stripes (16): 1, one less, one more, odd, several blocks.
SIZES = [(1, 1), (31, 15), (33, 17), (128, 16), (200, 200), (256, 128), (257, 129), (576, 48), (1800, 40)]


@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_matches_float64(new_experts: NewExperts, hidden: int, intermediate: int) -> None:
    layer = Layer.random(6, hidden, intermediate)
    x, topk_ids, topk_weights = random_step(layer, num_tokens=5, top_k=4)
    exact, bound = expert_sums(layer, x, topk_ids, topk_weights)
    y = new_experts(layer).run(pack(layer), x, topk_ids, topk_weights)
    assert y.shape == x.shape
    assert y.dtype == np.float32
    assert np.all(abs(y - exact) <= bound)
    # The bound is for the worst case; rounding errors that mostly cancel stay far below it.
    assert abs(y - exact).max() <= 1.5e-6 * abs(exact).max()


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_stripe_by_stripe_in_memory_gives_the_same_bits(new_experts: NewExperts, num_tokens: int) -> None:
    layer = Layer.random(6, 72, 100)
    x, topk_ids, topk_weights = random_step(layer, num_tokens=num_tokens, top_k=4)
    units = pack(layer)
    shards = np.zeros((units.shape[1], units.shape[0] * units.shape[2] + 4096), np.uint8)  # with gaps
    moved = shards[:, : units.shape[0] * units.shape[2]].reshape(units.shape[1], units.shape[0], -1)
    moved = moved.transpose(1, 0, 2)
    moved[:] = units
    experts = new_experts(layer)
    expected = experts.run(units, x, topk_ids, topk_weights)
    assert_same_bits(experts.run(moved, x, topk_ids, topk_weights), expected)
    assert experts.read_units(moved, topk_ids) == experts.read_units(units, topk_ids)


@pytest.mark.parametrize("top_k", range(1, 9))
def test_every_top_k_with_repeated_ids(new_experts: NewExperts, top_k: int) -> None:
    layer = Layer.random(3, 96, 40)
    x, topk_ids, topk_weights = random_step(layer, num_tokens=6, top_k=top_k)
    topk_ids[0] = 2
    exact, bound = expert_sums(layer, x, topk_ids, topk_weights)
    y = new_experts(layer).run(pack(layer), x, topk_ids, topk_weights)
    assert np.all(abs(y - exact) <= bound)
    assert abs(y - exact).max() <= 1.5e-6 * abs(exact).max()


def test_isas_agree() -> None:
    layer = Layer.random(6, 300, 100)
    x, topk_ids, topk_weights = random_step(layer, num_tokens=7, top_k=6)
    exact, bound = expert_sums(layer, x, topk_ids, topk_weights)
    results = {
        isa: _native.Experts(300, 100, 6, 6, 0, 7, 8, 2, 0, isa).run(pack(layer), x, topk_ids, topk_weights)
        for isa in _native.available_isas()
    }
    for y in results.values():
        assert np.all(abs(y - results["scalar"]) <= 2 * bound)
        assert abs(y - results["scalar"]).max() <= 2e-6 * abs(exact).max()
    if {"avx2", "avx512"} <= results.keys():  # the same operations in the same order
        assert_same_bits(results["avx512"], results["avx2"])


@pytest.mark.parametrize(("hidden", "intermediate"), [(33, 17), (200, 200), (576, 100)])
@pytest.mark.parametrize("num_slices", [2, 3, 5])
def test_slices_sum_to_the_whole(
    new_experts: NewExperts, hidden: int, intermediate: int, num_slices: int
) -> None:
    layer = Layer.random(4, hidden, intermediate)
    units = pack(layer)
    x, topk_ids, topk_weights = random_step(layer, num_tokens=4, top_k=3)
    exact, bound = expert_sums(layer, x, topk_ids, topk_weights)
    cuts = np.linspace(0, layer.num_stripes, min(num_slices, layer.num_stripes) + 1).astype(int)
    total = np.zeros_like(exact)
    for first, end in itertools.pairwise(cuts.tolist()):
        experts = new_experts(layer, first_stripe=first, num_stripes=end - first)
        part_exact, part_bound = expert_sums(layer, x, topk_ids, topk_weights, slice(16 * first, 16 * end))
        part = experts.run(units, x, topk_ids, topk_weights)
        assert np.all(abs(part - part_exact) <= part_bound)
        # The same slice from an array that holds its stripes alone.
        own = np.ascontiguousarray(units[:, first:end])
        assert_same_bits(experts.run(own, x, topk_ids, topk_weights, units_first_stripe=first), part)
        # And from a view whose experts lie further apart.
        view = units[:, first:end]
        assert_same_bits(experts.run(view, x, topk_ids, topk_weights, units_first_stripe=first), part)
        total += part
    assert np.all(abs(total - exact) <= bound)


def test_single_stripe_slices_add_up_exactly(new_experts: NewExperts) -> None:
    """With one expert a row the whole adds stripe by stripe, which is what the sum of slices does."""
    layer = Layer.random(4, 200, 200)
    units = pack(layer)
    x, topk_ids, topk_weights = random_step(layer, num_tokens=9, top_k=1)
    total = np.zeros_like(x)
    for stripe in range(layer.num_stripes):
        total += new_experts(layer, first_stripe=stripe, num_stripes=1).run(units, x, topk_ids, topk_weights)
    assert_same_bits(total, new_experts(layer).run(units, x, topk_ids, topk_weights))


def test_bf16_is_widened_exactly(new_experts: NewExperts) -> None:
    layer = Layer.random(4, 200, 40)
    units = pack(layer)
    x, topk_ids, topk_weights = random_step(layer, num_tokens=5, top_k=3)
    upper = (x.view(np.uint32) >> 16).astype(np.uint16)
    widened = (upper.astype(np.uint32) << 16).view(np.float32)
    assert np.any(widened != x)
    experts = new_experts(layer)
    y = experts.run(units, widened, topk_ids, topk_weights)
    assert_same_bits(experts.run(units, upper, topk_ids, topk_weights), y)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_misaligned_x_and_units(new_experts: NewExperts, offset: int) -> None:
    layer = Layer.random(4, 200, 40)
    units = pack(layer)
    x, topk_ids, topk_weights = random_step(layer, num_tokens=5, top_k=3)
    experts = new_experts(layer)
    y = experts.run(units, x, topk_ids, topk_weights)

    def shifted(array: np.ndarray) -> np.ndarray:
        memory = np.full(array.nbytes + 64, 0xFF, np.uint8)
        copy = memory[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    assert shifted(x).ctypes.data % 4 == offset
    assert_same_bits(experts.run(shifted(units), shifted(x), topk_ids, topk_weights), y)


def test_scratch_and_output_may_hold_anything(new_experts: NewExperts) -> None:
    layer = Layer.random(4, 200, 40)
    units = pack(layer)
    x, topk_ids, topk_weights = random_step(layer, num_tokens=5, top_k=3)
    fresh = new_experts(layer).run(units, x, topk_ids, topk_weights)
    used = new_experts(layer)
    used.run(units, np.full((64, 200), np.nan, np.float32), *random_step(layer, 64, 8)[1:])
    out = np.full((5, 200), np.inf, np.float32)
    assert used.run(units, x, topk_ids, topk_weights, out=out) is out
    assert_same_bits(out, fresh)


@pytest.mark.parametrize(("hidden", "intermediate"), [(1, 1), (33, 17), (200, 40)])
def test_padding_in_units_is_never_read(new_experts: NewExperts, hidden: int, intermediate: int) -> None:
    layer = Layer.random(3, hidden, intermediate)
    clean = pack(layer)
    ones = Layer(
        **{name: np.ones_like(getattr(layer, name)) for name in ("gate", "up", "down")},
        **{f"{name}_scale": getattr(layer, f"{name}_scale") for name in ("gate", "up", "down")},
    )
    # With every weight 0x01 the magnitudes that stay zero are the padding.
    padding = pack(ones) == 0
    scale_bytes = -(-12 * -(-hidden // 128) // 64) * 64
    padding[:, :, :scale_bytes] = False
    records = padding[:, :, scale_bytes:].reshape(3, layer.num_stripes, -1, 576)
    records[..., 512:] = False
    poisoned = np.where(padding, np.uint8(0xFF), clean)
    assert np.any(poisoned != clean)
    x, topk_ids, topk_weights = random_step(layer, num_tokens=5, top_k=3)
    x[1] = np.inf
    experts = new_experts(layer)
    y = experts.run(clean, x, topk_ids, topk_weights)
    finite = [0, 2, 3, 4]
    assert np.all(np.isfinite(y[finite]))
    again = experts.run(poisoned, x, topk_ids, topk_weights)
    assert_same_bits(again[finite], y[finite])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 57, 199])
def test_not_finite_x_comes_out_in_its_row_alone(new_experts: NewExperts, bad: float, place: int) -> None:
    layer = Layer.random(4, 200, 40)
    units = pack(layer)
    x, topk_ids, topk_weights = random_step(layer, num_tokens=6, top_k=3)
    experts = new_experts(layer, num_threads=2)
    clean = experts.run(units, x, topk_ids, topk_weights)
    x[2, place] = bad
    y = experts.run(units, x, topk_ids, topk_weights)
    assert not np.any(np.isfinite(y[2]))
    others = [0, 1, 3, 4, 5]
    assert_same_bits(y[others], clean[others])


def test_infinite_activation_of_the_last_channel_meets_no_padding(new_experts: NewExperts) -> None:
    """An infinite activation times padding zeros would be NaN: infinity must come out as infinity."""
    hidden, intermediate = 40, 17
    layer = Layer.random(1, hidden, intermediate)
    one = np.uint8(0x38)
    layer.gate[:], layer.up[:], layer.down[:] = one, one, one
    for name in ("gate_scale", "up_scale", "down_scale"):
        getattr(layer, name)[:] = 1.0
    x = np.ones((1, hidden), np.float32)
    x[0, 3] = np.inf
    ids, weights = np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
    y = new_experts(layer).run(pack(layer), x, ids, weights)
    assert np.all(np.isposinf(y))


@pytest.mark.parametrize("x_exponent", [-40, -20, 20, 62])
def test_x_over_its_whole_range(new_experts: NewExperts, x_exponent: int) -> None:
    """The scales bring gate and up back to order one, so the relative error stays that of ordinary x."""
    layer = Layer.random(3, 200, 40)
    layer.gate_scale[:] *= 2.0**-x_exponent
    layer.up_scale[:] *= 2.0**-x_exponent
    x, topk_ids, topk_weights = random_step(layer, num_tokens=3, top_k=3)
    x = np.ldexp(np.clip(abs(x), 1.0, 1.99).astype(np.float32) * np.sign(x), x_exponent).astype(np.float32)
    assert np.all(abs(x) >= 2.0**-40)
    assert np.all(abs(x) < 2.0**63)
    exact, bound = expert_sums(layer, x, topk_ids, topk_weights)
    y = new_experts(layer).run(pack(layer), x, topk_ids, topk_weights)
    assert np.all(exact != 0)
    assert np.all(abs(y - exact) <= bound)
    assert abs(y - exact).max() <= 3e-6 * abs(exact).max()


def test_read_units_reads_every_byte_of_the_active_experts(new_experts: NewExperts) -> None:
    layer = Layer.random(5, 200, 40)
    units = pack(layer)
    topk_ids = np.array([[3, 1], [1, 3]], np.int32)
    experts = new_experts(layer, first_stripe=1, num_stripes=2, num_threads=2)
    words = np.ascontiguousarray(units[[1, 3], 1:3]).view(np.uint64).reshape(-1)
    assert experts.read_units(units, topk_ids) == np.bitwise_xor.reduce(words)
    with pytest.raises(ValueError, match=r"^topk_ids\[0, 0\]: got 5"):
        experts.read_units(units, np.array([[5]], np.int32))
