"""DeepSeek sparse attention against an oracle in float64, written from the published formula.

    I[t, s] = sum over heads h of w[t, h] * ReLU(q[t, h] . k[s]),   s <= t

with the weights scaled by 1 / sqrt(heads) and the products by 1 / sqrt(head size); a token attends to the
index_topk largest, of equal ones to the lowest positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from duckllm.layers.indexer import Indexer
from duckllm.layers.step import SequenceStep, StepContext
from duckllm.models.causal_lm import CausalLM
from parity import test_glm_moe_dsa
from support import families
from support.attention import watch_selections
from support.families import Case, MakeCase
from support.models import TOLERANCE, all_logits, build_model, difference
from support.reference import read_checkpoint

Patch = pytest.MonkeyPatch
TOPK = 8
SPECS = {
    each.name: each
    for each in (
        families.deepseek_v32("sparse", index_topk=TOPK),
        # One head: half of all scores are exactly zero, and where its weight is negative these are the best.
        families.deepseek_v32("ties", index_topk=TOPK, index_n_heads=1),
        test_glm_moe_dsa.SPECS["shared_fp8"],
    )
}


@pytest.fixture(params=list(SPECS))
def case(request: pytest.FixtureRequest, make_case: MakeCase) -> Case:
    return make_case(SPECS[request.param])


@dataclass
class Watched:
    """What one indexer was given and chose, over all steps."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
    chosen: list[set[int]] = field(default_factory=list)


def watch(model: CausalLM, token_ids: list[int], step_tokens: int, patch: Patch) -> dict[int, Watched]:
    """Runs the tokens through the model; what happened in each layer that has an indexer."""
    indexers = {n: layer.attention.indexer for n, layer in enumerate(model.layers)}
    seen = {id(each): Watched() for each in indexers.values() if each is not None}

    def watch_one(
        indexer: Indexer, step: StepContext, x: torch.Tensor, scores: torch.Tensor | None, selection: Any
    ) -> None:
        own = seen[id(indexer)]
        own.inputs.append(x.clone())
        start = step.sequences[0].start
        for row in range(x.shape[0]):
            is_all = selection is None or selection[row, 0] < 0
            own.chosen.append(set(range(start + row + 1) if is_all else selection[row].tolist()))
        if scores is not None:
            own.scores.append(scores)

    with patch.context() as watching:
        watch_selections(watching, watch_one)
        all_logits(model, token_ids, step_tokens)
    return {n: seen[id(each)] for n, each in indexers.items() if each is not None}


@dataclass(frozen=True)
class Oracle:
    """The formula, and what can be done wrong with it."""

    rope_is_right: bool = True
    scale_is_right: bool = True
    weights_in_order: bool = True
    relu: bool = True

    def scores(self, case: Case, tensors: dict[str, torch.Tensor], layer: int, x: torch.Tensor) -> np.ndarray:
        """[T, T] for the inputs of the layer's attention at positions 0 to T - 1; -inf for later tokens."""
        config = case.reference.config
        prefix = f"model.layers.{layer}.self_attn."
        weight = {
            name.removeprefix(prefix): t.double().numpy() for name, t in tensors.items() if prefix in name
        }
        inputs = x.double().numpy()
        num_tokens, heads, size = len(inputs), config.index_n_heads, config.index_head_dim
        latent = inputs @ weight["q_a_proj.weight"].T + weight.get("q_a_proj.bias", 0.0)
        latent /= np.sqrt((latent**2).mean(-1, keepdims=True) + 1e-6)
        latent *= weight["q_a_layernorm.weight"]
        q = (latent @ weight["indexer.wq_b.weight"].T).reshape(num_tokens, heads, size)
        k = inputs @ weight["indexer.wk.weight"].T
        k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6)
        k = k * weight["indexer.k_norm.weight"] + weight["indexer.k_norm.bias"]
        interleaved = (config.model_type == "glm_moe_dsa") == self.rope_is_right
        theta = config.rope_parameters["rope_theta"]
        q, k = (rotated(each, config.qk_rope_head_dim, theta, interleaved) for each in (q, k[:, None]))
        products = np.einsum("thd,sd->hts", q, k[:, 0])
        if self.scale_is_right:
            products *= size**-0.5
        if self.relu:
            products = np.maximum(products, 0.0)
        weights = inputs @ weight["indexer.weights_proj.weight"].T * heads**-0.5
        if not self.weights_in_order:
            weights = np.roll(weights, 1, axis=1)
        scores = np.einsum("th,hts->ts", weights, products)
        return np.where(np.tri(num_tokens, dtype=bool), scores, -np.inf)


def rotated(x: np.ndarray, rope_dim: int, theta: float, interleaved: bool) -> np.ndarray:
    """The first ``rope_dim`` numbers as complex pairs, turned by position times frequency."""
    pair = slice(0, rope_dim, 2), slice(1, rope_dim, 2)
    if not interleaved:
        pair = slice(0, rope_dim // 2), slice(rope_dim // 2, rope_dim)
    angle = np.arange(len(x))[:, None] * theta ** (-np.arange(0, rope_dim, 2) / rope_dim)
    turned = (x[..., pair[0]] + 1j * x[..., pair[1]]) * np.exp(1j * angle)[:, None]
    result = x.copy()
    result[..., pair[0]], result[..., pair[1]] = turned.real, turned.imag
    return result


def best(scores: np.ndarray, position: int) -> set[int]:
    """Of the positions up to this one the best, and of equally good ones the lowest."""
    row = scores[position, : position + 1]
    return set(np.argsort(-row, kind="stable")[:TOPK].tolist())


def agrees(case: Case, seen: dict[int, Watched], oracle: Oracle) -> bool:
    """Whether every layer has chosen, and scored, as the oracle does."""
    tensors = read_checkpoint(case.checkpoint)
    for layer, watched in seen.items():
        expected = oracle.scores(case, tensors, layer, torch.cat(watched.inputs))
        if watched.chosen != [best(expected, position) for position in range(len(expected))]:
            return False
        last = watched.scores[-1][-1].numpy()  # of the last position, for every earlier one
        if not np.allclose(last, expected[-1], rtol=1e-4, atol=1e-4):
            return False
    return True


def test_each_layer_and_step_chooses_as_the_oracle(case: Case, monkeypatch: Patch) -> None:
    whole = watch(build_model(case.folder), case.token_ids, 96, monkeypatch)
    assert agrees(case, whole, Oracle())
    for step_tokens in (7, 1):
        seen = watch(build_model(case.folder), case.token_ids, step_tokens, monkeypatch)
        assert agrees(case, seen, Oracle())
        assert [each.chosen for each in seen.values()] == [each.chosen for each in whole.values()]


@pytest.mark.parametrize(
    "wrong",
    [
        Oracle(rope_is_right=False),
        Oracle(scale_is_right=False),
        Oracle(weights_in_order=False),
        Oracle(relu=False),
    ],
    ids=["rope_style", "scale", "weights_order", "no_relu"],
)
@pytest.mark.parametrize("name", ["sparse", "shared_fp8"])
def test_a_wrong_formula_does_not_agree(
    name: str, wrong: Oracle, make_case: MakeCase, monkeypatch: Patch
) -> None:
    case = make_case(SPECS[name])
    assert not agrees(case, watch(build_model(case.folder), case.token_ids, 96, monkeypatch), wrong)


def test_ties_are_at_the_border_and_go_to_the_lowest(make_case: MakeCase, monkeypatch: Patch) -> None:
    """That the comparison above has seen ties: many rows have more equal scores than room for them."""
    case = make_case(SPECS["ties"])
    seen = watch(build_model(case.folder), case.token_ids, 96, monkeypatch)
    tensors, tied = read_checkpoint(case.checkpoint), 0
    for layer, watched in seen.items():
        scores = Oracle().scores(case, tensors, layer, torch.cat(watched.inputs))
        for position in range(TOPK, len(scores)):
            zeros = np.flatnonzero(scores[position, : position + 1] == 0.0).tolist()
            chosen = sorted(watched.chosen[position] & set(zeros))
            assert chosen == zeros[: len(chosen)]
            tied += 0 < len(chosen) < len(zeros)
    assert tied > 100


@pytest.mark.parametrize("is_paged", [False, True], ids=["in_order", "paged"])
def test_decode_reads_no_latent_that_was_not_selected(
    is_paged: bool, make_case: MakeCase, monkeypatch: Patch
) -> None:
    """All others may be NaN: so the cost is that of the selected ones."""
    case = make_case(SPECS["sparse"])
    model, tokens = build_model(case.folder), torch.tensor(case.token_ids)
    cache = model.new_kv_cache(64)
    slots = np.random.default_rng(0).permutation(64).astype(np.int32) if is_paged else np.arange(64)

    def forward(start: int, stop: int) -> torch.Tensor:
        step = SequenceStep.of(0, start, stop - start, slots[:stop] if is_paged else None)
        return model.forward(tokens[start:stop], [step], cache)

    forward(0, 60)
    expected = forward(60, 61)
    selections: list[np.ndarray] = []
    select = Indexer.__call__

    def poisoning(self: Indexer, *args: Any) -> Any:
        selection = select(self, *args)
        cache[len(selections)][0][np.delete(slots[:61], selection[0])] = torch.nan
        selections.append(selection)
        return selection

    monkeypatch.setattr(Indexer, "__call__", poisoning)
    assert torch.equal(forward(60, 61), expected)
    assert [len(set(selection[0])) for selection in selections] == [TOPK] * len(model.layers)


def test_nothing_is_scored_while_all_is_attended_to(make_case: MakeCase, monkeypatch: Patch) -> None:
    case = make_case(SPECS["sparse"])
    seen = watch(build_model(case.folder), case.token_ids[:TOPK], 1, monkeypatch)
    assert all(not watched.scores for watched in seen.values())
    seen = watch(build_model(case.folder), case.token_ids[: TOPK + 1], 1, monkeypatch)
    assert all(len(watched.scores) == 1 for watched in seen.values())


LONG = families.deepseek_v32(
    "long",
    vocab_size=64,
    hidden_size=64,
    moe_intermediate_size=16,
    intermediate_size=64,
    num_hidden_layers=2,
    index_n_heads=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    index_topk=64,
    max_position_embeddings=4096,
)


def test_logits_after_2600_tokens_equal_the_reference(tmp_path: Any) -> None:
    """Prefilled in chunks by both; transformers keeps index keys of its own."""
    case = families.make_case(tmp_path, LONG, num_tokens=2600)
    model = build_model(case.folder, max_tokens=4096)
    logits = all_logits(model, case.token_ids, 200)
    assert difference(logits[-8:], case.logits[-8:]) <= TOLERANCE
    # Where float32 rounding decides between two tokens of a selection, a position may differ.
    assert float(((logits - case.logits).abs().amax(-1) > TOLERANCE).float().mean()) <= 0.01
    everything = build_model(case.folder, max_tokens=4096)
    for layer in everything.layers:
        layer.attention.indexer = None
    assert difference(all_logits(everything, case.token_ids, 200)[-8:], case.logits[-8:]) > 10 * TOLERANCE
