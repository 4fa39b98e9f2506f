"""Prefill in bf16: its stated error, its exact cases, and what a row's bits depend on in this mode."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from expert_reference import (
    Layer,
    assert_same_bits,
    decode_e4m3,
    expert_sums,
    pack,
    random_step,
    silu,
    whole_expert,
)
from test_isa import cpu_flags

from duckllm import _native, prefill
from duckllm.errors import ConfigError

FINITE = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
ONE, SIXTY_FOUR = 0x38, 0x68
MOST_DIRECT_ROWS = 8
# Edges of records (32), scale blocks (128) and stripes (16), an odd number of stripes, several blocks.
SIZES = [(1, 1), (31, 15), (33, 17), (128, 16), (200, 200), (257, 129), (576, 48), (1800, 40)]
FORMATS = ("fp9", "fp8", "fp8-normal")

New = Callable[..., _native.Experts]


@pytest.fixture(params=["avx512_bf16", "amx_bf16"])
def multipliers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the bf16 multipliers that this CPU has, forced."""
    name: str = request.param
    if name not in _native.available_bf16():
        pytest.skip(f"this CPU lacks {name}")
    monkeypatch.setenv("DUCK_FORCE_BF16", name)
    return name


@pytest.fixture
def new(multipliers: str) -> New:
    """Makes native Experts with prefill in bf16; by default the whole expert on one thread."""

    def make(layer: Layer, **changes: object) -> _native.Experts:
        arguments = whole_expert(layer) | {"isa": "avx512", "prefill": "bf16"} | changes
        experts = _native.Experts(**arguments)
        assert experts.prefill == (multipliers if arguments["prefill"] == "bf16" else "f32")
        return experts

    return make


