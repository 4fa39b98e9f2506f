from __future__ import annotations

import math

import pytest
import torch

from duckllm.layers.cpu_runtime import CpuRuntime
from duckllm.layers.linear import Linear
from duckllm.moe.router import Gate, GroupLimitedRouter, SigmoidRouting, SoftmaxRouter, SoftmaxRouting
from support.experts import DictTensors

HIDDEN, EXPERTS = 24, 16
RUNTIME = CpuRuntime.new(HIDDEN, 1)


def random_weight() -> torch.Tensor:
    return torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(3))


def gate_of(weight: torch.Tensor) -> Gate:
    tensors = DictTensors({"gate.weight": weight})
    return Linear.load(tensors, "gate", EXPERTS, HIDDEN, runtime=RUNTIME)


def make_router(num_groups: int = 4, topk_group: int = 2, normalize: bool = True) -> GroupLimitedRouter:
    return GroupLimitedRouter(
        gate_of(random_weight()),
        (0.4 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(6))).numpy(),
        SigmoidRouting(
            num_groups=num_groups, topk_group=topk_group, top_k=3, normalize=normalize, scaling_factor=2.5
        ),
        RUNTIME,
    )


def route_one(router: GroupLimitedRouter, x: list[float]) -> list[tuple[int, float]]:
    """The scalar twin: plain loops over Python floats."""
    scores, choice = [], []
    for weights, bias in zip(random_weight().tolist(), router.correction_bias.tolist(), strict=True):
        scores.append(1 / (1 + math.exp(-sum(a * b for a, b in zip(weights, x, strict=True)))))
        choice.append(scores[-1] + bias)
    size = len(choice) // router.routing.num_groups
    members = [list(range(g * size, (g + 1) * size)) for g in range(router.routing.num_groups)]
    group_score = [sum(sorted(choice[e] for e in group)[-2:]) for group in members]
    groups = sorted(range(router.routing.num_groups), key=lambda g: (-group_score[g], g))[
        : router.routing.topk_group
    ]
    candidates = sorted((e for g in groups for e in members[g]), key=lambda e: (-choice[e], e))
    chosen = candidates[: router.routing.top_k]
    total = sum(scores[e] for e in chosen) if router.routing.normalize else 1.0
    return [(e, scores[e] / total * router.routing.scaling_factor) for e in chosen]


@pytest.mark.parametrize(("num_groups", "topk_group"), [(1, 1), (4, 1), (4, 2), (4, 4), (8, 3)])
@pytest.mark.parametrize("normalize", [True, False])
def test_routes_as_the_scalar_twin(num_groups: int, topk_group: int, normalize: bool) -> None:
    router = make_router(num_groups, topk_group, normalize)
    if topk_group * (EXPERTS // num_groups) < router.routing.top_k:
        pytest.skip("fewer candidates than experts of a token")
    x = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(4))
    ids, weights = router(x)
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    for row in range(50):
        expected = route_one(router, x[row].tolist())
        assert ids[row].tolist() == [e for e, _ in expected]
        assert weights[row].tolist() == pytest.approx([w for _, w in expected], rel=1e-5)


def test_the_bias_changes_the_choice_and_not_the_weights() -> None:
    x = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(4))
    router = make_router(1, 1, normalize=False)
    before, _ = router(x)
    loser = next(e for e in range(EXPERTS) if e not in before[0].tolist())
    router.correction_bias[loser] += 10
    ids, weights = router(x)
    assert ids[0, 0] == loser
    assert weights[0, 0] == pytest.approx(2.5 * float(torch.sigmoid(x[0] @ random_weight()[loser])), rel=1e-5)


def test_equal_scores_go_to_the_lowest_numbers() -> None:
    router = make_router()
    router.gate = gate_of(torch.zeros(EXPERTS, HIDDEN))
    router.correction_bias[:] = 0
    ids, weights = router(torch.ones(2, HIDDEN))
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert weights.flatten().tolist() == pytest.approx([2.5 / 3] * 6)


def test_a_row_does_not_see_the_other_rows() -> None:
    router = make_router()
    x = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(5))
    ids, weights = router(x)
    for row in range(20):
        own_ids, own_weights = router(x[row : row + 1])
        assert own_ids.tolist() == [ids[row].tolist()]
        assert torch.equal(own_weights[0], weights[row])


def make_softmax_router(normalize: bool) -> SoftmaxRouter:
    return SoftmaxRouter(gate_of(random_weight()), SoftmaxRouting(top_k=3, normalize=normalize), RUNTIME)


def route_one_by_softmax(router: SoftmaxRouter, x: list[float]) -> list[tuple[int, float]]:
    """The scalar twin: plain loops over Python floats."""
    logits = [sum(a * b for a, b in zip(weights, x, strict=True)) for weights in random_weight().tolist()]
    exponentials = [math.exp(logit - max(logits)) for logit in logits]
    shares = [value / sum(exponentials) for value in exponentials]
    chosen = sorted(range(len(shares)), key=lambda e: (-shares[e], e))[: router.routing.top_k]
    total = sum(shares[e] for e in chosen) if router.routing.normalize else 1.0
    return [(e, shares[e] / total) for e in chosen]


@pytest.mark.parametrize("normalize", [True, False])
def test_softmax_routes_as_the_scalar_twin(normalize: bool) -> None:
    router = make_softmax_router(normalize)
    x = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(4))
    ids, weights = router(x)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    for row in range(50):
        expected = route_one_by_softmax(router, x[row].tolist())
        assert ids[row].tolist() == [e for e, _ in expected]
        assert weights[row].tolist() == pytest.approx([w for _, w in expected], rel=1e-5)
        assert router(x[row : row + 1])[0].tolist() == [ids[row].tolist()]


def test_softmax_gives_equal_scores_to_the_lowest_numbers() -> None:
    router = make_softmax_router(normalize=False)
    router.gate = gate_of(torch.zeros(EXPERTS, HIDDEN))
    ids, weights = router(torch.ones(2, HIDDEN))
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert weights.flatten().tolist() == pytest.approx([1 / EXPERTS] * 6)
