"""What workers that wait cost, and the first step after they have waited.

    python benchmarks/transport/idle.py [--workers 2] [--idle-s 10] [--rounds 5] [--spin-us -1] [--json FILE]

The program starts local workers for the demo model, measures the processor time of this process and of each
worker while nothing is asked for ``--idle-s`` seconds (goal: under 2 % of a core each), then the step that
comes first, a reply of one token, and warm ones after it (goal: under twice a warm one). Medians of the
rounds; one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

from duckllm import LLM, SamplingParams
from duckllm.bench.machine import commit, cpu_name

WARM_STEPS = 30
SETTLE_S = 1.0
PROMPT = "What is a duck?"


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--idle-s", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--spin-us", type=int, default=-1)
    parser.add_argument("--json", type=Path, help="append the JSON line to this file")
    arguments = parser.parse_args()
    first_ms, warm_ms, shares = [], [], []
    params = SamplingParams(temperature=0, max_tokens=1)
    with LLM(workers=arguments.workers, spin_us=arguments.spin_us) as llm:

        def step_ms() -> float:
            start = time.perf_counter()
            llm.generate(PROMPT, params)
            return 1000 * (time.perf_counter() - start)

        for _ in range(WARM_STEPS):
            step_ms()
        pids = [os.getpid(), *llm.cluster_info().pids]
        for _ in range(arguments.rounds):
            time.sleep(SETTLE_S)
            before = [cpu_seconds(pid) for pid in pids]
            time.sleep(arguments.idle_s)
            used = [cpu_seconds(pid) - then for pid, then in zip(pids, before, strict=True)]
            shares.append(max(used) / arguments.idle_s)
            first_ms.append(step_ms())
            warm_ms.append(statistics.median(step_ms() for _ in range(WARM_STEPS)))
    first, warm = statistics.median(first_ms), statistics.median(warm_ms)
    print(f"idle: at most {max(shares):.2%} of a core in any process")
    print(f"the first step {first:.2f} ms, a warm one {warm:.2f} ms: {first / warm:.2f} times")
    figures = {
        "idle_share": round(max(shares), 5),
        "first_ms": round(first, 3),
        "warm_ms": round(warm, 3),
        "first_of_warm": round(first / warm, 3),
        **{name: getattr(arguments, name) for name in ("workers", "idle_s", "rounds", "spin_us")},
    }
    line = json.dumps({"benchmark": "idle", "commit": commit(), "cpu": cpu_name(), **figures})
    print(line)
    if arguments.json is not None:
        with arguments.json.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
