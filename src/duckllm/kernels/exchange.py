"""The GPU's side of an exchange: kernels of a captured graph that hand the host a step and wait for its sum.

Called by :mod:`duckllm.moe.device_experts`, which owns the memory; csrc/transport/exchange.h states what both
sides write, and in what order. The polling is by one thread of each program, as every look is a read over the
bus, and of a line that no other program looks at, as far as there are lines; all numbers go over it as
16-byte accesses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from duckllm.kernels.card import can_start_early
from duckllm.transport.exchange import LINE_WORDS, REPLY_LINES

if TYPE_CHECKING:
    from duckllm.moe.device_experts import Mailboxes

_LINE_WORDS: tl.constexpr = tl.constexpr(LINE_WORDS)
_REPLY_LINES: tl.constexpr = tl.constexpr(REPLY_LINES)
_MOST_FLAGS = LINE_WORDS  # a line of requests
_PUBLISH_BLOCK, _PUBLISH_WARPS = 2048, 4
# Programs that wait: enough of them to have a row's bytes in flight, few enough not to keep the bus busy.
_COLLECT_PROGRAMS, _LEAST_COLLECT_BLOCK, _MOST_COLLECT_BLOCK = 16, 512, 16384


@triton.jit
def release_flag(flag_ptr, number):  # type: ignore[no-untyped-def]
    """Writes a flag behind everything that the program has written, for the host to see in this order."""
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first st.release.sys.global.u32 [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [flag_ptr, number],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait_for_flag(replies_ptr, lane, num_lanes, number, timeout_ms, THREADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 once the flag of a lane's reply is ``number``; 0 once an abort word is not zero, or time is up.

    What the host wrote before the flag may be read then. Where time is up, all abort words say so, and the
    reply is looked at once more.

    Args:
        replies_ptr: Lane 0's lines of the reply, which those of the other lanes follow.
        lane: Of the step.
        num_lanes: Of the exchange.
        number: Of the step.
        timeout_ms: How long to wait, milliseconds.
        THREADS: Of the program.
    """
    reply_ptr = replies_ptr + (lane * _REPLY_LINES + tl.program_id(0) % _REPLY_LINES) * _LINE_WORDS
    num_lines = num_lanes * _REPLY_LINES
    # An element a thread; the first one looks, and the maximum tells the others.
    thread = tl.arange(0, THREADS)
    arrived = tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .u32 flag, abort, left;
        .reg .u64 now, end, at;
        mov.u32 $0, 0;
        setp.ne.u32 p, $1, 0;
        @p bra DONE;
        mov.u64 end, %globaltimer;
        mul.wide.u32 at, $6, 1000000;
        add.u64 end, end, at;
        LOOK:
        ld.acquire.sys.global.v2.u32 {flag, abort}, [$2];
        setp.eq.u32 p, flag, $3;
        @p bra ARRIVED;
        setp.ne.u32 p, abort, 0;
        @p bra DONE;
        mov.u64 now, %globaltimer;
        setp.lt.u64 p, now, end;
        @p bra LOOK;
        mov.u64 at, $4;
        mov.u32 left, $5;
        ABORT:
        st.relaxed.sys.global.u32 [at+4], 2;
        add.u64 at, at, 128;
        sub.u32 left, left, 1;
        setp.ne.u32 p, left, 0;
        @p bra ABORT;
        fence.sc.sys;
        ld.acquire.sys.global.u32 flag, [$2];
        setp.ne.u32 p, flag, $3;
        @p bra DONE;
        ARRIVED:
        mov.u32 $0, 1;
        DONE:
        }""",
        "=&r,r,l,r,l,r,r",
        [thread, reply_ptr, number, replies_ptr, num_lines, timeout_ms],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    arrived = tl.max(arrived, 0)
    tl.debug_barrier()
    return arrived


@triton.jit
def _begin(state_ptr, start_ptr, num_words, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, WORDS)
    tl.store(state_ptr + at, tl.load(start_ptr + at, mask=at < num_words, volatile=True), mask=at < num_words)


@triton.jit(do_not_specialize=["index", "lane", "num_rows"])
def _publish(  # type: ignore[no-untyped-def]
    x_ptr, ids_ptr, weights_ptr, sent_x_ptr, sent_ids_ptr, sent_weights_ptr, requests_ptr, state_ptr,
    index, lane, num_rows, hidden_size, top_k, BLOCK: tl.constexpr, LIST_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    number = tl.load(state_ptr) + index + 1
    num_tokens = tl.minimum(tl.load(state_ptr + 1 + lane), num_rows)
    for start in range(program * BLOCK, num_rows * hidden_size, num_programs * BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < num_rows * hidden_size)
        tl.store(sent_x_ptr + at, x, mask=at < num_tokens * hidden_size)
    if program == num_programs - 1:  # whose part of x may be the smallest
        for start in range(0, num_rows * top_k, LIST_BLOCK):
            at = start + tl.arange(0, LIST_BLOCK)
            is_sent = at < num_tokens * top_k
            tl.store(sent_ids_ptr + at, tl.load(ids_ptr + at, mask=is_sent), mask=is_sent)
            tl.store(sent_weights_ptr + at, tl.load(weights_ptr + at, mask=is_sent), mask=is_sent)
    release_flag(requests_ptr + program, number)


@triton.jit(do_not_specialize=["index", "lane", "num_rows", "num_lanes", "timeout_ms"])
def _collect(  # type: ignore[no-untyped-def]
    y_ptr, sum_ptr, replies_ptr, state_ptr, index, lane, num_lanes, timeout_ms, num_rows, hidden_size,
    BLOCK: tl.constexpr, THREADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < num_rows * hidden_size
    number = tl.load(state_ptr) + index + 1
    num_tokens = tl.minimum(tl.load(state_ptr + 1 + lane), num_rows)
    arrived = wait_for_flag(replies_ptr, lane, num_lanes, number, timeout_ms, THREADS)
    is_sum = at < num_tokens * arrived * hidden_size
    tl.store(sum_ptr + at, tl.load(y_ptr + at, mask=is_sum, other=0.0), mask=is_there)


def begin(boxes: Mailboxes) -> None:
    """Takes over what the host said before the replay; the first of a graph's kernels."""
    num_words = 1 + len(boxes.lanes)
    _begin[(1,)](boxes.state, boxes.control, num_words, WORDS=triton.next_power_of_2(num_words), num_warps=1)


