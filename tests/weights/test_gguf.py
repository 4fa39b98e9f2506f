"""GGUF files beside config.json: experts and the host's matrices against the gguf package's own values."""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from random_checkpoint import RandomCheckpoint, to_bytes, write_checkpoint

from duckllm.errors import CheckpointError, MissingPackageError, UnsupportedModelError
from duckllm.models.inspection import inspect_model
from duckllm.weights.architectures import layout_of
from duckllm.weights.checkpoint import Checkpoint
from duckllm.weights.convert import convert
from duckllm.weights.e4m3 import dequantise
from duckllm.weights.grouped import unpack_quantised_expert
from duckllm.weights.host_tensors import HostTensors
from duckllm.weights.layout import PROJECTIONS
from duckllm.weights.manifest import Manifest
from duckllm.weights.reader import ExpertFile
from duckllm.weights.safetensors_file import TensorReader
from duckllm.weights.source import ExpertTensors
from duckllm.weights.tensor_check import find_tensors
from duckllm.weights.units import unpack_expert_units

Type = gguf.GGMLQuantizationType
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 48,
    "hidden_size": 256,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def names() -> dict[str, tuple[str, tuple[int, ...]]]:
    """llama.cpp's names as the package says them, with Hugging Face's and the shapes."""
    theirs = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, CONFIG["num_hidden_layers"])
    layout = layout_of(CONFIG, {})
    shapes = dict(layout.host_shapes)
    for layer in layout.moe_layers:
        for part in PROJECTIONS:
            stacked = (layout.num_experts, *layout.expert_shape(part))
            shapes[f"{layout.experts_prefix(layer)}{part}.weight"] = stacked
    found = {theirs.get_name(name, try_suffixes=(".weight",)): (name, each) for name, each in shapes.items()}
    assert None not in found
    assert len(found) == 2 * 12 + 3
    return found


