"""The router's choice on a GPU against a scalar twin, with ties, infinities and NaN, each row alone."""

from __future__ import annotations

import math

import pytest
import torch

pytestmark = pytest.mark.gpu
route = pytest.importorskip("duckllm.kernels.route", reason="needs Triton and an NVIDIA GPU")

DEVICE = "cuda"
NAN, INFINITY = float("nan"), float("inf")


def best(values: list[float], count: int) -> list[int]:
    """Numbers of the best: NaN first, then the largest, among equals the lowest."""
    order = [(0, 0.0, i) if math.isnan(v) else (1, -v, i) for i, v in enumerate(values)]
    return [i for _, _, i in sorted(order)][:count]


def limited(choice: list[float], num_groups: int, topk_group: int) -> list[float]:
    """Minus infinity in all groups but the best."""
    size = len(choice) // num_groups
    groups = [choice[g * size : (g + 1) * size] for g in range(num_groups)]
    scores = [sum(group[i] for i in best(group, 2)) for group in groups]
    allowed = best(scores, topk_group)
    return [v if i // size in allowed else -INFINITY for i, v in enumerate(choice)]


def weights_of(
    scores: torch.Tensor, ids: list[list[int]], normalize: bool, scaling_factor: float
) -> torch.Tensor:
    chosen = scores.gather(1, torch.tensor(ids))
    return chosen / (chosen.sum(1, keepdim=True) if normalize else 1.0) * scaling_factor


def random_logits(num_rows: int, num_experts: int) -> torch.Tensor:
    """A slice of something wider that holds NaN."""
    torch.manual_seed(num_experts)
    logits = torch.full((num_rows, num_experts + 5), NAN)
    logits[:, 2:-3] = 2 * torch.randn(num_rows, num_experts)
    return logits[:, 2:-3]


def slice_on_device(logits: torch.Tensor) -> torch.Tensor:
    wide = torch.full((logits.shape[0], logits.shape[1] + 5), NAN).to(DEVICE)
    wide[:, 2:-3] = logits.to(DEVICE)
    return wide[:, 2:-3]


@pytest.mark.parametrize(
    ("num_experts", "num_groups", "topk_group", "top_k"),
    [
        (256, 8, 4, 8),
        (256, 1, 1, 8),
        (256, 8, 8, 8),
        (60, 6, 2, 5),
        (512, 32, 9, 16),
        (64, 64, 9, 6),
        (6, 3, 1, 4),
        (7, 1, 1, 7),
        (1, 1, 1, 1),
    ],
)
@pytest.mark.parametrize("normalize", [True, False])
def test_routes_by_sigmoid_as_the_scalar_twin(
    num_experts: int, num_groups: int, topk_group: int, top_k: int, normalize: bool
) -> None:
    logits = random_logits(20, num_experts)
    bias = 0.4 * torch.randn(num_experts)
    scores = logits.double().sigmoid()
    choice = (scores.float() + bias).tolist()
    wanted = [best(limited(row, num_groups, topk_group), top_k) for row in choice]
    ids, weights = route.route_by_sigmoid(
        slice_on_device(logits), bias.to(DEVICE), top_k, num_groups, topk_group, normalize, 2.5
    )
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert ids.tolist() == wanted
    torch.testing.assert_close(
        weights.cpu().double(), weights_of(scores, wanted, normalize, 2.5), rtol=2e-6, atol=0
    )


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (60, 4), (512, 16), (3, 3), (1, 1)])
@pytest.mark.parametrize("normalize", [True, False])
def test_routes_by_softmax_as_the_scalar_twin(num_experts: int, top_k: int, normalize: bool) -> None:
    logits = random_logits(20, num_experts)
    shares = logits.double().softmax(1)
    wanted = [best(row, top_k) for row in shares.tolist()]
    ids, weights = route.route_by_softmax(slice_on_device(logits), top_k, normalize)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert ids.tolist() == wanted
    torch.testing.assert_close(
        weights.cpu().double(), weights_of(shares, wanted, normalize, 1.0), rtol=3e-6, atol=0
    )


def test_equal_scores_go_to_the_lowest_numbers() -> None:
    logits = torch.tensor([[0.0] * 16, [1.0, 2.0] * 8, [-0.0, 0.0] * 8]).to(DEVICE)
    ids, weights = route.route_by_softmax(logits, 4, True)
    assert ids.tolist() == [[0, 1, 2, 3], [1, 3, 5, 7], [0, 1, 2, 3]]
    torch.testing.assert_close(weights.cpu(), torch.full((3, 4), 0.25))
    ids, _ = route.route_by_sigmoid(logits, torch.zeros(16).to(DEVICE), 3, 4, 2, True, 1.0)
    assert ids.tolist() == [[0, 1, 2], [1, 3, 5], [0, 1, 2]]


def test_the_bias_changes_the_choice_and_not_the_weights() -> None:
    bias = torch.zeros(16)
    bias[9] = 10.0
    logits = torch.arange(16.0).view(1, 16) / 8
    ids, weights = route.route_by_sigmoid(logits.to(DEVICE), bias.to(DEVICE), 2, 1, 1, False, 1.0)
    assert ids.tolist() == [[9, 15]]
    torch.testing.assert_close(weights.cpu(), logits[:, [9, 15]].sigmoid())


def test_nan_and_infinity_end_and_are_chosen_as_on_the_cpu() -> None:
    logits = torch.zeros(5, 16)
    logits[0] = NAN
    logits[1, [3, 12]] = NAN
    logits[2, 5] = INFINITY
    logits[2, 6] = -INFINITY
    logits[3] = -INFINITY
    logits[4] = torch.arange(16) / 4
    bias = torch.linspace(-0.2, 0.2, 16)
    bias[0] = -INFINITY
    for num_groups, topk_group in ((1, 1), (4, 1), (4, 2)):
        choice = (logits.double().sigmoid().float() + bias).tolist()
        wanted = [best(limited(row, num_groups, topk_group), 6) for row in choice]
        ids, _ = route.route_by_sigmoid(
            logits.to(DEVICE), bias.to(DEVICE), 6, num_groups, topk_group, True, 1.0
        )
        assert ids.tolist() == wanted
    ids, weights = route.route_by_softmax(logits.to(DEVICE), 3, True)
    assert ids.tolist() == [[0, 1, 2]] * 4 + [[15, 14, 13]]
    assert weights[:4].isnan().all()
    assert weights[4].isfinite().all()


def test_a_row_does_not_see_the_other_rows() -> None:
    logits, bias = random_logits(64, 256).to(DEVICE), (0.4 * torch.randn(256)).to(DEVICE)
    ids, weights = route.route_by_sigmoid(logits, bias, 8, 8, 4, True, 2.5)
    shares_ids, shares = route.route_by_softmax(logits, 8, True)
    for start, stop in ((0, 1), (5, 8), (20, 37), (63, 64)):
        own = route.route_by_sigmoid(logits[start:stop], bias, 8, 8, 4, True, 2.5)
        assert torch.equal(own[0], ids[start:stop])
        assert torch.equal(own[1], weights[start:stop])
        own = route.route_by_softmax(logits[start:stop], 8, True)
        assert torch.equal(own[0], shares_ids[start:stop])
        assert torch.equal(own[1], shares[start:stop])