def round_bf16(values: np.ndarray) -> np.ndarray:
    """f32 rounded to bf16, to nearest, ties to even; finite values."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def rows_of_experts(topk_ids: np.ndarray, num_experts: int) -> list[int]:
    return [int((topk_ids == expert).any(1).sum()) for expert in range(num_experts)]


def one_expert(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((num_rows, 1), np.int32), np.ones((num_rows, 1), np.float32)


def small_layer(hidden: int, channels: int) -> Layer:
    """One expert of zeros, all scales 1."""
    blocks, channel_blocks = -(-hidden // 128), -(-channels // 128)
    return Layer(
        gate=np.zeros((1, channels, hidden), np.uint8),
        up=np.zeros((1, channels, hidden), np.uint8),
        down=np.zeros((1, hidden, channels), np.uint8),
        gate_scale=np.ones((1, channel_blocks, blocks), np.float32),
        up_scale=np.ones((1, channel_blocks, blocks), np.float32),
        down_scale=np.ones((1, blocks, channel_blocks), np.float32),
    )


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_within_its_bound_of_float64(new: New, hidden: int, intermediate: int, weight_format: str) -> None:
    layer = Layer.random(2, hidden, intermediate)
    x, topk_ids, topk_weights = random_step(layer, num_tokens=29, top_k=2)
    assert min(rows_of_experts(topk_ids, 2)) > MOST_DIRECT_ROWS
    exact, bound = expert_sums(layer, x, topk_ids, topk_weights, bf16=True)
    y = new(layer, format=weight_format).run(pack(layer, weight_format), x, topk_ids, topk_weights)
    assert np.all(abs(y - exact) <= bound)
    # Far below the worst case, as errors cancel; and far above f32's, so it is bf16 that computed.
    assert 1e-4 < abs(y - exact).max() / abs(exact).max() < 1e-2


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(1, 1), (33, 17), (200, 200), (1800, 40)])
def test_channel_scales_within_the_bound(
    new: New, hidden: int, intermediate: int, weight_format: str
) -> None:
    layer = Layer.random(2, hidden, intermediate, scale_layout="channel")
    layer.down_scale[:, ::3] *= np.float32(2.0**-20)
    layer.down_scale[:, 5::16] = 0
    x, topk_ids, topk_weights = random_step(layer, num_tokens=29, top_k=2)
    exact, bound = expert_sums(layer, x, topk_ids, topk_weights, bf16=True)
    y = new(layer, format=weight_format).run(pack(layer, weight_format), x, topk_ids, topk_weights)
    assert np.all(abs(y - exact) <= bound)
    assert not y[:, 5::16].any()
    assert abs(y - exact).max() / abs(exact).max() > 1e-4


def test_powers_of_two_by_channel_give_the_bits_of_blocks(new: New) -> None:
    layer, channel = (Layer.random(2, 1100, 136, scale_layout=name) for name in ("block", "channel"))
    for each in (layer, channel):
        each.gate_scale[:], each.up_scale[:], each.down_scale[:] = 2.0**-9, 2.0**-8, 2.0**-7
    x, topk_ids, topk_weights = random_step(layer, num_tokens=29, top_k=2)
    y = new(layer).run(pack(layer), x, topk_ids, topk_weights)
    assert len(np.unique(y)) > 0.9 * y.size
    for weight_format in FORMATS:
        units = pack(channel, weight_format)
        for num_threads in (1, 3):
            experts = new(channel, format=weight_format, num_threads=num_threads)
            assert_same_bits(experts.run(units, x, topk_ids, topk_weights), y)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_only_x_and_activations_are_rounded(new: New, weight_format: str) -> None:
    """Against float64 with just these two roundings; a few activations land on the other side of a tie."""
    layer = Layer.random(1, 300, 200)
    x = random_step(layer, 20, 1)[0]
    ids, weights = one_expert(20)
    gate, up, down = layer.dense(0)
    rounded = round_bf16(x).astype(np.float64)
    activations = silu(rounded @ gate.T) * (rounded @ up.T)
    exact = round_bf16(activations).astype(np.float64) @ down.T
    y = new(layer, format=weight_format).run(pack(layer, weight_format), x, ids, weights)
    error = abs(y - exact) / abs(exact).max()
    assert np.median(error) <= 3e-6
    assert error.max() <= 2e-4


@pytest.mark.parametrize("weight_format", FORMATS)
def test_every_byte_is_exact(new: New, weight_format: str) -> None:
    """Channel c holds weight c of up at the hidden index c; its gate is 64, and down the identity."""
    layer = small_layer(255, 254)
    layer.gate[0, :, 254] = SIXTY_FOUR
    layer.up[0, np.arange(254), np.arange(254)] = FINITE
    layer.down[0, np.arange(254), np.arange(254)] = ONE
    x = np.full((9, 255), 1 / 64, np.float32)
    x[:, 254] = 1.0
    y = new(layer, format=weight_format).run(pack(layer, weight_format), x, *one_expert(9))
    for row in y:
        np.testing.assert_array_equal(row[:254], decode_e4m3(FINITE))
    # The same bytes in down, with activations of 1.
    layer = small_layer(254, 1)
    layer.gate[0, 0, 0], layer.up[0, 0, 1] = SIXTY_FOUR, ONE
    layer.down[0, :, 0] = FINITE
    x = np.zeros((9, 254), np.float32)
    x[:, :2] = 1.0, 1 / 64
    y = new(layer, format=weight_format).run(pack(layer, weight_format), x, *one_expert(9))
    for row in y:
        np.testing.assert_array_equal(row, decode_e4m3(FINITE))


def test_x_is_rounded_to_nearest_even(new: New) -> None:
    layer = small_layer(2, 1)
    layer.gate[0, 0, 0], layer.up[0, 0, 1], layer.down[0, 0, 0] = SIXTY_FOUR, ONE, ONE
    below, tie, above = 2.0**-8 - 2.0**-20, 2.0**-8, 2.0**-8 + 2.0**-20
    values = np.array(
        [s * (1 + n / 128 + f) for n in (0, 1, 2, 127) for f in (below, tie, above) for s in (1, -1)]
    )
    assert len(np.unique(round_bf16(values))) == 12
    x = np.ones((len(values), 2), np.float32)
    x[:, 1] = values / 64
    y = new(layer).run(pack(layer), x, *one_expert(len(values)))[:, 0]
    np.testing.assert_array_equal(y, round_bf16(values))


def test_activations_are_rounded_to_nearest_even(new: New) -> None:
    """x is 1, so up is the weight; the row's own weight makes the activation what is to be rounded."""
    layer = small_layer(2, 1)
    layer.gate[0, 0, 0], layer.up[0, 0, 1], layer.down[0, 0, 0] = SIXTY_FOUR, ONE, ONE
    weights = np.linspace(1, 2, 100, dtype=np.float32)[:, None]
    weights[:3, 0] = 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20
    x = np.ones((100, 2), np.float32)
    y = new(layer).run(pack(layer), x, np.zeros((100, 1), np.int32), weights)[:, 0]
    np.testing.assert_array_equal(y, round_bf16(64 * weights[:, 0]))


