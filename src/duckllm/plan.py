"""Who would hold what, and whether it fits, before anything is loaded.

Called by ``duckllm plan``. Works on a model from outside (:mod:`duckllm.models.inspection`), so that a
configuration alone is enough; counts what :mod:`duckllm.worker` and the host will set aside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from duckllm.config import show_size
from duckllm.device import CPU, Device
from duckllm.engine.cache_size import DEFAULT_MAX_NUM_SEQS, GIB, HostMemory, host_needs, plan_host
from duckllm.errors import ConfigError, InWords
from duckllm.models.inspection import MTP, Inspection
from duckllm.moe.fit import ExpertSizes, Node, NodePlan, place_slices, plan_nodes

# What a node's system keeps for itself.
SYSTEM_BYTES = GIB


@dataclass(frozen=True)
class HostPlan:
    """The host, whose memory may be unknown.

    Args:
        memory: What the host's memory goes to; with as much KV cache as it takes at the start, or one context
            where the size of the memory that it is in is unknown.
        have_bytes: Its CPU memory without what its system keeps; None where that is unknown.
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
        num_moe_layers: Layers with experts that a token passes.
        host_read_bytes: Bytes of its own weights that the host reads for a token.
        host_gb_per_s: What the host reads from memory; None where that is unknown.
        sizes: The experts as they are shared out.
    """

    weight_format: str
    nodes: tuple[NodePlan, ...]
    host: HostPlan
    drafts: bool
    read_bytes: int
    num_moe_layers: int
    host_read_bytes: int
    host_gb_per_s: float | None
    sizes: ExpertSizes

    @property
    def step_us(self) -> float | None:
        """A layer's step of one token at best: the slowest node's; None where a speed is unknown."""
        times = [node.step_us for node in self.nodes]
        known = [time for time in times if time is not None]
        return max(known) if len(known) == len(times) else None

    @property
    def host_us(self) -> float | None:
        """Reading the host's own weights for one token; None where its speed is unknown."""
        return None if self.host_gb_per_s is None else self.host_read_bytes / self.host_gb_per_s / 1e3

    @property
    def ceiling_tokens_per_s(self) -> float | None:
        """Tokens a second of one answer at best; without the host's part where its speed is unknown."""
        if self.step_us is None:
            return None
        return 1e6 / ((self.host_us or 0.0) + self.num_moe_layers * self.step_us)

    @property
    def fits(self) -> bool:
        """Whether every node has what its worker needs."""
        return all(node.fits for node in self.nodes)


def plan_cluster(
    model: Inspection,
    memory_bytes: Sequence[int],
    *,
    weight_format: str,
    keep: Sequence[str] | None = None,
    max_model_len: int,
    max_step_tokens: int,
    drafts: bool = False,
    host_bytes: int | None = None,
    device: Device = CPU,
) -> ClusterPlan:
    """The model on nodes of these sizes; arguments as :func:`plan_on` has them.

    Args:
        model: The model.
        memory_bytes: Memory of each node, as it was bought.
        weight_format: Format of the experts.
        keep: Layers in other formats, as :meth:`Inspection.formats_in` takes them.
        max_model_len: Most tokens of a context.
        max_step_tokens: Most tokens in one step.
        drafts: Whether tokens are guessed ahead, by a layer more.
        host_bytes: Memory of the host, as it was bought; None where that is open.
        device: What computes the host's part.

    Raises:
        ConfigError: More nodes than stripes, or no node; or the host does not hold its weights and a context.
    """
    nodes = [Node(str(number), max(1, size - SYSTEM_BYTES)) for number, size in enumerate(memory_bytes)]
    return plan_on(
        model,
        nodes,
        weight_format=weight_format,
        keep=keep,
        max_model_len=max_model_len,
        max_step_tokens=max_step_tokens,
        drafts=drafts,
        host_bytes=host_bytes,
        device=device,
    )


