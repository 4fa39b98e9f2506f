"""Writes the model as an official DeepSeek-V3.2 checkpoint: FP8 e4m3 with 128x128 block scales, in shards."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from model import Block, Linear, Model, MoE, quantise_blocks
from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 14_000_000
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def export(model: Model, folder: Path, tokenizer: Path) -> None:
    """Writes config, weights, index and tokenizer files into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(checkpoint_tensors(model)))
    weight_map, total_bytes = {}, 0
    for index, shard in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, str(folder / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total_bytes}, "weight_map": weight_map},
    )
    _write_json(folder / "config.json", checkpoint_config(model))
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False})
    for path in tokenizer.iterdir():
        shutil.copy(path, folder / path.name)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1))


def _shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def checkpoint_tensors(model: Model) -> dict[str, Tensor]:
    """Every tensor under its official name."""
    layers = model.config.num_hidden_layers
    tensors = {
        "model.embed_tokens.weight": _bf16(model.embed_tokens.weight),
        "model.norm.weight": _bf16(model.norm.weight),
        "lm_head.weight": _bf16(model.lm_head.weight),
    }
    for index, block in enumerate(model.blocks()):
        tensors |= _block_tensors(f"model.layers.{index}.", block)
    prefix = f"model.layers.{layers}."
    tensors |= _fp8(prefix + "eh_proj", model.eh_proj.weight)
    for name, norm in (("enorm", model.enorm), ("hnorm", model.hnorm), ("shared_head.norm", model.mtp_norm)):
        tensors[f"{prefix}{name}.weight"] = _bf16(norm.weight)
    return tensors


def _bf16(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.bfloat16).contiguous().cpu()


def _f32(tensor: Tensor) -> Tensor:
    return tensor.detach().float().contiguous().cpu()


def _fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    values, scales = quantise_blocks(weight.detach())
    return {f"{name}.weight": values.contiguous().cpu(), f"{name}.weight_scale_inv": _f32(scales)}


def _block_tensors(prefix: str, block: Block) -> dict[str, Tensor]:
    attention, indexer = block.self_attn, block.self_attn.indexer
    tensors = {
        f"{prefix}input_layernorm.weight": _bf16(block.input_layernorm.weight),
        f"{prefix}post_attention_layernorm.weight": _bf16(block.post_attention_layernorm.weight),
        f"{prefix}self_attn.q_a_layernorm.weight": _bf16(attention.q_a_layernorm.weight),
        f"{prefix}self_attn.kv_a_layernorm.weight": _bf16(attention.kv_a_layernorm.weight),
        f"{prefix}self_attn.indexer.k_norm.weight": _f32(indexer.k_norm.weight),
        f"{prefix}self_attn.indexer.k_norm.bias": _f32(indexer.k_norm.bias),
        f"{prefix}self_attn.indexer.weights_proj.weight": _bf16(indexer.weights_proj.weight),
    }
    for name, module in block.named_modules():
        if isinstance(module, Linear):
            tensors |= _fp8(prefix + name, module.weight)
    if isinstance(block.mlp, MoE):
        tensors[f"{prefix}mlp.gate.weight"] = _bf16(block.mlp.gate)
        tensors[f"{prefix}mlp.gate.e_score_correction_bias"] = _f32(block.mlp.e_score_correction_bias)
        for projection in PROJECTIONS:
            for expert, weight in enumerate(getattr(block.mlp, projection)):
                tensors |= _fp8(f"{prefix}mlp.experts.{expert}.{projection}", weight)
    return tensors


def checkpoint_config(model: Model) -> dict:
    """config.json."""
    config = asdict(model.config)
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "torch_dtype": "bfloat16",
        **config,
        "num_key_value_heads": config["num_attention_heads"],
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 1,
        "moe_layer_freq": 1,
        "ep_size": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 5,
        "initializer_range": 0.02,
        "use_cache": True,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }
