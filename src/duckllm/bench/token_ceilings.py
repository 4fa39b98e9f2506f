"""What memory, arithmetic and links allow a whole model at best; docs/performance.md derives it.

Called by model_runs.py. Knows what a model reads and sends, not how it is run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from duckllm import _native
from duckllm.bench.ceilings import MemoryCeilings, default_size_bytes, fma_ceilings
from duckllm.bench.machine import available_memory_bytes, read_caches
from duckllm.cluster.address import parse_address
from duckllm.models.inspection import MTP, Inspection
from duckllm.weights.formats import is_lossless

if TYPE_CHECKING:
    from duckllm.assembly_experts import ClusterInfo

# Workers that have just computed spin for a moment, and would take time from what is measured here.
_QUIET_S = 0.02
_DTYPE_BYTES = {"f32": 4, "bf16": 2}


class MachineRates:
    """What this machine reads and computes at best, sampled in turns with what is held against it.

    Args:
        threads: Threads that read, and that multiply.
        size_bytes: Memory to read; None for several last-level caches.
    """

    def __init__(self, threads: int, size_bytes: int | None = None) -> None:
        size = size_bytes or default_size_bytes(read_caches(), available_memory_bytes())
        self._threads = threads
        self._memory = MemoryCeilings(threads, size, "auto", True)
        self._memory.verify()
        self._read_s: dict[str, list[float]] = {each: [] for each in _native.CeilingLoops.variants("read")}
        self._gflop_per_s: list[float] = []

    def sample(self) -> None:
        """Takes a sample of each."""
        time.sleep(_QUIET_S)
        for variant, seconds in self._read_s.items():
            seconds.append(self._memory.sample_cold_read(variant))
        [computed] = fma_ceilings(self._threads, ["auto"], 3)
        self._gflop_per_s.append(computed.rate.median)

    @property
    def read_gb_per_s(self) -> float:
        """Median of the best loop's samples, GB/s."""
        return self._memory.window_bytes / min(median(each) for each in self._read_s.values()) / 1e9

    @property
    def gflop_per_s(self) -> float:
        """Median of the samples of f32 multiply-adds, GFLOP/s."""
        return median(self._gflop_per_s)


@dataclass(frozen=True)
class LinkFacts:
    """The way to the workers.

    Args:
        words: What it is: ``"none"``, ``"shared memory"``, ``"loopback"`` or the interface's name.
        gbit_per_s: Its rate on the host's side, Gbit/s; None where there is no link or nothing says its rate.
    """

    words: str
    gbit_per_s: float | None = None


def link_facts(info: ClusterInfo, interface_of: Callable[[str], LinkFacts]) -> LinkFacts:
    """The way to a model's workers.

    Args:
        info: The workers.
        interface_of: What the system says of the interface that leads to an address's machine.
    """
    if not info.num_workers:
        return LinkFacts("none, the experts are in this process")
    if all(link.startswith("shared memory") for link in info.links) and info.links:
        return LinkFacts("shared memory")
    names = {parse_address(address, "workers").name for address in info.addresses}
    found = {interface_of(name) for name in names}
    if len(found) == 1:  # the host's own link carries what goes to all workers
        return found.pop()
    return LinkFacts("several: " + ", ".join(sorted(each.words for each in found)))


@dataclass(frozen=True)
class StepCeiling:
    """What a step of the whole model takes at least.

    Args:
        rows: Tokens of the step, on the average.
        expert_bytes: Experts that are read, over all workers: for several rows the number expected of rows
            that choose at random.
        host_bytes: Its own weights that the host's CPU reads.
        flop: Floating-point operations of the host and all workers.
        request_bytes: Sent to all workers.
        reply_bytes: Sent by all workers.
        memory_s: Reading host's weights and experts; None where a speed is unknown.
        compute_s: The multiply-adds in f32, where all is on this machine's CPU and in f32; else None.
        wire_s: Sending and receiving over the host's link; None where there is no link whose rate is known.
    """

    rows: float
    expert_bytes: float
    host_bytes: int
    flop: float
    request_bytes: float
    reply_bytes: float
    memory_s: float | None
    compute_s: float | None
    wire_s: float | None

    @property
    def step_s(self) -> float | None:
        """Seconds: memory or arithmetic, whichever is more, then the wire; None where both are unknown."""
        known = [each for each in (self.memory_s, self.compute_s) if each is not None]
        return max(known) + (self.wire_s or 0.0) if known else None

    @property
    def bound(self) -> str:
        """What most of it is: ``"memory"``, ``"arithmetic"``, ``"wire"`` or ``"unknown"``."""
        times = {"memory": self.memory_s, "arithmetic": self.compute_s, "wire": self.wire_s}
        known = {name: value for name, value in times.items() if value is not None}
        return max(known, key=lambda name: known[name]) if known else "unknown"


