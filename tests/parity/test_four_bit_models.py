"""Models of 4-bit checkpoints against transformers in float32 with the weights that the codes stand for."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from duckllm import _native
from duckllm.weights.convert import convert
from duckllm.weights.manifest import Manifest
from duckllm.weights.reader import ExpertFile
from duckllm.weights.safetensors_file import build_header
from support.families import Spec, random_tokens, write_model
from support.four_bit import FORMS, Form, Tensor, stored
from support.models import TOLERANCE, all_logits, build_model, difference
from support.reference import load_reference, read_checkpoint, reference_logits

QWEN3: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
DEEPSEEK: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS = re.compile(r".*\.experts\.\d+\..*_proj\.weight")
# A tool quantises every linear layer but the head and the router.
LINEARS = re.compile(r".*_proj(_with_mqa)?\.weight")


def rewrite(plain: Path, folder: Path, twin: Path, form: Form, which: re.Pattern[str]) -> None:
    """A checkpoint in the form, and its twin in f32 for the reference: experts exact, the host's in BF16."""
    rng = np.random.default_rng(1)
    packed: dict[str, Tensor] = {}
    wide: dict[str, torch.Tensor] = {}
    for name, weight in read_checkpoint(plain).items():
        if not which.fullmatch(name):
            packed[name], wide[name] = stored(weight.bfloat16()), weight
            continue
        written = form.write(rng, (weight.shape[0], weight.shape[1]), weight.double().numpy())
        stem = name.removesuffix("weight")
        packed |= {stem + part: tensor for part, tensor in written.tensors.items()}
        values = torch.from_numpy(written.values).float()
        assert 0.01 < (values - weight).norm() / weight.norm() < 0.2, name
        wide[name] = values if EXPERTS.fullmatch(name) else values.bfloat16().float()
    config = json.loads((plain / "config.json").read_text())
    for place, said in ((folder, config | {"quantization_config": form.config}), (twin, config)):
        place.mkdir()
        (place / "config.json").write_text(json.dumps(said))
    header = build_header({name: each[:2] for name, each in packed.items()}, {}, 8)
    (folder / "model.safetensors").write_bytes(header + b"".join(each[2] for each in packed.values()))
    save_file({name: tensor.contiguous() for name, tensor in wide.items()}, twin / "model.safetensors")


class NativeExperts:
    """The expert executor on a converted model's units, with x and activations in int8 or in f32."""

    def __init__(self, manifest: Manifest, activations: str) -> None:
        self._units = {layer: ExpertFile.open(manifest, layer).units for layer in manifest.expert_layers}
        self._experts = _native.Experts(
            *(manifest.hidden_size, manifest.moe_intermediate_size, manifest.num_experts),
            *(manifest.num_experts_per_tok, 0, manifest.num_stripes, 64, 1, 0),
            format=manifest.format,
            scale_layout=manifest.scale_layout,
            activations=activations,
        )

    def submit(
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, lane: int = 0
    ) -> NativeExperts._Pending:
        rows = (x.numpy(), topk_ids.numpy(), topk_weights.numpy())
        return self._Pending(torch.from_numpy(self._experts.run(self._units[layer], *rows)))

    class _Pending:
        def __init__(self, result: torch.Tensor) -> None:
            self._result = result

        def wait(self, shared: torch.Tensor | None = None) -> torch.Tensor:
            return self._result if shared is None else shared + self._result


CASES = [
    ("compressed-32", "DeepseekV3ForCausalLM", DEEPSEEK, EXPERTS),  # Kimi-K2-Thinking
    ("mxfp4", "DeepseekV3ForCausalLM", DEEPSEEK, EXPERTS),
    ("gptq-128", "DeepseekV3ForCausalLM", DEEPSEEK, LINEARS),
    ("compressed-zeros", "Qwen3MoeForCausalLM", QWEN3, LINEARS),
    ("gptq-zeros", "Qwen3MoeForCausalLM", QWEN3, LINEARS),
    ("awq-32", "Qwen3MoeForCausalLM", QWEN3, LINEARS),
]


@pytest.mark.parametrize(("name", "architecture", "config", "which"), CASES, ids=[case[0] for case in CASES])
def test_logits_equal_the_reference(
    tmp_path: Path, name: str, architecture: str, config: dict[str, Any], which: re.Pattern[str]
) -> None:
    form = FORMS[name]
    spec = Spec(f"four-bit-{name}", architecture, deepcopy(config))
    write_model(tmp_path / "plain", spec, crc32(name.encode()))
    rewrite(tmp_path / "plain", tmp_path / "src", tmp_path / "twin", form, which)
    manifest = convert(tmp_path / "src", tmp_path / "dst", verify=True)
    assert (manifest.format, manifest.source["quantisation_error"]) == (form.format, None)
    reference = load_reference(tmp_path / "twin", getattr(transformers, architecture))
    tokens = random_tokens(reference.config, 48, torch.Generator().manual_seed(5))
    expected = reference_logits(reference, tokens)
    # Nothing but the order of sums differs where nothing is rounded to bytes.
    exact = build_model(tmp_path / "dst", NativeExperts(manifest, "f32"))
    got = difference(all_logits(exact, tokens, 16), expected)
    # As models run: x and activations of the experts are rounded to bytes, by about 1 % in each layer.
    bytes_of = all_logits(build_model(tmp_path / "dst"), tokens, 16)
    each = (bytes_of - expected).norm(dim=1) / expected.norm(dim=1)
    rounded = float(each.median())  # where rounding has a token take another expert, more
    print(f"{name}: largest {got:.3g}, with bytes {rounded:.3%} of a token's norm")  # pytest -s shows it
    assert got <= TOLERANCE
    assert 1e-4 < rounded < 0.03
