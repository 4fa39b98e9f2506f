"""The router's choice on a GPU, in Triton: the experts of each row, and their weights.

Measured by benchmarks/gpu/small_kernels.py; csrc/rowwise/route.h says what is chosen,
and is the CPU's twin. A row is one warp's, which takes the best of what is left until it has enough: each
takes two reductions of integers, for which the card has instructions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from duckllm.kernels.card import can_start_early

# Key of what cannot be chosen: below that of minus infinity.
_NONE: tl.constexpr = tl.constexpr(-(2**31))


@triton.jit
def _keys(values):  # type: ignore[no-untyped-def]
    """Integers in the order of f32 numbers: minus zero is zero, and NaN is above all."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(values != values, 0x7FFFFFFF, keys)


@triton.jit
def _values(keys):  # type: ignore[no-untyped-def]
    """The numbers of keys."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _limit_groups(keys, expert, topk_group, GROUPS: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys [GROUPS, SIZE], those of minus infinity in all groups but the best."""
    best = tl.max(keys, 1)
    score = _values(best)
    if SIZE > 1:
        first = tl.min(tl.where(keys == best[:, None], expert, 0x7FFFFFFF), 1)
        score += _values(tl.max(tl.where(expert == first[:, None], _NONE, keys), 1))
    group = tl.arange(0, GROUPS)
    # A group that is not there has no key of its own: its experts have none.
    left = tl.where(best == _NONE, _NONE, _keys(score))
    is_chosen = tl.zeros((GROUPS,), tl.int32)
    for _ in range(topk_group):
        winner = tl.min(tl.where(left == tl.max(left, 0), group, 0x7FFFFFFF), 0)
        is_chosen = tl.where(group == winner, 1, is_chosen)
        left = tl.where(group == winner, _NONE, left)
    minus_infinity = tl.full((GROUPS, SIZE), float("-inf"), tl.float32)
    is_out = (is_chosen[:, None] == 0) & (keys != _NONE)
    return tl.where(is_out, _keys(minus_infinity), keys)


@triton.jit
def _route(  # type: ignore[no-untyped-def]
    logits_ptr, bias_ptr, ids_ptr, weights_ptr,
    logits_stride, num_groups, size, topk_group, top_k, scaling_factor,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, LIMITED: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    logits_row = logits_ptr + row.to(tl.int64) * logits_stride
    group, member = tl.arange(0, GROUPS)[:, None], tl.arange(0, SIZE)[None, :]
    expert = group * size + member
    is_there = (group < num_groups) & (member < size)
    logits = tl.load(logits_row + expert, mask=is_there, other=float("-inf"))
    if SIGMOID:
        choice = 1.0 / (1.0 + tl.exp(-logits)) + tl.load(bias_ptr + expert, mask=is_there, other=0.0)
    else:
        top = tl.max(logits)
        shares = tl.exp(logits - top)
        total = tl.sum(shares)
        choice = shares / total
    keys = tl.where(is_there, _keys(choice), _NONE)
    if LIMITED:
        keys = _limit_groups(keys, expert, topk_group, GROUPS, SIZE)
    place = tl.arange(0, TOP_K)
    ids = tl.zeros((TOP_K,), tl.int32)
    for k in range(top_k):
        winner = tl.min(tl.where(keys == tl.max(keys), expert, 0x7FFFFFFF))
        ids = tl.where(place == k, winner, ids)
        keys = tl.where(expert == winner, _NONE, keys)
    in_k = place < top_k
    chosen = tl.load(logits_row + ids, mask=in_k, other=0.0)
    weights = 1.0 / (1.0 + tl.exp(-chosen)) if SIGMOID else tl.exp(chosen - top) / total
    if NORMALIZE:
        weights = weights / (tl.sum(tl.where(in_k, weights, 0.0), 0) + 1e-20)
    tl.store(ids_ptr + row * top_k + place, ids, mask=in_k)
    tl.store(weights_ptr + row * top_k + place, weights * scaling_factor, mask=in_k)


def route_by_sigmoid(
    logits: torch.Tensor,
    correction_bias: torch.Tensor,
    top_k: int,
    num_groups: int,
    topk_group: int,
    normalize: bool,
    scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row, best first, and their weights, by sigmoid scores.

    Args:
        logits: The router's products.
        correction_bias: Added to the scores for the choice alone.
        top_k: Experts of a row.
        num_groups: Groups that the experts are divided into, evenly.
        topk_group: Groups that a row may use: those with the largest sums of their two best.
        normalize: Whether the chosen scores are divided by their sum.
        scaling_factor: Factor on the weights.

    Shapes:
        logits: [R, E] f32, the last dimension contiguous; correction_bias: [E] f32; all cuda;
        ids: [R, K] int32; weights: [R, K] f32

    Reference:
        tests/kernels/test_gpu_route.py has a scalar twin.
    """
    num_experts = logits.shape[1]
    is_limited = topk_group < num_groups
    groups = num_groups if is_limited else 1
    return _launch(
        logits, correction_bias, top_k, groups, num_experts // groups, topk_group, normalize, scaling_factor
    )


def route_by_softmax(logits: torch.Tensor, top_k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row, best first, and their weights, by their share in a softmax over all.

    Shapes:
        logits: [R, E] f32, cuda, the last dimension contiguous; ids: [R, K] int32; weights: [R, K] f32

    Reference:
        tests/kernels/test_gpu_route.py has a scalar twin.
    """
    return _launch(logits, None, top_k, 1, logits.shape[1], 1, normalize, 1.0)


def _launch(
    logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    top_k: int,
    groups: int,
    size: int,
    topk_group: int,
    normalize: bool,
    scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, is_early = logits.shape[0], can_start_early(logits.device.index or 0)
    ids = torch.empty(num_rows, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=logits.device)
    _route[(num_rows,)](
        logits, logits if correction_bias is None else correction_bias, ids, weights,
        logits.stride(0), groups, size, topk_group, top_k, scaling_factor,
        SIGMOID=correction_bias is not None, NORMALIZE=normalize, LIMITED=groups > 1,
        GROUPS=triton.next_power_of_2(groups), SIZE=triton.next_power_of_2(size),
        TOP_K=triton.next_power_of_2(top_k), EARLY=is_early, num_warps=1, launch_pdl=is_early,
    )  # fmt: skip
    return ids, weights
