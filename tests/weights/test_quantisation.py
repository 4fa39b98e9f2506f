"""What configurations say of quantised weights: FP8 and 4-bit forms, and everything else refused by name."""

from __future__ import annotations

import pytest

from duckllm.errors import CheckpointError, UnsupportedModelError
from duckllm.weights.imports.awq import Awq
from duckllm.weights.imports.compressed_tensors import PackQuantized
from duckllm.weights.imports.gptq import Gptq
from duckllm.weights.imports.mxfp4 import MxFp4Blocks, MxFp4PackQuantized
from duckllm.weights.quantisation import Quantisation
from duckllm.weights.scales import BLOCK_128, PER_CHANNEL, PER_TENSOR, ScaleKind

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": WEIGHTS, "targets": ["Linear"], "input_activations": None}},
    "ignore": ["lm_head"],
    "kv_cache_scheme": {"num_bits": 8},
    "quantization_status": "compressed",
    "sparsity_config": {"format": "dense"},
    "transform_config": {},
}


def of(value: object, field: str = "quantization_config", **files: dict) -> Quantisation:
    return Quantisation.of("m", {field: value}, **files)


def weights(**changes: object) -> dict:
    return COMPRESSED | {"config_groups": {"g": {"weights": WEIGHTS | changes}}}


@pytest.mark.parametrize(
    ("value", "kinds"),
    [
        (FP8, (BLOCK_128,)),
        (FP8 | {"weight_block_size": [1, 128]}, (ScaleKind(1, 128),)),
        (FP8 | {"weight_block_size": None, "activation_scheme": "static"}, (PER_TENSOR,)),
        ({"quant_method": "fp8", "activation_scheme": "static"}, (BLOCK_128, PER_TENSOR)),
        (COMPRESSED, (PER_CHANNEL,)),
        (weights(strategy="tensor"), (PER_TENSOR,)),
        (weights(strategy="block", block_structure=[64, 32]), (ScaleKind(64, 32),)),
        (weights(strategy="block", block_structure="64x32"), (ScaleKind(64, 32),)),
        (COMPRESSED | {"config_groups": {"kv": {"weights": None}}}, ()),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, (PER_TENSOR,)),
        (None, (BLOCK_128,)),
    ],
)
def test_what_is_understood(value: dict | None, kinds: tuple[ScaleKind, ...]) -> None:
    found = of(value)
    assert found.kinds == kinds
    assert found.method == ("" if value is None else value["quant_method"])


def test_groups_of_several_kinds() -> None:
    both = {
        "a": {"weights": WEIGHTS},
        "b": {"weights": WEIGHTS | {"strategy": "tensor"}},
        "c": {"weights": WEIGHTS},
    }
    assert of(COMPRESSED | {"config_groups": both}).kinds == (PER_CHANNEL, PER_TENSOR)


def test_the_older_name_of_compressed_tensors() -> None:
    older = {name: value for name, value in COMPRESSED.items() if name != "quant_method"}
    assert of(older, "compression_config").kinds == (PER_CHANNEL,)


def test_modelopts_own_file_counts_where_the_configuration_says_nothing() -> None:
    file = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": []}}
    assert of(None, modelopt=file).kinds == (PER_TENSOR,)
    assert of(FP8, modelopt=file).kinds == (BLOCK_128,)
    with pytest.raises(
        UnsupportedModelError, match=r"hf_quant_config\.json: quantization\.quant_algo: got 'NVFP4'"
    ):
        of(None, modelopt={"quantization": {"quant_algo": "NVFP4"}})
    with pytest.raises(
        CheckpointError, match=r"hf_quant_config\.json: quantization: got None, expected an object"
    ):
        of(None, modelopt={})


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}


def packed(form: str = "pack-quantized", **changes: object) -> dict:
    kind = INT4 if form == "pack-quantized" else MXFP4
    return COMPRESSED | {"format": form, "config_groups": {"g": {"weights": kind | changes}}}


