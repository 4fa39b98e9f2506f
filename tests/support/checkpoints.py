"""DeepSeek-V3.2 in miniature as its config.json has it, and e4m3 weights with 128x128 block scales."""

from __future__ import annotations

from typing import Any

import torch

BLOCK = 128
E4M3_MAX = 448.0

BASE_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "torch_dtype": "bfloat16",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 16,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "qk_nope_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "moe_layer_freq": 1,
    "index_topk": 256,
    "index_head_dim": 32,
    "index_n_heads": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    },
}


def blocks(size: int) -> int:
    return -(-size // BLOCK)


def expand_scales(scale: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    rows = scale.repeat_interleave(BLOCK, 0)[: shape[0]]
    return rows.repeat_interleave(BLOCK, 1)[:, : shape[1]]


def dequantise(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return weight.float() * expand_scales(scale, (weight.shape[0], weight.shape[1]))


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    padded = torch.zeros(blocks(rows) * BLOCK, blocks(columns) * BLOCK)
    padded[:rows, :columns] = weight
    tiles = padded.view(blocks(rows), BLOCK, blocks(columns), BLOCK)
    scale = tiles.abs().amax(dim=(1, 3)) / E4M3_MAX
    return (weight / expand_scales(scale, (rows, columns))).to(torch.float8_e4m3fn), scale
