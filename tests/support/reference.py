"""The reference: a class of transformers in float32 with eager attention, on dequantised weights.

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
from transformers import DeepseekV32ForCausalLM, DynamicCache, PreTrainedModel

from duckllm.text.quiet import quiet_transformers
from support.checkpoints import dequantise

# Steps that keep the reference's masks and expanded keys small.
STEP_TOKENS = 320


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


def load_reference(
    folder: Path, model_class: type[PreTrainedModel] = DeepseekV32ForCausalLM
) -> PreTrainedModel:
    """The model of a checkpoint, which must find every tensor and know every one but an MTP layer's."""
    config = model_class.config_class.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.model_type = model_class.config_class.model_type  # by which transformers renames tensors
    config._experts_implementation = "eager"
    with quiet_transformers():
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=read_checkpoint(folder),
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
    assert not info["missing_keys"], info["missing_keys"]
    assert not info["mismatched_keys"], info["mismatched_keys"]
    layers = (int(name.split(".")[2]) for name in info["unexpected_keys"])
    assert all(layer >= config.num_hidden_layers for layer in layers), info["unexpected_keys"]
    assert model.config._attn_implementation == "eager"
    assert model.config._experts_implementation == "eager"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return model.eval()


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
def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Logits at every position, [T, V]; of long contexts in steps through the reference's own cache."""
    chunks = torch.tensor([token_ids]).split(STEP_TOKENS, dim=1)
    cache = DynamicCache(config=model.config) if len(chunks) > 1 else None
    with ties_by_position():
        steps = [model(input_ids=chunk, cache=cache, use_cache=cache is not None) for chunk in chunks]
    return torch.cat([step.logits[0] for step in steps])


@torch.inference_mode()
def reference_greedy(model: PreTrainedModel, token_ids: list[int], steps: int, eos: int) -> list[int]:
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