@pytest.mark.parametrize(
    ("value", "forms"),
    [
        (packed(), (PackQuantized(32, True),)),
        (packed(group_size=128, symmetric=False), (PackQuantized(128, False),)),
        (packed(strategy="channel", group_size=None), (PackQuantized(None, True),)),
        (packed(actorder="static"), (PackQuantized(32, True),)),
        (packed("mxfp4-pack-quantized"), (MxFp4PackQuantized(),)),
        (GPTQ, (Gptq(128, True, True),)),
        (GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}, (Gptq(128, False, False),)),
        (GPTQ | {"format": "gptq_v2", "group_size": -1}, (Gptq(None, True, False),)),
        (GPTQ | {"desc_act": True}, (Gptq(128, True, True, True),)),
        ({name: GPTQ[name] for name in ("quant_method", "bits", "group_size")}, (Gptq(128, True, True),)),
        (AWQ, (Awq(128),)),
        (AWQ | {"version": "GEMM", "group_size": -1}, (Awq(None),)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, (Awq(64),)),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, (MxFp4Blocks(),)),
    ],
)
def test_forms_of_4_bits(value: dict, forms: tuple) -> None:
    found = of(value)
    assert (found.packed, found.kinds) == (forms, ())


def test_8_and_4_bits_in_one_checkpoint() -> None:
    groups = {
        "attention": {"format": "float-quantized", "weights": WEIGHTS},
        "experts": {"format": "pack-quantized", "weights": INT4},
        "more": {"format": "mxfp4-pack-quantized", "weights": MXFP4},
    }
    found = of(COMPRESSED | {"format": "mixed-precision", "config_groups": groups})
    assert found.kinds == (PER_CHANNEL,)
    assert found.packed == (PackQuantized(32, True), MxFp4PackQuantized())


