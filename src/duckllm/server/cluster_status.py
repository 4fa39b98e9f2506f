"""``/cluster``: what computes, how it fares, and where the time of steps goes.

Mounted by :mod:`duckllm.server.app`; read by the web page and by people. Everything in it may be asked for
while a step is under way.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field

from duckllm.outputs import WorkerTimes
from duckllm.prefill import select_isa
from duckllm.server.chat_service import ChatService
from duckllm.server.openai_models import ServedModel
from duckllm.server.routing import new_router

if TYPE_CHECKING:
    from duckllm.assembly_experts import ClusterInfo
    from duckllm.llm import LLM


class ModelStatus(BaseModel):
    """The model that is served."""

    id: str
    context_length: int
    weight_format: str


class HostStatus(BaseModel):
    """The server's own machine.

    What computes everything but the experts, what memory goes to, as it was decided, and its instruction set.
    """

    device: Annotated[str, Field(description="CPU, or the name of a GPU, which weights and KV cache are on.")]
    memory_bytes: dict[str, int]
    isa: str


class WorkerStatus(BaseModel):
    """A worker. Times are means over its last steps; None before there was one."""

    index: int
    address: str
    name: Annotated[str, Field(description="What its node goes by; empty where it does not say.")]
    memory_bytes: Annotated[int, Field(description="Memory of its node.")]
    read_gb_per_s: Annotated[float | None, Field(description="What its node reads from memory.")]
    isa: str
    threads: int
    stripes: int
    share: Annotated[float, Field(description="Part of every expert that it has, 0 to 1.")]
    weights_bytes: int
    weight_format: str
    connection: str
    is_lost: bool
    num_losses: int
    compute_us: float | None
    round_trip_us: float | None


class OtherNodeStatus(BaseModel):
    """A node that computes nothing."""

    name: str
    address: str
    state: Annotated[str, Field(description="waiting for a lost one's place, new, busy, gone or refused.")]
    memory_bytes: int
    read_gb_per_s: float | None
    problem: Annotated[str, Field(description="Why it is busy, gone or refused.")]


class EngineStatus(BaseModel):
    """Counts in all, and figures of the last steps, as of :class:`duckllm.outputs.EngineMetrics`."""

    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    window_steps: int
    step_s: float
    step_parts_s: dict[str, float]
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    acceptance: float | None
    time_to_first_token_p50_s: float | None
    time_to_first_token_p99_s: float | None
    inter_token_p50_s: float | None
    inter_token_p99_s: float | None


class RequestsStatus(BaseModel):
    """Replies under way."""

    running: int
    waiting: int


class ClusterStatus(BaseModel):
    """All of it. There are no workers where the experts are computed in the server's process."""

    model: ModelStatus
    host: HostStatus
    workers: list[WorkerStatus]
    other_nodes: list[OtherNodeStatus]
    layers: Annotated[list[int], Field(description="Layers with experts, of which there were steps.")]
    compute_us: Annotated[list[list[float]], Field(description="By layer, then by worker.")]
    engine: EngineStatus
    requests: RequestsStatus
    uptime_s: float


def router(service: ChatService, model: ServedModel) -> APIRouter:
    """The path of the cluster's state."""
    routes = new_router("server")
    start_s = time.monotonic()

    @routes.get("/cluster")
    async def cluster() -> ClusterStatus:
        """What computes, how it fares, and where the time of steps goes."""
        llm = service.llm
        times, info = llm.worker_times(), llm.cluster_info()
        running = llm.state().num_running
        return ClusterStatus(
            model=ModelStatus(
                id=model.names[0],
                context_length=llm.max_model_len,
                weight_format=info.weight_format,
            ),
            host=HostStatus(device=llm.device.title, memory_bytes=_memory(llm), isa=select_isa()),
            workers=_workers(info, times),
            other_nodes=[OtherNodeStatus(**dataclasses.asdict(each)) for each in info.other_nodes],
            layers=list(times.layers),
            compute_us=[list(each) for each in times.compute_us],
            engine=EngineStatus(**dataclasses.asdict(llm.stats())),
            # Those that the engine's thread has not taken yet wait as well.
            requests=RequestsStatus(running=running, waiting=max(0, service.engine.num_open - running)),
            uptime_s=time.monotonic() - start_s,
        )

    return routes


def _memory(llm: LLM) -> dict[str, int]:
    memory = dataclasses.asdict(llm.memory())
    left_out = () if llm.device.is_cuda else ("embedding_bytes", "workspace_bytes")
    return {name: memory[name] for name in memory if name.endswith("_bytes") and name not in left_out}


def _workers(info: ClusterInfo, times: WorkerTimes) -> list[WorkerStatus]:
    return [
        WorkerStatus(
            index=index,
            address=info.addresses[index],
            name=info.names[index],
            memory_bytes=info.memory_bytes[index],
            read_gb_per_s=info.read_gb_per_s[index],
            isa=info.isas[index],
            threads=info.threads[index],
            stripes=info.stripes[index],
            share=info.shares[index],
            weights_bytes=info.weight_bytes[index],
            weight_format=info.weight_formats[index],
            connection=info.links[index],
            is_lost=times.is_lost[index],
            num_losses=times.num_losses[index],
            compute_us=_mean([each[index] for each in times.compute_us]),
            round_trip_us=_mean([each[index] for each in times.round_trip_us]),
        )
        for index in range(info.num_workers)
    ]


def _mean(values: list[float]) -> float | None:
    """Over the layers."""
    return sum(values) / len(values) if values else None
