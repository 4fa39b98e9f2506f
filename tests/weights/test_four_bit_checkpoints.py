"""Checkpoints of 4-bit weights: the experts and the host's matrices, against what the tools wrote."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from random_checkpoint import (
    RandomCheckpoint,
    Tensor,
    config,
    make_checkpoint,
    tensor_shapes,
    write_checkpoint,
)

from duckllm.cli.convert import describe, summary
from duckllm.errors import CheckpointError, ConfigError, UnsupportedModelError
from duckllm.models.inspection import inspect_model
from duckllm.weights.architectures import layout_of
from duckllm.weights.checkpoint import Checkpoint
from duckllm.weights.convert import convert
from duckllm.weights.grouped import pack_quantised_expert, unpack_quantised_expert
from duckllm.weights.host_tensors import HostTensors
from duckllm.weights.reader import ExpertFile
from duckllm.weights.safetensors_file import TensorReader
from duckllm.weights.tensor_check import ModelTensors, find_tensors
from support.checkpoints import BASE_CONFIG
from support.four_bit import FORMS, Form, Written, gptq

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "v_head_dim": 32,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 0,
    "n_routed_experts": 2,
}
ALL = re.compile(r".*_proj\.weight")  # what GPTQ and AWQ quantise
EXPERTS = re.compile(r".*\.experts\.\d+\..*_proj\.weight")  # what Kimi-K2-Thinking does


def make(
    folder: Path, form: Form, which: re.Pattern[str] = ALL, **changes: object
) -> tuple[RandomCheckpoint, dict[str, Written]]:
    """A checkpoint whose matrices of some names are 4-bit, and those by the names of their weights."""
    rng = np.random.default_rng(0)
    written: dict[str, Written] = {}

    def edit(tensors: dict[str, Tensor]) -> None:
        for name, shape in tensor_shapes(config(**SIZES)).items():
            if len(shape) != 2 or not which.fullmatch(name) or "kv_a_proj" in name or "weights_proj" in name:
                continue
            written[name] = form.write(rng, shape)  # type: ignore[arg-type]
            del tensors[name]
            stem = name.removesuffix("weight")
            tensors |= {stem + part: each for part, each in written[name].tensors.items()}

    said = {"quantization_config": form.config} | changes
    return make_checkpoint(folder, dtype="BF16", edit=edit, **(SIZES | said)), written  # type: ignore[arg-type]


def tensors_of(folder: Path) -> ModelTensors:
    checkpoint = Checkpoint.open(folder)
    return find_tensors(checkpoint, layout_of(checkpoint.config, checkpoint.tensors))


@pytest.mark.parametrize("name", FORMS)
def test_experts_are_kept_bit_for_bit(tmp_path: Path, name: str) -> None:
    form = FORMS[name]
    _, written = make(tmp_path / "src", form, EXPERTS)
    experts = tensors_of(tmp_path / "src").experts
    assert (experts.kept_format(1), experts.dtype) == (form.format, form.name)
    assert (experts.scale_layout, experts.requantised) == ("block", "")
    with TensorReader() as reader:
        for expert in range(2):
            read = experts.read_packed(reader, 1, expert)
            assert read.format == form.format
            units = pack_quantised_expert(read, form.format)
            back = unpack_quantised_expert(units, 128, 256, form.format)
            for part in ("gate", "up", "down"):
                stem = f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"
                values = getattr(back, part).values().astype(np.float64)
                np.testing.assert_array_equal(values, written[stem].values)


@pytest.mark.parametrize("name", ["compressed-32", "gptq-128", "gptq-zeros", "awq-128", "mxfp4"])
def test_the_hosts_matrices_become_bf16(tmp_path: Path, name: str) -> None:
    made, written = make(tmp_path / "src", FORMS[name])
    manifest = convert(tmp_path / "src", tmp_path / "dst", verify=True)
    tensors = HostTensors(tmp_path / "dst")
    host = {weight: each for weight, each in written.items() if ".experts." not in weight}
    assert len(host) > 8
    for weight, each in host.items():
        expected = torch.from_numpy(each.values).bfloat16()
        assert torch.equal(tensors.get(weight), expected), weight
    for weight in ("model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"):
        assert tensors.get(weight).view(torch.int16).numpy().tobytes() == made.tensors[weight][2]
    assert not [left for left in tensors.names() if left.endswith(("qweight", "scales", "packed", "g_idx"))]
    stored = sum(len(data) for each in host.values() for _, _, data in each.tensors.values())
    assert manifest.source["host_dequantised"] == {
        "form": FORMS[name].name,
        "matrices": len(host),
        "stored_bytes": stored,
        "bytes": sum(2 * each.values.size for each in host.values()),
    }


def test_the_command_says_what_became_of_the_host(tmp_path: Path) -> None:
    make(tmp_path / "src", FORMS["gptq-128"])
    told = describe(summary(convert(tmp_path / "src", tmp_path / "dst"), False, 0.0))
    words = (
        r"\nthe host's \d+ matrices of gptq int4 are BF16 now, each value rounded once: .+ KiB, .+ before\n"
    )
    assert re.search(words, told), told
    assert "int4 from gptq int4" in told
    assert "rounded to e4m3" not in told


def test_a_checkpoint_of_4_bit_experts_alone_says_nothing_of_the_host(tmp_path: Path) -> None:
    make(tmp_path / "src", FORMS["compressed-32"], EXPERTS)
    assert convert(tmp_path / "src", tmp_path / "dst").source["host_dequantised"] is None


def test_layers_of_several_kinds(tmp_path: Path) -> None:
    """A layer that the tool left as it was is none of 4 bits; one of which a part was left is none either."""
    some = re.compile(r".*\.layers\.(1\.mlp\.experts\.\d+\..*|2\.mlp\.experts\.0\.up)_proj\.weight")
    sizes = {"num_hidden_layers": 3}
    rng = np.random.default_rng(0)
    form = FORMS["gptq-128"]

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if some.fullmatch(name)]:
            stem = name.removesuffix("weight")
            shape = tensors.pop(name)[1]
            tensors |= {stem + part: each for part, each in form.write(rng, shape).tensors.items()}

    make_checkpoint(
        tmp_path / "src", dtype="BF16", edit=edit, quantization_config=form.config, **(SIZES | sizes)
    )
    experts = tensors_of(tmp_path / "src").experts
    assert [experts.kept_format(layer) for layer in (1, 2)] == ["int4", ""]
    assert experts.dtype == "gptq int4"  # 7 of 12 matrices


def test_a_layer_of_several_kinds_of_4_bits_is_refused(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.1.mlp.experts.1.up_proj.weight_scale"
        dtype, shape, data = tensors[name]
        assert dtype == "BF16"
        scales = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        tensors[name] = ("F16", shape, scales.astype("<f2").tobytes())

    made, _ = make(tmp_path / "src", FORMS["compressed-32"], EXPERTS)
    edit(made.tensors)
    write_checkpoint(made, 3)
    words = (
        "model.layers.1.mlp.experts: got int4 with bf16 scales and int4 with f16 scales, expected one kind"
    )
    with pytest.raises(UnsupportedModelError, match=re.escape(words)):
        tensors_of(tmp_path / "src").experts.kept_format(1)


def test_leave_to_round_again_is_refused_where_nothing_is(tmp_path: Path) -> None:
    make(tmp_path / "src", FORMS["compressed-32"])
    make_checkpoint(tmp_path / "bf16", dtype="BF16")
    for source, weight_format in (("src", "auto"), ("src", "int4-bf16"), ("bf16", "int8")):
        with pytest.raises(ConfigError, match=r"^requantise: got True, expected nothing where"):
            convert(tmp_path / source, tmp_path / "dst", weight_format=weight_format, requantise=True)
    manifest = convert(tmp_path / "src", tmp_path / "dst", weight_format="int8", requantise=True)
    assert manifest.format == "int8"


def test_groups_that_no_format_holds_are_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path / "src", gptq(16), EXPERTS)
    words = (
        "model.layers.1.mlp.experts.0.gate_proj.weight: got groups of 16 weights, expected a multiple of 32"
    )
    with pytest.raises(CheckpointError, match=re.escape(words)) as caught:
        tensors_of(tmp_path / "src")
    assert "down_proj" not in str(caught.value)  # 16 channels are a stripe's


def test_what_is_left_over_and_what_is_missing_is_named(tmp_path: Path) -> None:
    made, _ = make(tmp_path / "src", FORMS["gptq-128"])
    gone = "model.layers.1.mlp.experts.1.up_proj."
    for part in ("qweight", "scales"):
        del made.tensors[gone + part]
    del made.tensors["model.layers.0.mlp.up_proj.qzeros"]
    write_checkpoint(made, 3)
    with pytest.raises(CheckpointError) as caught:
        tensors_of(tmp_path / "src")
    words = str(caught.value)
    assert f"1 missing tensor(s): {gone}weight" in words
    assert "model.layers.0.mlp.up_proj.qzeros: got none, expected the part of a 4-bit matrix" in words
    left = f"{gone}qzeros, {gone}g_idx"  # of the other one all are accounted for
    assert words.endswith(f"2 scale(s) or packed weight(s) that belong to no quantised weight: {left}")


def test_biases_of_zeros_beside_gptqs_weights_do_no_harm(tmp_path: Path) -> None:
    made, _ = make(tmp_path / "src", FORMS["gptq-128"])
    for name in ("model.layers.1.mlp.experts.1.up_proj.bias", "model.layers.0.mlp.down_proj.bias"):
        made.tensors[name] = ("F16", (128,), bytes(256))
    write_checkpoint(made, 3)
    host = tensors_of(tmp_path / "src").host
    assert not [info.name for info in host if info.name.endswith("_proj.bias")]
    made.tensors[name] = ("F16", (128,), bytes(254) + b"\0\x3c")
    write_checkpoint(made, 3)
    with pytest.raises(CheckpointError, match=re.escape(f"1 unknown tensor(s): {name}")):
        tensors_of(tmp_path / "src")


def test_gpt_oss_is_refused_by_its_family(tmp_path: Path) -> None:
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    make_checkpoint(tmp_path / "src", dtype="BF16", quantization_config=said)
    folder = tmp_path / "src" / "config.json"
    folder.write_text(folder.read_text().replace("DeepseekV32ForCausalLM", "GptOssForCausalLM"))
    with pytest.raises(
        UnsupportedModelError, match=r"architectures: got 'GptOssForCausalLM', expected one of"
    ):
        tensors_of(tmp_path / "src")


def test_act_order_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    form = gptq(128)
    made, _ = make(tmp_path / "src", replace(form, config=form.config | {"desc_act": True}))
    convert(tmp_path / "src", tmp_path / "same")  # groups that follow each other are in order
    name = "model.layers.1.mlp.experts.1.up_proj.g_idx"
    index = np.frombuffer(made.tensors[name][2], "<i4")[::-1]
    made.tensors[name] = ("I32", index.shape, index.tobytes())
    write_checkpoint(made, 3)
    words = f"{name}: got group 1 for input 0, expected 0"
    with pytest.raises(UnsupportedModelError, match=re.escape(words)):
        convert(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("name", ["compressed-32", "gptq-128"])
def test_a_configuration_alone_is_inspected_as_its_checkpoint(tmp_path: Path, name: str) -> None:
    form = FORMS[name]
    which = EXPERTS if name == "compressed-32" else ALL
    full = {key: value for key, value in BASE_CONFIG.items() if key not in config()}
    make(
        tmp_path / "src",
        form,
        which,
        **(full | {"num_key_value_heads": 2, "quantization_config": form.config}),
    )
    whole = inspect_model(tmp_path / "src")
    for path in (tmp_path / "src").glob("*.safetensors*"):
        path.unlink()
    alone = inspect_model(tmp_path / "src")
    assert (whole.kind, alone.kind) == ("checkpoint", "configuration")
    assert whole.dtype == alone.dtype == form.name
    assert whole.parts == alone.parts  # of BF16, whichever of the host's matrices are 4-bit


def test_fp8_and_4_bits_in_one_checkpoint(tmp_path: Path) -> None:
    """Experts of 4 bits, everything else FP8 with a scale a row, as groups of mixed-precision say."""
    form, rng = FORMS["compressed-32"], np.random.default_rng(0)
    written: dict[str, Written] = {}

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if EXPERTS.fullmatch(name)]:
            written[name] = form.write(rng, tensors.pop(name)[1])  # type: ignore[arg-type]
            stem = name.removesuffix("weight")
            del tensors[stem + "weight_scale"]
            tensors |= {stem + part: each for part, each in written[name].tensors.items()}

    int4 = form.config["config_groups"]["group_0"] | {"format": "pack-quantized"}
    fp8 = {"format": "float-quantized", "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    said = form.config | {"format": "mixed-precision", "config_groups": {"experts": int4, "others": fp8}}
    made = make_checkpoint(
        tmp_path / "src",
        scale_suffix="weight_scale",
        scale_block=(1, None),
        quantization_config=said,
        edit=edit,
        **SIZES,  # type: ignore[arg-type]
    )
    manifest = convert(tmp_path / "src", tmp_path / "dst", verify=True)
    assert (manifest.format, manifest.source["host_dequantised"]) == ("int4-bf16", None)
    name = "model.layers.0.mlp.up_proj"
    weight, scales = HostTensors(tmp_path / "dst").stored_linear(name)
    assert weight.view(torch.uint8).numpy().tobytes() == made.tensors[f"{name}.weight"][2]
    assert scales is not None
    assert scales.shape == (128, 1)
    units = np.array(ExpertFile.open(manifest, 1).units[1])
    got = unpack_quantised_expert(units, 128, 256, "int4-bf16").down.values()
    np.testing.assert_array_equal(got, written["model.layers.1.mlp.experts.1.down_proj.weight"].values)


def test_experts_in_gpt_oss_form_of_a_family_that_is_here(tmp_path: Path) -> None:
    form = FORMS["mxfp4"]
    _, written = make(tmp_path / "each", form, EXPERTS)
    joined: dict[str, list[np.ndarray]] = {}
    prefix = "model.layers.1.mlp.experts."
    for expert in range(2):
        parts = {}
        for part in ("gate", "up", "down"):
            for name, columns in (("weight_packed", 16), ("weight_scale", 1)):
                _, (rows, _), data = written[f"{prefix}{expert}.{part}_proj.weight"].tensors[name]
                parts[part, name] = np.frombuffer(data, np.uint8).reshape(rows, -1, columns)
        for name, suffix in (("weight_packed", "blocks"), ("weight_scale", "scales")):
            by_turns = np.stack([parts["gate", name], parts["up", name]], axis=1)
            both = by_turns.reshape(-1, *by_turns.shape[2:])
            joined.setdefault(f"{prefix}gate_up_proj_{suffix}", []).append(both)
            joined.setdefault(f"{prefix}down_proj_{suffix}", []).append(parts["down", name])

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if EXPERTS.fullmatch(name)]:
            del tensors[name]
        for name, each in joined.items():
            whole = np.stack(each)
            shape = whole.shape if name.endswith("blocks") else whole.shape[:-1]
            tensors[name] = ("U8", shape, whole.tobytes())

    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    make_checkpoint(tmp_path / "all", dtype="BF16", edit=edit, quantization_config=said, **SIZES)  # type: ignore[arg-type]
    one = convert(tmp_path / "each", tmp_path / "dst-each", verify=True)
    all_in_one = convert(tmp_path / "all", tmp_path / "dst-all", verify=True)
    assert one.format == all_in_one.format == "mxfp4"
    assert one.expert_layers == all_in_one.expert_layers  # the hashes of all units among them
