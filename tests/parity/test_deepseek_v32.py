"""DeepSeek-V3.2 against transformers in float32: the same logits and the same greedy tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from duckllm.layers import indexer, mla
from duckllm.layers.rope import rotate_half_split, rotate_interleaved
from duckllm.models import deepseek_v3
from duckllm.models.causal_lm import CausalLM, MoEBlock
from duckllm.moe.router import GroupLimitedRouter
from support import families
from support.families import STEP_TOKENS, Case, MakeCase, assert_greedy, assert_logits
from support.models import TOLERANCE, all_logits, build_model, difference

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
SPECS = {name: families.deepseek_v32(name, **changes) for name, changes in CONFIGS.items()}


@pytest.fixture(params=list(SPECS))
def case(request: pytest.FixtureRequest, make_case: MakeCase) -> Case:
    return make_case(SPECS[request.param])


@pytest.mark.parametrize("step_tokens", STEP_TOKENS)
def test_logits_equal_the_reference_at_every_position(case: Case, step_tokens: int) -> None:
    assert_logits(case, step_tokens)


def test_greedy_tokens_equal_the_reference(case: Case) -> None:
    """20 prompts where attention is to all and where it is sparse, 5 elsewhere."""
    assert_greedy(case, num_prompts=20 if case.spec.name in ("one_dense_layer", "sparse") else 5)


def test_the_sparse_path_decides(make_case: MakeCase) -> None:
    """Attention to everything gives other logits, so the comparison above sees the selection."""
    case = make_case(SPECS["sparse"])
    model = build_model(case.folder)
    for layer in model.layers:
        layer.attention.indexer.shape = replace(layer.attention.indexer.shape, topk=1000)
    logits = all_logits(model, case.token_ids, 96)
    assert difference(logits[:8], case.logits[:8]) <= TOLERANCE
    assert (logits[8:] - case.logits[8:]).abs().amax(dim=-1).median() > 0.1


def routers(model: CausalLM) -> list[GroupLimitedRouter]:
    return [layer.mlp.router for layer in model.layers if isinstance(layer.mlp, MoEBlock)]


def interleaved_indexer_rope(case: Case, patch: pytest.MonkeyPatch) -> CausalLM:
    patch.setattr(indexer, "rotate_half_split", rotate_interleaved)
    return build_model(case.folder)


def half_split_attention_rope(case: Case, patch: pytest.MonkeyPatch) -> CausalLM:
    patch.setattr(mla, "rotate_interleaved", rotate_half_split)
    return build_model(case.folder)


def mscale_dropped(case: Case, patch: pytest.MonkeyPatch) -> CausalLM:
    patch.setattr(deepseek_v3, "_yarn_mscale", lambda factor, mscale_all_dim: 1.0)
    return build_model(case.folder)


def scaling_factor_missing(case: Case, patch: pytest.MonkeyPatch) -> CausalLM:
    model = build_model(case.folder)
    for router in routers(model):
        router.routing = replace(router.routing, scaling_factor=1.0)
    return model


def correction_bias_in_the_weights(case: Case, patch: pytest.MonkeyPatch) -> CausalLM:
    original = GroupLimitedRouter.choose

    def biased(self: GroupLimitedRouter, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, _ = original(self, logits)
        choice = logits.sigmoid() + torch.from_numpy(self.correction_bias)
        weights = choice.gather(1, ids.long())
        return ids, weights / weights.sum(-1, keepdim=True) * self.routing.scaling_factor

    patch.setattr(GroupLimitedRouter, "choose", biased)
    return build_model(case.folder)


def groups_not_limited(case: Case, patch: pytest.MonkeyPatch) -> CausalLM:
    model = build_model(case.folder)
    for router in routers(model):
        router.routing = replace(router.routing, topk_group=router.routing.num_groups)
    return model


def shared_expert_missing(case: Case, patch: pytest.MonkeyPatch) -> CausalLM:
    model = build_model(case.folder)
    for layer in model.layers:
        if isinstance(layer.mlp, MoEBlock):
            layer.mlp.shared = None
    return model


@pytest.mark.parametrize(
    ("name", "wrong_variant"),
    [
        ("sparse", interleaved_indexer_rope),
        ("sparse", half_split_attention_rope),
        ("yarn", mscale_dropped),
        ("one_dense_layer", scaling_factor_missing),
        ("one_dense_layer", correction_bias_in_the_weights),
        ("three_dense_layers_four_groups", groups_not_limited),
        ("one_dense_layer", shared_expert_missing),
    ],
)
def test_a_wrong_variant_is_rejected(
    name: str,
    wrong_variant: Callable[[Case, pytest.MonkeyPatch], CausalLM],
    make_case: MakeCase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case(SPECS[name])
    assert_logits(case, 96)
    model = wrong_variant(case, monkeypatch)
    with pytest.raises(AssertionError, match="logits differ by"):
        assert_logits(case, 96, model)
