from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV32ForCausalLM

from duckllm.weights.convert import convert
from support.checkpoints import write_random_checkpoint
from support.reference import load_reference, reference_logits

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
# Sixteen index heads: a score of exactly zero, the one that ties, needs sixteen negative products at once.
CONFIGS: dict[str, dict[str, Any]] = {
    "one_dense_layer": {},
    "three_dense_layers_four_groups": {
        "num_hidden_layers": 5,
        "first_k_dense_replace": 3,
        "n_group": 4,
        "topk_group": 2,
    },
    "sizes_that_nothing_divides": {
        "hidden_size": 200,
        "moe_intermediate_size": 40,
        "intermediate_size": 136,
        "n_group": 4,
        "topk_group": 3,
        "kv_lora_rank": 36,
        "v_head_dim": 20,
    },
    "intermediate_200": {"hidden_size": 136, "moe_intermediate_size": 200, "num_experts_per_tok": 3},
    "yarn": {"rope_scaling": YARN, "max_position_embeddings": 256},
    "sparse": {"index_topk": 8, "n_group": 4, "topk_group": 2},
    "sparse_yarn_bias_two_shared": {
        "index_topk": 8,
        "rope_scaling": YARN,
        "max_position_embeddings": 256,
        "attention_bias": True,
        "n_shared_experts": 2,
        "first_k_dense_replace": 3,
        "num_hidden_layers": 5,
        "hidden_size": 200,
        "moe_intermediate_size": 72,
    },
    "tied_not_normalised": {
        "tie_word_embeddings": True,
        "norm_topk_prob": False,
        "num_experts_per_tok": 1,
        "first_k_dense_replace": 0,
        "num_hidden_layers": 3,
    },
}
NUM_TOKENS = 96


@dataclass(frozen=True)
class Case:
    """A random model: converted, in the reference, and the reference's logits for some tokens."""

    name: str
    folder: Path
    config: dict[str, Any]
    reference: DeepseekV32ForCausalLM
    token_ids: list[int]
    logits: torch.Tensor


@pytest.fixture(scope="session")
def make_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    cases: dict[str, Case] = {}

    def make(name: str) -> Case:
        if name not in cases:
            root = tmp_path_factory.mktemp(name)
            seed = 100 + list(CONFIGS).index(name)
            config = write_random_checkpoint(root / "checkpoint", seed, **CONFIGS[name])
            convert(root / "checkpoint", root / "converted")
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(2, config["vocab_size"], (NUM_TOKENS,), generator=generator).tolist()
            reference = load_reference(root / "checkpoint")
            logits = reference_logits(reference, tokens)
            cases[name] = Case(name, root / "converted", config, reference, tokens, logits)
        return cases[name]

    return make


@pytest.fixture(params=list(CONFIGS))
def case(request: pytest.FixtureRequest, make_case: Callable[[str], Case]) -> Case:
    return make_case(request.param)
