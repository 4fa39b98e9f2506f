"""Where experts are computed, put together: in this process, on workers, beside a GPU; what is said of it.

Called by :mod:`duckllm.assembly`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from duckllm import _native
from duckllm.config import ClusterConfig, available_cores, words_on_turns
from duckllm.outputs import WorkerTimes
from duckllm.transport.transport import Transport
from duckllm.weights.formats import is_lossless
from duckllm.weights.layer_formats import in_words

if TYPE_CHECKING:
    import torch

    from duckllm.cluster.base import Cluster, OtherNode
    from duckllm.moe.device_experts import DeviceExperts
    from duckllm.moe.executor import ExpertExecutor
    from duckllm.transport.flock import Flock
    from duckllm.weights.manifest import Manifest

_log = logging.getLogger("duckllm")
_LANES = 2  # of a step, at most


@dataclass(frozen=True)
class ClusterInfo:
    """What computes the experts.

    Args:
        num_workers: Workers; 0 when the experts run in this process.
        weight_format: Format that the experts are computed in; several, with a plus, where workers differ.
        isas: Instruction set of each worker, in worker order, or of this process; with a plus, the bf16
            multipliers where prefill uses them.
        stripes: Stripes of each worker, in worker order.
        addresses: Address of each worker, in worker order.
        pids: Process id of each worker on its node, in worker order.
        threads: Compute threads of each worker, in worker order, or of this process.
        weight_formats: Format that each worker computes in, in worker order, or this process.
        weight_bytes: Size of each worker's slice in that format, or of all experts in this process.
        own_memory_bytes: Of each worker's slice, how much lies in its own memory; the rest is mapped from
            files, and shared with the node's page cache.
        huge_page_bytes: Of that, how much in huge pages.
        names: What each worker's node goes by; empty where it does not say.
        memory_bytes: Memory of each worker's node.
        read_gb_per_s: What each node reads from memory, GB/s; None where it does not say.
        other_nodes: Nodes that are known and compute nothing: they wait, are gone or were refused.
        layer_formats: Which layers are computed in which format, in words; empty where all are in the same.
        links: How each worker is spoken with, in words: shared memory, or TCP and what of it is set, and what
            could not be.
    """

    num_workers: int
    weight_format: str
    isas: tuple[str, ...]
    stripes: tuple[int, ...] = ()
    addresses: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()
    weight_formats: tuple[str, ...] = ()
    weight_bytes: tuple[int, ...] = ()
    own_memory_bytes: tuple[int, ...] = ()
    huge_page_bytes: tuple[int, ...] = ()
    links: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    read_gb_per_s: tuple[float | None, ...] = ()
    other_nodes: tuple[OtherNode, ...] = ()
    layer_formats: str = ""

    @property
    def shares(self) -> tuple[float, ...]:
        """Which part of every expert each worker has, in worker order; they add up to 1."""
        return tuple(stripes / sum(self.stripes) for stripes in self.stripes)


@dataclass(frozen=True)
class ExpertsView:
    """What can be asked about the experts while they compute, from any thread.

    Args:
        info: Who computes them.
        times: Where the time of their steps goes.
        attend: Brings workers back that have gone, between two steps and in their thread.
        trace: Has the moments of steps at workers noted there, until it is called with None.
    """

    info: Callable[[], ClusterInfo]
    times: Callable[[], WorkerTimes] = WorkerTimes
    attend: Callable[[], None] = lambda: None
    trace: Callable[[_native.StepTrace | None], None] = lambda _: None


def warn_of_turns(field: str, threads: int) -> None:
    """Says where a setting of threads here is of more than there are cores."""
    words = words_on_turns(field, threads)
    if words:
        _log.warning("%s", words)


def experts_here(
    manifest: Manifest, config: ClusterConfig, device: torch.device
) -> tuple[ExpertExecutor, ExpertsView]:
    """The experts in this process, loaded, and what can be asked about them.

    Raises:
        ModelError: They cannot be used.
    """
    from duckllm.moe.local import LocalExperts

    num_threads = config.threads_per_worker or available_cores()
    warn_of_turns("threads_per_worker", num_threads)
    experts = LocalExperts(
        manifest,
        max_step_tokens=config.max_step_tokens,
        num_threads=num_threads,
        weight_format=config.weight_format,
        prefill=config.prefill,
    )
    info = ClusterInfo(
        0,
        experts.weight_format,
        (experts.isa,),
        threads=(num_threads,),
        weight_formats=(experts.weight_format,),
        weight_bytes=(experts.weight_bytes,),
    )
    view = ExpertsView(lambda: info)
    if device.type == "cpu":
        return experts, view
    server = experts.server(max_tokens=config.max_step_tokens, num_threads=num_threads)
    sizes = manifest.hidden_size, manifest.num_experts_per_tok
    return experts_of_gpu(experts, server, *sizes, device), view


def experts_on_workers(
    stack: ExitStack, manifest: Manifest, cluster: Cluster, config: ClusterConfig, device: torch.device
) -> tuple[ExpertExecutor, ExpertsView]:
    """The experts on workers that have their plans, once all are ready, and what can be asked about them.

    Raises:
        ModelError: A worker cannot use its weights.
        ClusterError: A worker is gone, or takes too long to prepare.
    """
    from duckllm.moe.dispatch import RemoteExperts
    from duckllm.transport.flock import Flock

    connections = cluster.wait_ready()
    transport = stack.enter_context(
        Transport(
            connections,
            manifest.hidden_size,
            manifest.num_experts_per_tok,
            max_step_tokens=config.max_step_tokens,
            wire_dtype=config.wire_dtype,
            reply_dtype=config.reply_dtype,
            step_timeout_s=config.step_timeout_s,
            submit_timeout_s=config.worker_silence_s,
            spin_us=max(0, config.spin_us),
            multicast=cluster.multicast,
        )
    )
    flock = Flock(transport, cluster, config.worker_silence_s, config.worker_timeout_s)
    experts = RemoteExperts(flock)
    view = ExpertsView(
        lambda: _describe_workers(cluster, flock), flock.times, flock.attend, transport.set_trace
    )
    if device.type == "cpu":
        return experts, view
    sizes = manifest.hidden_size, manifest.num_experts_per_tok
    return experts_of_gpu(experts, transport.server(), *sizes, device, flock, transport), view


def experts_of_gpu(
    executor: ExpertExecutor,
    server: _native.LaneServer,
    hidden_size: int,
    top_k: int,
    device: torch.device,
    flock: Flock | None = None,
    transport: Transport | None = None,
) -> DeviceExperts:
    """The expert executor of a host with a GPU.

    Args:
        executor: Computes steps of CPU tensors.
        server: Computes those of captured graphs.
        hidden_size: H.
        top_k: K.
        device: The GPU.
        flock: Brings back workers, where there are some.
        transport: Theirs.
    """
    from duckllm.kernels import exchange as kernels
    from duckllm.kernels.half_rows import MAX_GROUPED_ROWS
    from duckllm.moe.device_experts import DeviceExperts, Mailboxes

    boxes = Mailboxes.new(_LANES, MAX_GROUPED_ROWS, hidden_size, top_k, device)
    exchange = boxes.exchange(server, flock=flock, transport=transport)
    return DeviceExperts(executor, boxes, exchange, kernels)


def with_layers(info: Callable[[], ClusterInfo], manifest: Manifest, num_layers: int) -> ClusterInfo:
    """What computes the experts, with the formats of the first layers where these differ."""
    found = info()
    # fp9 and fp8 are computed in each other's place, perhaps not by all alike; others as they are stored.
    same = "+".join(filter(is_lossless, found.weight_format.split("+")))
    formats = {
        layer: same if is_lossless(name) else name
        for layer, name in manifest.layer_formats().items()
        if layer < num_layers
    }
    return replace(found, layer_formats=in_words(formats) if len(set(formats.values())) > 1 else "")


def _describe_workers(cluster: Cluster, flock: Flock) -> ClusterInfo:
    workers = cluster.workers
    return ClusterInfo(
        len(workers),
        "+".join(sorted({worker.weight_format for worker in workers})),
        tuple(worker.isa for worker in workers),
        tuple(worker.num_stripes for worker in workers),
        tuple(worker.address for worker in workers),
        tuple(worker.pid for worker in workers),
        tuple(worker.threads for worker in workers),
        tuple(worker.weight_format for worker in workers),
        tuple(worker.weight_bytes for worker in workers),
        tuple(worker.own_memory_bytes for worker in workers),
        tuple(worker.huge_page_bytes for worker in workers),
        flock.links,
        tuple(worker.name for worker in workers),
        tuple(worker.memory_bytes for worker in workers),
        tuple(worker.read_gb_per_s for worker in workers),
        cluster.other_nodes,
    )
