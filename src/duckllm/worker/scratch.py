"""What a worker sets aside for the largest step of a plan, told before it does so.

Called by :mod:`duckllm.worker.session`; the sizes are those of the constructors in csrc/kernels/experts.cpp,
csrc/kernels/routing.cpp and csrc/worker/step_loop.cpp, which a test compares with what is really allocated.
"""

from __future__ import annotations

from bisect import bisect_right

from duckllm import _native
from duckllm.cluster.plan import WorkerPlan
from duckllm.config import total_memory_bytes
from duckllm.errors import ProtocolError
from duckllm.weights.e4m3 import SCALE_BLOCK, ceil_div
from duckllm.weights.formats import padded_hidden
from duckllm.weights.records import STRIPE_CHANNELS

MAX_SCRATCH_BYTES = 4 << 30
# csrc/kernels: rows that go without tiles, rows of a tile, scale blocks of a part of a dot product.
_DIRECT_ROWS, _CHUNK_ROWS, _PART_BLOCKS = 8, 48, 8
_F32_BYTES = 4
_NUMBER_BYTES = {"f32": 4, "bf16": 2}  # of a tile and a panel
# csrc/kernels/integer_kernels.h: bytes of 16 rows and 32 hidden indices, where the CPU has tiles for them.
_PANEL_GROUP_BYTES, _PANEL_GROUP_ROWS, _PANEL_GROUP_INDICES = 576, 16, 32
_ROW_DOT_BYTES = 2 * STRIPE_CHANNELS * _F32_BYTES  # gate and up of a unit


def has_integer_tiles() -> bool:
    """Whether experts have panels for AMX-INT8 on this CPU, whatever their formats."""
    return "amx_int8" in _native.available_integer(_native.available_isas()[-1])


def scratch_bytes(
    plan: WorkerPlan,
    num_tokens: int,
    num_threads: int,
    prefill: str = "f32",
    *,
    integer_tiles: bool = False,
) -> int:
    """Bytes for steps of at most ``num_tokens`` tokens: kernels, routing, request and reply buffers.

    ``integer_tiles``: as :func:`has_integer_tiles` says of the worker's CPU.
    """
    number_bytes = _NUMBER_BYTES[prefill]
    pairs, direct_rows = num_tokens * plan.top_k, min(num_tokens, _DIRECT_ROWS)
    blocks = ceil_div(plan.hidden_size, SCALE_BLOCK)
    rows = 2 * num_tokens * padded_hidden(plan.hidden_size) * _F32_BYTES  # x and y
    activations = pairs * plan.num_stripes * STRIPE_CHANNELS * _F32_BYTES
    # Two pointers, row and weight of each pair; a third pointer in a vector that grew by doubling.
    routing = pairs * (2 * 8 + 8) + (8 << (pairs - 1).bit_length()) + 8 * plan.num_experts
    active = min(pairs, plan.num_experts)
    items = active * (4 + 8)
    parts_left = min(direct_rows * plan.top_k, plan.num_experts) * plan.num_stripes * 4
    parts = direct_rows * plan.top_k * plan.num_stripes * ceil_div(blocks, _PART_BLOCKS) * _ROW_DOT_BYTES
    panel = blocks * _CHUNK_ROWS * SCALE_BLOCK * number_bytes if num_tokens > _DIRECT_ROWS else 0
    if num_tokens > _DIRECT_ROWS and integer_tiles:
        groups = padded_hidden(plan.hidden_size) // _PANEL_GROUP_INDICES
        panel += _CHUNK_ROWS // _PANEL_GROUP_ROWS * groups * _PANEL_GROUP_BYTES
    tile = SCALE_BLOCK * 2 * STRIPE_CHANNELS * number_bytes
    thread = panel + tile + 2 * _CHUNK_ROWS * _ROW_DOT_BYTES
    requests = 2 * num_tokens * (_F32_BYTES * plan.hidden_size + 8 * plan.top_k)
    replies = num_tokens * plan.hidden_size * (_F32_BYTES + 2)
    kernels = rows + activations + routing + items + parts_left + parts + num_threads * thread
    return kernels + requests + replies


def check_scratch(plan: WorkerPlan, num_threads: int, prefill: str = "f32") -> None:
    """Refuses steps that would take a quarter of this machine's memory, or 4 GiB.

    Raises:
        ProtocolError: Says how many tokens would do.
    """
    limit = min(total_memory_bytes() // 4, MAX_SCRATCH_BYTES)
    tiles = has_integer_tiles()

    def bytes_of(tokens: int) -> int:
        return scratch_bytes(plan, tokens, num_threads, prefill, integer_tiles=tiles)

    if bytes_of(plan.max_step_tokens) <= limit:
        return
    most = bisect_right(range(1, plan.max_step_tokens + 1), limit, key=bytes_of)
    raise ProtocolError(
        f"plan max_step_tokens: got {plan.max_step_tokens}, expected at most {most}, "
        f"as this worker sets aside at most {limit} bytes for a step of such sizes"
    )
