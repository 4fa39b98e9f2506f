"""Who would hold what, and whether it fits, before anything is loaded.

Called by ``duckllm plan``. Works on a model from outside (:mod:`duckllm.models.inspection`), so that a
configuration alone is enough; counts what :mod:`duckllm.worker` and the host will set aside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from duckllm.cluster.plan import WorkerPlan
from duckllm.engine.cache_size import (
    DEFAULT_MAX_NUM_SEQS,
    GIB,
    WORKER_PROCESS_BYTES,
    HostMemory,
    host_needs,
    plan_host,
)
from duckllm.errors import ConfigError, InWords
from duckllm.models.inspection import Inspection
from duckllm.moe.placement import plan_slices
from duckllm.weights.formats import unit_bytes
from duckllm.worker.scratch import scratch_bytes

# What a node's system keeps for itself.
SYSTEM_BYTES = GIB
# Eight bytes of page table for each page of 4 KiB.
_PAGES_SHARE = 512
_THREADS = 4


@dataclass(frozen=True)
class NodePlan:
    """One worker's share.

    Args:
        worker: Its number.
        num_stripes: Stripes of its slice, of every expert.
        weight_bytes: Its slice.
        buffer_bytes: Steps' buffers, page tables and the process itself.
        have_bytes: The node's memory without what its system keeps.
    """

    worker: int
    num_stripes: int
    weight_bytes: int
    buffer_bytes: int
    have_bytes: int

    @property
    def need_bytes(self) -> int:
        """All that the worker takes."""
        return self.weight_bytes + self.buffer_bytes

    @property
    def fits(self) -> bool:
        """Whether the node has it."""
        return self.need_bytes <= self.have_bytes


@dataclass(frozen=True)
class HostPlan:
    """The host, whose memory may be unknown.

    Args:
        memory: What the host's memory goes to; with as much KV cache as it takes at the start, or one context
            where its size is unknown.
        have_bytes: Its memory without what its system keeps; None where that is unknown.
    """

    memory: HostMemory
    have_bytes: int | None


@dataclass(frozen=True)
class ClusterPlan:
    """A model spread over nodes.

    Args:
        weight_format: Format of the experts.
        nodes: The workers, in order.
        host: The host.
        drafts: Whether the layer that guesses tokens ahead is counted.
        read_bytes: Bytes of experts that one token reads, over all workers.
    """

    weight_format: str
    nodes: tuple[NodePlan, ...]
    host: HostPlan
    drafts: bool
    read_bytes: int

    @property
    def fits(self) -> bool:
        """Whether every node has what its worker needs."""
        return all(node.fits for node in self.nodes)


def plan_cluster(
    model: Inspection,
    memory_bytes: Sequence[int],
    *,
    weight_format: str,
    max_model_len: int,
    max_step_tokens: int,
    drafts: bool = False,
    host_bytes: int | None = None,
) -> ClusterPlan:
    """The model on nodes of these sizes; shares follow what each node has left for weights.

    Args:
        model: The model.
        memory_bytes: Memory of each node, as it was bought.
        weight_format: ``"fp9"`` or ``"fp8"``.
        max_model_len: Most tokens of a context.
        max_step_tokens: Most tokens in one step.
        drafts: Whether tokens are guessed ahead, by a layer more.
        host_bytes: Memory of the host, as it was bought; None where that is open.

    Raises:
        ConfigError: More nodes than stripes, or no node; or the host does not hold its weights and a context.
    """
    have = [max(1, size - SYSTEM_BYTES) for size in memory_bytes]
    slices = plan_slices(model.num_stripes, len(have), None if len(set(have)) == 1 else have)
    stripe_bytes = model.stripe_bytes(weight_format, drafts=drafts)
    nodes = tuple(
        NodePlan(
            worker,
            part.num_stripes,
            part.num_stripes * stripe_bytes,
            _buffer_bytes(model, part.num_stripes, weight_format, max_step_tokens, drafts),
            have[worker],
        )
        for worker, part in enumerate(slices)
    )
    return ClusterPlan(
        weight_format,
        nodes,
        _plan_host(model, drafts, max_model_len, host_bytes),
        drafts,
        model.expert_read_bytes(weight_format),
    )


def _plan_host(model: Inspection, drafts: bool, max_model_len: int, memory_bytes: int | None) -> HostPlan:
    have_bytes = None if memory_bytes is None else max(0, memory_bytes - SYSTEM_BYTES)
    unknown = 1 << 62
    needs = host_needs(
        model,
        drafts=drafts,
        weight_format=None,
        num_workers=0,
        available_bytes=unknown if have_bytes is None else have_bytes,
        total_bytes=unknown if memory_bytes is None else memory_bytes,
    )
    one_context = needs.context_bytes(max_model_len) if have_bytes is None else None
    memory = plan_host(
        needs, max_model_len=max_model_len, cache_bytes=one_context, max_num_seqs=DEFAULT_MAX_NUM_SEQS
    )
    return HostPlan(memory, have_bytes)


def fewest_nodes(
    model: Inspection,
    memory_bytes: int,
    *,
    weight_format: str,
    max_model_len: int,
    max_step_tokens: int,
    drafts: bool = False,
    host_bytes: int | None = None,
) -> ClusterPlan:
    """The plan with the fewest equal nodes that fit; arguments as :func:`plan_cluster` has them.

    Raises:
        ConfigError: A node of this size cannot hold even one stripe of every expert.
    """
    for count in range(1, model.num_stripes + 1):
        plan = plan_cluster(
            model,
            [memory_bytes] * count,
            weight_format=weight_format,
            max_model_len=max_model_len,
            max_step_tokens=max_step_tokens,
            drafts=drafts,
            host_bytes=host_bytes,
        )
        if plan.fits:
            return plan
    need = plan.nodes[0].need_bytes + SYSTEM_BYTES
    raise ConfigError(
        "memory",
        InWords(f"{memory_bytes / GIB:.1f} GiB a node"),
        f"at least {need / GIB:.1f} GiB, for one stripe of every expert on each of {model.num_stripes} nodes",
    )


def _buffer_bytes(
    model: Inspection, num_stripes: int, weight_format: str, max_step_tokens: int, drafts: bool
) -> int:
    layout = model.layout
    plan = WorkerPlan(
        model_hash="",
        format=weight_format,
        scale_layout=model.scale_layout,
        hidden_size=layout.hidden_size,
        intermediate_size=layout.moe_intermediate_size,
        num_experts=layout.num_experts,
        top_k=layout.num_experts_per_tok,
        total_stripes=model.num_stripes,
        unit_bytes=unit_bytes(layout.hidden_size, weight_format, model.scale_layout),
        first_stripe=0,
        num_stripes=num_stripes,
        layers=(),
        folder="",
        max_step_tokens=max_step_tokens,
    )
    tables = num_stripes * model.stripe_bytes(weight_format, drafts=drafts) // _PAGES_SHARE
    return WORKER_PROCESS_BYTES + tables + scratch_bytes(plan, max_step_tokens, _THREADS)
