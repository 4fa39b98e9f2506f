"""Operations of a row on a GPU, in Triton: norms, gated activations, gates.

Measured by benchmarks/gpu/small_kernels.py; calls kernels/half_rows.py, in whose form linear layers take what
these kernels make. The CPU's twins are csrc/rowwise. All arithmetic is f32, a row's sum has an order of its
own, and nothing here depends on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from duckllm.kernels.card import can_start_early
from duckllm.kernels.half_rows import (
    MAX_GROUPED_ROWS,
    SCALE_BLOCK,
    Activations,
    empty_half_rows,
    store_half_blocks,
)

# Programs of a norm's row in a decode step, if it is wide, and the blocks of 128 numbers that each writes.
_NORM_PROGRAMS = 8
_NORM_BLOCKS = 4
# Blocks of 128 numbers that a program of the gated activation takes.
_SILU_BLOCKS = 4
_SCALE_WIDTH = 1024


@triton.jit
def _rms_norm(  # type: ignore[no-untyped-def]
    x_ptr, delta_ptr, other_ptr, weight_ptr, sum_ptr, y_ptr, values_ptr, factors_ptr,
    width, x_stride, delta_stride, other_stride, padded_rows, eps,
    ADD: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCKS blocks of a row; the sum is over the whole row, WIDTH being as wide at least."""
    row, first = tl.program_id(0), tl.program_id(1) * BLOCKS
    wide_row = row.to(tl.int64)
    x_row, delta_row = x_ptr + wide_row * x_stride, delta_ptr + wide_row * delta_stride
    other_row = other_ptr + wide_row * other_stride
    every, k = tl.arange(0, WIDTH), (first + tl.arange(0, BLOCKS))[:, None] * 128 + tl.arange(0, 128)[None, :]
    is_there = k < width
    weight = tl.load(weight_ptr + k, mask=is_there, other=0.0)
    if EARLY:  # the linear layer behind may ask for its weights now
        gdc_launch_dependents()
        gdc_wait()
    whole = tl.load(x_row + every, mask=every < width, other=0.0)
    x = tl.load(x_row + k, mask=is_there, other=0.0)
    if ADD > 0:
        delta, whole_delta = (
            tl.load(delta_row + k, mask=is_there, other=0.0),
            tl.load(delta_row + every, mask=every < width, other=0.0),
        )
        if ADD > 1:
            delta += tl.load(other_row + k, mask=is_there, other=0.0)
            whole_delta += tl.load(other_row + every, mask=every < width, other=0.0)
        x += delta
        whole += whole_delta
        tl.store(sum_ptr + wide_row * width + k, x, mask=is_there)
    y = x * tl.rsqrt(tl.sum(whole * whole, 0) / width + eps) * weight
    tl.store(y_ptr + wide_row * width + k, y, mask=is_there)
    store_half_blocks(values_ptr, factors_ptr, row, first, y, width, padded_rows, BLOCKS)


