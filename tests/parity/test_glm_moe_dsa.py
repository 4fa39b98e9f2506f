"""GLM-5 against transformers in float32: an interleaved indexer, and layers that share a selection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from duckllm.layers import indexer
from duckllm.layers.rope import rotate_half_split
from duckllm.models.causal_lm import CausalLM
from duckllm.models.registry import load_config
from duckllm.weights.host_tensors import HostTensors
from support.families import STEP_TOKENS, Case, MakeCase, Spec, assert_greedy, assert_logits
from support.models import TOLERANCE, all_logits, build_model, difference

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    # Sixteen heads: a score of exactly zero, the one that ties, needs sixteen negative products at once.
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 8,
    "indexer_types": ["full"] * 4,
}


def spec(name: str, stored: str = "bf16", max_shard_size: str = "5GB", **changes: Any) -> Spec:
    return Spec(name, "GlmMoeDsaForCausalLM", BASE | changes, stored, max_shard_size)


SPECS = {
    each.name: each
    for each in (
        spec("all_full_bf16_in_shards", max_shard_size="200KB"),
        spec("shared_fp8", stored="fp8", indexer_types=["full", "shared", "shared", "full"]),
        spec(
            "shared_sizes_that_nothing_divides_f32",
            stored="f32",
            indexer_types=["full", "full", "shared", "shared"],
            hidden_size=200,
            intermediate_size=136,
            moe_intermediate_size=40,
            kv_lora_rank=36,
            v_head_dim=20,
            index_head_dim=24,
        ),
        spec("shorter_than_topk", index_topk=200, indexer_types=["full", "shared", "full", "shared"]),
        spec(
            "groups_bias_three_shared_experts",
            n_group=4,
            topk_group=2,
            attention_bias=True,
            n_shared_experts=3,
            indexer_types=["full", "shared", "full", "shared"],
        ),
        spec(
            "tied_one_expert",
            tie_word_embeddings=True,
            num_experts_per_tok=1,
            index_topk=5,
            indexer_types=["full", "full", "shared", "full"],
        ),
    )
}


@pytest.fixture(params=list(SPECS))
def case(request: pytest.FixtureRequest, make_case: MakeCase) -> Case:
    return make_case(SPECS[request.param])


@pytest.mark.parametrize("step_tokens", STEP_TOKENS)
def test_logits_equal_the_reference_at_every_position(case: Case, step_tokens: int) -> None:
    assert_logits(case, step_tokens)


def test_greedy_tokens_equal_the_reference(case: Case) -> None:
    assert_greedy(case)


def test_shared_layers_have_no_indexer_and_keep_no_keys(make_case: MakeCase) -> None:
    folder = make_case(SPECS["shared_fp8"]).folder
    shapes = load_config(folder).attention
    assert [shape.cache_widths for shape in shapes] == [(48, 32), (48,), (48,), (48, 32)]
    layers = {name.split(".")[2] for name in HostTensors(folder).names() if ".indexer." in name}
    assert layers == {"0", "3"}


def half_split_indexer(case: Case, patch: pytest.MonkeyPatch) -> CausalLM:
    patch.setattr(indexer, "rotate_interleaved", rotate_half_split)
    return build_model(case.folder)


def first_selection_for_all(case: Case, patch: pytest.MonkeyPatch) -> CausalLM:
    model = build_model(case.folder)
    original = indexer.Indexer.__call__
    first: list[Any] = []

    def once(self: indexer.Indexer, *inputs: Any) -> Any:
        if not first:
            first.append(original(self, *inputs))
        return first[0]

    patch.setattr(indexer.Indexer, "__call__", once)
    return model


@pytest.mark.parametrize("wrong_variant", [half_split_indexer, first_selection_for_all])
def test_a_wrong_variant_is_rejected(
    wrong_variant: Callable[[Case, pytest.MonkeyPatch], CausalLM],
    make_case: MakeCase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case(SPECS["shared_fp8"])
    model = wrong_variant(case, monkeypatch)
    assert difference(all_logits(model, case.token_ids, 96), case.logits) > 10 * TOLERANCE
