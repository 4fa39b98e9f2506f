"""The reference: transformers' DeepSeek-V3.2 in float32 with eager attention, on dequantised weights.

Independent of the package: it reads the checkpoint itself.

The indexer's ReLU gives many earlier tokens a score of exactly zero, and where such a tie falls on the border
of the selection torch.topk's choice is unspecified (it changes with the number of tokens in the call). The
reference therefore runs with that choice fixed, among equal scores the lowest position; nothing else of it is
changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

from support.checkpoints import dequantise


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint in float32, FP8 weights times the scales of their blocks."""
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                stored[name] = file.get_tensor(name)
    tensors = {}
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            continue
        scale = stored.get(f"{name}_scale_inv")
        tensors[name] = tensor.float() if scale is None else dequantise(tensor, scale)
    return tensors


def load_reference(folder: Path) -> DeepseekV32ForCausalLM:
    config = DeepseekV32Config.from_pretrained(folder)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    config.dtype = torch.float32
    del config.quantization_config
    model = DeepseekV32ForCausalLM(config).float().eval()
    tensors = read_checkpoint(folder)
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    state = {}
    for name, expected in model.state_dict().items():
        if ".mlp.experts." in name:
            prefix = name.rsplit(".", 1)[0]
            parts = [
                [tensors[f"{prefix}.{e}.{part}_proj.weight"] for e in range(config.n_routed_experts)]
                for part in ("gate", "up", "down")
            ]
            gate, up, down = (torch.stack(part) for part in parts)
            state[name] = torch.cat((gate, up), dim=1) if name.endswith("gate_up_proj") else down
        else:
            state[name] = tensors[name]
        assert state[name].shape == expected.shape, name
    model.load_state_dict(state, strict=True)
    assert model.config._attn_implementation == "eager"
    return model


@contextmanager
def ties_by_position() -> Iterator[None]:
    """Tensor.topk as a stable descending sort: a valid top-k whose ties are decided."""
    original = torch.Tensor.topk

    def stable_topk(self: torch.Tensor, k: int, dim: int = -1) -> torch.return_types.sort:
        result = torch.sort(self, dim=dim, descending=True, stable=True)
        first = (result.values.narrow(dim, 0, k), result.indices.narrow(dim, 0, k))
        return torch.return_types.topk(first)

    torch.Tensor.topk = stable_topk
    try:
        yield
    finally:
        torch.Tensor.topk = original


@torch.inference_mode()
def reference_logits(model: DeepseekV32ForCausalLM, token_ids: list[int]) -> torch.Tensor:
    """Logits at every position, [T, V]."""
    with ties_by_position():
        return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]


@torch.inference_mode()
def reference_greedy(model: DeepseekV32ForCausalLM, token_ids: list[int], steps: int, eos: int) -> list[int]:
    """Greedy continuation with the reference's own cache, up to and with ``eos``."""
    with ties_by_position():
        output = model.generate(
            torch.tensor([token_ids]),
            max_new_tokens=steps,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=eos,
        )
    return output[0, len(token_ids) :].tolist()
