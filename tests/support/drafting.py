"""Tiny random models with a layer of multi-token prediction, and layers whose guesses are often right."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import torch

from duckllm.engine.engine import Drafting, Engine
from duckllm.layers.step import LayerCache, SequenceStep
from duckllm.models.causal_lm import CausalLM
from duckllm.models.mtp import MTPLayer
from duckllm.models.registry import load_config, load_model
from duckllm.moe.local import LocalExperts
from duckllm.weights.convert import convert
from duckllm.weights.host_tensors import HostTensors
from duckllm.weights.manifest import Manifest
from support.attention import slots_of
from support.families import Spec, add_mtp_layer, write_model

_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
}
SPARSE = Spec(
    "tiny sparse",
    "DeepseekV32ForCausalLM",
    _COMMON
    | {"num_key_value_heads": 2, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 12}
    | {"qk_rope_head_dim": 8, "v_head_dim": 10, "index_n_heads": 3, "index_head_dim": 16, "index_topk": 8},
)
GROUPED = Spec(
    "tiny grouped",
    "Glm4MoeForCausalLM",
    _COMMON | {"num_key_value_heads": 1, "head_dim": 12, "use_qk_norm": True, "attention_bias": True},
)


def make_model(root: Path, spec: Spec, max_tokens: int) -> tuple[CausalLM, MTPLayer]:
    """A random model below ``root``, with a random layer of multi-token prediction."""
    seed = crc32(spec.name.encode())
    write_model(root / "checkpoint", spec, seed)
    add_mtp_layer(root / "checkpoint", seed + 1)
    convert(root / "checkpoint", root / "converted")
    return load(root / "converted", max_tokens)


def load(folder: Path, max_tokens: int) -> tuple[CausalLM, MTPLayer]:
    """A converted model, with its layer of multi-token prediction."""
    experts, tensors = LocalExperts(Manifest.load(folder), max_step_tokens=max_tokens), HostTensors(folder)
    model = load_model(load_config(folder), tensors, experts, max_tokens=max_tokens)
    return model, MTPLayer(model, tensors, experts)


class Remembering:
    """Stands for the layer: guesses what followed a token before, so that some guesses are right.

    Writes each token's number into its cache, so that what lies there can be looked at.
    """

    def __init__(self, model: CausalLM) -> None:
        self.followers: dict[int, int] = {}
        self.num_rows = 0
        self.model = SimpleNamespace(compute_logits=self._logits, config=model.config)

    def learn(self, token_ids: Sequence[int]) -> None:
        self.followers |= dict(pairwise(token_ids))

    def new_kv_cache(self, max_tokens: int) -> LayerCache:
        return (torch.full((max_tokens, 1), torch.nan),)

    def forward(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        sequences: Sequence[SequenceStep],
        cache: LayerCache,
    ) -> torch.Tensor:
        assert len(hidden) == len(token_ids) == sum(each.num_tokens for each in sequences)
        self.num_rows += len(token_ids)
        for each in sequences:
            cache[0][slots_of(each)[each.start :]] = token_ids[each.rows, None].float()
        guesses = [self.followers.get(token, token) for token in token_ids.tolist()]
        return torch.nn.functional.one_hot(torch.tensor(guesses), self.model.config.vocab_size).float()

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return 9.0 * hidden


def make_engine(
    model: CausalLM,
    drafting: Drafting | None = None,
    *,
    context: int = 64,
    step: int = 64,
    pages: int = 40,
    **options: Any,
) -> Engine:
    """An engine with pages of the KV cache that are filled with NaN: what is read too early shows."""
    engine = Engine(
        model,
        max_model_len=context,
        max_step_tokens=step,
        cache_tokens=16 * pages,
        drafting=drafting,
        **options,
    )
    for layer in engine.kv_cache.tensors:
        for tensor in layer:
            tensor.fill_(torch.nan)
    return engine
