"""A trace file as tables: steps with their moments, and what the engine computed meanwhile.

Called by cli/trace.py. Reads what :mod:`duckllm.tracing.writer` writes, line by line, so that memory holds
numbers and no text; a file that was cut in the middle of a line is read up to there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from duckllm.errors import ConfigError, InWords
from duckllm.tracing.writer import ENGINE_TID, FIRST_WORKER_PID, HOST_PID, MAGIC, MAX_LANES

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
PARTS = ("attention", "dense", "dispatch", "wait", "combine", "head", "sampling", "device", "draft")
_MOMENTS = ("free", "started", "finished", "taken")
_MAX_WORKERS = 4096
MAX_EXPERTS = 1 << 16
_MAX_LAYERS = 1 << 12
# Cells of a heat map: a damaged layer or expert shall not ask for memory without end.
MAX_CELLS = 1 << 24
_MAX_LINE_BYTES = 16 << 20
_MAX_US = 1e16  # three centuries
_MAX_COUNT = 1 << 53


@dataclass(frozen=True)
class Trace:
    """Steps in the order of their ends; moments in microseconds from the start of the run.

    Args:
        facts: What the run said of itself.
        workers: Names, in worker order.
        layer: Of each step.
        lane: Of each step.
        tokens: Of each step.
        submitted: The host began to hand it over.
        dispatched: The host computed on.
        waited: The host had nothing else to do.
        last: Every worker had answered, and the host waited.
        summed: Partial sums were added and given back.
        free: The request was leaving, and the worker was done with earlier steps; NaN where it is not known.
        started: The worker had the whole request.
        finished: The worker had its sums.
        taken: The host had the answer.
        error_us: Most that each worker's moments are wrong by.
        engine_start: Of each step of the engine.
        engine_us: How long it took.
        engine_parts_us: Of that, by :data:`PARTS`.
        engine_new_tokens: Tokens chosen in it.
        expert_step: The step of each choice of experts.
        expert: The expert.
        expert_rows: Tokens that chose it.
        num_dropped: Steps that there was no room for.
        replaced: (worker, moment) of each change of a worker.

    Shapes:
        layer to summed: [N]; free to error_us: [N, W]; engine_*: [M], engine_parts_us [M, 9];
        expert_*: [C]
    """

    facts: dict[str, Any]
    workers: tuple[str, ...]
    layer: I64
    lane: I64
    tokens: I64
    submitted: F64
    dispatched: F64
    waited: F64
    last: F64
    summed: F64
    free: F64
    started: F64
    finished: F64
    taken: F64
    error_us: F64
    engine_start: F64
    engine_us: F64
    engine_parts_us: F64
    engine_new_tokens: I64
    expert_step: I64
    expert: I64
    expert_rows: I64
    num_dropped: int
    replaced: tuple[tuple[int, float], ...]


class _Tables:
    """Collects events; a step is complete with its last one, "combine"."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.steps: list[tuple[float, ...]] = []
        self.moments: list[list[list[float]]] = []
        self.engine: list[tuple[float, ...]] = []
        self.experts: list[tuple[int, int, int]] = []
        self.num_dropped = 0
        self.replaced: list[tuple[int, float]] = []
        self.first_us: float | None = None  # of the part that is read
        self._open: dict[int, dict[str, Any]] = {}
        self._layers: set[int] = set()
        self._num_experts = 0

    def add(self, event: dict[str, Any]) -> None:
        name, pid = event["name"], event["pid"]
        if event["ph"] == "i":
            if name == "dropped":
                self.num_dropped += _count(event["args"]["steps"])
            elif name == "replaced":
                self.replaced.append((self._worker(pid), _us(event["ts"])))
            return
        if event["ph"] != "X":
            return
        start, duration, args = _us(event["ts"]), _us(event["dur"]), event["args"]
        if self.first_us is None:
            self.first_us = start
        if pid == HOST_PID and event["tid"] == ENGINE_TID:
            parts = [_us(each) for each in args["parts_us"]]
            if len(parts) != len(PARTS):
                raise ValueError("parts_us")
            self.engine.append((start, duration, float(_count(args["new_tokens"])), *parts))
            return
        number = _count(args["step"])
        if name == "dispatch":
            none = [[float("nan")] * (len(_MOMENTS) + 1) for _ in range(self.num_workers)]
            self._open[number] = {
                "lane": _count(event["tid"] - 1, MAX_LANES),
                "at": (start, start + duration),
                "moments": none,
                "layer": _count(args["layer"], _MAX_LAYERS),
                "tokens": _count(args["tokens"]),
                "experts": [_count(each, MAX_EXPERTS) for each in args["experts"]],
                "rows": args.get("rows"),
            }
        elif number in self._open:
            step = self._open[number]
            if pid == HOST_PID:
                step[name] = (start, start + duration)
                if name == "combine":
                    self._finish(self._open.pop(number))
            else:
                self._moment(step["moments"][self._worker(pid)], name, start, start + duration, args)

    def _worker(self, pid: int) -> int:
        return _count(pid - FIRST_WORKER_PID, self.num_workers)

    @staticmethod
    def _moment(moments: list[float], name: str, start: float, end: float, args: dict[str, Any]) -> None:
        if name == "wire":
            moments[0], moments[1] = start, end
        elif name == "compute":
            moments[2], moments[4] = end, _us(args["error_ns"]) / 1000
        elif name == "reply":
            moments[3] = end

    def _finish(self, step: dict[str, Any]) -> None:
        number = len(self.steps)
        at, wait, combine = step["at"], step["wait"], step["combine"]
        self.steps.append((step["layer"], step["lane"], step["tokens"], *at, *wait, combine[1]))
        # A worker of which a line is missing is one of which nothing is known.
        self.moments.append(
            [[float("nan")] * len(each) if any(map(math.isnan, each)) else each for each in step["moments"]]
        )
        experts = step["experts"]
        rows = step["rows"] or [1] * len(experts)
        for expert, count in zip(experts, rows, strict=True):
            self.experts.append((number, expert, _count(count)))
        self._layers.add(step["layer"])
        self._num_experts = max(self._num_experts, 1 + max(experts, default=0))
        if len(self._layers) * self._num_experts > MAX_CELLS:
            raise ValueError("experts")


