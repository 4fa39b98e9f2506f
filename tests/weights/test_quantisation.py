"""What configurations say of quantised weights: every tool's FP8, and everything else refused by name."""

from __future__ import annotations

import pytest

from duckllm.errors import CheckpointError, UnsupportedModelError
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


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "mxfp4", "fbgemm_fp8", None, 3, []])
def test_other_tools_are_refused_by_name(method: object) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        of({"quant_method": method, "bits": 4})
    assert str(caught.value) == (
        f"m: quantization_config.quant_method: got {method!r}, expected 'fp8' or 'compressed-tensors' or "
        "'modelopt' (FP8 weights as fp8, compressed-tensors or modelopt write them, "
        "or an unquantised checkpoint)"
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (FP8 | {"fmt": "e5m2"}, "quantization_config.fmt: got 'e5m2', expected 'e4m3'"),
        (
            COMPRESSED | {"format": "pack-quantized"},
            "format: got 'pack-quantized', expected 'float-quantized'",
        ),
        (COMPRESSED | {"format": "int-quantized"}, "format: got 'int-quantized'"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, "format: got 'nvfp4-pack-quantized'"),
        (COMPRESSED | {"format": None}, "format: got None, expected 'float-quantized'"),
        (
            COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format: got 'sparse",
        ),
        (COMPRESSED | {"transform_config": {"R1": 1}}, "transform_config: got {'R1': 1}, expected none"),
        (
            COMPRESSED | {"config_groups": {"g": {"format": "pack-quantized", "weights": WEIGHTS}}},
            "config_groups.g.format: got 'pack-quantized'",
        ),
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
