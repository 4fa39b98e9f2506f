"""Random tiny models against transformers in float32: the same logits and the same greedy tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from duckllm.engine.engine import Engine
from duckllm.layers import indexer, mla
from duckllm.layers.rope import rotate_half_split, rotate_interleaved
from duckllm.models import deepseek_v32
from duckllm.models.causal_lm import CausalLM, MoEBlock
from duckllm.moe.router import GroupLimitedRouter
from parity.conftest import Case
from support.models import TOLERANCE, all_logits, build_model, difference, greedy
from support.reference import reference_logits


def assert_parity(model: CausalLM, case: Case, step_tokens: int) -> None:
    got = difference(all_logits(model, case.token_ids, step_tokens), case.logits)
    print(f"f32, {case.name}, {step_tokens} tokens a step: largest {got:.3g}")  # pytest -s shows it
    assert got <= TOLERANCE, f"{case.name}: logits differ by {got}"


@pytest.mark.parametrize("step_tokens", [96, 7, 1], ids=["whole", "chunks", "token_by_token"])
def test_logits_equal_the_reference_at_every_position(case: Case, step_tokens: int) -> None:
    assert_parity(build_model(case.folder), case, step_tokens)


def test_long_prompts_in_row_blocks_give_the_same_logits(
    make_case: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case("sparse")
    monkeypatch.setattr(mla, "SCORE_BLOCK_ELEMENTS", 5 * 16 * 96)
    assert_parity(build_model(case.folder), case, 96)


def test_greedy_tokens_equal_the_reference(case: Case) -> None:
    """64 steps on 20 prompts. The reference judges each whole reply at once: token by token its likeliest."""
    engine = Engine(build_model(case.folder), max_model_len=256, max_step_tokens=5)
    generator = torch.Generator().manual_seed(7)
    replies = set()
    for length in range(1, 21):
        prompt = torch.randint(2, case.config["vocab_size"], (length,), generator=generator).tolist()
        reply = greedy(engine, prompt, 64)
        assert len(reply) == 64
        expected = reference_logits(case.reference, prompt + reply[:-1])[length - 1 :].argmax(-1).tolist()
        assert reply == expected, f"prompt of {length} tokens"
        replies.add(tuple(reply))
    assert len(replies) == 20


def test_the_sparse_path_decides(make_case: Callable[[str], Case]) -> None:
    """Attention to everything gives other logits, so the comparison above sees the selection."""
    case = make_case("sparse")
    model = build_model(case.folder)
    for layer in model.layers:
        shape = layer.attention.shape
        layer.attention.shape = replace(shape, indexer=replace(shape.indexer, topk=1000))
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
    patch.setattr(deepseek_v32, "_yarn_mscale", lambda factor, mscale_all_dim: 1.0)
    return build_model(case.folder)


def scaling_factor_missing(case: Case, patch: pytest.MonkeyPatch) -> CausalLM:
    model = build_model(case.folder)
    for router in routers(model):
        router.routing = replace(router.routing, scaling_factor=1.0)
    return model


def correction_bias_in_the_weights(case: Case, patch: pytest.MonkeyPatch) -> CausalLM:
    original = GroupLimitedRouter.__call__

    def biased(self: GroupLimitedRouter, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, _ = original(self, x)
        weights = (torch.sigmoid(x @ self.weight.T) + self.correction_bias).gather(1, ids.long())
        return ids, weights / weights.sum(-1, keepdim=True) * self.routing.scaling_factor

    patch.setattr(GroupLimitedRouter, "__call__", biased)
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
    make_case: Callable[[str], Case],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case(name)
    assert_parity(build_model(case.folder), case, 96)
    model = wrong_variant(case, monkeypatch)
    with pytest.raises(AssertionError, match="logits differ by"):
        assert_parity(model, case, 96)