def random_q6_k(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Blocks of 210 bytes for 256 weights, the last two a scale in F16; the package cannot quantise to it."""
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // 256, 210), np.uint8)
    blocks[:, 208:] = rng.uniform(1e-4, 1e-3, (len(blocks), 1)).astype("<f2").view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def make(
    folder: Path,
    experts: Type = Type.Q4_0,
    host: Type = Type.Q8_0,
    family: str = "qwen3moe",
    parts: int = 1,
    edit: Callable[[str, np.ndarray], None] | None = None,
    **types: Type,
) -> dict[str, np.ndarray]:
    """Writes a GGUF file, or parts of one, with config.json; returns the weights by Hugging Face's names.

    ``types`` are those of tensors of one name in llama.cpp, ``output`` or ``ffn_down_exps``.
    """
    rng = np.random.default_rng(0)
    write_checkpoint(RandomCheckpoint(folder, CONFIG), 1)
    (folder / "model.safetensors").unlink()
    values, written = {}, []
    for name, (ours, shape) in names().items():
        short = name.split(".")[-2]
        kind = Type.F32 if len(shape) == 1 or short == "ffn_gate_inp" else host
        kind = types.get(short, experts if len(shape) == 3 else kind)
        weights = rng.standard_normal(shape).astype(np.float32) / 16
        if kind == Type.Q6_K:
            data = random_q6_k(rng, shape)
        elif kind in (Type.F32, Type.F16):
            data = weights.astype(np.float32 if kind == Type.F32 else np.float16)
        else:
            data = gguf.quantize(weights, kind)
        values[ours] = data.astype(np.float32) if data.dtype != np.uint8 else gguf.dequantize(data, kind)
        if edit is not None:
            edit(name, data)
        written.append((name, data, kind))
    for part in range(parts):
        file = "model.gguf" if parts == 1 else f"model-{part + 1:05d}-of-{parts:05d}.gguf"
        writer = gguf.GGUFWriter(folder / file, family)
        writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
        for name, data, kind in written[part::parts]:
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return values


def experts_of(folder: Path) -> ExpertTensors:
    checkpoint = Checkpoint.open(folder)
    return find_tensors(checkpoint, layout_of(checkpoint.config, checkpoint.tensors)).experts


@pytest.mark.parametrize("parts", [1, 3])
def test_experts_in_q4_0_are_kept_bit_for_bit(tmp_path: Path, parts: int) -> None:
    values = make(tmp_path, parts=parts)
    experts = experts_of(tmp_path)
    assert (experts.kept_format(0), experts.kept_format(1), experts.dtype) == ("int4", "int4", "gguf Q4_0")
    with TensorReader() as reader:
        for layer, expert in ((0, 0), (0, 3), (1, 2)):
            read = experts.read_packed(reader, layer, expert)
            for part in ("gate", "up", "down"):
                got = getattr(read, part)
                whole = values[f"model.layers.{layer}.mlp.experts.{part}_proj.weight"]
                np.testing.assert_array_equal(got.values(), whole[expert])
                assert set(np.unique(got.codes)) == set(range(16))
                assert (got.scales < 0).any()  # Q4_0's scales have the sign of the largest weight, turned


@pytest.mark.parametrize("host", [Type.Q8_0, Type.Q4_0, Type.F16])
def test_the_hosts_tensors(tmp_path: Path, host: Type) -> None:
    values = make(tmp_path / "src", host=host, output=Type.Q6_K)
    manifest = convert(tmp_path / "src", tmp_path / "dst", verify=True)
    tensors = HostTensors(tmp_path / "dst")
    wanted = {name: each for name, each in values.items() if ".experts." not in name}
    assert set(tensors.names()) == set(wanted)
    for name, each in wanted.items():
        got, expected = tensors.get(name), torch.from_numpy(each)
        if got.dtype == torch.bfloat16:
            expected = expected.bfloat16()
        assert torch.equal(got.float(), expected.float()), name
        is_wide = each.ndim == 1 or name.endswith("mlp.gate.weight")
        kept = torch.float16 if host == Type.F16 and name != "lm_head.weight" else torch.bfloat16
        assert got.dtype == (torch.float32 if is_wide else kept)
    told = manifest.source["host_dequantised"]
    forms = {Type.Q8_0: "gguf Q6_K and gguf Q8_0", Type.Q4_0: "gguf Q4_0 and gguf Q6_K"}
    assert told["form"] == forms.get(host, "gguf Q6_K")
    assert told["matrices"] == (1 if host == Type.F16 else 10)


def test_converted_experts_in_q4_0_have_the_codes_of_the_file(tmp_path: Path) -> None:
    values = make(tmp_path / "src")
    manifest = convert(tmp_path / "src", tmp_path / "dst", verify=True)
    assert (manifest.format, manifest.source["quantisation_error"]) == ("int4", None)
    for layer, expert in ((0, 1), (1, 3)):
        units = np.array(ExpertFile.open(manifest, layer).units[expert])
        got = unpack_quantised_expert(units, 128, 256, "int4")
        for part in ("gate", "up", "down"):
            whole = values[f"model.layers.{layer}.mlp.experts.{part}_proj.weight"]
            np.testing.assert_array_equal(getattr(got, part).values(), whole[expert])


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.F16, Type.Q5_0])
def test_other_experts_are_rounded_as_floats_are(tmp_path: Path, kind: Type) -> None:
    values = make(tmp_path / "src", kind)
    assert experts_of(tmp_path / "src").kept_format(1) == ""
    manifest = convert(tmp_path / "src", tmp_path / "dst", verify=True)
    assert manifest.source["dtype"] == ("F16" if kind == Type.F16 else f"gguf {kind.name}")
    assert 0.02 < manifest.source["quantisation_error"]["rms_relative"] < 0.03
    units = np.array(ExpertFile.open(manifest, 1).units[3])
    got = unpack_expert_units(units, 128, 256, manifest.format, manifest.scale_layout)
    whole = values["model.layers.1.mlp.experts.up_proj.weight"][3]
    error = dequantise(got.up, got.up_scales) - whole
    assert np.linalg.norm(error) < 0.03 * np.linalg.norm(whole)


def test_a_layer_of_several_types_is_not_kept(tmp_path: Path) -> None:
    """Some files have the first layers' ffn_down in Q4_1, whose groups have an offset, and no zero point."""
    values = make(tmp_path, ffn_down_exps=Type.Q4_1)
    experts = experts_of(tmp_path)
    assert [experts.kept_format(layer) for layer in (0, 1)] == ["", ""]
    with TensorReader() as reader:
        read, error = experts.read(reader, 0, 1)
    assert error is not None
    whole = values["model.layers.0.mlp.experts.down_proj.weight"][1]
    assert np.linalg.norm(dequantise(read.down, read.down_scales) - whole) < 0.03 * np.linalg.norm(whole)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q8_0])
@pytest.mark.parametrize(("scale", "said"), [(0.0, "zero, expected others"), (np.inf, "non-finite")])
def test_blocks_without_a_scale_are_damaged(tmp_path: Path, kind: Type, scale: float, said: str) -> None:
    def edit(name: str, data: np.ndarray) -> None:
        if name == "blk.1.ffn_up_exps.weight":
            blocks = data[2].reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
            blocks[:, :2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)

    make(tmp_path, kind, edit=edit)
    experts = experts_of(tmp_path)
    read = experts.read_packed if kind == Type.Q4_0 else experts.read
    with TensorReader() as reader:
        read(reader, 1, 1)
        with pytest.raises(CheckpointError, match=rf"blk\.1\.ffn_up_exps\.weight\[2\]: .*{said}"):
            read(reader, 1, 2)


def test_an_expert_of_zeros_is_none_that_is_damaged(tmp_path: Path) -> None:
    def edit(name: str, data: np.ndarray) -> None:
        if name == "blk.0.ffn_up_exps.weight":
            data[1] = gguf.quantize(np.zeros((128, 256), np.float32), Type.Q8_0)

    make(tmp_path, Type.Q8_0, edit=edit)
    with TensorReader() as reader:
        weights, _ = experts_of(tmp_path).read(reader, 0, 1)
    assert not (weights.up & 0x7F).any()