def distinct_experts(num_experts: int, top_k: int, rows: float) -> float:
    """How many experts so many rows choose together, each at random: K for one row, E for very many."""
    return num_experts * (1.0 - float((1 - top_k / num_experts) ** rows))


def step_ceiling(
    model: Inspection,
    info: ClusterInfo,
    rows: float,
    *,
    logit_rows: float,
    wire_dtype: str,
    reply_dtype: str,
    multicast: bool,
    is_cuda: bool,
    is_bf16: bool,
    read_gb_per_s: float,
    gflop_per_s: float,
    worker_gb_per_s: Sequence[float | None] | None,
    link: LinkFacts,
) -> StepCeiling:
    """The ceiling of a step. What the KV cache reads is not in it, nor the layer that guesses tokens.

    Args:
        model: The model.
        info: Who computes the experts.
        rows: Tokens of the step.
        logit_rows: Of them, those whose logits are computed: not of a prompt but its last one.
        wire_dtype: What goes to workers, ``"f32"`` or ``"bf16"``.
        reply_dtype: What comes back.
        multicast: Whether a request goes out once for all workers.
        is_cuda: Whether a GPU computes the host's layers, whose speed is not measured here.
        is_bf16: Whether prompts are computed on bf16 multipliers, which no f32 ceiling bounds.
        read_gb_per_s: What this machine reads, with all cores.
        gflop_per_s: What it computes in f32.
        worker_gb_per_s: What each worker's node reads, None for one that does not say, empty where nobody was
            asked; None for workers here, which read what this machine does.
        link: The way to them.
    """
    layout, layers = model.layout, model.num_moe_layers
    formats = info.weight_format.split("+")
    per_token = min(model.expert_read_bytes(each) for each in formats)
    top_k = layout.num_experts_per_tok
    expert_bytes = per_token * distinct_experts(layout.num_experts, top_k, rows) / top_k
    read = {part.name: part.read_bytes for part in model.parts if part.name != MTP}
    # Steps of a long prompt that do not end it leave the head alone.
    head = sum(part.num_weights for part in model.parts if part.name == "head")
    host_bytes = round(sum(read.values()) - read.get("head", 0) * (1 - min(1.0, logit_rows)))
    if is_cuda:
        host_bytes = 0
    host_s = host_bytes / read_gb_per_s / 1e9
    memory_s: float | None
    if worker_gb_per_s is None:
        memory_s = host_s + expert_bytes / read_gb_per_s / 1e9
    else:
        times = [
            share * expert_bytes / speed / 1e9
            for share, speed in zip(info.shares, worker_gb_per_s, strict=False)
            if speed
        ]
        memory_s = host_s + max(times) if len(times) == info.num_workers else None
    flop = 2.0 * (rows * (model.active_weights - head) + logit_rows * head)
    in_f32 = not is_bf16 and all(is_lossless(each) for each in formats)  # others multiply integers
    here = worker_gb_per_s is None and not is_cuda and in_f32

    def row_bytes(dtype: str) -> int:
        return layout.hidden_size * _DTYPE_BYTES[dtype]

    headers = _native.FRAME_HEADER_BYTES + _native.STEP_REQUEST_HEADER_BYTES
    request = layers * (headers + rows * (row_bytes(wire_dtype) + 8 * top_k))
    reply = layers * (
        _native.FRAME_HEADER_BYTES + _native.STEP_REPLY_HEADER_BYTES + rows * row_bytes(reply_dtype)
    )
    request_bytes = request * (min(1, info.num_workers) if multicast else info.num_workers)
    reply_bytes = reply * info.num_workers
    rate = link.gbit_per_s
    return StepCeiling(
        rows,
        expert_bytes,
        host_bytes,
        flop,
        request_bytes,
        reply_bytes,
        memory_s,
        flop / gflop_per_s / 1e9 if here else None,
        None if not rate else 8 * (request_bytes + reply_bytes) / rate / 1e9,
    )
