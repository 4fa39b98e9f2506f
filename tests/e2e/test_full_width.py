"""A layer of real models in its full width: converted, through three workers, against float64."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from duckllm.weights.architectures import layout_of
from duckllm.weights.layout import PROJECTIONS
from duckllm.weights.safetensors_file import build_header
from kernels.expert_reference import Layer, expert_sums, random_e4m3
from support.models import remote_experts

WORKERS = 3
# Bytes between the windows of two experts: no divisor of anything.
SHIFT = 4099
MEASURED = """
import json, re, sys
from duckllm.weights.convert import convert
def peak():  # not getrusage's, which begins with the parent's
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
convert(sys.argv[1], sys.argv[2])
small = peak()
manifest = convert(sys.argv[3], sys.argv[4])
print(json.dumps([peak() - small, manifest.expert_layers[0].bytes]))
"""


@dataclass(frozen=True)
class Model:
    """A model with one layer, whose experts alone are as large as the real one's, and not as many.

    Args:
        config: Its config.json.
        num_experts: A fraction of the real model's: the others would be read in the same way.
        num_tokens: T of the step that is computed.
        top_k: K.
    """

    config: dict[str, Any]
    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    num_tokens: int
    top_k: int


QWEN3_30B = Model(
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 1,
        "head_dim": 8,
    },
    hidden_size=2048,
    moe_intermediate_size=768,
    num_experts=32,
    num_tokens=2,
    top_k=8,
)
DEEPSEEK_V32 = Model(
    {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "first_k_dense_replace": 0,
        "n_shared_experts": 0,
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"), 8),
        **dict.fromkeys(("v_head_dim", "index_head_dim", "index_n_heads"), 8),
    },
    hidden_size=7168,
    moe_intermediate_size=2048,
    num_experts=4,
    num_tokens=1,
    top_k=2,
)


def wide_layer(num_experts: int, hidden: int, intermediate: int) -> Layer:
    """Random experts, each another window of the same random bytes: to draw all of them would take long."""
    rng = np.random.default_rng(0)

    def matrices(rows: int, columns: int) -> np.ndarray:
        pool = random_e4m3(rng, (SHIFT * (num_experts - 1) + rows * columns,))
        return np.lib.stride_tricks.as_strided(pool, (num_experts, rows, columns), (SHIFT, columns, 1))

    def scales(rows: int, columns: int) -> np.ndarray:
        shape = (num_experts, -(-rows // 128), -(-columns // 128))
        return (rng.uniform(0.5, 2.0, shape) * 2.0**-9).astype(np.float32)

    wide, tall = (intermediate, hidden), (hidden, intermediate)
    codes = (matrices(*wide), matrices(*wide), matrices(*tall))
    return Layer(*codes, scales(*wide), scales(*wide), scales(*tall))


def write_checkpoint(folder: Path, model: Model, layer: Layer) -> None:
    """FP8 experts with 128 x 128 blocks, and zeros for the host."""
    experts = "num_experts" if "qwen3" in model.config["model_type"] else "n_routed_experts"
    config = model.config | {
        **{
            "hidden_size": layer.hidden,
            "moe_intermediate_size": layer.intermediate,
            experts: layer.num_experts,
        },
        **{"num_hidden_layers": 1, "num_attention_heads": 1, "num_experts_per_tok": model.top_k},
        **{"vocab_size": 8, "intermediate_size": 8},
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    }
    layout = layout_of(config, {})
    tensors = {name: ("BF16", shape) for name, shape in layout.host_shapes.items()}
    parts = [bytes(2 * int(np.prod(shape))) for shape in layout.host_shapes.values()]
    for expert in range(layer.num_experts):
        for projection, part in zip(PROJECTIONS, ("gate", "up", "down"), strict=True):
            name = layout.expert_weight(0, expert, projection)
            codes, scales = getattr(layer, part)[expert], getattr(layer, f"{part}_scale")[expert]
            tensors |= {name: ("F8_E4M3", codes.shape), f"{name}_scale_inv": ("F32", scales.shape)}
            parts += [codes.data, scales.data]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as out:
        out.write(build_header(tensors, {}, 8))
        out.writelines(parts)


@pytest.mark.slow
@pytest.mark.parametrize("model", [QWEN3_30B, DEEPSEEK_V32], ids=["qwen3_30b", "deepseek_v32"])
def test_a_full_layer_through_workers_is_within_the_bound(tmp_path: Path, model: Model) -> None:
    sizes = (model.num_experts, model.hidden_size, model.moe_intermediate_size)
    layer = wide_layer(*sizes)
    write_checkpoint(tmp_path / "small", model, Layer.random(model.top_k, 64, 32))
    write_checkpoint(tmp_path / "checkpoint", model, layer)
    folders = [str(tmp_path / name) for name in ("small", "small-out", "checkpoint", "converted")]
    output = subprocess.run(
        [sys.executable, "-c", MEASURED, *folders], capture_output=True, text=True, check=True, timeout=200
    ).stdout
    (tmp_path / "checkpoint" / "model.safetensors").unlink()
    grown_bytes, layer_bytes = json.loads(output)
    assert layer_bytes > 3 * np.prod(sizes) * 9 / 8
    # An expert as it was, as it becomes and in between, and the buffers of reading and hashing.
    assert 0 < grown_bytes < 4 * layer_bytes / model.num_experts + (32 << 20)

    rng = np.random.default_rng(1)
    x = rng.standard_normal((model.num_tokens, model.hidden_size), np.float32)
    ids = np.stack([rng.permutation(model.num_experts)[: model.top_k] for _ in x]).astype(np.int32)
    weights = rng.uniform(0.1, 1.0, ids.shape).astype(np.float32)
    with remote_experts(tmp_path / "converted", WORKERS, max_step_tokens=8) as experts:
        step = experts.submit(0, *(torch.from_numpy(array) for array in (x, ids, weights)))
        got = step.wait().numpy()
    exact, bound = expert_sums(layer, x, ids, weights)
    # The host's sums over workers are roundings more than those of one process, which has so many.
    bound *= 1 + WORKERS / (layer.num_stripes * model.top_k)
    error = np.abs(got - exact)
    assert (error <= bound).all()
    assert np.abs(exact).min() > 0
    assert bound.max() < 2e-3 * np.abs(exact).max()
