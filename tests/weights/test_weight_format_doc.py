"""docs/weight-format.md against the code: its example, and a reader written from its text alone.

The reader uses ``struct`` and ``json`` only and imports nothing of ours.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from random_checkpoint import FINITE_CODES, make_checkpoint
from safetensors import safe_open

from duckllm.weights import e4m3, formats, fp9
from duckllm.weights.convert import convert
from duckllm.weights.grouped import QuantisedExpert, QuantisedMatrix, pack_quantised_expert
from duckllm.weights.units import ExpertWeights, pack_expert_units

GROUPED = ("int4", "int4-bf16", "int4-zero", "int4-zero-bf16", "mxfp4")


def ceil(a: int, b: int) -> int:
    return -(-a // b)


RECORD_BYTES = {"fp9": 576, "fp8": 512}
FORMATS = list(RECORD_BYTES)
LAYOUTS = ("block", "channel")


def scale_bytes(hidden: int, layout: str) -> int:
    if layout == "channel":
        return 128 + 4 * ceil(hidden, 32) * 32
    return ceil(12 * ceil(hidden, 128), 64) * 64


def read_scales(unit: bytes, hidden: int, layout: str) -> dict[str, list[float]]:
    """Gate's and up's scales of each channel of the stripe and hidden index, down's of each output."""
    if layout == "channel":
        scales = struct.unpack_from(f"<{32 + hidden}f", unit, 0)
        by_channel = {"gate": scales[:16], "up": scales[16:32]}
        return {
            **{name: [[scale] * hidden for scale in part] for name, part in by_channel.items()},
            "down": list(scales[32:]),
        }
    runs = ceil(hidden, 128)
    scales = struct.unpack_from(f"<{3 * runs}f", unit, 0)
    wide = [[scales[part * runs + index // 128] for index in range(hidden)] for part in range(3)]
    return {"gate": [wide[0]] * 16, "up": [wide[1]] * 16, "down": wide[2]}


def read_e4m3(byte: int) -> float:
    sign = -1.0 if byte >> 7 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    assert byte & 0x7F != 0x7F
    return sign * (2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else mantissa * 2.0**-9)


def read_weight(unit: bytes, record: int, row: int, lane: int, weight_format: str) -> float:
    magnitude = unit[record + 64 * (row // 4) + 4 * lane + (0, 2, 1, 3)[row % 4]]
    if weight_format == "fp8":
        return read_e4m3(magnitude)
    (signs,) = struct.unpack_from("<I", unit, record + 512 + 4 * lane)
    sign = -1.0 if signs >> (16 * (row % 2) + 15 - row // 2) & 1 else 1.0
    if magnitude == 0:
        return sign * 0.0
    exponent, mantissa = magnitude >> 3, magnitude & 7
    assert exponent >= 1
    return sign * 2.0 ** (exponent - 23) * (1 + mantissa / 8)


def read_unit(
    unit: bytes, hidden: int, stripe: int, intermediate: int, weight_format: str, layout: str = "block"
) -> dict[tuple[str, int, int], float]:
    """Weight by (matrix, row, column), scales multiplied in."""
    record_bytes = RECORD_BYTES[weight_format]
    scales = read_scales(unit, hidden, layout)
    data = scale_bytes(hidden, layout)
    blocks = ceil(hidden, 32)
    weights = {}
    for block in range(blocks):
        for half, matrix in enumerate(("gate", "up")):
            record = data + (2 * block + half) * record_bytes
            for row in range(min(32, hidden - 32 * block)):
                for lane in range(min(16, intermediate - 16 * stripe)):
                    column = 32 * block + row
                    value = read_weight(unit, record, row, lane, weight_format)
                    weights[matrix, 16 * stripe + lane, column] = scales[matrix][lane][column] * value
        record = data + (2 * blocks + block) * record_bytes
        for tile in range(2):
            for channel in range(min(16, intermediate - 16 * stripe)):
                for lane in range(16):
                    output = 32 * block + 16 * tile + lane
                    if output < hidden:
                        value = read_weight(unit, record, 16 * tile + channel, lane, weight_format)
                        weights["down", output, 16 * stripe + channel] = scales["down"][output] * value
    return weights


class Reader:
    """A converted folder, as the page describes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = json.loads((folder / "duck.json").read_text())
        assert self.manifest["format_version"] == 2
        self.format = self.manifest["format"]
        self.layout = self.manifest.get("scale_layout", "block")
        record_bytes = RECORD_BYTES[self.format]
        self.hidden, self.intermediate = self.manifest["hidden_size"], self.manifest["moe_intermediate_size"]
        hidden, blocks = self.hidden, ceil(self.hidden, 32)
        assert self.manifest["unit_bytes"] == scale_bytes(hidden, self.layout) + 3 * blocks * record_bytes
        assert self.manifest["num_stripes"] == ceil(self.intermediate, 16)
        content = {k: v for k, v in self.manifest.items() if k not in ("model_hash", "source", "created_by")}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        assert self.manifest["model_hash"] == hashlib.sha256(text.encode()).hexdigest()

    def units(self, layer: int) -> list[list[bytes]]:
        """Units by expert and stripe, hashes checked."""
        entry = self.manifest["expert_layers"][str(layer)]
        assert "/" not in entry["file"]
        data = (self.folder / entry["file"]).read_bytes()
        assert len(data) == entry["bytes"]
        (length,) = struct.unpack_from("<Q", data, 0)
        header = json.loads(data[8 : 8 + length])["units"]
        experts, stripes, unit = header["shape"]
        assert header["dtype"] == "U8"
        assert (experts, stripes, unit) == tuple(
            self.manifest[key] for key in ("num_experts", "num_stripes", "unit_bytes")
        )
        start = 8 + length + header["data_offsets"][0]
        assert start % 4096 == 0
        units = [
            [data[start + (e * stripes + s) * unit :][:unit] for s in range(stripes)] for e in range(experts)
        ]
        for s in range(stripes):
            digest = hashlib.sha256(b"".join(units[e][s] for e in range(experts))).hexdigest()
            assert digest == entry["stripe_sha256"][s]
        return units

    def expert(self, units: list[bytes]) -> dict[str, np.ndarray]:
        wide = (self.intermediate, self.hidden)
        shapes = {"gate": wide, "up": wide, "down": wide[::-1]}
        matrices = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
        for stripe, unit in enumerate(units):
            for (matrix, row, column), value in read_unit(
                unit, self.hidden, stripe, self.intermediate, self.format, self.layout
            ).items():
                matrices[matrix][row, column] = value
        return matrices


@pytest.mark.parametrize("weight_format", FORMATS)
def test_the_reader_of_the_page_reads_the_demo_model(
    tmp_path: Path, demo_checkpoint: Path, weight_format: str
) -> None:
    convert(demo_checkpoint, tmp_path / "demo", weight_format=weight_format)
    reader = Reader(tmp_path / "demo")
    assert reader.format == weight_format
    index = json.loads((demo_checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    units = reader.units(3)
    for expert in (0, 17):
        got = reader.expert(units[expert])
        for matrix, weights in got.items():
            stem = f"model.layers.3.mlp.experts.{expert}.{matrix}_proj.weight"
            with safe_open(demo_checkpoint / index[stem], "pt") as file:
                codes = file.get_tensor(stem).to(torch.float64)
                scales = file.get_tensor(stem + "_scale_inv").to(torch.float64)
            wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            expected = (codes * wide[: codes.shape[0], : codes.shape[1]]).numpy()
            np.testing.assert_array_equal(weights, expected)
            np.testing.assert_array_equal(np.signbit(weights), np.signbit(expected))


@pytest.mark.parametrize("weight_format", FORMATS)
def test_the_reader_of_the_page_reads_awkward_sizes(tmp_path: Path, weight_format: str) -> None:
    made = make_checkpoint(tmp_path / "src", moe_intermediate_size=138, hidden_size=140, n_routed_experts=2)
    convert(tmp_path / "src", tmp_path / "dst", weight_format=weight_format)
    reader = Reader(tmp_path / "dst")
    got = reader.expert(reader.units(2)[1])
    values = e4m3.e4m3_values().astype(np.float64)
    for matrix, weights in got.items():
        stem = f"model.layers.2.mlp.experts.1.{matrix}_proj.weight"
        rows, columns = weights.shape
        scales = made.array(stem + "_scale_inv").astype(np.float64)[
            np.arange(rows)[:, None] // 128, np.arange(columns)[None] // 128
        ]
        np.testing.assert_array_equal(weights, values[made.array(stem)] * scales)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_the_reader_of_the_page_reads_channel_scales(weight_format: str) -> None:
    hidden, intermediate = 70, 40
    rng = np.random.default_rng(2)
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    codes = {name: rng.choice(FINITE_CODES, shape) for name, shape in shapes.items()}
    scales = {name: rng.uniform(0.5, 2, (shape[0], 1)).astype("f4") for name, shape in shapes.items()}
    units = pack_expert_units(ExpertWeights(*codes.values(), *scales.values()), weight_format, "channel")
    values = e4m3.e4m3_values().astype(np.float64)
    for stripe, unit in enumerate(units):
        read = read_unit(unit.tobytes(), hidden, stripe, intermediate, weight_format, "channel")
        for (matrix, row, column), value in read.items():
            assert value == values[codes[matrix][row, column]] * float(scales[matrix][row, 0])


@pytest.fixture
def page(repository: Path) -> str:
    return (repository / "docs" / "weight-format.md").read_text()


def example_matrices(page: str) -> dict[str, tuple[np.ndarray, float, list[float]]]:
    found = re.findall(r"\| (gate|up|down) \[(\d), (\d)\] \| (.*?) \| ([\d.]+) \| (.*?) \|", page)
    return {
        name: (
            np.array(list(bytes.fromhex(re.sub("[`/]", " ", codes))))
            .astype(np.uint8)
            .reshape(int(r), int(c)),
            float(scale),
            [float(value) for value in re.split("[,/]", values)],
        )
        for name, r, c, codes, scale, values in found
    }


@pytest.mark.parametrize(("weight_format", "size", "num_lines"), [("fp9", 1792, 7), ("fp8", 1600, 4)])
def test_the_example_of_the_page(page: str, weight_format: str, size: int, num_lines: int) -> None:
    assert f"64 + 3 * {RECORD_BYTES[weight_format]} = {size}" in page
    matrices = example_matrices(page.split("The other formats, of the same sizes")[0])
    assert set(matrices) == {"gate", "up", "down"}
    codes = [matrices[name][0] for name in ("gate", "up", "down")]
    scales = [np.full((1, 1), matrices[name][1], np.float32) for name in ("gate", "up", "down")]
    units = pack_expert_units(ExpertWeights(*codes, *scales), weight_format)
    shown = bytearray(size)
    listing = page.split(f"The unit in {weight_format}")[1].split("```")[1]
    lines = re.findall(r"^([0-9a-f]{4})((?:  ?[0-9a-f]{2}){16})$", listing, re.MULTILINE)
    assert len(lines) == num_lines
    for offset, text in lines:
        shown[int(offset, 16) : int(offset, 16) + 16] = bytes.fromhex(text)
    assert units.tobytes() == bytes(shown)
    weights = read_unit(bytes(shown), 3, 0, 2, weight_format)
    for name, (matrix, _, values) in matrices.items():
        rows, columns = matrix.shape
        assert [weights[name, r, c] for r in range(rows) for c in range(columns)] == values


def listed_unit(page: str, weight_format: str, size: int, fills: list[tuple[int, int, int]]) -> bytes:
    """The unit that the page lists: first, end and byte of what fills the lines that it leaves out."""
    shown = bytearray(size)
    for first, end, fill in fills:
        shown[first:end] = bytes([fill]) * (end - first)
    listing = page.split(f"The unit in {weight_format}, ")[1].split("```")[1]
    lines = re.findall(r"^([0-9a-f]{4})((?:  ?[0-9a-f]{2}){16})$", listing, re.MULTILINE)
    assert len(lines) == listing.strip().count("\n") + 1
    for offset, text in lines:
        shown[int(offset, 16) : int(offset, 16) + 16] = bytes.fromhex(text)
    return bytes(shown)


def test_the_int8_example_of_the_page(page: str) -> None:
    section = page.split("The matrices in int8")[1]
    matrices = example_matrices(section.split("The unit in int8")[0])
    names = ("gate", "up", "down")
    scales = [np.full((1, 1), matrices[name][1], np.float32) for name in names]
    units = pack_expert_units(ExpertWeights(*(matrices[name][0] for name in names), *scales), "int8")
    unit = listed_unit(page, "int8", 64 + 3 * 512, [(64, 1600, 128)])
    assert units.tobytes() == unit
    for name, (codes, scale, values) in matrices.items():
        rows, columns = codes.shape
        for r in range(rows):
            for c in range(columns):
                row, lane = c, r  # of down, too: its rows are channels
                record = 64 + 512 * names.index(name)
                byte = unit[record + 64 * (row // 4) + 4 * lane + row % 4]
                assert (byte - 128) * scale == values[r * columns + c]


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def read_grouped(
    unit: bytes, hidden: int, intermediate: int, stripe: int, weight_format: str
) -> dict[tuple[str, int, int], float]:
    """Weight by (matrix, row, column) of a unit of groups."""
    blocks = ceil(hidden, 32)
    with_zeros = "zero" in weight_format
    start = ceil(32 * blocks, 64) * 64 if with_zeros else 0

    def scale(at: int) -> float:
        if weight_format in ("int4", "int4-zero"):
            return struct.unpack_from("<e", unit, at)[0]
        return struct.unpack("<f", b"\0\0" + unit[at : at + 2])[0]

    def zero(index: int) -> int:
        return unit[index // 2] >> 4 * (index % 2) & 15 if with_zeros else 8

    def weight(codes: int, row: int, lane: int, zero: int, scale: float) -> float:
        code = unit[codes + 64 * (row // 8) + 4 * lane + row % 4] >> (4 if row % 8 >= 4 else 0) & 15
        return (E2M1[code] if weight_format == "mxfp4" else code - zero) * scale

    weights = {}
    channels = min(16, intermediate - 16 * stripe)
    for block in range(blocks):
        pair, down = start + 576 * block, start + 576 * blocks + 320 * block
        for half, matrix in enumerate(("gate", "up")):
            for lane in range(channels):
                group = zero(32 * block + 16 * half + lane), scale(pair + 512 + 32 * half + 2 * lane)
                for row in range(min(32, hidden - 32 * block)):
                    place = matrix, 16 * stripe + lane, 32 * block + row
                    weights[place] = weight(pair + 256 * half, row, lane, *group)
        for output in range(min(32, hidden - 32 * block)):
            group = zero(32 * blocks + 32 * block + output), scale(down + 256 + 2 * output)
            for channel in range(channels):
                place = "down", 32 * block + output, 16 * stripe + channel
                weights[place] = weight(down + 128 * (output // 16), channel, output % 16, *group)
    return weights


@pytest.mark.parametrize("weight_format", ["int4", "int4-zero", "mxfp4"])
def test_the_examples_of_groups_of_the_page(page: str, weight_format: str) -> None:
    table = re.findall(
        r"^\| (gate|up|down) \[(\d), (\d)\] \| (`.*)$", page.split("in groups, one a row")[1], re.M
    )
    assert [row[0] for row in table] == ["gate", "up", "down"]
    grouped = formats.FORMATS[weight_format].grouped
    assert grouped is not None
    matrices, expected = [], {}
    for name, rows, columns, rest in table:
        codes, scales, zeros, *values = (cell.strip() for cell in rest.strip(" |").split("|"))
        numbers = [int(code, 16) for code in re.findall(r"[0-9a-f]", codes)]
        shape = int(rows), int(columns)
        matrices.append(
            QuantisedMatrix(
                np.array(numbers, np.uint8).reshape(shape),
                np.array([[float(scale)] for scale in scales.split(", ")], np.float32),
                grouped.scale_type,
                np.array([[int(zero)] for zero in zeros.split(", ")], np.uint8)
                if grouped.has_zeros
                else None,
                16 if name == "down" else 32,
                grouped.kind,
            )
        )
        column = ["int4", "int4-zero", "mxfp4"].index(weight_format)
        listed = [float(value) for value in re.split("[,/]", values[column])]
        places = [(name, r, c) for r in range(shape[0]) for c in range(shape[1])]
        expected |= dict(zip(places, listed, strict=True))
    size = formats.unit_bytes(3, weight_format)
    start = size - 896
    fill = 0 if weight_format == "mxfp4" else 0x88
    fills = [(start, start + 512, fill), (start + 576, start + 832, fill)]
    unit = listed_unit(page, weight_format, size, fills)
    assert pack_quantised_expert(QuantisedExpert(*matrices), weight_format).tobytes() == unit
    assert read_grouped(unit, 3, 2, 0, weight_format) == expected


@pytest.mark.parametrize("weight_format", GROUPED)
def test_the_reader_of_the_page_reads_groups(weight_format: str) -> None:
    grouped = formats.FORMATS[weight_format].grouped
    assert grouped is not None
    rng = np.random.default_rng(3)

    def matrix(rows: int, columns: int, size: int) -> QuantisedMatrix:
        scales = rng.integers(1, 99, (rows, ceil(columns, size))).astype(np.float32) / 64
        zeros = rng.integers(0, 16, scales.shape).astype(np.uint8) if grouped.has_zeros else None
        codes = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
        return QuantisedMatrix(codes, scales, grouped.scale_type, zeros, size, grouped.kind)

    expert = QuantisedExpert(matrix(40, 70, 32), matrix(40, 70, 64), matrix(70, 40, 16))
    read: dict[tuple[str, int, int], float] = {}
    for stripe, unit in enumerate(pack_quantised_expert(expert, weight_format)):
        read |= read_grouped(unit.tobytes(), 70, 40, stripe, weight_format)
    for name in ("gate", "up", "down"):
        for (row, column), value in np.ndenumerate(getattr(expert, name).values()):
            assert read.pop((name, row, column)) == value
    assert not read


def test_the_numbers_of_the_page(page: str) -> None:
    big, small = ([formats.unit_bytes(hidden, name) for name in FORMATS] for hidden in (7168, 256))
    assert f"With H = 7168 it is {big[0]:,} in fp9 and {big[1]:,} in fp8; " in page
    assert f"with H = 256, {small[0]:,} and {small[1]:,}." in page
    big, small = ([formats.unit_bytes(hidden, name, "channel") for name in FORMATS] for hidden in (7168, 256))
    of_channels = f"these are {big[0]:,} and {big[1]:,}; {small[0]:,} and {small[1]:,}."
    assert f"In the layout channel {of_channels}" in page
    assert all(f"- **{layout}**: one scale" in page for layout in LAYOUTS)
    of_groups = [formats.unit_bytes(hidden, name) for hidden in (7168, 256) for name in ("int4", "int4-zero")]
    wide, wide_zero, narrow, narrow_zero = (f"{size:,}" for size in of_groups)
    assert (
        f"it is {wide}, and {wide_zero} with zero points; with H = 256, {narrow} and {narrow_zero}." in page
    )
    for names, bits in re.findall(r"^\| (\*\*.*?) \|.*\| ([\d., ]+) \|$", page, re.MULTILINE):
        found = re.findall(r"\*\*(.*?)\*\*", names)
        shown = bits.split(", ") * (len(found) if ", " not in bits else 1)
        assert [f"{formats.bits_per_weight(name):.2f}" for name in found] == shown
    assert set(re.findall(r"\*\*(\w+[\w-]*)\*\*", page.split("fp9 and fp8 differ")[0])) == set(
        formats.FORMATS
    )
    listed = re.search(r"\| 0x01 \.\.\. 0x07 .*? \| (.*?) \|", page)
    assert listed is not None
    magnitudes, _ = fp9.encode_e4m3(np.arange(1, 8, dtype=np.uint8))
    assert [int(value, 16) for value in listed[1].split(", ")] == magnitudes.tolist()


def test_the_keys_of_the_page_are_the_manifests(page: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    manifest = convert(tmp_path / "src", tmp_path / "dst")
    keys = set(replace(manifest, scale_layout="channel").to_json())
    assert keys - set(manifest.to_json()) == {"scale_layout"}
    section = page.split("## The manifest")[1].split("Hashes are")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {key for row in rows for key in re.findall("`(.*?)`", row)} == keys
