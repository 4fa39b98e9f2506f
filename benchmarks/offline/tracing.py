"""What a trace costs: decode speed with ``trace=`` and without, in turns.

    python benchmarks/offline/tracing.py [--model FOLDER] [--workers 2] [--tokens 256] [--rounds 15]

The program

1. starts two LLMs with the same workers, one of which is traced, and verifies that both give the same tokens,
2. measures in turns, one reply each, the traced one first in every other round. A reply's time is that of the
   whole program, what is written to the file included; besides it takes the CPU time of the host's process,
   which other programs on the machine disturb less,
3. prints the medians, and the median of the rounds' ratios with its quartiles. The ceiling is 1: nothing is
   added. Without the file's own limit nothing ends the trace,
4. prints one JSON line. The demo model is the hardest case: steps at workers take some ten microseconds, and
   there are several thousand a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from duckllm import LLM, SamplingParams
from duckllm.bench.machine import commit, cpu_name
from duckllm.tracing.read import read_trace

QUESTION = [{"role": "user", "content": "List all prime numbers below 400."}]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="model folder; the demo model if left out")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a reply")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--draft", default="off", choices=["off", "on", "auto"])
    return parser.parse_args()


def measure(llm: LLM, params: SamplingParams) -> tuple[float, float, tuple[int, ...]]:
    """Seconds, seconds of the host's CPU time, and tokens of a reply."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    (reply,) = llm.chat(QUESTION, params)
    seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return seconds, cpu_s, tuple(reply.outputs[0].token_ids)


def main() -> None:
    arguments = parse_arguments()
    params = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
    options = {"workers": arguments.workers, "draft": arguments.draft, "lanes": "off"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with (
            LLM(arguments.model, **options) as plain,
            LLM(arguments.model, trace=path, trace_bytes="4GiB", **options) as traced,
        ):
            if measure(plain, params)[2] != measure(traced, params)[2]:
                raise SystemExit("a traced run gives other tokens")
            print("verified: the same tokens. Ceiling: a ratio of 1, as nothing need be added.")
            seconds: dict[str, list[float]] = {"plain": [], "traced": []}
            cpu_s: dict[str, list[float]] = {"plain": [], "traced": []}
            for number in range(arguments.rounds):
                turns = [("plain", plain), ("traced", traced)]
                for name, llm in turns[:: 1 if number % 2 == 0 else -1]:
                    took_s, took_cpu_s, _ = measure(llm, params)
                    seconds[name].append(took_s)
                    cpu_s[name].append(took_cpu_s)
        trace = read_trace([path])
        num_bytes = path.stat().st_size
    result: dict[str, object] = {}
    for what, values in (("seconds", seconds), ("cpu_seconds", cpu_s)):
        ratios = np.array(values["traced"]) / np.array(values["plain"])
        low, middle, high = np.percentile(ratios, (25, 50, 75))
        plain_s, traced_s = (statistics.median(values[name]) for name in ("plain", "traced"))
        print(
            f"{what}: {plain_s:.4f} without, {traced_s:.4f} with a trace, medians of {arguments.rounds}; "
            f"ratio of rounds {middle:.4f} ({low:.4f} to {high:.4f})"
        )
        result[what] = {"plain": plain_s, "traced": traced_s, "ratio": middle, "quartiles": [low, high]}
    steps = len(trace.layer)
    print(f"{steps} steps at {arguments.workers} workers, {num_bytes / steps:.0f} bytes each in the file")
    result |= {
        "benchmark": "tracing",
        "commit": commit(),
        "cpu": cpu_name(),
        "workers": arguments.workers,
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "draft": arguments.draft,
        "bytes_per_step": num_bytes / steps,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