def test_a_folder_with_a_gguf_file_is_inspected(tmp_path: Path) -> None:
    make(tmp_path / "src")
    found = inspect_model(tmp_path / "src")
    assert (found.kind, found.dtype) == ("checkpoint", "gguf Q4_0")
    convert(tmp_path / "src", tmp_path / "dst")
    assert inspect_model(tmp_path / "dst").parts == found.parts
    source = Manifest.load(tmp_path / "dst").source
    assert source["fingerprint"] == Checkpoint.open(tmp_path / "src").fingerprint()


def test_other_families_are_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path, family="deepseek2")
    words = "model.gguf: general.architecture: got 'deepseek2', expected 'qwen3moe'"
    with pytest.raises(UnsupportedModelError, match=re.escape(words)):
        Checkpoint.open(tmp_path)


def test_parts_that_are_missing_and_files_that_do_not_belong_together(tmp_path: Path) -> None:
    make(tmp_path / "parts", parts=3)
    (tmp_path / "parts" / "model-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003\.gguf, model-00003-of-00003\.gguf, e"):
        Checkpoint.open(tmp_path / "parts")
    make(tmp_path / "two")
    (tmp_path / "two" / "other.gguf").write_bytes((tmp_path / "two" / "model.gguf").read_bytes())
    with pytest.raises(CheckpointError, match=r"got model\.gguf, other\.gguf, expected one GGUF file"):
        Checkpoint.open(tmp_path / "two")


@pytest.mark.parametrize("length", [0, 3, 20, 100, 2000])
def test_a_file_that_ends_early(tmp_path: Path, length: int) -> None:
    make(tmp_path)
    path = tmp_path / "model.gguf"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"model\.gguf: got no whole GGUF file"):
        Checkpoint.open(tmp_path)


def test_a_file_without_its_last_byte(tmp_path: Path) -> None:
    make(tmp_path)
    path = tmp_path / "model.gguf"
    size = max(info.offset + info.num_bytes for info in Checkpoint.open(tmp_path).tensors.values())
    path.write_bytes(path.read_bytes()[: size - 1])
    with pytest.raises(CheckpointError, match=r"model\.gguf: got no whole GGUF file"):
        Checkpoint.open(tmp_path)


def of_metadata(kind: int, payload: bytes, count: int = 1) -> bytes:
    """A file with a value of metadata and nothing else."""
    return b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, count, 1, b"x", kind) + payload


U8, ARRAY = 0, 9


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (of_metadata(ARRAY, struct.pack("<IQ", U8, 1 << 40)), "a list of 1099511627776 items"),
        (
            of_metadata(ARRAY, struct.pack("<IQ", U8, 1 << 20)),
            "it has 49 bytes, and says something of byte 50",
        ),
        (of_metadata(U8, b"1", 1 << 62), "it has 38 bytes, and says something of byte 46"),
        (of_metadata(ARRAY, struct.pack("<IQ", ARRAY, 1) * 5000), "maximum recursion depth exceeded"),
    ],
)
def test_headers_that_say_more_than_a_file_can_hold_end_at_once(
    tmp_path: Path, data: bytes, words: str
) -> None:
    make(tmp_path)
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"model\.gguf: got no whole GGUF file \({words}"):
        Checkpoint.open(tmp_path)


def test_numbers_in_the_other_order_of_bytes_are_refused(tmp_path: Path) -> None:
    make(tmp_path)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3moe", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("output_norm.weight", np.ones(256, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="got a GGUF file of big-endian numbers"):
        Checkpoint.open(tmp_path)


def test_shapes_that_are_not_the_configurations(tmp_path: Path) -> None:
    make(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"num_experts": 4', '"num_experts": 5'))
    with pytest.raises(CheckpointError) as caught:
        experts_of(tmp_path)
    assert "blk.0.ffn_gate_exps.weight: got 4 experts, expected more than 4" in str(caught.value)
    path.write_text(path.read_text().replace('"num_experts": 5', '"num_experts": 4').replace("256", "512"))
    with pytest.raises(CheckpointError) as caught:
        experts_of(tmp_path)
    words = "blk.1.ffn_down_exps.weight: got shape [4, 256, 128], expected [4, 512, 128]"
    assert words in str(caught.value)


def test_without_the_package_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingPackageError, match=r"model: gguf is not installed; .*'duckllm\[gguf\]'"):
        Checkpoint.open(tmp_path)


def test_safetensors_come_first(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}}')
    assert len(Checkpoint.open(tmp_path).tensors) == len(names())  # an index alone holds no weights
    (tmp_path / "model.safetensors.index.json").unlink()
    made = RandomCheckpoint(tmp_path, CONFIG)
    made.tensors["model.norm.weight"] = ("BF16", (256,), to_bytes(np.ones(256), "BF16"))
    write_checkpoint(made, 1)
    assert set(Checkpoint.open(tmp_path).tensors) == {"model.norm.weight"}