def _normalize(
    x: torch.Tensor,
    deltas: Sequence[torch.Tensor],
    total: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> Activations:
    num_rows, width = x.shape
    y = torch.empty(num_rows, width, dtype=torch.float32, device=x.device)
    half = empty_half_rows(num_rows, width, x.device)
    # Where rows are few, the limit is what one multiprocessor moves: several share what is written of a row,
    # and each adds up all of it (7168 numbers on an H200: 2.1 us instead of 3.8, with a sum before).
    blocks = triton.next_power_of_2(triton.cdiv(width, SCALE_BLOCK))
    piece = blocks
    if num_rows <= MAX_GROUPED_ROWS:
        piece = min(blocks, max(_NORM_BLOCKS, blocks // _NORM_PROGRAMS))
    (delta, other), is_early = (*deltas, x, x)[:2], can_start_early(x.device.index or 0)
    _rms_norm[(num_rows, triton.cdiv(triton.cdiv(width, SCALE_BLOCK), piece))](
        x, delta, other, weight, y if total is None else total, y, half.values, half.factors,
        width, x.stride(0), delta.stride(0), other.stride(0), half.values.shape[0], eps,
        ADD=len(deltas), WIDTH=blocks * SCALE_BLOCK, BLOCKS=piece,
        EARLY=is_early, num_warps=min(16, max(1, blocks // 4)), launch_pdl=is_early,
    )  # fmt: skip
    return Activations(y, half)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Activations:
    """``x / sqrt(mean(x^2) + eps) * weight``, row by row.

    Shapes:
        x: [R, W] f32, W up to 32768, the last dimension contiguous; weight: [W] f32; all cuda

    Reference:
        tests/kernels/test_gpu_rowwise.py, float64: within 6e-7 of each number.
    """
    return _normalize(x, (), None, weight, eps)


def add_rms_norm(
    hidden: torch.Tensor, deltas: Sequence[torch.Tensor], weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, Activations]:
    """``hidden`` plus the sum of one or two deltas, a new tensor, and its norm as :func:`rms_norm` has it.

    Shapes:
        hidden, each of deltas: [R, W] f32, W up to 32768, the last dimension contiguous; weight: [W] f32;
        all cuda
    """
    total = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device)
    return total, _normalize(hidden, deltas, total, weight, eps)


@triton.jit
def _silu_mul(  # type: ignore[no-untyped-def]
    gate_up_ptr, y_ptr, values_ptr, factors_ptr, width, gate_up_stride, padded_rows,
    BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row, first = tl.program_id(0), tl.program_id(1) * BLOCKS
    wide_row = row.to(tl.int64)
    k = (first + tl.arange(0, BLOCKS))[:, None] * 128 + tl.arange(0, 128)[None, :]
    is_there = k < width
    gate = tl.load(gate_up_ptr + wide_row * gate_up_stride + k, mask=is_there, other=0.0)
    up = tl.load(gate_up_ptr + wide_row * gate_up_stride + width + k, mask=is_there, other=0.0)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + wide_row * width + k, y, mask=is_there)
    store_half_blocks(values_ptr, factors_ptr, row, first, y, width, padded_rows, BLOCKS)


def silu_mul(gate_up: torch.Tensor) -> Activations:
    """``silu(gate) * up``, the two side by side; silu(g) = g / (1 + e^-g).

    Shapes:
        gate_up: [R, 2 I] f32, cuda, the last dimension contiguous; result: [R, I]

    Reference:
        tests/kernels/test_gpu_rowwise.py, float64: within (6 + |gate|) 2^-23 of each number.
    """
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(num_rows, width, dtype=torch.float32, device=gate_up.device)
    half, is_early = (
        empty_half_rows(num_rows, width, gate_up.device),
        can_start_early(gate_up.device.index or 0),
    )
    _silu_mul[(num_rows, triton.cdiv(width, SCALE_BLOCK * _SILU_BLOCKS))](
        gate_up, y, half.values, half.factors, width, gate_up.stride(0), half.values.shape[0],
        BLOCKS=_SILU_BLOCKS, EARLY=is_early, num_warps=4, launch_pdl=is_early,
    )  # fmt: skip
    return Activations(y, half)


@triton.jit
def _scale_by_sigmoid(y_ptr, gate_ptr, width, y_stride, gate_stride, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    factor = 1.0 / (1.0 + tl.exp(-tl.load(gate_ptr + row * gate_stride)))
    at = y_ptr + row * y_stride + k
    tl.store(at, tl.load(at, mask=k < width) * factor, mask=k < width)


def scale_by_sigmoid(y: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiplies each row by the sigmoid of its gate, in place.

    Shapes:
        y: [R, H] f32, the last dimension contiguous; gate: [R, 1] f32; all cuda
    """
    num_rows, width = y.shape
    _scale_by_sigmoid[(num_rows, triton.cdiv(width, _SCALE_WIDTH))](
        y, gate, width, y.stride(0), gate.stride(0), WIDTH=_SCALE_WIDTH, num_warps=4
    )
