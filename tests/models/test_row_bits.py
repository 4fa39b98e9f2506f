"""A token's hidden state and logits are the same bits whatever tokens go with it in a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from duckllm.layers.step import SequenceStep
from duckllm.models.causal_lm import CausalLM, MoEBlock
from duckllm.weights.convert import convert
from support.families import Spec, write_model
from support.models import build_model

NUM_TOKENS = 33
COMMON = {
    "vocab_size": 101,
    "hidden_size": 72,
    "intermediate_size": 88,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
# A shared expert behind a gate of its own and a softmax over six experts; groups of experts by sigmoids.
SPECS = [
    Spec(
        "gated",
        "Qwen2MoeForCausalLM",
        COMMON
        | {
            "num_experts": 6,
            "shared_expert_intermediate_size": 56,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
        },
        "f32",
    ),
    Spec(
        "groups",
        "DeepseekV3ForCausalLM",
        COMMON
        | {
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 1,
            "q_lora_rank": 20,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "first_k_dense_replace": 1,
        },
        "f32",
    ),
]


@pytest.fixture(params=SPECS, ids=lambda spec: spec.name)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> CausalLM:
    """A random model of F32 weights and odd sizes."""
    write_model(tmp_path / "checkpoint", request.param, seed=11)
    convert(tmp_path / "checkpoint", tmp_path / "converted")
    return build_model(tmp_path / "converted", max_tokens=64)


def outputs(model: CausalLM, token_ids: torch.Tensor) -> torch.Tensor:
    """Hidden states and logits side by side, of tokens in one step."""
    cache = model.new_kv_cache(len(token_ids))
    hidden = model.forward(token_ids, [SequenceStep.of(0, 0, len(token_ids))], cache)
    return torch.cat((hidden, model.compute_logits(hidden)), dim=1)


def in_steps(model: CausalLM, token_ids: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """The same in steps of these sizes."""
    cache, start, hidden = model.new_kv_cache(len(token_ids)), 0, []
    for rows in token_ids.split(sizes):
        hidden.append(model.forward(rows, [SequenceStep.of(0, start, len(rows))], cache))
        start += len(rows)
    return torch.cat([torch.cat((each, model.compute_logits(each)), dim=1) for each in hidden])


def test_one_row_gives_the_bits_of_the_same_row_among_others(model: CausalLM) -> None:
    """Attention gives each row back here."""
    for layer in model.layers:
        layer.attention = lambda x, step, cache: x
    assert [isinstance(layer.mlp, MoEBlock) for layer in model.layers] == [False, True, True]
    token_ids = torch.randint(101, (NUM_TOKENS,), generator=torch.Generator().manual_seed(2))
    alone = torch.cat([outputs(model, token_ids[row : row + 1]) for row in range(NUM_TOKENS)])
    assert alone.isfinite().all()
    assert alone.std() > 0.1
    for num_tokens in range(2, NUM_TOKENS + 1):
        assert torch.equal(outputs(model, token_ids[:num_tokens]), alone[:num_tokens])
        assert torch.equal(outputs(model, token_ids[-num_tokens:]), alone[-num_tokens:])


def test_a_context_in_any_steps_gives_the_bits_of_the_whole(model: CausalLM) -> None:
    token_ids = torch.randint(101, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))
    whole = outputs(model, token_ids)
    for sizes in ([1] * 33, [32, 1], [8, 9, 16], [1, 7, 25]):
        assert torch.equal(in_steps(model, token_ids, sizes), whole)
