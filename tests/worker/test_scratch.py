"""What a worker says that it will set aside is what the native code does set aside."""

from __future__ import annotations

import ctypes
import gc
import socket
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

import pytest

from duckllm import _native
from duckllm.cluster.plan import WorkerPlan
from duckllm.errors import ProtocolError
from duckllm.weights.formats import num_stripes, unit_bytes
from duckllm.weights.manifest import Manifest
from duckllm.worker import scratch
from duckllm.worker.config import WorkerConfig
from duckllm.worker.scratch import check_scratch, has_integer_tiles, scratch_bytes
from duckllm.worker.session import Sessions
from worker_harness import plan_for, worker_channel


class _MallocInfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def allocated_bytes() -> int:
    """Bytes that this process has from malloc, in every arena and in mappings of their own."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallocInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def plan_of(hidden_size: int, intermediate_size: int, top_k: int, stripes: int, **fields: int) -> WorkerPlan:
    return WorkerPlan(
        model_hash="",
        format="fp9",
        scale_layout="block",
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=64,
        top_k=top_k,
        total_stripes=num_stripes(intermediate_size),
        unit_bytes=unit_bytes(hidden_size, "fp9"),
        first_stripe=0,
        num_stripes=stripes,
        layers=(),
        folder="",
        **{"max_step_tokens": 1, **fields},
    )


@pytest.fixture(scope="module")
def no_garbage() -> Iterator[None]:
    """What other tests left must not go while bytes are counted."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("prefill", ["f32", "bf16"])
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 256])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(
    ("hidden_size", "intermediate_size", "top_k", "stripes"),
    [(7168, 2048, 8, 4), (7168, 2048, 8, 128), (2000, 1000, 6, 60), (256, 128, 4, 8), (72, 104, 3, 1)],
)
def test_the_estimate_is_what_is_allocated(
    hidden_size: int,
    intermediate_size: int,
    top_k: int,
    stripes: int,
    num_threads: int,
    num_tokens: int,
    prefill: str,
) -> None:
    if prefill == "bf16" and not _native.available_bf16():
        pytest.skip("this CPU has no bf16 multipliers")
    plan = plan_of(hidden_size, intermediate_size, top_k, stripes, max_step_tokens=num_tokens)
    got = []
    for _ in range(5):  # threads of other tests may allocate meanwhile, but not most of the time
        before = allocated_bytes()
        server = _native.StepServer(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_experts=plan.num_experts,
            top_k=top_k,
            first_stripe=0,
            num_stripes=stripes,
            max_step_tokens=num_tokens,
            num_threads=num_threads,
            prefill=prefill,
        )
        got.append(allocated_bytes() - before)
        del server
    # 10 %, and 4 KiB for objects and for what malloc adds to each piece.
    assert scratch_bytes(
        plan, num_tokens, num_threads, prefill, integer_tiles=has_integer_tiles()
    ) == pytest.approx(median(got), rel=0.1, abs=4096)


def test_the_scratch_of_the_largest_step_is_bounded(model: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    (plan,) = plan_for(model, max_step_tokens=8)
    monkeypatch.setattr(scratch, "MAX_SCRATCH_BYTES", scratch_bytes(plan, 8, 1))
    sessions = Sessions(WorkerConfig(threads=1), print)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert sessions._prepare(plan, worker_channel(theirs))[1] == 14
        with pytest.raises(ProtocolError, match="plan max_step_tokens: got 9, expected at most 8, "):
            sessions._prepare(replace(plan, max_step_tokens=9), worker_channel(theirs))


def test_the_limit_is_a_quarter_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(7168, 2048, 8, 128, max_step_tokens=256)
    need = [scratch_bytes(plan, tokens, 2, integer_tiles=has_integer_tiles()) for tokens in (100, 101)]
    assert need[0] < need[1]
    monkeypatch.setattr(scratch, "total_memory_bytes", lambda: 4 * need[1] - 4)
    with pytest.raises(ProtocolError, match=f"got 256, expected at most 100, .* at most {need[1] - 1} bytes"):
        check_scratch(plan, 2)
    check_scratch(replace(plan, max_step_tokens=100), 2)
