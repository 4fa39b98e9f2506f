"""The native packer against the format's definition and against the numpy twin."""

from __future__ import annotations

import numpy as np
import pytest
from expert_reference import Layer, decode_e4m3, pack
from hypothesis import given, settings
from hypothesis import strategies as st

from duckllm import _native
from duckllm.weights import e4m3, units
from duckllm.weights.formats import unit_bytes

FINITE = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)


def value_of(magnitude: int, sign: int) -> float:
    """The format's definition: |w| = 2^(e5 - 23) * (1 + m / 8), 0 for 0."""
    size = 2.0 ** ((magnitude >> 3) - 23) * (1 + (magnitude & 7) / 8) if magnitude else 0.0
    return -size if sign else size


def read_weight(unit: np.ndarray, hidden: int, which: str, index: int, channel: int) -> float:
    """One weight by the layout alone: hidden index (or output) and channel of a unit."""
    blocks = -(-hidden // 32)
    scale_bytes = -(-12 * -(-hidden // 128) // 64) * 64
    block, row, lane = index // 32, index % 32, channel
    if which == "down":
        record = 2 * blocks + block
        row, lane = 16 * (row // 16) + channel, row % 16
    else:
        record = 2 * block + (which == "up")
    start = scale_bytes + 576 * record
    sign_word = int.from_bytes(unit[start + 512 + 4 * lane : start + 516 + 4 * lane].tobytes(), "little")
    magnitude = unit[start + 64 * (row // 4) + 4 * lane + (0, 2, 1, 3)[row % 4]]
    return value_of(int(magnitude), (sign_word >> (16 * (row % 2) + 15 - row // 2)) & 1)


@pytest.mark.parametrize(("hidden", "intermediate"), [(1, 1), (31, 15), (33, 17), (200, 200), (576, 130)])
def test_layout(hidden: int, intermediate: int) -> None:
    layer = Layer.random(1, hidden, intermediate)
    units = pack(layer)[0]
    assert units.shape == (-(-intermediate // 16), _native.unit_bytes(hidden))
    rng = np.random.default_rng(5)
    for _ in range(300):
        h, c = int(rng.integers(hidden)), int(rng.integers(intermediate))
        unit = units[c // 16]
        for which, code in (
            ("gate", layer.gate[0, c, h]),
            ("up", layer.up[0, c, h]),
            ("down", layer.down[0, h, c]),
        ):
            got = read_weight(unit, hidden, which, h, c % 16)
            assert got == decode_e4m3(code)
            assert np.signbit(got) == (code >= 0x80)
    blocks = -(-hidden // 128)
    for stripe in range(len(units)):
        scales = units[stripe, : 12 * blocks].copy().view(np.float32).reshape(3, blocks)
        np.testing.assert_array_equal(scales[0], layer.gate_scale[0, stripe // 8])
        np.testing.assert_array_equal(scales[1], layer.up_scale[0, stripe // 8])
        np.testing.assert_array_equal(scales[2], layer.down_scale[0, :, stripe // 8])
        assert not units[stripe, 12 * blocks : -(-12 * blocks // 64) * 64].any()


@pytest.mark.parametrize(("hidden", "intermediate"), [(1, 1), (31, 15), (33, 17), (200, 200), (576, 130)])
def test_same_bytes_as_the_numpy_twin(hidden: int, intermediate: int) -> None:
    layer = Layer.random(1, hidden, intermediate)
    names = ("gate", "up", "down", "gate_scale", "up_scale", "down_scale")
    twin = units.pack_expert_units(units.ExpertWeights(*(getattr(layer, name)[0] for name in names)), "fp9")
    np.testing.assert_array_equal(pack(layer)[0], twin)


def test_unit_bytes_of_known_models() -> None:
    assert _native.unit_bytes(7168) == 387776
    assert _native.unit_bytes(2048) == 110784
    assert _native.unit_bytes(7168) == unit_bytes(7168, "fp9")


def test_every_finite_byte_keeps_its_value_and_sign() -> None:
    codes = np.resize(FINITE, (16, 254)).astype(np.uint8)
    layer = Layer.random(1, 254, 16)
    layer.gate[0] = codes
    unit = pack(layer)[0, 0]
    for h in range(254):
        got = read_weight(unit, 254, "gate", h, 0)
        assert got == decode_e4m3(FINITE[h])
        assert np.signbit(got) == (FINITE[h] >= 0x80)


@pytest.mark.parametrize("name", ["gate", "up", "down"])
@pytest.mark.parametrize("nan", [0x7F, 0xFF])
def test_nan_is_an_error_with_its_count(name: str, nan: int) -> None:
    layer = Layer.random(1, 40, 20)
    codes = getattr(layer, name)
    codes.reshape(-1)[[0, 100, 799]] = nan
    assert _native.count_nan_e4m3(codes) == 3
    with pytest.raises(ValueError, match=rf"^{name}: got 3 NaN bytes \(0x7f, 0xff\), expected none"):
        pack(layer)


def test_wrong_shapes_are_errors() -> None:
    layer = Layer.random(1, 200, 40)
    parts = [layer.gate[0], layer.up[0], layer.down[0]]
    scales = [layer.gate_scale[0], layer.up_scale[0], layer.down_scale[0]]
    with pytest.raises(ValueError, match=r"^down: got shape \[40, 200\], expected shape \[200, 40\]"):
        _native.pack_expert_units(parts[0], parts[1], parts[1], *scales)
    with pytest.raises(ValueError, match=r"^down_scale: got shape \[1, 2\], expected shape \[2, 1\]"):
        _native.pack_expert_units(*parts, scales[0], scales[1], scales[1])
    with pytest.raises(ValueError, match=r"^gate_scale: got elements of type float64, expected float32"):
        _native.pack_expert_units(*parts, scales[0].astype(np.float64), *scales[1:])
    with pytest.raises(ValueError, match=r"^out: got shape \[3, 8\], expected shape \[3, 12160\]"):
        _native.pack_expert_units(*parts, *scales, out=np.zeros((3, 8), np.uint8))
    with pytest.raises(ValueError, match=r"^gate: got shape \[0, 4\]"):
        _native.pack_expert_units(np.zeros((0, 4), np.uint8), *parts[1:], *scales)


def test_out_is_filled_whole() -> None:
    layer = Layer.random(1, 33, 17)
    out = np.full((2, _native.unit_bytes(33)), 0xAA, np.uint8)
    names = ("gate", "up", "down", "gate_scale", "up_scale", "down_scale")
    assert _native.pack_expert_units(*(getattr(layer, n)[0] for n in names), out=out) is out
    np.testing.assert_array_equal(out, pack(layer)[0])


def quantise(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    codes, scales = _native.quantize_e4m3_blocks(weights)
    twin_codes, twin_scales, _ = e4m3.quantise_blocks(weights)
    np.testing.assert_array_equal(codes, twin_codes)
    np.testing.assert_array_equal(scales.view(np.uint32), twin_scales.view(np.uint32))
    return codes, scales


def test_quantised_weights_are_the_nearest_of_the_grid() -> None:
    rng = np.random.default_rng(6)
    weights = (rng.standard_normal((150, 140)) * np.exp2(rng.uniform(-12, 0, (150, 140)))).astype(np.float32)
    weights[0, 0], weights[1, 1] = 0.0, -0.0
    codes, scales = quantise(weights)
    assert scales.shape == (2, 2)
    assert scales[0, 0] == abs(weights[:128, :128]).max() / np.float32(448)
    grid = np.sort(np.unique(decode_e4m3(FINITE)))
    wide = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:150, :140]
    scaled = (weights / wide).astype(np.float64)
    nearest = abs(scaled[..., None] - grid).min(-1)
    np.testing.assert_array_equal(abs(decode_e4m3(codes) - scaled), nearest)
    assert codes[0, 0] == 0x00
    assert codes[1, 1] == 0x80


def test_ties_go_to_the_even_code() -> None:
    weights = np.zeros((1, 128), np.float32)
    weights[0, 0] = 448.0  # the block's scale is 1
    positive = np.sort(decode_e4m3(np.arange(0x7F, dtype=np.uint8)))
    weights[0, 1:127] = (positive[1:] + positive[:-1]) / 2
    codes, scales = quantise(weights)
    assert scales[0, 0] == 1
    np.testing.assert_array_equal(codes[0, 1:127] % 2, 0)
    np.testing.assert_array_equal(codes[0, 1:127] // 2, (np.arange(126) + 1) // 2)


def test_blocks_of_zeros_and_of_tiny_weights() -> None:
    weights = np.zeros((3, 300), np.float32)
    weights[0, 130] = 2.0**-140
    codes, scales = quantise(weights)
    np.testing.assert_array_equal(scales, np.array([[1.0, 2.0**-126, 1.0]], np.float32))
    assert not codes[:, :128].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_an_error(bad: float) -> None:
    weights = np.ones((4, 200), np.float32)
    weights[1, 3] = weights[2, 150] = bad
    with pytest.raises(ValueError, match=r"^weights: got 2 values that are not finite, expected none"):
        _native.quantize_e4m3_blocks(weights)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 140),
    st.integers(1, 140),
    st.integers(0, 2**32 - 1),
    st.integers(-60, 60),
)
def test_quantiser_and_twin_agree(rows: int, columns: int, seed: int, exponent: int) -> None:
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**23, (rows, columns), dtype=np.uint32)
    bits |= rng.integers(110, 130, (rows, columns), dtype=np.uint32) << np.uint32(23)
    bits |= rng.integers(0, 2, (rows, columns), dtype=np.uint32) << np.uint32(31)
    quantise(np.ldexp(bits.view(np.float32), exponent).astype(np.float32))
