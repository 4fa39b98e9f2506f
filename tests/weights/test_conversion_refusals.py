"""Checkpoints that cannot be converted: a typed error in one sentence that names what is wrong."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from random_checkpoint import FP8_CONFIG, config, make_checkpoint, tensor_shapes

from duckllm.errors import (
    CheckpointError,
    ConfigError,
    DiskSpaceError,
    DuckError,
    ModelNotFoundError,
    UnsupportedModelError,
    WeightFormatError,
)
from duckllm.weights import pack
from duckllm.weights.convert import convert
from duckllm.weights.safetensors_file import build_header
from duckllm.weights.tensor_check import ModelTensors

EXPERT = "model.layers.2.mlp.experts.1."


def refused(tmp_path: Path, kind: type[DuckError]) -> str:
    with pytest.raises(kind) as caught:
        convert(tmp_path / "src", tmp_path / "dst")
    assert type(caught.value) is kind
    message = str(caught.value)
    assert "\n" not in message
    return message


def retype(name: str, dtype: str, **more: object) -> Callable[[dict], None]:
    def edit(tensors: dict) -> None:
        _, shape, data = tensors[name]
        size = int(np.prod(shape))
        tensors[name] = (dtype, shape, (data * 4)[: size * {"F32": 4, "I8": 1}.get(dtype, 1)])

    return edit


def rename(old: str, new: str) -> Callable[[dict], None]:
    def edit(tensors: dict) -> None:
        tensors[new] = tensors.pop(old)

    return edit


def add(name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> Callable[[dict], None]:
    return lambda tensors: tensors.update({name: (dtype, shape, data)})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            rename(EXPERT + "up_proj.weight_scale_inv", EXPERT + "up_proj.weight_scale_2"),
            [
                "1 scale(s) or packed weight(s) that belong to no quantised weight",
                EXPERT + "up_proj.weight_scale_2",
            ],
        ),
        (
            rename(EXPERT + "up_proj.weight_scale_inv", EXPERT + "up_proj.weight_scale_2"),
            ["FP8 without", EXPERT + "up_proj.weight_scale_inv"],
        ),
        (
            lambda t: t.pop(EXPERT + "gate_proj.weight_scale_inv"),
            [EXPERT + "gate_proj.weight", "FP8 without"],
        ),
        (
            lambda t: t.pop("model.layers.0.self_attn.o_proj.weight_scale_inv"),
            ["model.layers.0.self_attn.o_proj.weight: FP8 without"],
        ),
        (
            add("model.layers.0.self_attn.o_proj.weight_zero_point", "F32", (1,), bytes(4)),
            ["model.layers.0.self_attn.o_proj.weight_zero_point", "belong to no quantised weight"],
        ),
        (
            add("model.norm.weight_scale_inv", "F32", (1, 1), bytes(4)),
            ["model.norm.weight_scale_inv", "belong to no quantised weight"],
        ),
        (
            add(EXPERT + "up_proj.scale", "F32", (1, 1), bytes(4)),
            [EXPERT + "up_proj.weight: FP8 with several scales", EXPERT + "up_proj.scale"],
        ),
        (
            add(EXPERT + "up_proj.weight_scale", "F32", (1, 1), bytes(4)),
            [EXPERT + "up_proj.weight: FP8 with several scales", EXPERT + "up_proj.weight_scale"],
        ),
        (
            retype(EXPERT + "down_proj.weight_scale_inv", "I8"),
            ["down_proj.weight_scale_inv: got dtype I8, expected one of F32, BF16, F16, F8_E8M0"],
        ),
        (retype(EXPERT + "down_proj.weight", "F8_E5M2"), ["down_proj.weight: got dtype F8_E5M2"]),
        (retype(EXPERT + "down_proj.weight", "I8"), ["down_proj.weight: got dtype I8"]),
        (
            add(EXPERT + "down_proj.weight_scale_inv", "F32", (2, 1), bytes(8)),
            [EXPERT + "down_proj.weight_scale_inv: got shape [2, 1], expected [1, 1]"],
        ),
    ],
)
def test_scales_and_types_are_never_guessed(tmp_path: Path, edit: Callable, words: list[str]) -> None:
    make_checkpoint(tmp_path / "src", edit=edit)
    message = refused(tmp_path, CheckpointError)
    for word in words:
        assert word in message
    assert not (tmp_path / "dst").exists()


def test_every_missing_and_misshaped_tensor_is_named_at_once(tmp_path: Path) -> None:
    names = [EXPERT + "gate_proj.weight", "model.norm.weight", "model.layers.3.eh_proj.weight"]

    def edit(tensors: dict) -> None:
        for name in names:
            del tensors[name]
            tensors.pop(name + "_scale_inv", None)
        tensors["lm_head.weight"] = ("BF16", (41, 72), bytes(41 * 72 * 2))
        tensors["model.layers.1.input_layernorm.weight"] = ("BF16", (71,), bytes(142))

    make_checkpoint(tmp_path / "src", edit=edit)
    message = refused(tmp_path, CheckpointError)
    assert "3 missing tensor(s)" in message
    for name in names:
        assert name in message
    assert "lm_head.weight: got shape [41, 72], expected [40, 72]" in message
    assert "model.layers.1.input_layernorm.weight: got shape [71], expected [72]" in message


def test_experts_that_the_configuration_does_not_know_are_named(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "src")
    (tmp_path / "src/config.json").write_text(json.dumps(made.config | {"n_routed_experts": 3}))
    message = refused(tmp_path, CheckpointError)
    assert "18 tensor(s) of an expert that config.json has not: model.layers.1.mlp.exp" in message
    assert "model.layers.1.mlp.experts.3.gate_proj.weight, " in message
    assert "model.layers.1.mlp.gate.weight: got shape [4, 72], expected [3, 72]" in message


@pytest.mark.parametrize(
    ("present", "declared", "words"),
    [
        ([3], 2, "got 2 with tensors of layer 3 alone, expected those of layers 3 to 4, or of"),
        ([4], 2, "got 2 with tensors of layer 4 alone, expected those of layers 3 to 4, or of"),
        ([3, 4], 3, "got 3 with tensors of layers 3, 4 alone, expected those of layers 3 to 5, or"),
    ],
)
def test_layers_of_multi_token_prediction_that_are_not_there(
    tmp_path: Path, present: list[int], declared: int, words: str
) -> None:
    def edit(tensors: dict) -> None:
        stem = "model.layers.3."
        layer = {name: tensors.pop(name) for name in list(tensors) if name.startswith(stem)}
        for number in present:
            tensors |= {name.replace(stem, f"model.layers.{number}."): each for name, each in layer.items()}

    made = make_checkpoint(tmp_path / "src", edit=edit)
    changes = {"num_nextn_predict_layers": declared}
    (tmp_path / "src/config.json").write_text(json.dumps(made.config | changes))
    assert f"config.json: num_nextn_predict_layers: {words}" in refused(tmp_path, CheckpointError)
    assert not (tmp_path / "dst").exists()


def test_a_model_saved_again_may_have_lost_its_layers_of_multi_token_prediction(tmp_path: Path) -> None:
    def edit(tensors: dict) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.3.")]:
            del tensors[name]

    make_checkpoint(tmp_path / "src", edit=edit)
    assert sorted(convert(tmp_path / "src", tmp_path / "dst").expert_layers) == [1, 2]


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("name", [EXPERT + "down_proj.weight", "model.layers.1.self_attn.q_b_proj.weight"])
def test_nan_bytes_are_counted_by_tensor(tmp_path: Path, code: int, name: str) -> None:
    def edit(tensors: dict) -> None:
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape, bytes([code, code]) + data[2:-1] + bytes([code]))

    make_checkpoint(tmp_path / "src", edit=edit)
    assert f"{name}: got 3 NaN" in refused(tmp_path, WeightFormatError)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_source_weights_are_counted_by_tensor(tmp_path: Path, value: float) -> None:
    name = EXPERT + "up_proj.weight"

    def edit(tensors: dict) -> None:
        dtype, shape, data = tensors[name]
        weights = np.frombuffer(data, "<f4").copy()
        weights[[3, 70]] = value
        tensors[name] = (dtype, shape, weights.tobytes())

    make_checkpoint(tmp_path / "src", dtype="F32", edit=edit)
    assert f"{name}: got 2 non-finite" in refused(tmp_path, WeightFormatError)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.self_attn.q_b_proj.weight", "model.norm.weight"]
)
def test_non_finite_weights_of_the_host_are_counted_by_tensor(
    tmp_path: Path, dtype: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(tensors: dict) -> None:
        _, shape, data = tensors[name]
        values = np.frombuffer(data, {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[dtype]).copy()
        values[[0, 5, -1]] = [0x7FC0, 0xFF80, 0x7F80] if dtype == "BF16" else [np.nan, -np.inf, np.inf]
        tensors[name] = (dtype, shape, values.tobytes())

    make_checkpoint(tmp_path / "src", dtype=dtype, edit=edit)
    words = f"{name}: got 3 non-finite weight(s), expected finite weights"
    assert words in refused(tmp_path, WeightFormatError)
    with monkeypatch.context() as patched:  # a conversion of earlier is not verified
        patched.setattr(pack, "host_chunks", pack.tensor_chunks)
        convert(tmp_path / "src", tmp_path / "dst")
    with pytest.raises(WeightFormatError, match=re.escape(words)):
        convert(tmp_path / "src", tmp_path / "dst", verify=True)


HOST = (
    "model.layers.0.self_attn.o_proj.",
    "model.layers.0.mlp.down_proj.",
    "model.layers.1.mlp.shared_experts.up_proj.",
)
SCALES = [
    (np.nan, "got a scale of nan (1 of 1 are out of range), expected scales from 0 to 7.6e+35"),
    (np.inf, "got a scale of inf (1 of 1 are out of range), expected scales from 0 to 7.6e+35"),
    (1e36, "got a scale of 1e+36 (1 of 1 are out of range), expected scales from 0 to 7.6e+35"),
    (-1.0, "got a scale of -1 (1 of 1 are out of range), expected scales from 0 to 7.6e+35"),
    (0.0, "got 1 scale(s) of zero, expected others for codes that are not all zero"),
]


@pytest.mark.parametrize(("value", "words"), SCALES)
@pytest.mark.parametrize("stem", [EXPERT + "up_proj.", *HOST, "model.layers.3.self_attn.q_a_proj."])
def test_damaged_scales_are_refused_whosever_they_are(
    tmp_path: Path, stem: str, value: float, words: str
) -> None:
    """Of experts, attention, dense MLPs, shared experts and layers of multi-token prediction."""
    name = f"{stem}weight_scale_inv"
    make_checkpoint(tmp_path / "src", edit=add(name, "F32", (1, 1), np.array([value], "<f4").tobytes()))
    assert f"{name}: {words}" in refused(tmp_path, CheckpointError)


def test_damaged_scales_of_the_host_are_named_all_at_once_before_anything_is_written(tmp_path: Path) -> None:
    def edit(tensors: dict) -> None:
        for stem, value in zip(HOST, (np.nan, -2.0, 0.0), strict=True):
            data = np.array([value], "<f4").tobytes()
            tensors[f"{stem}weight_scale_inv"] = ("F32", (1, 1), data)

    make_checkpoint(tmp_path / "src", edit=edit)
    message = refused(tmp_path, CheckpointError)
    for stem, words in zip(HOST, ("a scale of nan", "a scale of -2 ", "1 scale(s) of zero"), strict=True):
        assert f"{stem}weight_scale_inv: got {words}" in message
    assert not (tmp_path / "dst").exists()


def test_a_matrix_of_zeros_may_have_a_scale_of_zero(tmp_path: Path) -> None:
    def edit(tensors: dict) -> None:
        for part in ("weight", "weight_scale_inv"):
            dtype, shape, data = tensors[HOST[0] + part]
            tensors[HOST[0] + part] = (dtype, shape, bytes(len(data)))

    make_checkpoint(tmp_path / "src", edit=edit)
    assert convert(tmp_path / "src", tmp_path / "dst", verify=True).num_experts == 4


@pytest.mark.parametrize(
    ("dtype", "shape", "words"),
    [
        ("I8", (1, 1), "got dtype I8, expected one of F32, BF16, F16, F8_E8M0"),
        ("F32", (2, 1), "got shape [2, 1], expected [1, 1] (one scale per block of 128 x 128) for 72 x 16"),
    ],
)
def test_scales_of_the_host_of_another_type_or_shape_are_refused(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], words: str
) -> None:
    name = HOST[0] + "weight_scale_inv"
    size = math.prod(shape) * (4 if dtype == "F32" else 1)
    make_checkpoint(tmp_path / "src", edit=add(name, dtype, shape, bytes([1]) * size))
    assert f"{name}: {words}" in refused(tmp_path, CheckpointError)


@pytest.mark.parametrize(("value", "words"), SCALES)
def test_a_conversion_of_earlier_whose_scales_are_damaged_is_not_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, words: str
) -> None:
    """Checkpoint and conversion are the same, and both are wrong."""
    name = HOST[0] + "weight_scale_inv"
    make_checkpoint(tmp_path / "src", edit=add(name, "F32", (1, 1), np.array([value], "<f4").tobytes()))
    with monkeypatch.context() as patched:
        patched.setattr(ModelTensors, "check_host_scales", lambda tensors: None)
        patched.setattr(pack, "host_chunks", pack.tensor_chunks)
        convert(tmp_path / "src", tmp_path / "dst")
    with pytest.raises(CheckpointError, match=re.escape(f"{name}: {words}")):
        convert(tmp_path / "src", tmp_path / "dst", verify=True)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, UnsupportedModelError, ["LlamaForCausalLM", "DeepseekV32"]),
        (
            {"architectures": None},
            UnsupportedModelError,
            ["architectures: got None", "DeepseekV32ForCausalLM"],
        ),
        ({"n_routed_experts": None}, CheckpointError, ["n_routed_experts: got None"]),
        ({"hidden_size": "72"}, CheckpointError, ["hidden_size: got '72'"]),
        ({"moe_intermediate_size": 0}, CheckpointError, ["moe_intermediate_size: got 0"]),
        ({"num_hidden_layers": True}, CheckpointError, ["num_hidden_layers: got True"]),
        ({"first_k_dense_replace": -1}, CheckpointError, ["first_k_dense_replace: got -1"]),
        ({"mlp_layer_types": ["sparse"]}, CheckpointError, ["mlp_layer_types"]),
        (
            {"quantization_config": {"quant_method": "quark"}},
            UnsupportedModelError,
            ["quantization_config.quant_method: got 'quark', expected 'fp8' or"],
        ),
    ],
)
def test_configurations_that_are_not_understood(
    tmp_path: Path, changes: dict, kind: type[DuckError], words: list[str]
) -> None:
    made = make_checkpoint(tmp_path / "src")
    (tmp_path / "src/config.json").write_text(json.dumps(made.config | changes))
    message = refused(tmp_path, kind)
    for word in words:
        assert word in message


def test_the_official_scale_format_note_is_accepted(tmp_path: Path) -> None:
    """DeepSeek-V3.2 says ``ue8m0`` in its configuration, and stores its scales in f32."""
    made = make_checkpoint(tmp_path / "src")
    noted = {"quantization_config": FP8_CONFIG | {"scale_fmt": "ue8m0", "activation_scheme": "dynamic"}}
    (tmp_path / "src/config.json").write_text(json.dumps(made.config | noted))
    assert convert(tmp_path / "src", tmp_path / "dst").num_experts == 4


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b""])
def test_a_broken_config(tmp_path: Path, content: bytes) -> None:
    make_checkpoint(tmp_path / "src")
    (tmp_path / "src/config.json").write_bytes(content)
    assert "config.json" in refused(tmp_path, CheckpointError)


def test_no_folder_and_no_model(tmp_path: Path) -> None:
    assert "src: no such folder" in refused(tmp_path, ModelNotFoundError)
    (tmp_path / "src").mkdir()
    assert "no config.json" in refused(tmp_path, ModelNotFoundError)
    (tmp_path / "src/config.json").write_text("{}")
    assert "0 safetensors files" in refused(tmp_path, ModelNotFoundError)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1, -5000])
def test_a_truncated_file(tmp_path: Path, keep: int) -> None:
    make_checkpoint(tmp_path / "src")
    file = tmp_path / "src/model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model-00002-of-00003.safetensors" in refused(tmp_path, CheckpointError)
    assert not (tmp_path / "dst").exists()


def with_header(header: object) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(64)


@pytest.mark.parametrize(
    "content",
    [
        (10**7).to_bytes(8, "little") + bytes(50),
        (2**63).to_bytes(8, "little") + bytes(50),
        with_header(b"not json"),
        with_header([]),
        with_header({"a": 1}),
        with_header({"a": {"dtype": "F32", "shape": [1]}}),
        with_header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}),
        with_header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}),
        with_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}),
        with_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}),
        with_header({"a": {"dtype": "F6_NEW", "shape": [1], "data_offsets": [0, 4]}}),
        with_header({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}),
    ],
)
def test_a_malformed_header(tmp_path: Path, content: bytes) -> None:
    make_checkpoint(tmp_path / "src", shards=1)
    (tmp_path / "src/model.safetensors").write_bytes(content)
    assert "model.safetensors" in refused(tmp_path, CheckpointError)


def test_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src", shards=1)
    content = with_header({"odd": {"dtype": "F6_NEW", "shape": [1], "data_offsets": [0, 4]}})
    (tmp_path / "src/model.safetensors").write_bytes(content)
    assert "odd: got dtype 'F6_NEW'" in refused(tmp_path, CheckpointError)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda m: m.update({"lm_head.weight": "absent.safetensors"}), "absent.safetensors"),
        (lambda m: m.update({"lm_head.weight": "../secret.safetensors"}), "plain file name"),
        (lambda m: m.update({"ghost.weight": "model-00001-of-00003.safetensors"}), "ghost.weight"),
        (lambda m: m.update({"lm_head.weight": 3}), "weight_map"),
    ],
)
def test_a_wrong_index(tmp_path: Path, change: Callable, word: str) -> None:
    make_checkpoint(tmp_path / "src")
    path = tmp_path / "src/model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))
    assert word in refused(tmp_path, CheckpointError)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    (tmp_path / "src/model.safetensors.index.json").unlink()
    assert "3 safetensors files" in refused(tmp_path, CheckpointError)


def test_a_disk_too_small_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """A sparse file stands for a checkpoint of terabytes."""
    big = config(vocab_size=10**8, hidden_size=10_000)
    entries = {name: ("BF16", shape) for name, shape in tensor_shapes(big).items()}
    header = build_header(entries, {}, 8)
    size = len(header) + sum(2 * math.prod(shape) for _, shape in entries.values())
    (tmp_path / "src").mkdir()
    (tmp_path / "src/config.json").write_text(json.dumps(big))
    with (tmp_path / "src/model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(size)
    message = refused(tmp_path, DiskSpaceError)
    assert f"expected at least {size // 10**12}," in message
    assert "bytes free" in message
    assert not (tmp_path / "dst").exists()


def test_a_destination_that_cannot_be_made(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    (tmp_path / "file").write_text("")
    with pytest.raises(DuckError, match=r"dst: got .*file/dst"):
        convert(tmp_path / "src", tmp_path / "file" / "dst")


def test_a_model_without_routed_experts_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    (tmp_path / "src" / "config.json").write_text(
        json.dumps(config(first_k_dense_replace=3, num_nextn_predict_layers=0))
    )
    with pytest.raises(UnsupportedModelError, match="got 3 layers without routed experts, expected some"):
        convert(tmp_path / "src", tmp_path / "dst")


def test_a_model_that_is_converted_already_is_no_checkpoint(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst")
    whole = "it is a converted model: use it as it is, or convert the checkpoint that it was made from"
    for destination in ("other", "dst"):
        with pytest.raises(ConfigError) as caught:
            convert(tmp_path / "dst", tmp_path / destination)
        assert str(caught.value) == f"src: got '{tmp_path}/dst', expected a checkpoint ({whole})"
    (tmp_path / "dst/duck.json").rename(tmp_path / "dst/.duck-progress.json")
    part = r"it holds an unfinished conversion: the same command as before goes on with it"
    with pytest.raises(ConfigError, match=rf"src: got '.*dst', expected a checkpoint \({part}\)"):
        convert(tmp_path / "dst", tmp_path / "other")
    assert not (tmp_path / "other").exists()
