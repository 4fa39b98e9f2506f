"""Random tiny checkpoints in the published format: e4m3 weights with 128x128 block scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

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


class _Writer:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def linear(self, name: str, out: int, inp: int, bias: bool = False, gain: float = 1.0) -> None:
        weight, scale = quantise(self.normal(out, inp) * (gain * inp**-0.5))
        self.tensors[f"{name}.weight"], self.tensors[f"{name}.weight_scale_inv"] = weight, scale
        if bias:
            self.tensors[f"{name}.bias"] = (self.normal(out) * 0.3).bfloat16()

    def dense(self, name: str, out: int, inp: int, gain: float = 1.0) -> None:
        self.tensors[f"{name}.weight"] = (self.normal(out, inp) * (gain * inp**-0.5)).bfloat16()

    def norm(self, name: str, size: int) -> None:
        self.tensors[f"{name}.weight"] = (1 + 0.3 * self.normal(size)).bfloat16()

    def mlp(self, prefix: str, hidden: int, intermediate: int) -> None:
        self.linear(f"{prefix}.gate_proj", intermediate, hidden, gain=2.0)
        self.linear(f"{prefix}.up_proj", intermediate, hidden)
        self.linear(f"{prefix}.down_proj", hidden, intermediate, gain=2.0)

    def attention(self, p: str, c: dict[str, Any]) -> None:
        hidden, heads, bias = c["hidden_size"], c["num_attention_heads"], c["attention_bias"]
        query = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
        self.linear(f"{p}.q_a_proj", c["q_lora_rank"], hidden, bias)
        self.norm(f"{p}.q_a_layernorm", c["q_lora_rank"])
        self.linear(f"{p}.q_b_proj", heads * query, c["q_lora_rank"], gain=2.0)
        self.linear(f"{p}.kv_a_proj_with_mqa", c["kv_lora_rank"] + c["qk_rope_head_dim"], hidden, bias)
        self.norm(f"{p}.kv_a_layernorm", c["kv_lora_rank"])
        self.linear(f"{p}.kv_b_proj", heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), c["kv_lora_rank"])
        self.linear(f"{p}.o_proj", hidden, heads * c["v_head_dim"], bias, gain=2.0)
        self.linear(f"{p}.indexer.wq_b", c["index_n_heads"] * c["index_head_dim"], c["q_lora_rank"])
        self.linear(f"{p}.indexer.wk", c["index_head_dim"], hidden)
        self.tensors[f"{p}.indexer.k_norm.weight"] = 1 + 0.3 * self.normal(c["index_head_dim"])
        self.tensors[f"{p}.indexer.k_norm.bias"] = 0.3 * self.normal(c["index_head_dim"])
        self.dense(f"{p}.indexer.weights_proj", c["index_n_heads"], hidden)


def write_random_checkpoint(folder: Path, seed: int, **overrides: Any) -> dict[str, Any]:
    """Writes a checkpoint whose every tensor is random; returns its configuration."""
    unknown = set(overrides) - set(BASE_CONFIG)
    assert not unknown, unknown
    c = BASE_CONFIG | overrides
    w = _Writer(seed)
    hidden = c["hidden_size"]
    w.dense("model.embed_tokens", c["vocab_size"], hidden, gain=hidden**0.5)
    if not c["tie_word_embeddings"]:
        w.dense("lm_head", c["vocab_size"], hidden, gain=3.0)
    w.norm("model.norm", hidden)
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}"
        w.norm(f"{p}.input_layernorm", hidden)
        w.norm(f"{p}.post_attention_layernorm", hidden)
        w.attention(f"{p}.self_attn", c)
        if layer < c["first_k_dense_replace"]:
            w.mlp(f"{p}.mlp", hidden, c["intermediate_size"])
            continue
        w.dense(f"{p}.mlp.gate", c["n_routed_experts"], hidden)
        w.tensors[f"{p}.mlp.gate.e_score_correction_bias"] = 0.2 * w.normal(c["n_routed_experts"])
        for expert in range(c["n_routed_experts"]):
            w.mlp(f"{p}.mlp.experts.{expert}", hidden, c["moe_intermediate_size"])
        if c["n_shared_experts"]:
            w.mlp(f"{p}.mlp.shared_experts", hidden, c["moe_intermediate_size"] * c["n_shared_experts"])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(w.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(c))
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 0, "eos_token_id": 1, "do_sample": False})
    )
    return c