def plan_on(
    model: Inspection,
    nodes: Sequence[Node],
    *,
    weight_format: str,
    keep: Sequence[str] | None = None,
    max_model_len: int,
    max_step_tokens: int,
    drafts: bool = False,
    host_bytes: int | None = None,
    device: Device = CPU,
    host_gb_per_s: float | None = None,
    shares: str | Sequence[float] = "auto",
) -> ClusterPlan:
    """The model on these nodes, shared out as a start does it.

    Args:
        model: The model.
        nodes: The nodes.
        weight_format: Format of the experts.
        keep: Layers in other formats, as :meth:`Inspection.formats_in` takes them.
        max_model_len: Most tokens of a context.
        max_step_tokens: Most tokens in one step.
        drafts: Whether tokens are guessed ahead, by a layer more.
        host_bytes: Memory of the host, as it was bought; None where that is open.
        device: What computes the host's part.
        host_gb_per_s: What the host reads from memory; None where that is open.
        shares: As in :class:`duckllm.config.ClusterConfig`.

    Raises:
        ConfigError: More nodes than stripes, or no node; or the host does not hold its weights and a context.
    """
    layout = model.layout
    sizes = ExpertSizes(
        layout.hidden_size,
        layout.moe_intermediate_size,
        layout.num_experts,
        layout.num_experts_per_tok,
        model.num_stripes,
        model.counted_formats(weight_format, drafts=drafts, keep=keep),
        max_step_tokens,
    )
    return ClusterPlan(
        weight_format,
        plan_nodes(sizes, nodes, place_slices(sizes, nodes, shares)),
        plan_host_part(
            model,
            max_model_len=max_model_len,
            max_step_tokens=max_step_tokens,
            drafts=drafts,
            host_bytes=host_bytes,
            device=device,
        ),
        drafts,
        model.expert_read_bytes(weight_format, keep),
        model.num_moe_layers,
        sum(
            part.gpu_bytes if device.is_cuda else part.read_bytes for part in model.parts if part.name != MTP
        ),
        host_gb_per_s,
        sizes,
    )


def plan_host_part(
    model: Inspection,
    *,
    max_model_len: int,
    max_step_tokens: int,
    drafts: bool = False,
    host_bytes: int | None = None,
    device: Device = CPU,
) -> HostPlan:
    """The host alone; arguments as :func:`plan_cluster` has them. The experts are elsewhere.

    Raises:
        ConfigError: The host, or its card, does not hold its weights and a context.
    """
    have_bytes = None if host_bytes is None else max(0, host_bytes - SYSTEM_BYTES)
    unknown = 1 << 62
    needs = host_needs(
        model,
        drafts=drafts,
        weight_format=None,
        num_workers=0,
        available_bytes=unknown if have_bytes is None else have_bytes,
        total_bytes=unknown if host_bytes is None else host_bytes,
        device=device,
        max_step_tokens=max_step_tokens,
    )
    is_open = have_bytes is None and not device.is_cuda
    one_context = needs.context_bytes(max_model_len) if is_open else None
    try:
        memory = plan_host(
            needs, max_model_len=max_model_len, cache_bytes=one_context, max_num_seqs=DEFAULT_MAX_NUM_SEQS
        )
    except ConfigError as error:
        if error.field != "memory":
            raise
        raise ConfigError("host_memory", error.got, error.expected, error.hint) from None  # not the nodes'
    return HostPlan(memory, have_bytes)


def fewest_nodes(
    model: Inspection,
    memory_bytes: int,
    *,
    weight_format: str,
    keep: Sequence[str] | None = None,
    max_model_len: int,
    max_step_tokens: int,
    drafts: bool = False,
    host_bytes: int | None = None,
    device: Device = CPU,
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
            keep=keep,
            max_model_len=max_model_len,
            max_step_tokens=max_step_tokens,
            drafts=drafts,
            host_bytes=host_bytes,
            device=device,
        )
        if plan.fits:
            return plan
    need = plan.nodes[0].need_bytes + SYSTEM_BYTES
    raise ConfigError(
        "memory",
        InWords(f"{show_size(memory_bytes)} a node"),
        f"at least {show_size(need, up=True)}, for one stripe of every expert on each of "
        f"{model.num_stripes} nodes",
    )
