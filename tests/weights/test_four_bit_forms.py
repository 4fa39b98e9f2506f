"""4-bit matrices of every form against the tools' own dequantisation, element by element."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from duckllm.errors import CheckpointError, UnsupportedModelError
from duckllm.weights.imports.mxfp4 import powers_of_two
from duckllm.weights.imports.packed import DequantisedTensor, PackedMatrix, nibbles
from duckllm.weights.quantisation import Quantisation
from duckllm.weights.safetensors_file import TensorReader, build_header, read_header
from support.four_bit import FORMS, Form, Written, compressed_tensors, gptq, stored

# Of out and in; the first two are no multiples of one another, the third has a row of one group.
SHAPES = [(72, 256), (256, 128), (16, 384)]
NAME = "model.layers.0.mlp.experts.0.up_proj."


def write(folder: Path, written: Written, **changes: tuple | None) -> Path:
    """A safetensors file with one matrix; ``changes`` replace tensors, or leave them out."""
    tensors = {name: each for name, each in (written.tensors | changes).items() if each is not None}
    header = build_header({NAME + name: each[:2] for name, each in tensors.items()}, {}, 8)
    path = folder / "one.safetensors"
    path.write_bytes(header + b"".join(each[2] for each in tensors.values()))
    return path


def find(path: Path, form: Form, shape: tuple[int, int], **config: object) -> PackedMatrix | None:
    said = Quantisation.of("m", {"quantization_config": form.config | config})
    return said.find_packed(read_header(path), NAME + "weight", shape)


def found(path: Path, form: Form, shape: tuple[int, int]) -> PackedMatrix:
    matrix = find(path, form, shape)
    assert matrix is not None
    return matrix


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_a_matrix_is_what_its_tool_says(tmp_path: Path, name: str, shape: tuple[int, int]) -> None:
    form = FORMS[name]
    written = form.write(np.random.default_rng(3), shape)
    matrix = found(write(tmp_path, written), form, shape)
    assert matrix.form == form.name
    assert {info.name for info in matrix.tensors} == {NAME + part for part in written.tensors}
    with TensorReader() as reader:
        got = matrix.unpack(reader)
        host = b"".join(DequantisedTensor.of(matrix).chunks(reader))
    np.testing.assert_array_equal(got.values().astype(np.float64), written.values)
    assert (got.kind, got.scale_type, got.zeros is not None) == (
        matrix.kind, matrix.scale_type, matrix.has_zeros
    )  # fmt: skip
    assert got.scales.shape == (shape[0], -(-shape[1] // got.group_size))
    assert set(np.unique(got.codes)) == set(range(16))
    assert all(part is None or part.flags.c_contiguous for part in (got.codes, got.scales, got.zeros))
    # The tool's own values, of which it rounds to the scales' type; and the host's copy.
    if written.stored.dtype == torch.float16:
        assert torch.equal(torch.from_numpy(got.values()).half(), written.stored)
    kept = torch.frombuffer(bytearray(host), dtype=torch.bfloat16).reshape(shape)
    assert torch.equal(kept, torch.from_numpy(got.values()).bfloat16())
    if written.stored.dtype == torch.bfloat16:
        assert torch.equal(kept, written.stored)


def test_the_hosts_copy_is_made_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form, shape = FORMS["gptq-zeros"], (72, 256)
    written = form.write(np.random.default_rng(3), shape)
    tensor = DequantisedTensor.of(found(write(tmp_path, written), form, shape))
    monkeypatch.setattr("duckllm.weights.imports.packed._CHUNK_BYTES", 5 * 2 * 256)
    with TensorReader() as reader:
        pieces = [bytes(piece) for piece in tensor.chunks(reader)]
    assert [len(piece) for piece in pieces] == [5 * 2 * 256] * 14 + [2 * 2 * 256]
    assert b"".join(pieces) == stored(torch.from_numpy(written.values).bfloat16())[2]
    assert (tensor.dtype, tensor.num_bytes) == ("BF16", 72 * 256 * 2)


def test_a_zero_point_of_0_in_gptqs_first_version_borrows_from_its_neighbour(tmp_path: Path) -> None:
    """Zero points 0 and 5 of two outputs are stored as 15 and 3, as whole words are one less in each part."""
    form = gptq(32, symmetric=False)
    written = form.write(np.random.default_rng(0), (8, 32))
    words = np.array([[0x77777750]], np.uint32) - np.uint32(0x11111111)
    assert f"{int(words[0, 0]):08x}" == "6666663f"
    matrix = found(write(tmp_path, written, qzeros=("I32", (1, 1), words.tobytes())), form, (8, 32))
    with TensorReader() as reader:
        zeros = matrix.unpack(reader).zeros
    assert zeros is not None
    assert zeros[:, 0].tolist() == [0, 5, 7, 7, 7, 7, 7, 7]


def test_a_checkpoint_without_the_matrix_has_none(tmp_path: Path) -> None:
    for form in FORMS.values():
        written = form.write(np.random.default_rng(0), (8, 256))
        other = {name: None for name in written.tensors}
        path = write(tmp_path, written, **other, weight=("BF16", (8, 256), bytes(4096)))
        assert find(path, form, (8, 256)) is None


def test_groups_of_several_sizes_are_told_apart_by_their_scales(tmp_path: Path) -> None:
    both = compressed_tensors(32).config["config_groups"]["group_0"]
    wide = compressed_tensors(128).config["config_groups"]["group_0"]
    for size in (32, 128):
        form = compressed_tensors(size)
        path = write(tmp_path, form.write(np.random.default_rng(0), (8, 256)))
        matrix = find(path, form, (8, 256), config_groups={"a": both, "b": wide})
        assert matrix is not None
        assert matrix.group_size == size
    path = write(tmp_path, compressed_tensors(64).write(np.random.default_rng(0), (8, 256)))
    with pytest.raises(CheckpointError, match=r"weight_scale: got shape \[8, 4\], expected \[8, 8\]"):
        find(path, form, (8, 256), config_groups={"a": both, "b": wide})


# A form, a tensor, its new type and shape (None: left out), and what is said.
WRONG = [
    (
        "compressed-32",
        "weight_packed",
        ("I32", (8, 16)),
        "weight_packed: got shape [8, 16], expected [8, 32]",
    ),
    ("compressed-32", "weight_scale", None, "weight_scale: got none, expected the part of a 4-bit matrix"),
    ("compressed-32", "weight_scale", ("F32", (8, 8)), "weight_scale: got dtype F32, expected F16 or BF16"),
    ("compressed-32", "weight_scale", ("BF16", (8, 4)), "weight_scale: got shape [8, 4], expected [8, 8]"),
    (
        "compressed-32",
        "weight_zero_point",
        ("I32", (1, 8)),
        "weight_zero_point: got zero points, expected none as symmetric is true",
    ),
    (
        "compressed-zeros",
        "weight_zero_point",
        None,
        "weight_zero_point: got no zero points, expected some as symmetric is false",
    ),
    ("compressed-zeros", "weight_zero_point", ("I32", (8, 8)), "got shape [8, 8], expected [1, 8]"),
    ("mxfp4", "weight_scale", ("BF16", (8, 8)), "weight_scale: got dtype BF16, expected U8 or F8_E8M0"),
    ("mxfp4", "weight_packed", ("U8", (8, 256)), "weight_packed: got shape [8, 256], expected [8, 128]"),
    ("gptq-32", "qweight", ("I32", (64, 8)), "qweight: got shape [64, 8], expected [32, 8]"),  # 8 bits
    ("gptq-32", "qweight", ("I16", (32, 8)), "qweight: got dtype I16, expected I32"),
    ("gptq-32", "qzeros", None, "qzeros: got none, expected the part of a 4-bit matrix"),
    ("gptq-32", "scales", ("F16", (8, 8)), None),
    ("gptq-32", "scales", ("F16", (4, 8)), "scales: got shape [4, 8], expected [8, 8]"),
    ("gptq-128", "g_idx", ("I32", (8,)), "g_idx: got shape [8], expected [256]"),
    ("awq-32", "qweight", ("I32", (32, 8)), "qweight: got shape [32, 8], expected [256, 1]"),
    ("awq-32", "qzeros", ("I32", (8, 8)), "qzeros: got shape [8, 8], expected [8, 1]"),
    ("awq-32", "scales", ("F32", (8, 8)), "scales: got dtype F32, expected F16 or BF16"),
]
SIZES = {"I32": 4, "F32": 4, "BF16": 2, "F16": 2, "I16": 2, "U8": 1}


@pytest.mark.parametrize(("name", "tensor", "new", "words"), WRONG)
def test_parts_that_do_not_fit_are_named(
    tmp_path: Path, name: str, tensor: str, new: tuple[str, tuple[int, ...]] | None, words: str | None
) -> None:
    form = FORMS[name]
    written = form.write(np.random.default_rng(0), (8, 256))
    change = None if new is None else (*new, bytes(SIZES[new[0]] * int(np.prod(new[1]))))
    path = write(tmp_path, written, **{tensor: change})
    if words is None:  # what is right is taken
        assert find(path, form, (8, 256)) is not None
        return
    with pytest.raises(CheckpointError, match=re.escape(NAME)) as caught:
        find(path, form, (8, 256))
    assert words in str(caught.value)


def unpack(path: Path, form: Form, shape: tuple[int, int]) -> None:
    matrix = found(path, form, shape)
    with TensorReader() as reader:
        matrix.load(reader)


def test_act_order_is_refused_by_name(tmp_path: Path) -> None:
    form, shape = gptq(128), (8, 256)
    index = np.arange(256, dtype=np.int32) // 128
    index[[3, 200]] = index[[200, 3]]
    written = form.write(np.random.default_rng(0), shape)
    path = write(tmp_path, written, g_idx=("I32", (256,), index.tobytes()))
    words = "up_proj.g_idx: got group 1 for input 3, expected 0 (act-order, desc_act, scatters"
    with pytest.raises(UnsupportedModelError, match=re.escape(words)):
        unpack(path, form, shape)
    # Where the configuration says so it is seen before anything is read.
    ordered = replace(form, config=form.config | {"desc_act": True})
    with pytest.raises(UnsupportedModelError, match=re.escape(words)):
        find(path, ordered, shape)
    unpack(write(tmp_path, written), ordered, shape)  # an order that changes nothing is none


def test_compressed_tensors_index_of_groups(tmp_path: Path) -> None:
    form, shape = FORMS["compressed-128-f16"], (8, 256)
    written = form.write(np.random.default_rng(0), shape)
    scattered = (np.arange(256, dtype=np.int32) % 2).tobytes()
    with pytest.raises(UnsupportedModelError, match="weight_g_idx: got group 1 for input 1, expected 0"):
        unpack(write(tmp_path, written, weight_g_idx=("I32", (256,), scattered)), form, shape)
    none = np.full(256, -1, np.int32).tobytes()
    unpack(write(tmp_path, written, weight_g_idx=("I32", (256,), none)), form, shape)
    with pytest.raises(
        CheckpointError, match=re.escape("weight_g_idx: got I64 [128], expected I32 [inputs]")
    ):
        unpack(write(tmp_path, written, weight_g_idx=("I64", (128,), bytes(1024))), form, shape)


def test_what_a_symmetric_checkpoint_may_not_have(tmp_path: Path) -> None:
    form, shape = gptq(128), (8, 256)
    written = form.write(np.random.default_rng(0), shape)
    zeros = np.array([[0x77777777], [0x77776777]], np.uint32)
    path = write(tmp_path, written, qzeros=("I32", (2, 1), zeros.tobytes()))
    words = "up_proj.qzeros: got 1 zero point(s) other than 8, the first 7, expected 8 as"
    with pytest.raises(CheckpointError, match=re.escape(words)):
        unpack(path, form, shape)


def test_a_shape_that_is_not_the_models(tmp_path: Path) -> None:
    form, shape = FORMS["compressed-32"], (8, 256)
    written = form.write(np.random.default_rng(0), shape)
    wrong = np.array([8, 250], np.int64).tobytes()
    with pytest.raises(CheckpointError, match=re.escape("weight_shape: got [8, 250], expected [8, 256]")):
        unpack(write(tmp_path, written, weight_shape=("I64", (2,), wrong)), form, shape)
    small = np.array(shape, np.int32).tobytes()
    unpack(write(tmp_path, written, weight_shape=("I32", (2,), small)), form, shape)
    unpack(write(tmp_path, written, weight_shape=None), form, shape)
    with pytest.raises(CheckpointError, match=re.escape("weight_shape: got I16 [2], expected I64 or I32")):
        unpack(write(tmp_path, written, weight_shape=("I16", (2,), bytes(4))), form, shape)


@pytest.mark.parametrize(("name", "tensor"), [("compressed-32", "weight_scale"), ("gptq-32", "scales")])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_scales_that_are_not_finite(tmp_path: Path, name: str, tensor: str, bad: float) -> None:
    form, shape = FORMS[name], (8, 256)
    written = form.write(np.random.default_rng(0), shape)
    dtype, grid, data = written.tensors[tensor]
    kind = torch.bfloat16 if dtype == "BF16" else torch.float16
    scales = torch.frombuffer(bytearray(data), dtype=kind)
    scales[5] = bad
    path = write(tmp_path, written, **{tensor: (dtype, grid, stored(scales)[2])})
    with pytest.raises(CheckpointError, match=rf"{tensor}: got 1 non-finite scale\(s\), expected none"):
        unpack(path, form, shape)


@pytest.mark.parametrize("name", ["compressed-32", "compressed-zeros", "mxfp4", "gptq-zeros", "awq-32"])
def test_a_matrix_without_any_scale_is_damaged(tmp_path: Path, name: str) -> None:
    """A group without a scale is one of small weights; a matrix without one, of zeros."""
    form, shape = FORMS[name], (8, 256)
    written = form.write(np.random.default_rng(0), shape)
    tensor = "weight_scale" if "weight_scale" in written.tensors else "scales"
    dtype, grid, data = written.tensors[tensor]
    none = np.zeros(len(data), np.uint8)
    number = int(np.prod(grid))
    lost = re.escape(f"{NAME}{tensor}: got {number} scale(s) of zero, expected others for codes that are not")
    with pytest.raises(CheckpointError, match=lost):
        unpack(write(tmp_path, written, **{tensor: (dtype, grid, none.tobytes())}), form, shape)
    with pytest.raises(CheckpointError, match=lost), TensorReader() as reader:
        list(DequantisedTensor.of(found(tmp_path / "one.safetensors", form, shape)).chunks(reader))
    one = none.copy()
    one[:2] = 0x20
    unpack(write(tmp_path, written, **{tensor: (dtype, grid, one.tobytes())}), form, shape)
    if name in ("compressed-32", "mxfp4"):  # whose code of 0 is the same in each group
        codes = written.tensors["weight_packed"]
        zeros = bytes([0x88 if name == "compressed-32" else 0x80]) * len(codes[2])
        changes = {tensor: (dtype, grid, none.tobytes()), "weight_packed": (*codes[:2], zeros)}
        with TensorReader() as reader:
            matrix = found(write(tmp_path, written, **changes), form, shape).load(reader)
        assert not matrix.values().any()


def test_a_negative_scale_turns_its_group(tmp_path: Path) -> None:
    form, shape = FORMS["gptq-row"], (8, 256)
    written = form.write(np.random.default_rng(0), shape)
    dtype, grid, data = written.tensors["scales"]
    negative = bytearray(data)
    negative[1] |= 0x80
    with TensorReader() as reader:
        path = write(tmp_path, written, scales=(dtype, grid, bytes(negative)))
        values = found(path, form, shape).unpack(reader).values()
    np.testing.assert_array_equal(values[0], -written.values[0])
    np.testing.assert_array_equal(values[1:], written.values[1:])


def test_weights_beyond_bf16_are_refused_for_the_host(tmp_path: Path) -> None:
    form, shape = FORMS["compressed-row"], (16, 256)
    written = form.write(np.random.default_rng(0), shape)
    large = torch.full((16, 1), 2.0**127, dtype=torch.bfloat16)
    matrix = found(write(tmp_path, written, weight_scale=stored(large)), form, shape)
    with (
        TensorReader() as reader,
        pytest.raises(CheckpointError, match=r"up_proj\.weight: got a weight beyond BF16, expected finite"),
    ):
        list(DequantisedTensor.of(matrix).chunks(reader))


def test_experts_of_gpt_oss_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    """gate_up_proj of transformers is [E, H, 2I], gate's columns and up's by turns; down_proj [E, I, H]."""
    rng = np.random.default_rng(0)
    experts, hidden, intermediate = 3, 96, 64
    shapes = {"gate_up_proj": (2 * intermediate, hidden), "down_proj": (hidden, intermediate)}
    tensors, whole = {}, {}
    for name, (rows, columns) in shapes.items():
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
        scales = rng.integers(118, 124, (experts, rows, columns // 32), np.uint8)
        stem = f"model.layers.7.mlp.experts.{name}"
        tensors |= {f"{stem}_blocks": blocks, f"{stem}_scales": scales}
        wide = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
        whole[name] = wide.float().numpy()
    header = build_header({name: ("U8", each.shape) for name, each in tensors.items()}, {}, 8)
    path = tmp_path / "one.safetensors"
    path.write_bytes(header + b"".join(each.tobytes() for each in tensors.values()))
    said = Quantisation.of("m", {"quantization_config": {"quant_method": "mxfp4"}})
    infos = read_header(path)

    def read(part: str, expert: int, *shape: int) -> np.ndarray:
        matrix = said.find_packed(infos, f"model.layers.7.mlp.experts.{expert}.{part}_proj.weight", shape)
        assert matrix is not None
        assert (matrix.form, matrix.kind, len(matrix.tensors)) == ("mxfp4", "mxfp4", 2)
        with TensorReader() as reader:
            return matrix.unpack(reader).values()

    for expert in range(experts):
        joined = whole["gate_up_proj"][expert].T
        np.testing.assert_array_equal(read("gate", expert, intermediate, hidden), joined[0::2])
        np.testing.assert_array_equal(read("up", expert, intermediate, hidden), joined[1::2])
        np.testing.assert_array_equal(
            read("down", expert, hidden, intermediate), whole["down_proj"][expert].T
        )
    with pytest.raises(CheckpointError, match="down_proj_blocks: got 3 experts, expected more than 3"):
        read("down", 3, hidden, intermediate)
    words = "gate_up_proj_blocks: got shape [3, 128, 3, 16], expected [3, 192, 3, 16]"
    with pytest.raises(CheckpointError, match=re.escape(words)):
        read("up", 0, 96, hidden)
    assert said.find_packed(infos, "model.layers.7.self_attn.q_proj.weight", (96, 96)) is None


def test_powers_of_two() -> None:
    every = np.arange(253, dtype=np.uint8)
    got = powers_of_two(every, "s")
    np.testing.assert_array_equal(got.astype(np.float64), 2.0 ** (every.astype(np.float64) - 127))
    assert (got.view(np.uint32) & 0xFFFF == 0).all()  # bf16 has them all, the denormal 2^-127 too
    with pytest.raises(CheckpointError, match=r"s: got 2 scale\(s\) above 2\^125, the largest byte 255, exp"):
        powers_of_two(np.array([1, 253, 255], np.uint8), "s")


def test_nibbles() -> None:
    packed = np.array([[0x21, 0x43], [0xF0, 0x0F]], np.uint8)
    assert nibbles(packed).tolist() == [[1, 2, 3, 4], [0, 15, 15, 0]]