@pytest.mark.parametrize(("hidden", "intermediate"), [(33, 17), (576, 100), (1100, 136)])
def test_all_formats_give_the_same_bits(new: New, hidden: int, intermediate: int) -> None:
    layer = Layer.random(2, hidden, intermediate)
    x, topk_ids, topk_weights = random_step(layer, 40, top_k=2)
    fp9 = new(layer).run(pack(layer), x, topk_ids, topk_weights)
    assert len(np.unique(fp9)) > 0.9 * fp9.size
    for name in ("fp8", "fp8-normal"):
        fp8 = new(layer, format=name).run(pack(layer, name), x, topk_ids, topk_weights)
        assert_same_bits(fp9, fp8)


@pytest.mark.parametrize("scale_layout", ["block", "channel"])
@pytest.mark.parametrize(("first", "count"), [(3, 7), (7, 1), (5, 8), (8, 5), (1, 12)])
def test_slices_that_cut_scale_blocks(new: New, first: int, count: int, scale_layout: str) -> None:
    layer = Layer.random(1, 200, 200, scale_layout=scale_layout)
    x = random_step(layer, 11, 1)[0]
    ids, weights = one_expert(11)
    channels = slice(16 * first, 16 * (first + count))
    exact, bound = expert_sums(layer, x, ids, weights, channels, bf16=True)
    y = new(layer, first_stripe=first, num_stripes=count).run(pack(layer), x, ids, weights)
    assert np.all(abs(y - exact) <= bound)
    assert 1e-4 < abs(y - exact).max() / abs(exact).max() < 1e-2


def test_experts_of_few_rows_stay_in_f32(new: New) -> None:
    """Expert 0 has 9 rows of a step, expert 1 has 8: their own decide, not the step's."""
    layer = Layer.random(2, 200, 100)
    units = pack(layer)
    x, _, weights = random_step(layer, 17, top_k=1)
    ids = np.array([[0]] * 9 + [[1]] * 8, np.int32)
    f32 = new(layer, prefill="f32").run(units, x, ids, weights)
    experts = new(layer)
    y = experts.run(units, x, ids, weights)
    assert_same_bits(y[9:], f32[9:])
    assert np.mean(y[:9] != f32[:9]) > 0.9
    eight = experts.run(units, x[:8], ids[:8], weights[:8])
    assert_same_bits(eight, f32[:8])


