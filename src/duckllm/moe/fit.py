"""Which node gets how much of the experts: by speed, bounded by memory, before anything is loaded.

Called when workers have said what they are, and by ``duckllm plan``. Counts what :mod:`duckllm.worker` sets
aside; knows neither sockets nor the host's own half.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from duckllm.cluster.plan import WorkerPlan
from duckllm.config import show_size
from duckllm.errors import InWords, PlacementError
from duckllm.moe.placement import Slice, plan_slices
from duckllm.weights.formats import LayerFormat
from duckllm.worker.scratch import scratch_bytes

if TYPE_CHECKING:
    from duckllm.cluster.connect import WorkerInfo

# A worker before it has loaded anything: Python, NumPy, the native module.
WORKER_PROCESS_BYTES = 50_000_000
# Speeds that differ by less are one speed, measured twice.
SPEED_NOISE = 1.15
# Eight bytes of page table for each page of 4 KiB.
_PAGES_SHARE = 512
_THREADS = 4


@dataclass(frozen=True)
class ExpertSizes:
    """The routed experts of a model, as far as their place is concerned.

    Args:
        hidden_size: H.
        intermediate_size: I of a whole expert.
        num_experts: E.
        top_k: K.
        num_stripes: Stripes of a whole expert.
        formats: How many layers are stored in each format.
        max_step_tokens: Most tokens in one step.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    num_stripes: int
    formats: Mapping[LayerFormat, int]
    max_step_tokens: int

    @property
    def num_layers(self) -> int:
        """Layers with experts that workers hold."""
        return sum(self.formats.values())

    @property
    def stripe_read_bytes(self) -> int:
        """What one token reads of one stripe, in one layer; the mean where layers differ."""
        return self.top_k * self.stripe_bytes // (self.num_experts * max(1, self.num_layers))

    @property
    def stripe_bytes(self) -> int:
        """One stripe of every expert of every layer."""
        units = sum(form.unit_bytes(self.hidden_size) * count for form, count in self.formats.items())
        return self.num_experts * units

    def in_format(self, weight_format: str) -> ExpertSizes:
        """These experts, all layers in another format; as they are where most are in it already."""
        main = max(self.formats, key=lambda form: self.formats[form])
        if main.format == weight_format:
            return self
        layout = "channel" if any(form.scale_layout == "channel" for form in self.formats) else "block"
        return replace(self, formats={LayerFormat.of(weight_format, layout): self.num_layers})

    def buffer_bytes(self, num_stripes: int) -> int:
        """What a worker of so many stripes takes beside them: steps' buffers, page tables, the process."""
        form = next(iter(self.formats))
        plan = WorkerPlan(
            model_hash="",
            format=form.format,
            scale_layout=form.scale_layout,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
            total_stripes=self.num_stripes,
            unit_bytes=form.unit_bytes(self.hidden_size),
            first_stripe=0,
            num_stripes=num_stripes,
            layers=(),
            folder="",
            max_step_tokens=self.max_step_tokens,
        )
        tables = num_stripes * self.stripe_bytes // _PAGES_SHARE
        return WORKER_PROCESS_BYTES + tables + scratch_bytes(plan, self.max_step_tokens, _THREADS)

    def need_bytes(self, num_stripes: int) -> int:
        """All that a worker of so many stripes takes."""
        return num_stripes * self.stripe_bytes + self.buffer_bytes(num_stripes)

    def most_stripes(self, have_bytes: int | None) -> int:
        """How many stripes a node holds; all where its memory is unknown."""
        if have_bytes is None:
            return self.num_stripes
        return bisect_right(range(1, self.num_stripes + 1), have_bytes, key=self.need_bytes)


@dataclass(frozen=True)
class Node:
    """A worker's node, as far as it is known.

    Args:
        name: Its address, or its number.
        have_bytes: Memory that a worker may take there; None where that is unknown.
        gb_per_s: What it reads from memory; None where that is unknown.
        isa: Its instruction set; empty where that is unknown.
        round_trip_us: A message to it and back; None where that is unknown.
        keeps_weights: Whether weights that a host sends stay on its disk.
    """

    name: str
    have_bytes: int | None = None
    gb_per_s: float | None = None
    isa: str = ""
    round_trip_us: float | None = None
    keeps_weights: bool = True