@pytest.mark.parametrize(
    "method", ["bitsandbytes", "nvfp4", "fbgemm_fp8", "auto-round", "quark", None, 3, []]
)
def test_other_tools_are_refused_by_name(method: object) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        of({"quant_method": method, "bits": 4})
    assert str(caught.value) == (
        f"m: quantization_config.quant_method: got {method!r}, expected 'fp8' or 'compressed-tensors' or "
        "'modelopt' or 'gptq' or 'awq' or 'mxfp4' (FP8 weights as fp8, compressed-tensors or modelopt write "
        "them, 4-bit ones as compressed-tensors, gptq, awq or gpt-oss do, or an unquantised checkpoint)"
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (FP8 | {"fmt": "e5m2"}, "quantization_config.fmt: got 'e5m2', expected 'e4m3'"),
        (
            COMPRESSED | {"format": "int-quantized"},
            "quantization_config.format: got 'int-quantized', expected 'float-quantized' or "
            "'pack-quantized' or 'mxfp4-pack-quantized'",
        ),
        (COMPRESSED | {"format": "pack-quantized"}, "group_0.weights.num_bits: got 8, expected 4"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, "format: got 'nvfp4-pack-quantized'"),
        (COMPRESSED | {"format": None}, "format: got None, expected 'float-quantized'"),
        (
            COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format: got 'sparse",
        ),
        (COMPRESSED | {"transform_config": {"R1": 1}}, "transform_config: got {'R1': 1}, expected none"),
        (
            COMPRESSED | {"config_groups": {"g": {"format": "marlin-24", "weights": WEIGHTS}}},
            "config_groups.g.format: got 'marlin-24'",
        ),
        (
            COMPRESSED | {"format": "mixed-precision", "config_groups": {"g": {"weights": INT4}}},
            "config_groups.g.format: got 'mixed-precision', expected 'float-quantized' or",
        ),
        (packed(num_bits=8), "config_groups.g.weights.num_bits: got 8, expected 4"),
        (packed(type="float"), "config_groups.g.weights.type: got 'float', expected 'int'"),
        (packed(actorder="group"), "weights.actorder: got 'group', expected null, 'static' or 'weight'"),
        (packed(strategy="tensor"), "weights.strategy: got 'tensor', expected 'group' or 'channel'"),
        (packed("mxfp4-pack-quantized", group_size=16), "weights.group_size: got 16, expected 32"),
        (packed("mxfp4-pack-quantized", type="int"), "weights.type: got 'int', expected 'float'"),
        (packed("mxfp4-pack-quantized", strategy="channel"), "strategy: got 'channel', expected 'group'"),
        (GPTQ | {"bits": 8}, "quantization_config.bits: got 8, expected 4"),
        (GPTQ | {"bits": 3}, "quantization_config.bits: got 3, expected 4"),
        (
            GPTQ | {"checkpoint_format": "marlin"},
            "checkpoint_format: got 'marlin', expected 'gptq' or 'gptq_v2'",
        ),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format: got True, expected False"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype: got 'int16', expected 'int32'"),
        (AWQ | {"bits": 8}, "quantization_config.bits: got 8, expected 4"),
        (AWQ | {"version": "gemv"}, "quantization_config.version: got 'gemv', expected 'gemm'"),
        (AWQ | {"zero_point": False}, "quantization_config.zero_point: got False, expected True"),
        (weights(num_bits=4), "config_groups.g.weights.num_bits: got 4, expected 8"),
        (weights(type="int"), "config_groups.g.weights.type: got 'int', expected 'float'"),
        (weights(symmetric=False), "config_groups.g.weights.symmetric: got False, expected True"),
        (weights(strategy="group"), "weights.strategy: got 'group', expected 'tensor', 'channel' or 'block'"),
        (weights(strategy=["tensor"]), "weights.strategy: got ['tensor']"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo: got 'NVFP4', expected 'FP8'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo: got 'W4A8_AWQ'"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "quant_algo: got 'FP8_PB_WO'"),
    ],
)
def test_other_schemes_are_refused_by_name(value: dict, words: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        of(value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("fp8", "quantization_config: got 'fp8', expected an object"),
        (FP8 | {"weight_block_size": 128}, "weight_block_size: got 128, expected rows and columns"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size: got [128], expected"),
        (FP8 | {"weight_block_size": [0, 128]}, "weight_block_size: got [0, 128], expected"),
        (FP8 | {"weight_block_size": [True, 128]}, "weight_block_size: got [True, 128], expected"),
        (FP8 | {"weight_block_size": [128.0, 128]}, "weight_block_size: got [128.0, 128], expected"),
        (weights(strategy="block"), "weights.block_structure: got None, expected rows and columns"),
        (weights(strategy="block", block_structure="128"), "block_structure: got '128', expected"),
        (packed(group_size=0), "g.weights.group_size: got 0, expected a whole number of at least 1, or -1"),
        (packed(group_size=None), "g.weights.group_size: got None, expected a whole number"),
        (packed(symmetric=None), "g.weights.symmetric: got None, expected true or false"),
        (GPTQ | {"group_size": "128"}, "quantization_config.group_size: got '128', expected"),
        (GPTQ | {"sym": 1}, "quantization_config.sym: got 1, expected true or false"),
        (AWQ | {"group_size": True}, "quantization_config.group_size: got True, expected"),
        (COMPRESSED | {"config_groups": None}, "config_groups: got None, expected an object"),
        (COMPRESSED | {"config_groups": {"g": 3}}, "config_groups.g: got 3, expected an object"),
        (COMPRESSED | {"config_groups": {"g": {"weights": 3}}}, "config_groups.g.weights: got 3, expected"),
        (COMPRESSED | {"sparsity_config": 3}, "sparsity_config: got 3, expected an object"),
    ],
)
def test_malformed_fields_are_named(value: object, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        of(value)
    assert words in str(caught.value)
