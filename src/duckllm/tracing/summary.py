"""Where the time of a trace went: by part of the host, worker, layer and expert. Called by cli/trace.py.

The host is one thread, so its own parts add up to the whole. Workers' phases lie beside each other; what of
them the host waited for is that of the worker that answered last.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from duckllm.tracing.read import F64, MAX_CELLS, MAX_EXPERTS, Trace

PHASES = ("queue", "wire", "compute", "reply")
_LATE_TIMES = 3.0  # an answer that takes so many times the worker's usual is a straggler
_FEW_STEPS = 8  # of which there is no usual


@dataclass(frozen=True)
class WorkerSummary:
    """One worker.

    Args:
        name: Its address.
        queue_us: Mean of a step until the request left and the worker was done with earlier ones.
        wire_us: Until the worker had it.
        compute_us: Until it had the sums.
        reply_us: Until the host had them; what of it the host was busy itself is not counted.
        held_us: That.
        compute_p99_us: Of a step; 99 % take no longer.
        busy_share: Part of the engine's time that it computed.
        last_share: Part of the steps that the host waited in which it answered last.
        late_us: Mean of how long after the one before it, in those.
        num_late: Answers that took three times the usual of this worker, layer and number of tokens.
        clock_error_us: Median of the most that its moments are wrong by.
    """

    name: str
    queue_us: float
    wire_us: float
    compute_us: float
    reply_us: float
    held_us: float
    compute_p99_us: float
    busy_share: float
    last_share: float
    late_us: float
    num_late: int
    clock_error_us: float


@dataclass(frozen=True)
class LayerSummary:
    """One layer.

    Args:
        layer: Its number.
        num_steps: In the trace.
        step_us: Mean from the host's handing it over to the sum.
        step_p99_us: 99 % take no longer.
        compute_us: Mean of the slowest worker of each step.
        slowest_worker: Whose median is the highest.
        imbalance: The slowest worker's compute time over the mean of all, averaged over steps.
        expert_imbalance: Choices of the expert chosen most over the mean of all experts.
    """

    layer: int
    num_steps: int
    step_us: float
    step_p99_us: float
    compute_us: float
    slowest_worker: int
    imbalance: float
    expert_imbalance: float


@dataclass(frozen=True)
class Late:
    """An answer that took long: where, when, and the phase that took most of it.

    Args:
        at_ms: Since the start of the run.
        layer: Its layer.
        worker: Who.
        took_us: From the host's handing it over to the answer.
        usual_us: Median of this worker, layer and number of tokens.
        phase: What grew most.
    """

    at_ms: float
    layer: int
    worker: int
    took_us: float
    usual_us: float
    phase: str


@dataclass(frozen=True)
class LaneSummary:
    """Steps of the engine in one lane, or in two.

    Args:
        lanes: How many.
        num_steps: Of the engine.
        step_us: Mean.
        host_waits_share: Of their time, the host had nothing to do.
        workers_idle_share: Of their time, a worker computed nothing; mean over workers.
        overlap_share: Of their time, host and workers computed, mean over workers.
    """

    lanes: int
    num_steps: int
    step_us: float
    host_waits_share: float
    workers_idle_share: float
    overlap_share: float


@dataclass(frozen=True)
class Summary:
    """Where the time went.

    Args:
        span_ms: From the first step to the last one's end.
        engine_ms: Of that, in steps of the engine.
        num_steps: At workers.
        num_engine_steps: Of the engine.
        num_new_tokens: Chosen.
        parts_ms: The host's time: each part, and its waits by what they waited for. They add up to
            ``engine_ms``.
        workers: In worker order.
        layers: In the order of layers.
        lanes: One lane, two.
        late: The longest first.
        imbalance_ms: Of the host's waits, what an even division of the same work would have saved.
        num_dropped: Steps that are missing in the trace.
        num_replaced: Workers that came in another's place.
    """

    span_ms: float
    engine_ms: float
    num_steps: int
    num_engine_steps: int
    num_new_tokens: int
    parts_ms: dict[str, float]
    workers: tuple[WorkerSummary, ...]
    layers: tuple[LayerSummary, ...]
    lanes: tuple[LaneSummary, ...]
    late: tuple[Late, ...]
    imbalance_ms: float
    num_dropped: int
    num_replaced: int

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class HeatMaps:
    """Numbers by layer and worker, and by layer and expert; NaN where there is none.

    Args:
        layers: Rows.
        workers: Columns of the first two.
        compute_us: Median compute time of a step.
        round_trip_us: Median time from the host's handing over to its having the answer.
        expert_rows: Choices, one a token.
        expert_ms: Time of the mean worker, shared evenly among the experts of a step: each is read once.

    Shapes:
        compute_us, round_trip_us: [L, W]; expert_rows, expert_ms: [L, E]
    """

    layers: tuple[int, ...]
    workers: tuple[str, ...]
    compute_us: F64
    round_trip_us: F64
    expert_rows: F64
    expert_ms: F64

    def to_json(self) -> dict[str, Any]:
        """The same as plain values; null where there is none."""

        def rows(values: F64) -> list[list[float | None]]:
            return [[None if np.isnan(each) else round(float(each), 3) for each in row] for row in values]

        names = ("compute_us", "round_trip_us", "expert_rows", "expert_ms")
        return {"layers": list(self.layers), "workers": list(self.workers)} | {
            name: rows(getattr(self, name)) for name in names
        }


def phases_us(trace: Trace) -> dict[str, F64]:
    """How long each phase of each step took at each worker, and how long the answer was there unlooked for.

    Shapes: each [N, W]
    """
    looked = np.clip(trace.waited[:, None], trace.finished, trace.taken)
    return {
        "queue": trace.free - trace.submitted[:, None],
        "wire": trace.started - trace.free,
        "compute": trace.finished - trace.started,
        "reply": trace.taken - looked,
        "held": looked - trace.finished,
    }


def waits_us(trace: Trace) -> dict[str, float]:
    """What the host waited for: phases of the worker that answered last, as far as they lie in the wait."""
    waits = dict.fromkeys(PHASES, 0.0)
    known = ~np.isnan(trace.taken).any(axis=1) if trace.workers else np.zeros(len(trace.layer), bool)
    rows = np.flatnonzero(known)
    if rows.size == 0:
        return waits
    last = trace.taken[rows].argmax(axis=1)
    begin, end = trace.waited[rows], trace.last[rows]
    moments = [trace.submitted[rows]]
    moments += [each[rows, last] for each in (trace.free, trace.started, trace.finished, trace.taken)]
    clipped = [np.clip(each, begin, end) for each in moments]
    for phase, start, stop in zip(PHASES, clipped, clipped[1:], strict=False):
        waits[phase] = float((stop - start).sum())
    return waits


def summarise(trace: Trace, num_late: int = 5) -> Summary:
    """Where the time went.

    Args:
        trace: A trace.
        num_late: Most single answers that took long to name.
    """
    starts = np.concatenate([trace.submitted, trace.engine_start])
    ends = np.concatenate([trace.summed, trace.engine_start + trace.engine_us])
    span_us = float(ends.max() - starts.min()) if starts.size else 0.0
    engine_us = float(trace.engine_us.sum()) if trace.engine_us.size else span_us
    wait_us = float((trace.last - trace.waited).sum())
    waits = waits_us(trace)
    parts = {
        "dispatch": float((trace.dispatched - trace.submitted).sum()),
        **{f"wait: {phase}": waits[phase] for phase in PHASES},
        "wait: not known": max(0.0, wait_us - sum(waits.values())),
        "combine": float((trace.summed - trace.last).sum()),
    }
    parts["host computes"] = max(0.0, engine_us - sum(parts.values()))
    workers = _workers(trace, engine_us)
    late = _late(trace)
    return Summary(
        span_us / 1000,
        engine_us / 1000,
        len(trace.layer),
        len(trace.engine_us),
        int(trace.engine_new_tokens.sum()),
        {name: us / 1000 for name, us in parts.items()},
        tuple(workers),
        tuple(_layers(trace)),
        tuple(_lanes(trace)),
        tuple(late[:num_late]),
        _imbalance_us(trace) / 1000,
        trace.num_dropped,
        len(trace.replaced),
    )


def heat_maps(trace: Trace) -> HeatMaps:
    """The trace by layer and worker, and by layer and expert."""
    layers, row = np.unique(trace.layer, return_inverse=True)
    phases = phases_us(trace)
    shape = (len(layers), len(trace.workers))

    def median_by_layer(values: F64) -> F64:
        medians = np.full(shape, np.nan)
        for index, worker in np.ndindex(*shape):
            mine = values[row == index, worker]
            mine = mine[~np.isnan(mine)]
            if mine.size:
                medians[index, worker] = np.median(mine)
        return medians

    num_experts = int(trace.expert.max()) + 1 if trace.expert.size else 0
    said = trace.facts.get("num_experts")
    if type(said) is int and num_experts < said <= min(MAX_EXPERTS, MAX_CELLS // max(1, len(layers))):
        num_experts = said
    rows, ms = np.zeros((len(layers), num_experts)), np.zeros((len(layers), num_experts))
    at = row[trace.expert_step], trace.expert
    np.add.at(rows, at, trace.expert_rows)
    chosen = np.bincount(trace.expert_step, minlength=len(trace.layer))
    compute = np.zeros(len(trace.layer))
    if trace.workers:
        known = ~np.isnan(phases["compute"])
        compute = np.where(known, phases["compute"], 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    np.add.at(ms, at, (compute / np.maximum(chosen, 1))[trace.expert_step] / 1000)
    return HeatMaps(
        tuple(int(layer) for layer in layers),
        trace.workers,
        median_by_layer(phases["compute"]),
        median_by_layer(trace.taken - trace.submitted[:, None]),
        rows,
        ms,
    )


def _workers(trace: Trace, engine_us: float) -> list[WorkerSummary]:
    phases = phases_us(trace)
    usual = _usual_us(trace)
    took = trace.taken - trace.submitted[:, None]
    waited = (trace.last > trace.waited) & ~np.isnan(trace.taken).any(axis=1)
    order = np.sort(trace.taken, axis=1)
    last = np.argmax(np.where(np.isnan(trace.taken), -np.inf, trace.taken), axis=1) if trace.workers else None
    summaries = []
    for worker, name in enumerate(trace.workers):
        known = ~np.isnan(trace.taken[:, worker])
        mean = {phase: _mean(values[known, worker]) for phase, values in phases.items()}
        compute = phases["compute"][known, worker]
        was_last = waited & (last == worker)
        behind = order[was_last, -1] - order[was_last, -2] if len(trace.workers) > 1 else np.zeros(0)
        with np.errstate(invalid="ignore"):
            late = int((took[:, worker] > _LATE_TIMES * usual[:, worker]).sum())
        summaries.append(
            WorkerSummary(
                name,
                mean["queue"],
                mean["wire"],
                mean["compute"],
                mean["reply"],
                mean["held"],
                float(np.percentile(compute, 99)) if compute.size else 0.0,
                float(compute.sum()) / engine_us if engine_us else 0.0,
                float(was_last.sum()) / max(1, int(waited.sum())),
                _mean(behind),
                late,
                float(np.median(trace.error_us[known, worker])) if known.any() else 0.0,
            )
        )
    return summaries


def _layers(trace: Trace) -> list[LayerSummary]:
    maps = heat_maps(trace)
    compute = phases_us(trace)["compute"]
    took = trace.summed - trace.submitted
    summaries = []
    for index, layer in enumerate(maps.layers):
        mine = trace.layer == layer
        known = mine & ~np.isnan(compute).any(axis=1) if trace.workers else np.zeros_like(mine)
        slowest = compute[known].max(axis=1) if known.any() else np.zeros(0)
        mean = compute[known].mean(axis=1) if known.any() else np.zeros(0)
        medians = np.where(np.isnan(maps.compute_us[index]), -1.0, maps.compute_us[index])
        rows = maps.expert_rows[index]
        summaries.append(
            LayerSummary(
                layer,
                int(mine.sum()),
                _mean(took[mine]),
                float(np.percentile(took[mine], 99)),
                _mean(slowest),
                int(medians.argmax()) if medians.size else 0,
                _mean(slowest / np.maximum(mean, 1e-3)),
                float(rows.max() / rows.mean()) if rows.any() else 0.0,
            )
        )
    return summaries


def _imbalance_us(trace: Trace) -> float:
    """How much earlier the waits would end if each step's compute time were the mean of its workers."""
    compute = phases_us(trace)["compute"]
    if not trace.workers:
        return 0.0
    saved = compute.max(axis=1) - compute.mean(axis=1)
    return float(np.nansum(np.minimum(saved, trace.last - trace.waited)))