@dataclass(frozen=True)
class NodePlan:
    """One worker's share.

    Args:
        worker: Its number.
        node: Its node.
        num_stripes: Stripes of its slice, of every expert.
        share: Its part of all stripes, 0 to 1.
        weight_bytes: Its slice.
        buffer_bytes: Steps' buffers, page tables and the process itself.
        read_bytes: What one token reads of its slice, in one layer.
    """

    worker: int
    node: Node
    num_stripes: int
    share: float
    weight_bytes: int
    buffer_bytes: int
    read_bytes: int

    @property
    def have_bytes(self) -> int | None:
        """The node's memory."""
        return self.node.have_bytes

    @property
    def need_bytes(self) -> int:
        """All that the worker takes."""
        return self.weight_bytes + self.buffer_bytes

    @property
    def fits(self) -> bool:
        """Whether the node has it."""
        return self.node.have_bytes is None or self.need_bytes <= self.node.have_bytes

    @property
    def step_us(self) -> float | None:
        """A layer's step of one token at best: reading at the node's speed, and the round trip if known."""
        if self.node.gb_per_s is None:
            return None
        return self.read_bytes / self.node.gb_per_s / 1e3 + (self.node.round_trip_us or 0.0)


def nodes_of(
    workers: Sequence[WorkerInfo], round_trips_us: Sequence[float | None] | None = None
) -> tuple[Node, ...]:
    """The nodes of workers that have said what they are.

    Workers on one machine (:attr:`duckllm.cluster.connect.WorkerInfo.machine`) have equal parts of its memory
    and of the speed at which it is read.

    Args:
        workers: The workers.
        round_trips_us: What was measured to each; None where nothing was.
    """
    if round_trips_us is None:
        round_trips_us = [None] * len(workers)
    sharing = Counter(worker.machine for worker in workers)
    return tuple(
        Node(
            worker.address,
            None if worker.available_bytes is None else worker.available_bytes // sharing[worker.machine],
            None if worker.read_gb_per_s is None else worker.read_gb_per_s / sharing[worker.machine],
            worker.isa,
            round_trip_us,
            worker.keeps_weights,
        )
        for worker, round_trip_us in zip(workers, round_trips_us, strict=True)
    )


def wanted_shares(shares: str | Sequence[float], speeds: Sequence[float | None]) -> tuple[float, ...] | None:
    """How much each worker should get relative to the others; None for the same.

    Args:
        shares: ``"even"``, numbers, or ``"auto"``, which takes the speeds where all of them are known and
            they differ by more than noise.
        speeds: Each worker's.
    """
    if not isinstance(shares, str):
        return tuple(shares)
    known = [speed for speed in speeds if speed]
    if shares == "even" or len(known) < len(speeds) or max(known) <= SPEED_NOISE * min(known):
        return None
    return tuple(known)


def place_slices(
    sizes: ExpertSizes, nodes: Sequence[Node], shares: str | Sequence[float] = "auto"
) -> tuple[Slice, ...]:
    """Each node's slice, in order.

    With ``"auto"`` what a node has no memory for goes to others, if together they have it. Otherwise, and
    where it was asked for in another way, a division is made that does not fit: :func:`check_fits` says so.

    Raises:
        ConfigError: More nodes than stripes, no node, or shares that are no numbers for them.
    """
    wanted = wanted_shares(shares, [node.gb_per_s for node in nodes])
    most = None
    if shares == "auto":
        most_in = {have: sizes.most_stripes(have) for have in {node.have_bytes for node in nodes}}
        room = [most_in[node.have_bytes] for node in nodes]
        if nodes and min(room) >= 1 and sum(room) >= sizes.num_stripes:
            most = room
    return plan_slices(sizes.num_stripes, len(nodes), wanted, most)


