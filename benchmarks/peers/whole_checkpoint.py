"""A random checkpoint of Qwen3-30B-A3B's layers as Hugging Face has them, FP8, and its logits in float32.

Called by whole_model.py. The numbers come from ../gpu/random_model.py; each matrix of an expert takes a
stretch of them from a random place on. The float32 logits are the plain formulas in torch, with one expert
dequantised at a time: slow, and independent of the package and of llama.cpp.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as f
from safetensors import safe_open
from safetensors.torch import save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "gpu"))
from random_model import Numbers, RandomTensors, weight_scale  # noqa: E402 - of the folder of GPU benchmarks

from duckllm.demo import CHECKPOINT  # noqa: E402
from duckllm.weights.architectures import layout_of  # noqa: E402
from duckllm.weights.e4m3 import scale_shape  # noqa: E402

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INDEX_FILE = "model.safetensors.index.json"
QUANTISATION = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
BLOCK = 128


def shape_of(published: Mapping[str, Any], num_layers: int, vocab_size: int) -> dict[str, Any]:
    """The config.json of a model with the layers of a published one, fewer of them, and FP8 weights."""
    return {
        **published,
        "num_hidden_layers": num_layers,
        "vocab_size": vocab_size,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "quantization_config": QUANTISATION,
    }


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], progress: Callable[[str], None], seed: int = 0
) -> None:
    """Writes the checkpoint, a file a layer, with the demo model's tokenizer.

    Args:
        folder: To be made; there must be none.
        config: config.json.
        progress: Told in a line what takes time now.
        seed: Of the numbers.
    """
    layout = layout_of(config, {})
    host, numbers = RandomTensors(config, layout, seed=seed), Numbers(seed)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((CHECKPOINT / name).read_bytes())
    where: dict[str, str] = {}
    for layer in (*range(layout.num_layers), None):
        progress(f"random weights of layer {layer}" if layer is not None else "random embedding and head")
        tensors = {name: host.get(name) for name in host.names() if layout.layer_of(name) == layer}
        if layer is not None:
            tensors |= _experts(layout, layer, numbers, np.random.default_rng([seed, 1, layer]))
        file = f"model-{'rest' if layer is None else f'{layer:05d}'}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def _experts(layout: Any, layer: int, numbers: Numbers, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    hidden, width = layout.hidden_size, layout.moe_intermediate_size
    tensors = {}
    for expert in range(layout.num_experts):
        for name, rows, columns in (
            ("gate_proj", width, hidden),
            ("up_proj", width, hidden),
            ("down_proj", hidden, width),
        ):
            at = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
            start = int(rng.integers(len(numbers.codes) - rows * columns + 1))
            codes = numbers.codes[start : start + rows * columns].clone().reshape(rows, columns)
            tensors[at] = codes.view(torch.float8_e4m3fn)
            # Scales that differ, so that one in a wrong place is seen.
            spread = rng.uniform(0.8, 1.25, scale_shape(rows, columns)).astype(np.float32)
            tensors[f"{at}_scale_inv"] = torch.from_numpy(spread * np.float32(weight_scale(columns)))
    return tensors


class FloatModel:
    """The checkpoint's logits in float32.

    Args:
        folder: The checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        self._where: dict[str, str] = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        self._files = {name: safe_open(folder / name, "pt") for name in sorted(set(self._where.values()))}

    def _stored(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[self._where[name]].get_tensor(name)
        return tensor

    def _weight(self, name: str) -> torch.Tensor:
        weight = self._stored(name).float()
        if f"{name}_scale_inv" in self._where:
            rows, columns = weight.shape
            scales = self._stored(f"{name}_scale_inv")
            scales = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
            weight *= scales
        return weight

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits behind every token.

        Shapes:
            tokens: [T] int64
            result: [T, V] f32
        """
        x = self._stored(EMBEDDING)[tokens].float()
        for layer in range(self._config["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            x = x + self._attention(f"{at}.self_attn", self._norm(x, f"{at}.input_layernorm"))
            x = x + self._moe(f"{at}.mlp", self._norm(x, f"{at}.post_attention_layernorm"))
        return f.linear(self._norm(x, "model.norm"), self._weight(HEAD))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return f.rms_norm(x, x.shape[-1:], self._weight(f"{name}.weight"), self._config["rms_norm_eps"])

    def _attention(self, at: str, x: torch.Tensor) -> torch.Tensor:
        size, tokens = self._config["head_dim"], len(x)
        query, key, value = (
            f.linear(x, self._weight(f"{at}.{name}_proj.weight")).view(tokens, -1, size) for name in "qkv"
        )
        query = self._rotated(self._norm(query, f"{at}.q_norm"))
        key = self._rotated(self._norm(key, f"{at}.k_norm"))
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        scores = torch.einsum("thd,shd->hts", query, key) / math.sqrt(size)
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        shares = scores.masked_fill(hidden, -math.inf).softmax(-1)
        mixed = torch.einsum("hts,shd->thd", shares, value).reshape(tokens, -1)
        return f.linear(mixed, self._weight(f"{at}.o_proj.weight"))

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        rates = self._config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(len(x), dtype=torch.float64), rates).float()[:, None]
        cosine, sine, first, second = angles.cos(), angles.sin(), x[..., :half], x[..., half:]
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)

    def _moe(self, at: str, x: torch.Tensor) -> torch.Tensor:
        chances = f.linear(x, self._weight(f"{at}.gate.weight")).softmax(-1)
        shares, chosen = chances.topk(self._config["num_experts_per_tok"])
        shares = shares / shares.sum(-1, keepdim=True)
        result = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            gate, up, down = (
                self._weight(f"{at}.experts.{expert}.{name}_proj.weight") for name in ("gate", "up", "down")
            )
            inner = f.silu(f.linear(x[rows], gate)) * f.linear(x[rows], up)
            result[rows] += shares[rows, places, None] * f.linear(inner, down)
        return result