def publish(
    boxes: Mailboxes,
    lane: int,
    index: int,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> int:
    """Writes a step to the host's memory, and then its flags; how many these are.

    Args:
        boxes: The memory.
        lane: Of the step.
        index: Of the step in its program.
        x: Activations; rows behind the lane's tokens are not sent.
        topk_ids: Experts of each row.
        topk_weights: Their weights.

    Shapes:
        x: [R, H] f32; topk_ids: [R, K] int32; topk_weights: [R, K] f32; contiguous, on the device
    """
    num_rows, hidden_size = x.shape
    sent, is_early = boxes.lanes[lane], can_start_early(x.device.index or 0)
    num_programs: int = min(_MOST_FLAGS, triton.cdiv(x.numel(), _PUBLISH_BLOCK))
    _publish[(num_programs,)](
        x, topk_ids, topk_weights, sent.x, sent.topk_ids, sent.topk_weights,
        boxes.requests(lane), boxes.state, index, lane, num_rows, hidden_size, topk_ids.shape[1],
        BLOCK=_PUBLISH_BLOCK, LIST_BLOCK=128, EARLY=is_early, num_warps=_PUBLISH_WARPS, launch_pdl=is_early,
    )  # fmt: skip
    return num_programs


def collect(
    boxes: Mailboxes,
    lane: int,
    index: int,
    num_rows: int,
    *,
    timeout_s: float,
) -> torch.Tensor:
    """Waits for a step's sum. Rows that are padding are zero.

    Where the program is aborted, or after ``timeout_s``, all of them are.

    Args:
        boxes: The memory.
        lane: Of the step.
        index: Of the step in its program.
        num_rows: R, as published.
        timeout_s: How long to wait, seconds.

    Shapes:
        result: [R, H] f32, contiguous, on the device
    """
    hidden_size = boxes.lanes[lane].x.shape[1]
    num_values = num_rows * hidden_size
    block = triton.next_power_of_2(triton.cdiv(num_values, _COLLECT_PROGRAMS))
    block = min(max(block, _LEAST_COLLECT_BLOCK), _MOST_COLLECT_BLOCK)
    num_warps, is_early = 4 if block <= 2048 else 8, can_start_early(boxes.state.device.index or 0)
    total = torch.empty(num_rows, hidden_size, dtype=torch.float32, device=boxes.state.device)
    _collect[(triton.cdiv(num_values, block),)](
        boxes.lanes[lane].y, total, boxes.replies(0), boxes.state, index, lane, len(boxes.lanes),
        round(1000 * timeout_s), num_rows, hidden_size, BLOCK=block, THREADS=32 * num_warps, EARLY=is_early,
        num_warps=num_warps, launch_pdl=is_early,
    )  # fmt: skip
    return total
