"""The numpy formats against the definition of e4m3, torch's rounding, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_checkpoint import FINITE_CODES

from duckllm import _native, errors
from duckllm.weights import e4m3, formats, fp8, fp9
from duckllm.weights.pack import pack_units
from duckllm.weights.units import ExpertWeights, pack_expert_units, unpack_expert_units

FORMATS = ["fp9", "fp8"]
LAYOUTS = ["block", "channel"]
ALL_CODES = np.arange(256, dtype=np.uint8)


def random_expert(
    rng: np.random.Generator, intermediate: int, hidden: int, scale_layout: str = "block"
) -> ExpertWeights:
    wide, tall = (intermediate, hidden), (hidden, intermediate)
    scale_shape = e4m3.scale_shape if scale_layout == "block" else lambda rows, columns: (rows, 1)
    return ExpertWeights(
        *(rng.choice(FINITE_CODES, size=shape) for shape in (wide, wide, tall)),
        *(rng.uniform(0.5, 2, scale_shape(*shape)).astype(np.float32) for shape in (wide, wide, tall)),
    )


def test_values_are_torchs() -> None:
    expected = torch.from_numpy(ALL_CODES).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(e4m3.e4m3_values(), expected)
    assert e4m3.e4m3_values()[0x7E] == 448.0
    assert e4m3.e4m3_values()[0x01] == 2.0**-9


def test_every_finite_code_decodes_to_its_value_times_2_to_minus_104() -> None:
    assert len(FINITE_CODES) == 254
    magnitudes, signs = fp9.encode_e4m3(FINITE_CODES)
    decoded = fp9.decode_f32(magnitudes, signs)
    expected = e4m3.e4m3_values()[FINITE_CODES].astype(np.float64) * 2.0**-104
    np.testing.assert_array_equal(decoded.astype(np.float64), expected)
    np.testing.assert_array_equal(np.signbit(decoded), FINITE_CODES >= 128)
    nonzero = decoded[decoded != 0]
    assert nonzero.size == 252
    assert np.all(np.abs(nonzero) >= np.finfo(np.float32).tiny), "no denormal may reach an FMA"
    np.testing.assert_array_equal(fp9.decode_e4m3(magnitudes, signs), FINITE_CODES)


def test_magnitudes_of_the_specification() -> None:
    codes = np.array([0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x38, 0x7E], np.uint8)
    expected = [0x00, 0x70, 0x78, 0x7C, 0x80, 0x82, 0x84, 0x86, 0x88, 0xB8, 0xFE]
    magnitudes, signs = fp9.encode_e4m3(codes)
    assert magnitudes.tolist() == expected
    assert not signs.any()
    magnitudes, signs = fp9.encode_e4m3(codes | 0x80)
    assert magnitudes.tolist() == expected
    assert signs.all()


@pytest.mark.parametrize(("codes", "count"), [([0x7F], 1), ([0xFF], 1), ([1, 0xFF, 0x7F, 0x7F], 3)])
def test_nan_is_an_error_that_names_tensor_and_count(codes: list[int], count: int) -> None:
    with pytest.raises(errors.WeightFormatError, match=rf"layer.weight: got {count} NaN"):
        fp9.encode_e4m3(np.array(codes, np.uint8), "layer.weight")


def test_a_magnitude_that_no_e4m3_value_has_is_an_error() -> None:
    with pytest.raises(errors.WeightFormatError, match="got 2 magnitude"):
        fp9.decode_e4m3(np.array([0x01, 0x88, 0x71], np.uint8), np.zeros(3, bool))


def test_rounding_is_torchs_for_every_kind_of_value() -> None:
    rng = np.random.default_rng(1)
    spread = rng.standard_normal(200_000) * np.exp(rng.uniform(-14, 4, 200_000))
    ties = np.concatenate([np.arange(-32, 33) / 1024, np.arange(-900, 900) / 2])
    values = np.concatenate([spread, ties, [0.0, -0.0]]).astype(np.float32)
    values = values[np.abs(values) <= 448]
    assert np.count_nonzero(np.abs(values) < 2**-6) > 10_000
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(e4m3.round_to_e4m3(values), expected)
    assert e4m3.round_to_e4m3(np.array([1e9, -1e9], np.float32)).tolist() == [0x7E, 0xFE]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.sampled_from(LAYOUTS),
    st.integers(1, 300),
    st.integers(1, 300),
    st.integers(0, 2**32 - 1),
)
def test_packing_then_unpacking_gives_the_same_bytes(
    weight_format: str, scale_layout: str, intermediate: int, hidden: int, seed: int
) -> None:
    expert = random_expert(np.random.default_rng(seed), intermediate, hidden, scale_layout)
    units = pack_expert_units(expert, weight_format, scale_layout)
    assert units.shape == (-(-intermediate // 16), formats.unit_bytes(hidden, weight_format, scale_layout))
    again = unpack_expert_units(units, intermediate, hidden, weight_format, scale_layout)
    for name in ("gate", "up", "down", "gate_scales", "up_scales", "down_scales"):
        got, expected = getattr(again, name), getattr(expert, name)
        assert got.shape == expected.shape
        assert got.tobytes() == expected.tobytes(), name


def test_places_of_single_weights() -> None:
    """One non-zero weight a matrix, looked up by hand: channel 21 of 40, hidden 70 of 72."""
    gate, up, down = np.zeros((40, 72), np.uint8), np.zeros((40, 72), np.uint8), np.zeros((72, 40), np.uint8)
    gate[21, 70], up[21, 33], down[70, 21] = 0xB8, 0x39, 0xBA
    ones = [np.ones((1, 1), np.float32)] * 3
    units = pack_expert_units(ExpertWeights(gate, up, down, *ones), "fp9")
    assert units.shape == (3, 64 + 9 * 576)
    unit = units[1].copy()
    records = unit[64:].reshape(9, 576)
    assert records[4, 1 * 64 + 4 * 5 + 1] == 0xB8  # gate: row block 2, row 6, lane 5
    assert records[4, 512 + 5 * 4 :][:4].view("<u4")[0] == 1 << (15 - 3)
    assert records[3, 4 * 5 + 2] == 0xB9  # up: row block 1, row 1
    assert (
        records[8, 1 * 64 + 4 * 6 + 2] == 0xBA
    )  # down: row block 2, tile 0, row = channel 5, lane = output 6
    assert records[8, 512 + 6 * 4 :][:4].view("<u4")[0] == 1 << (16 + 15 - 2)
    records[:] = 0
    assert unit[:12].view("<f4").tolist() == [1, 1, 1]
    assert not unit[12:].any()
    assert not units[0, 64:].any()
    assert not units[2, 64:].any()


def test_places_of_single_fp8_weights() -> None:
    """The same weights: an fp8 record is 512 e4m3 bytes, signs included, in the same places."""
    gate, up, down = np.zeros((40, 72), np.uint8), np.zeros((40, 72), np.uint8), np.zeros((72, 40), np.uint8)
    gate[21, 70], up[21, 33], down[70, 21] = 0xB8, 0x39, 0x83
    ones = [np.ones((1, 1), np.float32)] * 3
    units = pack_expert_units(ExpertWeights(gate, up, down, *ones), "fp8")
    assert units.shape == (3, 64 + 9 * 512)
    records = units[1, 64:].reshape(9, 512)
    places = {(4, 1 * 64 + 4 * 5 + 1): 0xB8, (3, 4 * 5 + 2): 0x39, (8, 1 * 64 + 4 * 6 + 2): 0x83}
    for (record, place), code in places.items():
        assert records[record, place] == code
    assert np.count_nonzero(units[:, 64:]) == 3


@pytest.mark.parametrize("scale_layout", LAYOUTS)
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(1, 1), (31, 15), (33, 17), (200, 200), (576, 130)])
def test_the_native_packer_writes_the_same_bytes(
    weight_format: str, hidden: int, intermediate: int, scale_layout: str
) -> None:
    expert = random_expert(np.random.default_rng(hidden), intermediate, hidden, scale_layout)
    native = pack_units(expert, weight_format, scale_layout)
    assert native.shape[1] == _native.unit_bytes(hidden, weight_format, scale_layout)
    np.testing.assert_array_equal(native, pack_expert_units(expert, weight_format, scale_layout))


def test_places_of_channel_scales() -> None:
    """40 channels of 70 hidden indices: a unit has its stripe's gate and up scales and all of down's."""
    expert = random_expert(np.random.default_rng(3), 40, 70, "channel")
    units = pack_expert_units(expert, "fp8", "channel")
    assert units.shape == (3, 4 * (32 + 96) + 9 * 512)
    scales = units[:, : 4 * (32 + 96)].copy().view("<f4")
    for stripe, channels in enumerate((16, 16, 8)):
        first = 16 * stripe
        np.testing.assert_array_equal(
            scales[stripe, :channels], expert.gate_scales[first : first + channels, 0]
        )
        np.testing.assert_array_equal(
            scales[stripe, 16 : 16 + channels], expert.up_scales[first : first + channels, 0]
        )
        np.testing.assert_array_equal(scales[stripe, 32 : 32 + 70], expert.down_scales[:, 0])
        padding = [*scales[stripe, channels:16], *scales[stripe, 16 + channels : 32], *scales[stripe, 102:]]
        assert not np.any(padding)
    block = pack_expert_units(random_expert(np.random.default_rng(3), 40, 70), "fp8")
    np.testing.assert_array_equal(units[:, 4 * (32 + 96) :], block[:, 64:])


def test_every_finite_code_of_fp8_decodes_to_its_value_times_2_to_minus_120() -> None:
    decoded = fp8.decode_f32(FINITE_CODES)
    expected = e4m3.e4m3_values()[FINITE_CODES].astype(np.float64) * 2.0**-120
    np.testing.assert_array_equal(decoded.astype(np.float64), expected)
    np.testing.assert_array_equal(np.signbit(decoded), FINITE_CODES >= 128)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("nan", [0x7F, 0xFF])
def test_no_format_takes_nan(weight_format: str, nan: int) -> None:
    expert = random_expert(np.random.default_rng(7), 40, 72)
    expert.down[71, 39] = nan
    with pytest.raises(errors.WeightFormatError, match="got 1 NaN value"):
        pack_expert_units(expert, weight_format)
    with pytest.raises(ValueError, match="down: got 1 NaN bytes"):
        pack_units(expert, weight_format)


def test_an_fp8_payload_with_nan_is_an_error() -> None:
    units = pack_expert_units(random_expert(np.random.default_rng(7), 40, 72), "fp8")
    units[2, -1] = 0xFF
    with pytest.raises(errors.WeightFormatError, match="fp8 payload: got 1 NaN value"):
        unpack_expert_units(units, 40, 72, "fp8")


def test_scales_of_edge_blocks_reach_their_stripes() -> None:
    expert = random_expert(np.random.default_rng(3), 200, 300)
    units = pack_expert_units(expert, "fp8")
    scales = units[:, : 9 * 4].copy().view("<f4").reshape(13, 3, 3)
    np.testing.assert_array_equal(scales[7, 0], expert.gate_scales[0])
    np.testing.assert_array_equal(scales[8, 0], expert.gate_scales[1])
    np.testing.assert_array_equal(scales[12, 1], expert.up_scales[1])
    np.testing.assert_array_equal(scales[12, 2], expert.down_scales[:, 1])


def test_unpacking_refuses_other_shapes_and_scales_that_disagree() -> None:
    units = pack_expert_units(random_expert(np.random.default_rng(4), 40, 72), "fp9")
    with pytest.raises(errors.WeightFormatError, match=r"got shape \(3, 5248\), expected \(4, 5248\)"):
        unpack_expert_units(units, 50, 72, "fp9")
    units[1, 3] ^= 1
    with pytest.raises(errors.WeightFormatError, match="several scales in one 128-channel block"):
        unpack_expert_units(units, 40, 72, "fp9")
    units = pack_expert_units(random_expert(np.random.default_rng(4), 40, 72, "channel"), "fp9", "channel")
    with pytest.raises(errors.WeightFormatError, match=r"got shape \(3, 5696\), expected \(3, 5248\)"):
        unpack_expert_units(units, 40, 72, "fp9")
    units[1, 128 + 4 * 71] ^= 1
    with pytest.raises(errors.WeightFormatError, match="several scales of one output of down"):
        unpack_expert_units(units, 40, 72, "fp9", "channel")


@pytest.mark.parametrize(("given", "other"), [LAYOUTS, LAYOUTS[::-1]])
def test_scales_of_another_layout_are_refused(given: str, other: str) -> None:
    expert = random_expert(np.random.default_rng(4), 40, 72, given)
    with pytest.raises(errors.WeightFormatError, match=f"expected .* in the layout {other}"):
        pack_expert_units(expert, "fp9", other)
    with pytest.raises(ValueError, match=r"gate_scale: got shape \[\d+, 1\], expected shape \[\d+, 1\]"):
        pack_units(expert, "fp9", other)
    with pytest.raises(ValueError, match="scale_layout: got 'row', expected block, channel or group"):
        pack_units(expert, "fp9", "row")


@pytest.mark.parametrize(("hidden", "scale_bytes", "records"), [(1, 64, 3), (256, 64, 24), (7168, 704, 672)])
def test_unit_bytes(hidden: int, scale_bytes: int, records: int) -> None:
    for weight_format, record_bytes in (("fp9", 576), ("fp8", 512)):
        expected = scale_bytes + records * record_bytes
        assert formats.unit_bytes(hidden, weight_format) == expected
        assert expected % 64 == 0
        by_channel = 4 * (32 + -(-hidden // 32) * 32) + records * record_bytes
        assert formats.unit_bytes(hidden, weight_format, "channel") == by_channel
        assert by_channel % 64 == 0


def test_quantising_scales_each_block_by_its_largest_weight() -> None:
    weights = np.zeros((200, 130), np.float32)
    weights[3, 5], weights[10, 10] = -8.0, 1.0
    weights[199, 129] = 3.0
    codes, scales, error = e4m3.quantise_blocks(weights)
    np.testing.assert_array_equal(scales, np.array([[8 / 448, 1], [1, 3 / 448]], np.float32))
    assert codes[3, 5] == 0xFE
    assert codes[199, 129] == 0x7E
    assert codes[10, 10] == 0x66  # 1 / (8 / 448) = 56, exactly 2^5 * 1.75
    assert np.count_nonzero(codes) == 3
    assert error.weights == 200 * 130
    assert error.rms_relative < 1e-6


def test_the_error_of_quantising_gaussian_weights() -> None:
    weights = np.random.default_rng(5).standard_normal((256, 384)).astype(np.float32)
    codes, scales, error = e4m3.quantise_blocks(weights)
    distance = np.abs(e4m3.dequantise(codes, scales).astype(np.float64) - weights)
    rms = np.sqrt(np.mean(distance**2) / np.mean(weights.astype(np.float64) ** 2))
    assert error.rms_relative == pytest.approx(rms, rel=1e-4)
    assert 0.02 < error.rms_relative < 0.03
    wide = np.repeat(np.repeat(scales, 128, 0), 128, 1)
    normal = np.abs(weights) >= wide * np.float32(2.0**-6)
    assert np.count_nonzero(~normal) >= 10
    largest = np.max(distance[normal] / np.abs(weights[normal]))
    assert error.max_relative == pytest.approx(largest, rel=1e-5)
    assert 0.05 < largest <= 1 / 17 + 1e-6
    assert np.max(distance[~normal] / wide[~normal]) <= 2.0**-10 * (1 + 1e-6)


def test_weights_that_become_zero_are_counted() -> None:
    weights = np.array([[448.0, 2.0**-11, -(2.0**-10), 2.0**-9]], np.float32)
    codes, _, error = e4m3.quantise_blocks(weights)
    assert codes[0].tolist() == [0x7E, 0x00, 0x80, 0x01]
    assert error.flushed == 2


def test_tiny_blocks_get_a_normal_scale() -> None:
    _, scales, _ = e4m3.quantise_blocks(np.full((1, 2), 1e-40, np.float32))
    assert scales[0, 0] == np.float32(2.0**-126)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_weights_are_an_error(bad: float) -> None:
    weights = np.ones((4, 4), np.float32)
    weights[1, 2] = weights[3, 3] = bad
    with pytest.raises(errors.WeightFormatError, match=r"w: got 2 non-finite"):
        e4m3.quantise_blocks(weights, "w")
