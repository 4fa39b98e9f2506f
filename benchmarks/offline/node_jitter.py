"""How evenly a worker's steps are computed, run as any program and with a node's settings.

    sudo python benchmarks/offline/node_jitter.py [--rounds 5] [--core 1] [--move-irqs]

A worker of one thread serves a host on this machine, in turns

    ``normal``: as any program, on any core
    ``node``: pinned to one core and scheduled before all others (SCHED_FIFO), its weights copied into huge
        pages, the host on the other cores; with --move-irqs devices interrupt other cores meanwhile

and the program verifies that the tokens are the same, takes from a trace how long each step of one token was
computed at the worker, and how long until its answer was there, and prints p50, p99, p99.9 and the longest;
as the ratio to the ceiling p99.9 by p50, of which an even core has 1. What needs a restart (isolated cores,
no ticks) is not done. One JSON line ends it. Others' programs run on as they are, and their load is said.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from duckllm import LLM, SamplingParams
from duckllm.bench.machine import commit, cpu_name

PROMPTS = ("What is a duck?", "Is 1001 prime?", "What does a swan eat?")
PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=200)
MODES = ("normal", "node")


@contextlib.contextmanager
def worker(mode: str, core: int) -> Iterator[str]:
    """The address of a worker that runs in this mode."""
    before = ["taskset", "-c", str(core), "chrt", "-f", "10"] if mode == "node" else []
    own = ["--copy"] if mode == "node" else ["--no-pin"]
    command = [sys.executable, "-m", "duckllm.worker", "--json", "--exit-with-stdin", "--threads", "1"]
    with subprocess.Popen(
        [*before, *command, *own, "--speed", "0", "--listen", "127.0.0.1:0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["address"]
        finally:
            process.stdin.close()


@contextlib.contextmanager
def interrupts_elsewhere(others: set[int]) -> Iterator[list[str]]:
    """Devices' interrupts on other cores, as far as the kernel lets them; put back in the end."""
    was: dict[Path, str] = {}
    for file in Path("/proc/irq").glob("*/smp_affinity_list"):
        with contextlib.suppress(OSError):
            now = file.read_text().strip()
            file.write_text(",".join(map(str, sorted(others))))
            was[file] = now
    try:
        yield [file.parent.name for file in was]
    finally:
        for file, cores in was.items():
            with contextlib.suppress(OSError):
                file.write_text(cores)


def step_times(events: list[dict[str, Any]]) -> np.ndarray:
    """Of each step of one token, us: the worker's compute time, and all until its answer: [steps, 2]."""
    single = {event["args"]["step"] for event in events if event.get("args", {}).get("tokens") == 1}
    compute = dict.fromkeys(single, 0.0)
    round_trip = dict.fromkeys(single, 0.0)
    for event in events:
        step = event.get("args", {}).get("step")
        if step in single and event["name"] in ("queue", "wire", "compute", "reply"):
            round_trip[step] += event["dur"]
            if event["name"] == "compute":
                compute[step] += event["dur"]
    return np.array([[compute[step], round_trip[step]] for step in sorted(single)])


def measure(model: str | None, mode: str, core: int) -> tuple[np.ndarray, list[list[int]]]:
    """The times of :func:`step_times`, and the tokens."""
    everywhere = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as folder, worker(mode, core) as address:
        if mode == "node" and len(everywhere) > 1:
            os.sched_setaffinity(0, everywhere - {core})
        try:
            trace = Path(folder) / "trace.json"
            options: dict[str, Any] = {"lanes": "off", "draft": "off", "max_model_len": 512}
            with LLM(model, workers=[address], trace=trace, **options) as llm:
                tokens = [list(llm.generate(prompt, PARAMS)[0].outputs[0].token_ids) for prompt in PROMPTS]
            events = json.loads(trace.read_text())["traceEvents"]
        finally:
            os.sched_setaffinity(0, everywhere)
    return step_times(events), tokens


def main() -> None:
    """Measures in turns, and prints medians over the rounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model's folder; the demo model if left out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--move-irqs", action="store_true")
    arguments = parser.parse_args()
    found: dict[tuple[str, str], list[list[float]]] = {
        (mode, part): [] for part in ("compute", "round_trip") for mode in MODES
    }
    loads, num_steps, expected, moved = [], 0, None, []
    for _ in range(arguments.rounds):
        for mode in MODES:
            with contextlib.ExitStack() as stack:
                if mode == "node" and arguments.move_irqs:
                    others = os.sched_getaffinity(0) - {arguments.core}
                    moved = stack.enter_context(interrupts_elsewhere(others))
                times, tokens = measure(arguments.model, mode, arguments.core)
            if expected not in (None, tokens):
                raise SystemExit(f"{mode}: got other tokens, expected the same")
            expected, num_steps = tokens, len(times)
            loads.append(os.getloadavg()[0])
            for column, part in enumerate(("compute", "round_trip")):
                row = times[:, column]
                found[mode, part].append([*np.percentile(row, [50, 99, 99.9]), row.max()])
    result: dict[str, dict[str, float]] = {}
    print(f"{num_steps} steps a round, load {min(loads):.1f} to {max(loads):.1f}; ceiling: p99.9 by p50 of 1")
    for (mode, part), rows in found.items():
        p50, p99, p999, longest = (statistics.median(column) for column in zip(*rows, strict=True))
        print(
            f"{part:>10} {mode:>6}: p50 {p50:.1f} us, p99 {p99:.1f}, p99.9 {p999:.1f}, most {longest:.0f}; "
            f"p99.9 by p50 {p999 / p50:.1f}"
        )
        names = ("p50_us", "p99_us", "p999_us", "max_us")
        result[f"{part}_{mode}"] = {
            name: round(value, 1) for name, value in zip(names, (p50, p99, p999, longest), strict=True)
        } | {"p999_by_p50": round(p999 / p50, 2)}
    facts: dict[str, Any] = {"cpu": cpu_name(), "commit": commit(), "rounds": arguments.rounds}
    facts |= {"steps": num_steps, "load": [round(min(loads), 1), round(max(loads), 1)]}
    print(json.dumps({"benchmark": "node_jitter", **facts, "moved_irqs": len(moved), **result}))


if __name__ == "__main__":
    main()
