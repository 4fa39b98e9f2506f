"""Random tiny models of any family, made and saved by transformers' own class, and compared with it.

The weights are varied, so that a tensor left out or mixed up shows: norms are not 1, biases and the
correction bias not 0. Experts of a BF16 or F32 checkpoint are e4m3 values times a power of two, with 448 in
every block, so that converting them rounds nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import transformers
from safetensors.torch import load_file, save_file

from duckllm.engine.engine import Engine
from duckllm.models.causal_lm import CausalLM
from duckllm.text.quiet import quiet_transformers
from duckllm.weights.architectures import layout_of
from duckllm.weights.convert import convert
from duckllm.weights.layout import PROJECTIONS, ModelLayout
from support.checkpoints import BASE_CONFIG, BLOCK, E4M3_MAX, quantise
from support.models import TOLERANCE, all_logits, build_model, difference, greedy_replies
from support.reference import load_reference, reference_logits

NUM_TOKENS = 96
# Tokens a step: the whole prompt, chunks that do not divide it, one by one.
STEP_TOKENS = (NUM_TOKENS, 7, 1)
FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
# Linear layers that published block-FP8 checkpoints keep in BF16.
KEPT_WIDE = ("weights_proj", "eh_proj")
# Weights that get more than unit gain, so that attention and the gates are far from linear.
GAINS = {"q_b_proj": 2.0, "q_proj": 2.0, "o_proj": 2.0, "gate_proj": 2.0, "down_proj": 2.0, "lm_head": 3.0}


@dataclass(frozen=True)
class Spec:
    """A tiny model: which class of transformers, with which fields, and how it is stored.

    Args:
        name: Of the case, for people.
        architecture: Name of the class in transformers.
        config: Fields of its configuration; the rest has its defaults.
        stored: ``"bf16"``, ``"f32"``, or ``"fp8"`` with 128 x 128 block scales.
        max_shard_size: As ``save_pretrained`` has it.
        file_config: Changes to config.json once it is written.
    """

    name: str
    architecture: str
    config: Mapping[str, Any]
    stored: str = "bf16"
    max_shard_size: str = "5GB"
    file_config: Mapping[str, Any] = field(default_factory=dict)


def deepseek_v32(name: str, **changes: Any) -> Spec:
    """DeepSeek-V3.2 in FP8, as it is published; ``changes`` to a tiny configuration."""
    own = ("architectures", "model_type", "quantization_config")
    config = {field: value for field, value in BASE_CONFIG.items() if field not in own} | changes
    # Published files have the older form of these fields.
    rope = {field: config.get(field) for field in ("rope_parameters", "rope_theta", "rope_scaling")}
    return Spec(name, "DeepseekV32ForCausalLM", config, stored="fp8", file_config=rope)


@dataclass(frozen=True)
class Case:
    """A random model: saved, converted, in the reference, and the reference's logits for some tokens."""

    spec: Spec
    checkpoint: Path
    folder: Path
    reference: transformers.PreTrainedModel
    token_ids: list[int]
    logits: torch.Tensor

    def prompts(self, lengths: range) -> list[list[int]]:
        """Random prompts, one of each length."""
        generator = torch.Generator().manual_seed(7)
        return [random_tokens(self.reference.config, length, generator) for length in lengths]


MakeCase = Callable[[Spec], Case]


def make_case(root: Path, spec: Spec, num_tokens: int = NUM_TOKENS) -> Case:
    """Makes, saves, converts and loads a random model below ``root``."""
    seed = crc32(spec.name.encode())
    write_model(root / "checkpoint", spec, seed)
    manifest = convert(root / "checkpoint", root / "converted")
    if spec.stored != "fp8":
        assert manifest.source["quantisation_error"]["max_relative"] == 0.0, "experts must not be rounded"
    reference = load_reference(root / "checkpoint", getattr(transformers, spec.architecture))
    tokens = random_tokens(reference.config, num_tokens, torch.Generator().manual_seed(seed))
    logits = reference_logits(reference, tokens)
    return Case(spec, root / "checkpoint", root / "converted", reference, tokens, logits)


def random_tokens(
    config: transformers.PretrainedConfig, num_tokens: int, generator: torch.Generator
) -> list[int]:
    return torch.randint(2, config.vocab_size, (num_tokens,), generator=generator).tolist()


def write_model(folder: Path, spec: Spec, seed: int) -> None:
    """Writes a random model as ``save_pretrained`` does, rewritten in FP8 where that is asked for."""
    model_class = getattr(transformers, spec.architecture)
    config = model_class.config_class(**spec.config)
    with quiet_transformers():
        model = model_class(config)
    randomise(model, seed, wide=spec.stored == "f32", exact_experts=spec.stored != "fp8")
    config.dtype = "float32" if spec.stored == "f32" else "bfloat16"
    with quiet_transformers():
        model.save_pretrained(folder, max_shard_size=spec.max_shard_size)
    if spec.stored == "fp8":
        rewrite_as_fp8(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(spec.file_config)))


