"""Grouped-query attention families against transformers in float32: the same logits and greedy tokens."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from duckllm.layers import cpu_runtime
from duckllm.layers.cpu_runtime import CpuRuntime
from duckllm.layers.gqa import GQAttention
from duckllm.layers.rope import RotaryTable, rotate_half_split, rotate_interleaved
from duckllm.models.causal_lm import CausalLM, MoEBlock
from duckllm.moe.router import SoftmaxRouter
from duckllm.weights.architectures import layout_of
from duckllm.weights.checkpoint import Checkpoint
from duckllm.weights.layout import PROJECTIONS
from support.families import STEP_TOKENS, Case, MakeCase, Spec, assert_greedy, assert_logits
from support.models import build_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
QWEN3 = COMMON | {"head_dim": 24, "num_experts": 8, "moe_intermediate_size": 32}
GLM4 = COMMON | {"head_dim": 24, "n_routed_experts": 8, "moe_intermediate_size": 32, "use_qk_norm": True}
QWEN2 = COMMON | {
    "num_experts": 8,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
MIXTRAL = COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48}


# transformers writes into the dictionaries that it is given.
def qwen3(name: str, stored: str = "bf16", **changes: Any) -> Spec:
    return Spec(f"qwen3-{name}", "Qwen3MoeForCausalLM", deepcopy(QWEN3 | changes), stored)


def glm4(name: str, stored: str = "bf16", **changes: Any) -> Spec:
    return Spec(f"glm4-{name}", "Glm4MoeForCausalLM", deepcopy(GLM4 | changes), stored)


def qwen2(name: str, stored: str = "bf16", **changes: Any) -> Spec:
    return Spec(f"qwen2-{name}", "Qwen2MoeForCausalLM", deepcopy(QWEN2 | changes), stored)


def mixtral(name: str, stored: str = "bf16", **changes: Any) -> Spec:
    return Spec(f"mixtral-{name}", "MixtralForCausalLM", deepcopy(MIXTRAL | changes), stored)


SPECS = [
    qwen3("normalised", norm_topk_prob=True),
    qwen3("not-normalised-tied", "fp8", tie_word_embeddings=True, num_attention_heads=8, head_dim=16),
    qwen3(
        "dense-layers-bias",
        num_hidden_layers=4,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        attention_bias=True,
    ),
    qwen3("odd-sizes", "fp8", hidden_size=200, moe_intermediate_size=40, head_dim=10, num_attention_heads=6),
    qwen3("window-5", use_sliding_window=True, sliding_window=5, norm_topk_prob=True),
    qwen3(
        "yarn", "fp8", rope_parameters=YARN, norm_topk_prob=True, hidden_size=136, moe_intermediate_size=200
    ),
    qwen3("linear-one-kv-head", "f32", rope_parameters=LINEAR, num_key_value_heads=1, num_experts_per_tok=8),
    qwen3("llama3-every-head-its-own", rope_parameters=LLAMA3, num_key_value_heads=4, num_experts_per_tok=1),
    glm4("norm-bias", attention_bias=True, routed_scaling_factor=2.5, num_hidden_layers=3),
    glm4("no-norm-three-shared", "fp8", use_qk_norm=False, n_shared_experts=3, first_k_dense_replace=0),
    glm4(
        "grouped",
        n_group=4,
        topk_group=2,
        num_attention_heads=6,
        num_hidden_layers=3,
        first_k_dense_replace=2,
    ),
    glm4("plain-tied", tie_word_embeddings=True, norm_topk_prob=False),
    glm4("odd-sizes-yarn", "fp8", hidden_size=200, moe_intermediate_size=72, rope_parameters=YARN),
    glm4(
        "quarter-rotated",
        "f32",
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    ),
    qwen2("plain"),
    qwen2("normalised-no-bias", "fp8", norm_topk_prob=True, qkv_bias=False, tie_word_embeddings=True),
    qwen2(
        "windows-in-some-layers",
        use_sliding_window=True,
        sliding_window=6,
        num_hidden_layers=3,
        max_window_layers=3,
    ),
    qwen2("dense-layers", "f32", num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3]),
    qwen2(
        "odd-sizes",
        "fp8",
        hidden_size=200,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=136,
        num_attention_heads=5,
        num_key_value_heads=5,
    ),
    qwen2("yarn", rope_parameters=YARN, shared_expert_intermediate_size=96),
    mixtral("plain"),
    mixtral("window-5", sliding_window=5, head_dim=20),
    mixtral("fp8-tied", "fp8", tie_word_embeddings=True),
    mixtral(
        "odd-sizes",
        "fp8",
        hidden_size=200,
        intermediate_size=72,
        num_attention_heads=10,
        num_key_value_heads=5,
    ),
    mixtral("yarn-one-expert", head_dim=16, rope_parameters=YARN, num_experts_per_tok=1),
    mixtral(
        "linear-all-experts", "f32", rope_parameters=LINEAR, num_experts_per_tok=4, num_key_value_heads=1
    ),
]
BY_NAME = {spec.name: spec for spec in SPECS}


@pytest.fixture(params=list(BY_NAME))
def case(request: pytest.FixtureRequest, make_case: MakeCase) -> Case:
    return make_case(BY_NAME[request.param])


@pytest.mark.parametrize("step_tokens", STEP_TOKENS[:2])
def test_logits_equal_the_reference_whole_and_in_chunks(case: Case, step_tokens: int) -> None:
    assert_logits(case, step_tokens)


@pytest.mark.parametrize("name", ["qwen3-window-5", "glm4-grouped", "qwen2-yarn", "mixtral-odd-sizes"])
def test_logits_equal_the_reference_token_by_token(name: str, make_case: MakeCase) -> None:
    assert_logits(make_case(BY_NAME[name]), STEP_TOKENS[2])


def test_the_layout_names_every_tensor(case: Case) -> None:
    stored = Checkpoint.open(case.checkpoint)
    layout = layout_of(stored.config, stored.tensors)
    names = {name for name in stored.tensors if not name.endswith("_scale_inv")}
    assert names == set(layout.host_shapes) | {
        layout.expert_weight(layer, expert, projection)
        for layer in layout.moe_layers
        for expert in range(layout.num_experts)
        for projection in PROJECTIONS
    }


def test_greedy_tokens_equal_the_reference(case: Case) -> None:
    assert_greedy(case, num_prompts=2)


def attentions(model: CausalLM) -> list[GQAttention]:
    layers = [layer.attention for layer in model.layers]
    assert all(isinstance(layer, GQAttention) for layer in layers)
    return layers


def moe_blocks(model: CausalLM) -> list[MoEBlock]:
    return [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoEBlock)]


def interleaved_rope(model: CausalLM, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cpu_runtime, "rotate_half_split", rotate_interleaved)


def last_dimensions_rotated(model: CausalLM, patch: pytest.MonkeyPatch) -> None:
    def rotate_last(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        offset = x.storage_offset() + x.stride(-2) - x.shape[-1]
        part = x.as_strided(x.shape, x.stride(), offset)
        return rotate_half_split(part, cos, sin, part)

    patch.setattr(cpu_runtime, "rotate_half_split", rotate_last)


def attention_scaling_dropped(model: CausalLM, patch: pytest.MonkeyPatch) -> None:
    model.rotary = RotaryTable(model.config.rotary.inv_freq, 1.0, model.max_tokens)


def leave_out_norm(model: CausalLM, patch: pytest.MonkeyPatch, number: int) -> None:
    left_out = {id(layer.norms[number]) for layer in attentions(model) if layer.norms is not None}
    rms_norm = CpuRuntime.rms_norm

    def norm(self: CpuRuntime, x: torch.Tensor, weight: Any, eps: float) -> torch.Tensor:
        return x.contiguous() if id(weight) in left_out else rms_norm(self, x, weight, eps)

    patch.setattr(CpuRuntime, "rms_norm", norm)


def query_norm_missing(model: CausalLM, patch: pytest.MonkeyPatch) -> None:
    leave_out_norm(model, patch, 0)


def key_norm_missing(model: CausalLM, patch: pytest.MonkeyPatch) -> None:
    leave_out_norm(model, patch, 1)


def input_bias_dropped(model: CausalLM, patch: pytest.MonkeyPatch) -> None:
    for layer in attentions(model):
        layer.qkv.bias = None


def output_bias_dropped(model: CausalLM, patch: pytest.MonkeyPatch) -> None:
    for layer in attentions(model):
        layer.o.bias = None


def window_one_longer(model: CausalLM, patch: pytest.MonkeyPatch) -> None:
    for layer in attentions(model):
        if layer.shape.sliding_window is not None:
            layer.shape = replace(layer.shape, sliding_window=layer.shape.sliding_window + 1)


def window_in_every_layer(model: CausalLM, patch: pytest.MonkeyPatch) -> None:
    window = next(layer.shape.sliding_window for layer in attentions(model))
    for layer in attentions(model):
        layer.shape = replace(layer.shape, sliding_window=window)


def heads_grouped_by_remainder(model: CausalLM, patch: pytest.MonkeyPatch) -> None:
    """Head h with key head h % kv_heads, where h // group is right."""
    native = model.runtime.attention

    class ByRemainder:
        """Attention with its query heads in another order."""

        store = native.store

        def attend(self, step: Any, q: Any, keys: Any, values: Any, num_kv_heads: int, *rest: Any) -> Any:
            order = np.arange(q.shape[1]).reshape(-1, num_kv_heads).T.reshape(-1)
            attended = native.attend(
                step, np.ascontiguousarray(q[:, order]), keys, values, num_kv_heads, *rest
            )
            return np.ascontiguousarray(attended[:, order.argsort()])

    patch.setitem(vars(model.runtime), "attention", ByRemainder())