def read_trace(paths: Sequence[Path]) -> Trace:
    """The trace of one run in its parts, earlier ones first.

    Raises:
        ConfigError: A file cannot be read or is no trace of ours, or parts are of different runs, or not each
            once and in their order.
    """
    tables: _Tables | None = None
    facts: dict[str, Any] = {}
    before_us: float | None = None
    for path in paths:
        number = 1
        try:
            with path.open("rb") as file:
                found = _facts(file.readline(_MAX_LINE_BYTES))
                if tables is None:
                    facts, tables = found, _Tables(len(found["workers"]))
                elif found["start_unix_s"] != facts["start_unix_s"]:
                    raise ConfigError("file", str(path), f"a part of the same run as {paths[0]}")
                tables.first_us = None
                while line := file.readline(_MAX_LINE_BYTES):
                    number += 1
                    if len(line) == _MAX_LINE_BYTES:
                        raise ValueError("line")
                    text = line.strip()
                    if text == b"]}" or not line.endswith(b"\n"):
                        break  # the end, or where it was cut off
                    tables.add(json.loads(text.removesuffix(b",")))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError("file", str(path), f"a file that can be read ({reason})") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            expected = f"a trace that duckllm has written (line {number} is none)"
            raise ConfigError("file", str(path), expected) from error
        if tables.first_us is not None:
            if before_us is not None and tables.first_us <= before_us:
                raise ConfigError("file", str(path), "parts of a run, each once, earlier ones first")
            before_us = tables.first_us
    if tables is None:
        raise ConfigError("file", InWords("none"), "a trace")
    return _trace(facts, tables)


def _facts(line: bytes) -> dict[str, Any]:
    if not line.startswith(MAGIC):
        raise ValueError("head")
    whole = line.decode().rstrip().removesuffix("[") + "[]}"
    facts = json.loads(whole, parse_constant=_refuse, parse_float=_finite)["otherData"]["duckllm"]
    if not isinstance(facts["workers"], list) or len(facts["workers"]) > _MAX_WORKERS:
        raise ValueError("workers")
    _us(facts["start_unix_s"])
    return cast("dict[str, Any]", facts)


def _refuse(text: str) -> float:
    raise ValueError(text)


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _us(value: object) -> float:
    """A time, or refused: what is summed and drawn is finite."""
    if type(value) not in (int, float) or not abs(cast("float", value)) <= _MAX_US:
        raise ValueError("time")
    return float(cast("float", value))


def _count(value: object, below: int = _MAX_COUNT) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise ValueError("number")
    return value


def _trace(facts: dict[str, Any], tables: _Tables) -> Trace:
    steps = np.array(tables.steps, np.float64).reshape(-1, 8).T
    moments = np.array(tables.moments, np.float64).reshape(len(tables.moments), tables.num_workers, 5)
    engine = np.array(tables.engine, np.float64).reshape(-1, 3 + len(PARTS)).T
    experts = np.array(tables.experts, np.int64).reshape(-1, 3).T
    return Trace(
        facts,
        tuple(str(name) for name in facts["workers"]),
        layer=steps[0].astype(np.int64),
        lane=steps[1].astype(np.int64),
        tokens=steps[2].astype(np.int64),
        submitted=steps[3],
        dispatched=steps[4],
        waited=steps[5],
        last=steps[6],
        summed=steps[7],
        free=moments[:, :, 0],
        started=moments[:, :, 1],
        finished=moments[:, :, 2],
        taken=moments[:, :, 3],
        error_us=moments[:, :, 4],
        engine_start=engine[0],
        engine_us=engine[1],
        engine_parts_us=engine[3:].T,
        engine_new_tokens=engine[2].astype(np.int64),
        expert_step=experts[0],
        expert=experts[1],
        expert_rows=experts[2],
        num_dropped=tables.num_dropped,
        replaced=tuple(tables.replaced),
    )