def _usual_us(trace: Trace) -> F64:
    """The median of each worker's answers of the same layer and number of tokens; NaN where there are few."""
    took = trace.taken - trace.submitted[:, None]
    usual = np.full_like(took, np.nan)
    kinds, kind = np.unique(np.stack([trace.layer, trace.tokens]), axis=1, return_inverse=True)
    kind = kind.reshape(-1)
    for number in range(kinds.shape[1]):
        mine = kind == number
        if mine.sum() >= _FEW_STEPS:
            for worker in range(took.shape[1]):
                values = took[mine, worker]
                values = values[~np.isnan(values)]
                usual[mine, worker] = np.median(values) if values.size else np.nan
    return usual


def _late(trace: Trace) -> list[Late]:
    usual = _usual_us(trace)
    took = trace.taken - trace.submitted[:, None]
    phases = phases_us(trace)
    with np.errstate(invalid="ignore"):
        found = np.argwhere(took > _LATE_TIMES * usual)
    known = ~np.isnan(trace.taken)
    medians = {
        phase: [
            float(np.median(values[known[:, worker], worker])) if known[:, worker].any() else 0.0
            for worker in range(len(trace.workers))
        ]
        for phase, values in phases.items()
    }
    late = []
    for step, worker in found:
        grown = {name: phases[name][step, worker] - medians[name][worker] for name in phases}
        late.append(
            Late(
                float(trace.submitted[step]) / 1000,
                int(trace.layer[step]),
                int(worker),
                float(took[step, worker]),
                float(usual[step, worker]),
                max(grown, key=lambda name: grown[name]),
            )
        )
    return sorted(late, key=lambda each: each.usual_us - each.took_us)


