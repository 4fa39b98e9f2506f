"""Formats of 4 bits and int8 in numpy: there and back, places by hand, what is refused; native sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duckllm import _native
from duckllm.errors import WeightFormatError
from duckllm.weights import int8
from duckllm.weights.formats import FORMATS, bits_per_weight, layout_in, unit_bytes
from duckllm.weights.grouped import (
    E2M1_VALUES,
    QuantisedExpert,
    QuantisedMatrix,
    codes_of,
    pack_quantised_expert,
    scale_values,
    scale_words,
    unpack_quantised_expert,
)
from duckllm.weights.pack import pack_units
from duckllm.weights.units import ExpertWeights, pack_expert_units, unpack_expert_units

GROUPED = [name for name, row in FORMATS.items() if row.grouped]


def random_matrix(
    rng: np.random.Generator, rows: int, columns: int, weight_format: str, group_size: int
) -> QuantisedMatrix:
    row = codes_of(weight_format)
    scales = rng.uniform(-2, 2, (rows, -(-columns // group_size))).astype(np.float32)
    scales = scale_values(scale_words(scales, row.scale_type), row.scale_type)
    zeros = rng.integers(0, 16, scales.shape).astype(np.uint8) if row.has_zeros else None
    codes = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
    return QuantisedMatrix(codes, scales, row.scale_type, zeros, group_size, row.kind)


def random_quantised(
    seed: int, intermediate: int, hidden: int, weight_format: str, gate_group: int = 32, down_group: int = 16
) -> QuantisedExpert:
    rng = np.random.default_rng(seed)
    return QuantisedExpert(
        random_matrix(rng, intermediate, hidden, weight_format, gate_group),
        random_matrix(rng, intermediate, hidden, weight_format, gate_group),
        random_matrix(rng, hidden, intermediate, weight_format, down_group),
    )


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(GROUPED),
    st.integers(1, 150),
    st.integers(1, 200),
    st.sampled_from([(32, 16), (64, 32), (128, 128), (32, 48)]),
    st.integers(0, 2**32 - 1),
)
def test_packing_then_unpacking_gives_the_same_weights(
    weight_format: str, intermediate: int, hidden: int, groups: tuple[int, int], seed: int
) -> None:
    expert = random_quantised(seed, intermediate, hidden, weight_format, *groups)
    assert expert.format == weight_format
    units = pack_quantised_expert(expert, weight_format)
    assert units.shape == (-(-intermediate // 16), unit_bytes(hidden, weight_format))
    again = unpack_quantised_expert(units, intermediate, hidden, weight_format)
    assert (again.gate.group_size, again.up.group_size, again.down.group_size) == (32, 32, 16)
    for name in ("gate", "up", "down"):
        got, expected = getattr(again, name), getattr(expert, name)
        assert got.codes.tobytes() == expected.codes.tobytes()
        np.testing.assert_array_equal(got.values(), expected.values())
    np.testing.assert_array_equal(pack_quantised_expert(again, weight_format), units)


def test_places_of_single_weights() -> None:
    """Channel 21 of 40, hidden 70 of 72: lane 5 of stripe 1, row 6 of row block 2."""
    expert = random_quantised(0, 40, 72, "int4-zero")
    unit = pack_quantised_expert(expert, "int4-zero")[1]
    zeros, pairs, downs = unit[:128], unit[128 : 128 + 3 * 576].reshape(3, 576), unit[-3 * 320 :]
    assert pairs[2, 4 * 5 + 2] >> 4 == expert.gate.codes[21, 70]  # row 6: byte 2, its high half
    assert pairs[2, 4 * 5 + 3] & 15 == expert.gate.codes[21, 67]  # row 3: byte 3, its low half
    assert pairs[1, 256 + 2 * 64 + 4 * 5 + 1] & 15 == expert.up.codes[21, 32 + 17]
    assert pairs[2, 512:544].view("<f2")[5] == expert.gate.scales[21, 2]
    assert pairs[2, 544:].view("<f2")[5] == expert.up.scales[21, 2]
    assert zeros[2 * 16 + 2] >> 4 == expert.gate.zeros[21, 2]  # lane 5 of block 2
    assert zeros[2 * 16 + 8 + 2] >> 4 == expert.up.zeros[21, 2]
    record = downs.reshape(3, 320)[2]  # outputs 64 to 71: tile 0, lane 6 is output 70; row 5 is channel 21
    assert record[4 * 6 + 1] >> 4 == expert.down.codes[70, 21]
    assert record[256:].view("<f2")[6] == expert.down.scales[70, 1]
    assert zeros[3 * 16 + 2 * 16 + 3] & 15 == expert.down.zeros[70, 1]
    assert zeros[96:].tolist() == [0] * 32
    # Rows 72 to 95 of a group are at its zero point, and outputs from 72 on are 8 with scale 0.
    assert pairs[2, 64 + 4 * 5] & 15 == expert.gate.zeros[21, 2]
    assert record[4 * 9] == 0x88
    assert record[256:].view("<f2")[8:].tolist() == [0] * 24


def test_padded_channels_are_zero() -> None:
    for weight_format, fill in (("int4", 0x88), ("mxfp4", 0)):
        unit = pack_quantised_expert(random_quantised(1, 3, 32, weight_format), weight_format)[0]
        assert set(unit[12:64].tolist()) == {fill}
        assert unit[512 + 6 : 512 + 32].tolist() == [0] * 26


def test_values_of_codes_and_scales() -> None:
    codes = np.arange(16, dtype=np.uint8)[None]
    half = np.full((1, 1), 0.5, np.float32)
    plain = QuantisedMatrix(codes, half, "f16", None, 32)
    assert plain.values()[0].tolist() == [(code - 8) / 2 for code in range(16)]
    zero = replace(plain, zeros=np.array([[3]], np.uint8))
    assert zero.values()[0].tolist() == [(code - 3) / 2 for code in range(16)]
    e2m1 = QuantisedMatrix(codes, half, "bf16", None, 32, "mxfp4")
    assert e2m1.values()[0].tolist() == (E2M1_VALUES / 2).tolist()
    assert E2M1_VALUES[[1, 3, 7, 15]].tolist() == [0.5, 1.5, 6, -6]


def test_scales_round_to_the_nearest() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 3.0e38, 2.0**-24, 65504.0], np.float32)
    assert scale_values(scale_words(values, "bf16"), "bf16")[:3].tolist() == [1, 1, 1 + 2**-6]
    assert scale_values(scale_words(values, "f16"), "f16")[[0, 1, 4, 5]].tolist() == [
        1,
        1 + 2**-8,
        2**-24,
        65504,
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 16}, "gate: got groups of 16 weights, expected a multiple of 32 for int4"),
        ({"scale_type": "bf16"}, "gate: got int4 with bf16 scales, expected int4 with f16 scales for int4"),
        ({"kind": "mxfp4"}, "gate: got mxfp4 with f16 scales, expected int4"),
        ({"zeros": np.full((40, 3), 8, np.uint8)}, "gate: got zero points, expected none for int4"),
        ({"scales": np.full((40, 3), 0.1, np.float32)}, "gate: got scales that f16 does not hold exactly"),
        ({"scales": np.full((40, 3), np.inf, np.float32)}, "gate: got scales that are not finite"),
        (
            {"scales": np.ones((40, 2), np.float32)},
            r"gate: got scales of shape \(40, 2\), expected \(40, 3\)",
        ),
        ({"codes": np.full((40, 72), 16, np.uint8)}, "gate: got codes up to 16, expected 0 to 15"),
    ],
)
def test_what_has_no_place_is_refused_by_name(change: dict[str, object], message: str) -> None:
    expert = random_quantised(0, 40, 72, "int4")
    with pytest.raises(WeightFormatError, match=message):
        pack_quantised_expert(replace(expert, gate=replace(expert.gate, **change)), "int4")


def test_an_expert_knows_its_format() -> None:
    expert = random_quantised(0, 16, 32, "int4")
    zeros = np.full((32, 1), 3, np.uint8)
    assert replace(expert, down=replace(expert.down, zeros=zeros)).format == "int4-zero"
    with pytest.raises(WeightFormatError, match="got int4 with bf16 scales, int4 with f16 scales, which no"):
        _ = replace(expert, up=replace(expert.up, scale_type="bf16")).format


def random_int8(seed: int, intermediate: int, hidden: int) -> ExpertWeights:
    rng = np.random.default_rng(seed)
    wide, blocks = (intermediate, hidden), (-(-intermediate // 128), -(-hidden // 128))
    return ExpertWeights(
        *(rng.integers(1, 256, shape).astype(np.uint8) for shape in (wide, wide, wide[::-1])),
        *(rng.uniform(0.5, 2, shape).astype(np.float32) for shape in (blocks, blocks, blocks[::-1])),
    )


@pytest.mark.parametrize(("intermediate", "hidden"), [(16, 32), (40, 72), (138, 140), (1, 1)])
def test_int8_there_and_back_and_by_the_native_packer(intermediate: int, hidden: int) -> None:
    expert = random_int8(0, intermediate, hidden)
    units = pack_expert_units(expert, "int8")
    assert units.shape == (-(-intermediate // 16), unit_bytes(hidden, "int8"))
    again = unpack_expert_units(units, intermediate, hidden, "int8")
    for name in ("gate", "up", "down", "gate_scales", "up_scales", "down_scales"):
        assert getattr(again, name).tobytes() == getattr(expert, name).tobytes(), name
    np.testing.assert_array_equal(pack_units(expert, "int8"), units)


def test_places_of_int8() -> None:
    expert = random_int8(0, 40, 72)
    unit = pack_expert_units(expert, "int8")[1]
    records = unit[64:].reshape(9, 512)
    assert records[4, 64 + 4 * 5 + 2] == expert.gate[21, 70]  # row 6 of block 2
    assert records[6 + 2, 64 + 4 * 6 + 1] == expert.down[70, 21]  # row 5 is channel 21, lane 6 output 70
    assert records[4, 4 * 64 + 4 * 5] == int8.CODE_OF_ZERO  # row 16 of block 2: hidden 80 of 72


def test_minus_128_is_refused() -> None:
    expert = replace(random_int8(0, 16, 32), up=np.zeros((16, 32), np.uint8))
    with pytest.raises(WeightFormatError, match="int8 codes: got 512 byte"):
        pack_expert_units(expert, "int8")
    with pytest.raises(ValueError, match="up: got 512 bytes 0"):
        pack_units(expert, "int8")
    with pytest.raises(WeightFormatError, match="int8 codes"):
        int8.decode_records(np.zeros((1, 512), np.uint8))


def test_the_native_sizes_are_these() -> None:
    for weight_format, row in FORMATS.items():
        for scale_layout in row.scale_layouts:
            for hidden in (1, 32, 33, 128, 200, 7168):
                expected = unit_bytes(hidden, weight_format, scale_layout)
                assert expected % 64 == 0
                assert _native.unit_bytes(hidden, weight_format, scale_layout) == expected
    bits = {name: round(bits_per_weight(name), 3) for name in ("int8", "int4", "int4-zero", "mxfp4")}
    assert bits == {"int8": 8.016, "int4": 4.667, "int4-zero": 4.833, "mxfp4": 4.667}


def test_a_format_has_its_layouts() -> None:
    assert layout_in("fp8", "channel") == "channel"
    assert layout_in("int8", "channel") == "block"
    assert layout_in("int4", "block") == "group"
    assert layout_in("fp9", "group") == "block"
