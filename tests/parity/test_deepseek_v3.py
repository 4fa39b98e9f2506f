"""DeepSeek-V3 and what has its architecture against transformers in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from duckllm.layers import mla
from duckllm.layers.rope import rotate_half_split, rotate_interleaved
from duckllm.models import deepseek_v3
from duckllm.models.registry import load_config
from support.families import STEP_TOKENS, Case, MakeCase, Spec, assert_greedy, assert_logits
from support.models import TOLERANCE, all_logits, build_model, difference

YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
    "original_max_position_embeddings": 64,
}
BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
}


def spec(name: str, stored: str = "bf16", max_shard_size: str = "5GB", **changes: Any) -> Spec:
    return Spec(name, "DeepseekV3ForCausalLM", BASE | changes, stored, max_shard_size)


KIMI_K2 = Spec(
    "kimi_k2",
    "DeepseekV3ForCausalLM",
    BASE | {"n_group": 1, "topk_group": 1, "rope_parameters": YARN},
    stored="fp8",
    # transformers knows no such model_type, and no code of the checkpoint is ever run.
    file_config={
        "model_type": "kimi_k2",
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
    },
)
SPECS = {
    each.name: each
    for each in (
        spec("groups_bf16_in_shards", max_shard_size="200KB"),
        spec(
            "sizes_that_nothing_divides_f32",
            stored="f32",
            hidden_size=200,
            intermediate_size=136,
            moe_intermediate_size=40,
            kv_lora_rank=36,
            v_head_dim=20,
            first_k_dense_replace=2,
        ),
        spec("fp8_three_shared_tied", stored="fp8", n_shared_experts=3, tie_word_embeddings=True),
        spec(
            "yarn_bias",
            rope_parameters=YARN,
            attention_bias=True,
            num_attention_heads=6,
            num_key_value_heads=6,
        ),
        spec(
            "no_query_latent",
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            n_shared_experts=2,
            moe_intermediate_size=200,
        ),
        spec(
            "half_split_not_normalised", rope_interleave=False, norm_topk_prob=False, first_k_dense_replace=0
        ),
        KIMI_K2,
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


def test_the_cache_holds_latents_alone(make_case: MakeCase) -> None:
    config = load_config(make_case(SPECS["groups_bf16_in_shards"]).folder)
    assert config.cache_elements_per_token == 3 * (32 + 16)


def wrong_rotation(case: Case, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mla, "rotate_interleaved", rotate_half_split)
    patch.setattr(mla, "rotate_half_split", rotate_interleaved)


def mscale_dropped(case: Case, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(deepseek_v3, "_yarn_mscale", lambda factor, mscale_all_dim: 1.0)


def bias_left_out(case: Case, patch: pytest.MonkeyPatch) -> None:
    original = deepseek_v3.mla_shape

    def without(parsed: Any, *rest: Any, **options: Any) -> Any:
        parsed.attention_bias = False
        return original(parsed, *rest, **options)

    patch.setattr(deepseek_v3, "mla_shape", without)


@pytest.mark.parametrize(
    ("name", "mutate"),
    [
        ("groups_bf16_in_shards", wrong_rotation),
        ("half_split_not_normalised", wrong_rotation),
        ("yarn_bias", mscale_dropped),
        ("yarn_bias", bias_left_out),
    ],
)
def test_a_wrong_variant_is_rejected(
    name: str,
    mutate: Callable[[Case, pytest.MonkeyPatch], None],
    make_case: MakeCase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case(SPECS[name])
    mutate(case, monkeypatch)
    assert difference(all_logits(build_model(case.folder), case.token_ids, 96), case.logits) > 10 * TOLERANCE
