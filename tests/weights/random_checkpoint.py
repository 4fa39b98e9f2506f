"""Random DeepSeek-V3.2 checkpoints for the tests of this folder, written without torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from duckllm.weights.architectures import layout_of
from duckllm.weights.safetensors_file import build_header

Tensor = tuple[str, tuple[int, ...], bytes]
FINITE_CODES = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def config(**changes: object) -> dict:
    """A config.json of small, awkward sizes."""
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "vocab_size": 40,
        "hidden_size": 72,
        "intermediate_size": 80,
        "moe_intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "index_n_heads": 2,
        "index_head_dim": 16,
    } | changes


@dataclass
class RandomCheckpoint:
    """What was written: the tensors by name, as bytes."""

    folder: Path
    config: dict
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def array(self, name: str) -> np.ndarray:
        """A tensor as numpy has it; bf16 as u16."""
        dtype, shape, data = self.tensors[name]
        kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E8M0": "u1"}[dtype]
        return np.frombuffer(data, kind).reshape(shape)


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """The weights that a checkpoint of this configuration has, its MTP layer's included."""
    layout = layout_of(config, {f"model.layers.{config['num_hidden_layers']}.": None})
    shapes = dict(layout.host_shapes)
    for layer in layout.moe_layers:
        for expert in range(layout.num_experts):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                name = layout.expert_weight(layer, expert, projection)
                shapes[name] = layout.expert_shape(projection)
    return shapes


def to_bytes(values: np.ndarray, dtype: str) -> bytes:
    """f32 values stored as F32, F16 or (cut off) BF16, or as the powers of two that E8M0 has."""
    if dtype == "F8_E8M0":
        return (np.frexp(values)[1] + 126).astype(np.uint8).tobytes()
    if dtype == "BF16":
        return (np.ascontiguousarray(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def make_checkpoint(
    folder: Path,
    *,
    dtype: str = "F8_E4M3",
    scale_suffix: str = "weight_scale_inv",
    scale_dtype: str = "F32",
    scale_block: tuple[int | None, int | None] = (128, 128),
    scale_rank: int = 2,
    shards: int = 3,
    seed: int = 0,
    edit: Callable[[dict[str, Tensor]], object] | None = None,
    **changes: object,
) -> RandomCheckpoint:
    """Writes a checkpoint folder; ``edit`` may change the tensors before they are written.

    ``scale_block`` is the rows and columns that share a scale, None for all; scales of one column may have
    ``scale_rank`` 1, and a single one 0.
    """
    fp8 = {"quantization_config": FP8_CONFIG} if dtype == "F8_E4M3" else {}
    made = RandomCheckpoint(folder, config(**(fp8 | changes)))
    rng = np.random.default_rng(seed)
    for name, shape in tensor_shapes(made.config).items():
        if len(shape) == 2 and "_proj." in name and "weights_proj" not in name and dtype == "F8_E4M3":
            codes = rng.choice(FINITE_CODES, size=shape)
            spans = zip(shape, scale_block, strict=True)
            blocks = tuple(-(-size // (span or size)) for size, span in spans)
            scales = rng.uniform(0.001, 0.01, blocks)
            made.tensors[name] = ("F8_E4M3", shape, codes.tobytes())
            scale_name = name.removesuffix("weight") + scale_suffix
            assert set(blocks[scale_rank:]) <= {1}
            made.tensors[scale_name] = (scale_dtype, blocks[:scale_rank], to_bytes(scales, scale_dtype))
        else:
            kind = "BF16" if dtype == "F8_E4M3" else dtype
            made.tensors[name] = (kind, shape, to_bytes(rng.standard_normal(shape), kind))
    if edit is not None:
        edit(made.tensors)
    write_checkpoint(made, shards)
    return made


def write_checkpoint(made: RandomCheckpoint, shards: int) -> None:
    """Writes the files: one without an index, or several with one."""
    made.folder.mkdir(parents=True, exist_ok=True)
    (made.folder / "config.json").write_text(json.dumps(made.config))
    (made.folder / "tokenizer.json").write_text("{}")
    names = list(made.tensors)
    weight_map = {}
    for shard in range(shards):
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        entries = {name: made.tensors[name][:2] for name in part}
        data = b"".join(made.tensors[name][2] for name in part)
        (made.folder / file).write_bytes(build_header(entries, {}, 8) + data)
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (made.folder / "model.safetensors.index.json").write_text(json.dumps(index))