def _lanes(trace: Trace) -> list[LaneSummary]:
    """Bubbles: the host's waits and the workers' idle time, in steps of the engine of one lane and of two."""
    if not trace.engine_us.size or not trace.workers or not trace.layer.size:
        return []
    order = np.argsort(trace.engine_start)
    starts, us = trace.engine_start[order], trace.engine_us[order]
    of = np.clip(np.searchsorted(starts, trace.submitted, side="right") - 1, 0, len(starts) - 1)
    in_lanes = np.zeros(len(starts), bool)
    np.logical_or.at(in_lanes, of, trace.lane > 0)
    wait = np.zeros(len(starts))
    np.add.at(wait, of, trace.last - trace.waited)
    compute = np.nan_to_num(trace.finished - trace.started)
    busy, beside = np.zeros(len(starts)), np.zeros(len(starts))
    np.add.at(busy, of, compute.mean(axis=1))
    # How long the host had waited, in all, at any moment: waits follow one another.
    by_time = np.argsort(trace.waited)
    edges = np.stack([trace.waited[by_time], trace.last[by_time]], axis=1).reshape(-1)
    edges = np.maximum.accumulate(edges)
    waited = np.repeat(np.cumsum(trace.last[by_time] - trace.waited[by_time]), 2)
    waited[::2] -= trace.last[by_time] - trace.waited[by_time]
    both = compute - (
        np.interp(np.nan_to_num(trace.finished), edges, waited)
        - np.interp(np.nan_to_num(trace.started), edges, waited)
    )
    np.add.at(beside, of, both.mean(axis=1))
    summaries = []
    for lanes, mine in ((1, ~in_lanes), (2, in_lanes)):
        total = float(us[mine].sum())
        if total > 0:
            summaries.append(
                LaneSummary(
                    lanes,
                    int(mine.sum()),
                    float(us[mine].mean()),
                    float(wait[mine].sum()) / total,
                    1 - float(busy[mine].sum()) / total,
                    float(beside[mine].sum()) / total,
                )
            )
    return summaries


def _mean(values: F64) -> float:
    return float(values.mean()) if values.size else 0.0