def plan_nodes(sizes: ExpertSizes, nodes: Sequence[Node], slices: Sequence[Slice]) -> tuple[NodePlan, ...]:
    """What each node would hold and need, and how long its steps would take."""
    return tuple(
        NodePlan(
            worker,
            node,
            part.num_stripes,
            part.num_stripes / sizes.num_stripes,
            part.num_stripes * sizes.stripe_bytes,
            sizes.buffer_bytes(part.num_stripes),
            part.num_stripes * sizes.stripe_read_bytes,
        )
        for worker, (node, part) in enumerate(zip(nodes, slices, strict=True))
    )


def table_of(plans: Sequence[NodePlan]) -> str:
    """The plan for people: equal rows, one behind the other, are one."""
    rows: list[tuple[NodePlan, NodePlan, str]] = []
    for plan in plans:
        cells = _cells(plan)
        named = plan.node.name == str(plan.worker)
        if named and rows and rows[-1][2] == cells and rows[-1][1].worker + 1 == plan.worker:
            rows[-1] = (rows[-1][0], plan, cells)
        else:
            rows.append((plan, plan, cells))
    names = [
        first.node.name if first is last else f"{first.node.name} to {last.node.name}"
        for first, last, _ in rows
    ]
    width = max([12, *(len(name) + 2 for name in names)])
    head = (
        f"{'node':<{width}}{'stripes':>8}{'share':>8}{'weights':>12}{'buffers':>12}{'need':>12}{'have':>12}"
    )
    lines = [head + f"{'speed':>12}{'isa':>8}{'step':>12}"]
    lines += [f"{name:<{width}}{cells}" for name, (_, _, cells) in zip(names, rows, strict=True)]
    return "\n".join(lines)


def _cells(plan: NodePlan) -> str:
    memory = (plan.weight_bytes, plan.buffer_bytes, plan.need_bytes, plan.have_bytes)
    cells = f"{plan.num_stripes:>8}{100 * plan.share:>6.1f} %"
    cells += "".join(f"{'-':>12}" if size is None else f"{show_size(size):>12}" for size in memory)
    speed = plan.node.gb_per_s
    cells += f"{'-':>12}" if speed is None else f"{speed:>7.1f} GB/s"
    cells += f"{plan.node.isa.partition('+')[0] or '-':>8}"
    cells += f"{'-':>12}" if plan.step_us is None else f"{plan.step_us:>9.1f} us"
    return cells + ("" if plan.fits else "  too little")


def check_fits(sizes: ExpertSizes, plans: Sequence[NodePlan]) -> None:
    """Refuses a plan that a node has too little memory for.

    Raises:
        PlacementError: Says what would do; its ``table`` shows every node.
    """
    short = [plan for plan in plans if not plan.fits]
    if not short:
        return
    have = sum(plan.have_bytes or 0 for plan in short)
    need = sum(plan.need_bytes for plan in short)
    room = sum(sizes.most_stripes(plan.have_bytes) for plan in plans)
    names = ", ".join(plan.node.name for plan in short[:3]) + (", ..." if len(short) > 3 else "")
    hint = f"all nodes together hold {room} of {sizes.num_stripes} stripes"
    if not all(sizes.most_stripes(plan.have_bytes) for plan in plans):
        hint += "; a node that holds none must be left out"
    elif room >= sizes.num_stripes:
        hint += "; shares auto moves them to where they fit"
    raise PlacementError(
        "memory",
        InWords(f"{show_size(have)} on {len(short)} of {len(plans)} nodes ({names})"),
        f"at least {show_size(need, up=True)} there, or more nodes",
        hint,
        table=table_of(plans),
    )


def words_on_repeats(isas: Sequence[str]) -> str:
    """What different instruction sets mean for repeats; empty where they are one, or unknown."""
    known = sorted({isa.partition("+")[0] for isa in isas if isa})
    if len(known) < 2:
        return ""
    return (
        f"Nodes compute with {' and '.join(known)}, which round differently: an answer repeats bit for bit "
        "only with the same nodes in the same order and the same stripes on each."
    )
