"""The other end of experts.py: a process that holds one peer's experts and times its steps on request.

Called by kt_kernel_peer.py and llama_cpp_peer.py. One JSON object a line: first the engine's own name,
version and error against float64, or why it cannot run; then for each ``{"rows": T}`` of the standard input
the seconds of a few steps of T rows. NumPy only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from block_formats import F32, I64, Expert, expert_output, random_expert

# Different experts; the others are copies of them, which a cache cannot know.
DISTINCT_EXPERTS = 4
SAMPLE_S, MOST_STEPS = 4e-3, 8
VERIFIED_ROWS = 4


@dataclass(frozen=True)
class Job:
    """What a peer is asked to hold: see experts.py's arguments."""

    weight_format: str
    hidden_size: int
    channels: int
    num_experts: int
    top_k: int
    threads: int
    isa: str
    most_rows: int
    library: str

    @classmethod
    def of(cls, line: str) -> Job:
        """The job of a JSON object."""
        return cls(**json.loads(line))

    def experts(self) -> list[Expert]:
        """The different experts; expert e of the layer is number ``e % len`` of these."""
        return [
            random_expert(self.weight_format, self.hidden_size, self.channels, seed)
            for seed in range(DISTINCT_EXPERTS)
        ]


class Engine(Protocol):
    """One peer with its weights."""

    description: str
    # Largest error in the L2 norm, over the output's: what this path's own rounding is expected to cost.
    tolerance: float

    def step(self, x: F32, ids: I64, weights: F32) -> F32:
        """The routed experts' weighted sum: [T, H] of x [T, H], ids [T, K] and weights [T, K]."""

    def timed(self, rows: int, ids: I64) -> float:
        """Seconds of a step on inputs that lie ready."""


class Routing:
    """Which experts the next step takes: of one row the next ones, in a circle; of many, random ones."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        self._num_experts, self._top_k = num_experts, top_k
        self._rng = np.random.default_rng(7)
        self._next = 0

    def take(self, rows: int) -> I64:
        """Ids [T, K]."""
        if rows == 1:
            chosen = (self._next + np.arange(self._top_k)) % self._num_experts
            self._next = (self._next + self._top_k) % self._num_experts
            return chosen.reshape(1, -1)
        return self._rng.random((rows, self._num_experts)).argsort(axis=1)[:, : self._top_k]


def relative_error(job: Job, engine: Engine, experts: list[Expert]) -> float:
    """The L2 norm of a step's error against float64 over that of the exact output, with one row and a few."""
    rng = np.random.default_rng(3)
    worst = 0.0
    for rows in sorted({1, min(VERIFIED_ROWS, job.most_rows), job.most_rows}):
        x = rng.standard_normal((rows, job.hidden_size), np.float32)
        weights = rng.uniform(0.1, 1.0, (rows, job.top_k)).astype(np.float32)
        ids = Routing(job.num_experts, job.top_k).take(rows)
        y = engine.step(x, ids, weights)
        if not np.isfinite(y).all():
            return float("inf")
        looked_at = min(rows, VERIFIED_ROWS)
        each = [expert_output(expert, x[:looked_at]) for expert in experts]
        exact = np.zeros((looked_at, job.hidden_size))
        for row in range(looked_at):
            for expert, weight in zip(ids[row], weights[row], strict=True):
                exact[row] += float(weight) * each[expert % len(experts)][row]
        worst = max(worst, float(np.linalg.norm(y[:looked_at] - exact) / np.linalg.norm(exact)))
    return worst


def sample(engine: Engine, routing: Routing, rows: int, steps: int) -> list[float]:
    """Seconds of each step, after one that wakes the threads."""
    engine.timed(1, routing.take(1))
    return [engine.timed(rows, routing.take(rows)) for _ in range(steps)]


def answer(
    lines: Iterable[str], engine: Engine, routing: Routing, say: Callable[[dict[str, object]], None]
) -> None:
    """Answers requests until there are no more."""
    steps: dict[int, int] = {}
    for line in lines:
        rows = int(json.loads(line)["rows"])
        if rows not in steps:
            once = min(sample(engine, routing, rows, 2))
            steps[rows] = int(min(MOST_STEPS, max(1, SAMPLE_S / once)))
        say({"rows": rows, "seconds": sample(engine, routing, rows, steps[rows])})


def serve(make: Callable[[Job, list[Expert]], Engine]) -> None:
    """Runs a peer: makes it, verifies it, answers. What the engine prints goes to the standard error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Job.of)
    job: Job = parser.parse_args().job
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(message: dict[str, object]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    start = time.monotonic()
    try:
        experts = job.experts()
        engine = make(job, experts)
        error = relative_error(job, engine, experts)
    except Exception as problem:  # whatever it is, it is why this peer has no row of numbers
        say({"refused": f"{type(problem).__name__}: {problem}".split("\n", 1)[0]})
        return
    if not error <= engine.tolerance:
        say({"refused": f"its output is {error:.1e} off float64, expected at most {engine.tolerance:.0e}"})
        return
    say({"description": engine.description, "error": error, "seconds": round(time.monotonic() - start, 1)})
    answer(sys.stdin, engine, Routing(job.num_experts, job.top_k), say)