def normalisation_flipped(model: CausalLM, patch: pytest.MonkeyPatch) -> None:
    for block in moe_blocks(model):
        block.router.routing = replace(block.router.routing, normalize=not block.router.routing.normalize)


def softmax_over_the_chosen_alone(model: CausalLM, patch: pytest.MonkeyPatch) -> None:
    original = SoftmaxRouter.choose

    def chosen(self: SoftmaxRouter, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = original(self, logits)
        return ids, weights / weights.sum(-1, keepdim=True)

    patch.setattr(SoftmaxRouter, "choose", chosen)


def shared_gate_missing(model: CausalLM, patch: pytest.MonkeyPatch) -> None:
    for block in moe_blocks(model):
        assert block.shared is not None
        block.shared.output_gate = None


def shared_expert_missing(model: CausalLM, patch: pytest.MonkeyPatch) -> None:
    for block in moe_blocks(model):
        block.shared = None


def scaling_factor_missing(model: CausalLM, patch: pytest.MonkeyPatch) -> None:
    for block in moe_blocks(model):
        block.router.routing = replace(block.router.routing, scaling_factor=1.0)


def groups_not_limited(model: CausalLM, patch: pytest.MonkeyPatch) -> None:
    for block in moe_blocks(model):
        block.router.routing = replace(block.router.routing, topk_group=block.router.routing.num_groups)


@pytest.mark.parametrize(
    ("name", "make_wrong"),
    [
        ("qwen3-normalised", interleaved_rope),
        ("qwen3-normalised", query_norm_missing),
        ("qwen3-normalised", key_norm_missing),
        ("qwen3-normalised", heads_grouped_by_remainder),
        ("qwen3-normalised", normalisation_flipped),
        ("qwen3-dense-layers-bias", input_bias_dropped),
        ("qwen3-dense-layers-bias", output_bias_dropped),
        ("qwen3-dense-layers-bias", softmax_over_the_chosen_alone),
        ("qwen3-window-5", window_one_longer),
        ("qwen3-yarn", attention_scaling_dropped),
        ("glm4-norm-bias", last_dimensions_rotated),
        ("glm4-norm-bias", key_norm_missing),
        ("glm4-norm-bias", input_bias_dropped),
        ("glm4-norm-bias", scaling_factor_missing),
        ("glm4-norm-bias", shared_expert_missing),
        ("glm4-grouped", groups_not_limited),
        ("glm4-plain-tied", normalisation_flipped),
        ("qwen2-plain", shared_gate_missing),
        ("qwen2-plain", input_bias_dropped),
        ("qwen2-plain", normalisation_flipped),
        ("qwen2-windows-in-some-layers", window_one_longer),
        ("qwen2-windows-in-some-layers", window_in_every_layer),
        ("mixtral-plain", normalisation_flipped),
        ("mixtral-window-5", window_one_longer),
    ],
)
def test_a_wrong_variant_is_rejected(
    name: str,
    make_wrong: Callable[[CausalLM, pytest.MonkeyPatch], None],
    make_case: MakeCase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case(BY_NAME[name])
    model = build_model(case.folder)
    make_wrong(model, monkeypatch)
    with pytest.raises(AssertionError, match="logits differ by"):
        assert_logits(case, 96, model)
