"""Random models of the benchmarks on a GPU: whole, right in size, and finite through all layers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from duckllm import LLM, SamplingParams
from duckllm.layers.step import SequenceStep
from duckllm.models.registry import load_config, load_model
from duckllm.moe.local import LocalExperts
from duckllm.weights.architectures import layout_of
from duckllm.weights.e4m3 import dequantise
from duckllm.weights.host_tensors import HostTensors
from duckllm.weights.manifest import Manifest
from duckllm.weights.reader import ExpertFile
from duckllm.weights.units import unpack_expert_units

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 144,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
}
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 96,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 64,
    "max_position_embeddings": 256,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}


@pytest.fixture(scope="module")
def random_model() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))
    try:
        yield __import__("random_model")
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("random_model", None)


@pytest.fixture(scope="module", params=[QWEN, DEEPSEEK], ids=["qwen3", "deepseek"])
def folder(
    random_model: ModuleType, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("random") / "model"
    random_model.write_model(path, random_model.cut(request.param, None))
    return path


def config_of(folder: Path) -> dict[str, Any]:
    return QWEN if "Qwen3" in (folder / "config.json").read_text() else DEEPSEEK


def test_a_folder_is_a_converted_model_with_true_hashes(folder: Path) -> None:
    manifest = Manifest.load(folder)
    manifest.check_config()
    manifest.check_files()
    assert sorted(manifest.expert_layers) == ([0, 1, 2] if config_of(folder) is QWEN else [1, 2])
    for layer in manifest.expert_layers:
        ExpertFile.open(manifest, layer).verify()
    tensors = HostTensors(folder)
    assert set(layout_of(config_of(folder), {}).host_shapes) <= set(tensors.names())
    for name in tensors.names():  # hashes each file
        assert tensors.get(name).isfinite().all() if tensors.get(name).dtype != torch.float8_e4m3fn else True


def test_experts_differ_and_keep_the_size_of_what_they_multiply(folder: Path) -> None:
    manifest = Manifest.load(folder)
    hidden, width = manifest.hidden_size, manifest.moe_intermediate_size
    seen = set()
    for layer in manifest.expert_layers:
        for units in ExpertFile.open(manifest, layer).units:
            expert = unpack_expert_units(np.ascontiguousarray(units), width, hidden, "fp8")
            for codes, scales, fan_in in (
                (expert.gate, expert.gate_scales, hidden),
                (expert.up, expert.up_scales, hidden),
                (expert.down, expert.down_scales, width),
            ):
                assert dequantise(codes, scales).std() * fan_in**0.5 == pytest.approx(1, abs=0.03)
                seen.add(codes.tobytes())
    assert len(seen) == 3 * manifest.num_experts * len(manifest.expert_layers)


def test_host_tensors_in_memory_are_of_the_kinds_in_the_folder(
    random_model: ModuleType, folder: Path
) -> None:
    config = config_of(folder)
    stored = HostTensors(folder)
    tensors = random_model.RandomTensors(config, layout_of(config, {}))
    assert tensors.names() == stored.names()
    for name in stored.names():
        ours, theirs = tensors.get(name), stored.get(name)
        assert (ours.dtype, ours.shape, tensors.shape(name)) == (theirs.dtype, theirs.shape, theirs.shape)
        assert torch.equal(ours.float(), tensors.get(name).float())
        if name.endswith(".weight") and ours.dim() == 2:
            linear = tensors.linear(name.removesuffix(".weight"))
            std = 1.0 if "embed_tokens" in name else ours.shape[1] ** -0.5
            assert linear.std().item() == pytest.approx(std, rel=0.1)
            same = stored.linear(name.removesuffix(".weight"))
            assert linear.std().item() == pytest.approx(same.std().item(), rel=0.1)
    is_fp8 = config is DEEPSEEK
    assert (stored.get("model.layers.0.self_attn.o_proj.weight").dtype == torch.float8_e4m3fn) is is_fp8
    assert stored.get("model.layers.1.mlp.gate.weight").dtype == torch.bfloat16


def test_logits_are_finite_and_of_unit_size(random_model: ModuleType, folder: Path) -> None:
    parsed, layout = load_config(folder), layout_of(config_of(folder), {})
    for tensors in (HostTensors(folder), random_model.RandomTensors(config_of(folder), layout)):
        model = load_model(parsed, tensors, LocalExperts(Manifest.load(folder)), max_tokens=64)
        tokens = torch.arange(8)
        hidden = model.forward(tokens, [SequenceStep.of(0, 0, 8)], model.new_kv_cache(64))
        logits = model.compute_logits(hidden)
        assert 0.5 < logits.std().item() < 2
        assert len(set(logits.argmax(-1).tolist())) > 1


def test_layers_in_memory_have_the_layout_of_files(random_model: ModuleType, folder: Path) -> None:
    layout, manifest = layout_of(config_of(folder), {}), Manifest.load(folder)
    layers = random_model.random_layers(layout, 2)
    shape = (manifest.num_experts, manifest.num_stripes, manifest.unit_bytes)
    assert [layer.shape for layer in layers] == [shape, shape]
    experts = [expert for layer in layers for expert in layer]
    assert len({expert.tobytes() for expert in experts}) == len(experts)
    for units in experts:  # refuses NaN, and scales that differ within a block
        weights = unpack_expert_units(units, layout.moe_intermediate_size, layout.hidden_size, "fp8")
        assert weights.gate_scales[0, 0] == np.float32(random_model.weight_scale(layout.hidden_size))
        assert weights.down_scales[0, 0] == np.float32(
            random_model.weight_scale(layout.moe_intermediate_size)
        )


def test_a_folder_answers_prompts(random_model: ModuleType, tmp_path: Path) -> None:
    random_model.write_model(tmp_path / "model", random_model.cut(QWEN, 2))
    with LLM(tmp_path / "model", workers=0, device="cpu", draft="off") as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        [output] = llm.generate([[1, 2, 3]], params)
    assert len(output.outputs[0].token_ids) == 6


def test_cut_takes_layers_and_experts_away(random_model: ModuleType) -> None:
    small = random_model.cut(DEEPSEEK, 1, 4)
    assert (small["num_hidden_layers"], small["first_k_dense_replace"], small["n_routed_experts"]) == (
        1,
        0,
        4,
    )
    assert small["num_nextn_predict_layers"] == 0
    assert random_model.cut(QWEN, 2, 3) == {**QWEN, "num_hidden_layers": 2, "num_experts": 3}


def test_sizes_with_padding_are_refused(random_model: ModuleType) -> None:
    with pytest.raises(ValueError, match="multiples of 32 and of 16"):
        random_model.RandomUnits(layout_of({**QWEN, "hidden_size": 248}, {}))