def test_a_row_has_the_same_bits_beside_any_others(new: New) -> None:
    """9 to 120 rows of an expert: every block of rows, chunks of 48, any order and number of threads."""
    layer = Layer.random(1, 300, 136)
    units = pack(layer)
    x = random_step(layer, 120, 1)[0]
    ids, weights = one_expert(120)
    experts = new(layer)
    together = experts.run(units, x, ids, weights)
    assert len(np.unique(together)) > 0.9 * together.size
    for num_rows in (9, 12, 13, 16, 17, 25, 32, 33, 48, 49, 96, 97):
        part = slice(120 - num_rows, 120)
        assert_same_bits(experts.run(units, x[part], ids[part], weights[part]), together[part])
    order = np.random.default_rng(3).permutation(120)
    for num_threads in (2, 3, 7):
        many = new(layer, num_threads=num_threads)
        for _ in range(3):
            assert_same_bits(many.run(units, x[order], ids, weights), together[order])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(new: New, value: float) -> None:
    layer = Layer.random(1, 200, 72)
    units = pack(layer)
    x = random_step(layer, 30, 1)[0]
    ids, weights = one_expert(30)
    experts = new(layer)
    finite = experts.run(units, x, ids, weights)
    x[7, 50] = value
    y = experts.run(units, x, ids, weights)
    assert not np.isfinite(y[7]).any()
    others = np.arange(30) != 7
    assert_same_bits(y[others], finite[others])
    # Nothing of it is left in the panels, which a shorter slice fills in part.
    assert_same_bits(experts.run(units, x[others], ids[others], weights[others]), finite[others])


def test_bf16_rows_as_x(new: New) -> None:
    layer = Layer.random(1, 200, 40)
    x = round_bf16(random_step(layer, 12, 1)[0])
    units, experts = pack(layer), new(layer)
    y = experts.run(units, x, *one_expert(12))
    assert_same_bits(experts.run(units, (x.view(np.uint32) >> 16).astype(np.uint16), *one_expert(12)), y)


def test_the_best_multipliers_are_the_default(multipliers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _native.select_bf16("avx512") == multipliers
    monkeypatch.delenv("DUCK_FORCE_BF16")
    assert _native.select_bf16("avx512") == _native.available_bf16()[-1]
    assert prefill.check_prefill("bf16", "avx512") == f"avx512+{_native.available_bf16()[-1]}"
    monkeypatch.setenv("DUCK_FORCE_BF16", "neon")
    with pytest.raises(ValueError, match=r"^DUCK_FORCE_BF16: got 'neon', expected one of avx512_bf16"):
        _native.select_bf16("avx512")
    with pytest.raises(ConfigError, match=r"^DUCK_FORCE_BF16: got 'neon', expected one of avx512_bf16"):
        prefill.check_prefill("bf16", "avx512")


@pytest.mark.parametrize("other", ["scalar", "avx2"])
def test_bf16_needs_avx512(new: New, other: str) -> None:
    message = f"prefill: got 'bf16', expected '?f32'? with the instruction set {other}, as bf16 needs avx512$"
    with pytest.raises(ValueError, match=message):
        new(Layer.random(1, 32, 16), isa=other)
    with pytest.raises(ConfigError, match=message):
        prefill.check_prefill("bf16", other)


def test_an_unknown_prefill() -> None:
    with pytest.raises(ValueError, match=r"^prefill: got 'f16', expected 'f32' or 'bf16'$"):
        _native.Experts(32, 16, 1, 1, 0, 1, 1, 1, 0, prefill="f16")


def test_a_cpu_without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "available_bf16", list)
    assert prefill.check_prefill("f32", "avx2") == "avx2"
    message = "^prefill: got 'bf16', expected f32, as this CPU has neither AVX512-BF16 nor AMX-BF16$"
    with pytest.raises(ConfigError, match=message):
        prefill.check_prefill("bf16", "avx512")


def test_available_multipliers_are_those_of_the_cpu() -> None:
    flags = cpu_flags()
    available = _native.available_bf16()
    assert ("avx512_bf16" in available) == ("avx512_bf16" in flags)
    # The operating system may refuse a process the tiles of a CPU that has them.
    needed = {"avx512_bf16", "amx_bf16", "amx_tile"}
    assert available in (["avx512_bf16"], ["avx512_bf16", "amx_bf16"]) or not available
    assert "amx_bf16" not in available or needed <= flags
