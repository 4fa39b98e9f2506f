"""Traces that tests make up, in numbers that are easy to add."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from duckllm.models.step_times import StepTimes
from duckllm.tracing.read import PARTS, Trace


@dataclass
class EngineStepValues:
    """What the engine says of a step."""

    seconds: float = 0.001
    num_prompt_tokens: int = 0
    num_decode_tokens: int = 1
    num_new_tokens: int = 1
    times: StepTimes = field(default_factory=StepTimes)


@dataclass
class StepValues:
    """One step: the host's moments, and (free, started, finished, taken) of each worker."""

    host: tuple[float, float, float, float, float]
    workers: list[tuple[float, float, float, float]]
    layer: int = 1
    lane: int = 0
    tokens: int = 1
    experts: dict[int, int] = field(default_factory=dict)


def make_trace(
    steps: list[StepValues],
    engine: list[tuple[float, float]],
    *,
    num_experts: int = 4,
    names: tuple[str, ...] = ("one", "two"),
) -> Trace:
    """A trace of these steps; ``engine`` has the start and the length of each step of the engine."""
    moments = np.array([step.workers for step in steps], np.float64).reshape(len(steps), len(names), 4)
    chosen = [(n, e, r) for n, step in enumerate(steps) for e, r in step.experts.items()]
    experts = np.array(chosen, np.int64).reshape(-1, 3).T
    facts: dict[str, Any] = {"num_experts": num_experts}
    return Trace(
        facts,
        names,
        *np.array([(step.layer, step.lane, step.tokens) for step in steps], np.int64).reshape(-1, 3).T,
        *np.array([step.host for step in steps], np.float64).reshape(-1, 5).T,
        *np.moveaxis(moments, 2, 0),
        error_us=np.full(moments.shape[:2], 2.0),
        engine_start=np.array([start for start, _ in engine], np.float64),
        engine_us=np.array([us for _, us in engine], np.float64),
        engine_parts_us=np.zeros((len(engine), len(PARTS))),
        engine_new_tokens=np.ones(len(engine), np.int64),
        expert_step=experts[0],
        expert=experts[1],
        expert_rows=experts[2],
        num_dropped=0,
        replaced=(),
    )