def add_mtp_layer(checkpoint: Path, seed: int) -> None:
    """Gives a checkpoint of transformers, which saves none, a random MTP layer."""
    config = json.loads((checkpoint / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (checkpoint / "config.json").write_text(json.dumps(config))
    tensors, layer = load_file(checkpoint / "model.safetensors"), config["num_hidden_layers"]
    layout = layout_of(config, {f"model.layers.{layer}.": None})
    generator = torch.Generator().manual_seed(seed)
    for name, shape in layout.host_shapes.items():
        if ModelLayout.layer_of(name) == layer:
            tensors[name] = random_values(name, shape, generator).bfloat16()
    for expert in range(layout.num_experts):
        for projection in PROJECTIONS:
            name = layout.expert_weight(layer, expert, projection)
            values = random_values(name, layout.expert_shape(projection), generator)
            tensors[name] = exactly_e4m3(values).bfloat16()
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int, *, wide: bool, exact_experts: bool) -> None:
    """Gives every tensor of a model random values; BF16 ones unless ``wide``."""
    generator = torch.Generator().manual_seed(seed)
    drawn: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.data_ptr() in drawn:  # a tied head
            continue
        values = random_values(name, tensor.shape, generator)
        if exact_experts and tensor.dim() == 3:
            values = torch.stack([_exact_expert(name, matrix) for matrix in values])
        tensor.data = values if wide or "correction_bias" in name else values.bfloat16()
        drawn.add(tensor.data_ptr())
    model.tie_weights()


def random_values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Values that suit a tensor of this name."""
    normal = torch.randn(shape, generator=generator)
    if "correction_bias" in name:
        return 0.2 * normal
    if name.endswith(".bias"):
        return 0.3 * normal
    if len(shape) == 1:
        return 1 + 0.3 * normal
    if "embed_tokens" in name:
        return normal
    normal *= shape[-1] ** -0.5
    if name.endswith("experts.gate_up_proj"):
        normal[:, : shape[1] // 2] *= 2.0
    elif name.endswith("experts.down_proj"):
        normal *= 2.0
    parts = name.split(".")
    return normal * next((gain for part, gain in GAINS.items() if part in parts), 1.0)


def _exact_expert(name: str, matrix: torch.Tensor) -> torch.Tensor:
    """Gate and up lie in one tensor, but are blocked each for itself."""
    parts = matrix.chunk(2) if name.endswith("gate_up_proj") else (matrix,)
    return torch.cat([exactly_e4m3(part) for part in parts])


def exactly_e4m3(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` rounded to e4m3 times a power of two per 128 x 128 block, with 448 reached in each."""
    result = torch.empty_like(matrix)
    for row in range(0, matrix.shape[0], BLOCK):
        for column in range(0, matrix.shape[1], BLOCK):
            tile = matrix[row : row + BLOCK, column : column + BLOCK]
            scale = torch.exp2(torch.ceil(torch.log2(tile.abs().max() / E4M3_MAX)))
            rounded = (tile / scale).to(torch.float8_e4m3fn).float()
            largest = rounded.abs() == rounded.abs().max()
            rounded[largest] = E4M3_MAX * rounded[largest].sign()
            result[row : row + BLOCK, column : column + BLOCK] = rounded * scale
    return result


def rewrite_as_fp8(folder: Path) -> None:
    """Turns the linear layers of a checkpoint into e4m3 with block scales, as published ones have them."""
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text()) if index_file.is_file() else None
    for path in sorted(folder.glob("*.safetensors")):
        stored = load_file(path)
        for name in list(stored):
            if is_fp8(name, stored[name]):
                stored[name], scale = quantise(stored[name].float())
                stored[f"{name}_scale_inv"] = scale
                if index is not None:
                    index["weight_map"][f"{name}_scale_inv"] = path.name
        save_file(stored, path, metadata={"format": "pt"})
    if index is not None:
        index_file.write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": FP8_CONFIG}))


def is_fp8(name: str, tensor: torch.Tensor) -> bool:
    """Whether published FP8 checkpoints hold this tensor in FP8."""
    layer = name.removesuffix(".weight").rpartition(".")[2]
    is_linear = layer.endswith("_proj") or layer in ("kv_a_proj_with_mqa", "wq_b", "wk", "w1", "w2", "w3")
    return tensor.dim() == 2 and is_linear and layer not in KEPT_WIDE


def assert_logits(case: Case, step_tokens: int, model: CausalLM | None = None) -> None:
    """The logits of every position equal the reference's, computed ``step_tokens`` at a time."""
    model = model or build_model(case.folder)
    got = difference(all_logits(model, case.token_ids, step_tokens), case.logits)
    print(f"f32, {case.spec.name}, {step_tokens} tokens a step: largest {got:.3g}")  # pytest -s shows it
    assert got <= TOLERANCE, f"{case.spec.name}: logits differ by {got}"


def assert_greedy(case: Case, num_prompts: int = 4, num_tokens: int = 64) -> None:
    """Greedy replies equal the reference's, which judges each at once: token by token its likeliest.

    Up to five replies are made at a time, each a row of a step, beside prompts of the next.
    """
    engine = Engine(build_model(case.folder), max_model_len=256, max_step_tokens=5, cache_tokens=512)
    replies = set()
    prompts = case.prompts(range(1, num_prompts + 1))
    for prompt, reply in zip(prompts, greedy_replies(engine, prompts, num_tokens), strict=True):
        assert len(reply) == num_tokens
        logits = reference_logits(case.reference, prompt + reply[:-1])
        assert reply == logits[len(prompt) - 1 :].argmax(-1).tolist(), f"prompt of {len(prompt)} tokens"
        replies.add(tuple(reply))
    assert len(replies) == num_prompts
