"""What workers that wait cost, and the first step after they have waited.

    python benchmarks/transport/idle.py [--workers 2] [--idle-s 10] [--rounds 5] [--spin-us -1] [--json FILE]

The program starts local workers for the demo model, measures the processor time of this process and of each
worker while nothing is asked for ``--idle-s`` seconds (goal: under 2 % of a core each), then the step that
comes first, a reply of one token, and warm ones after it (goal: under twice a warm one).

What sleep alone does is measured beside it, in turns: the same reply with the experts in this process, where
nobody has to be woken, and after_sleep.c, two processes that read as much memory as bytes are read by a token
of the demo model (a few 100 KiB a layer) and exchange a step's bytes as often as it has layers. Caches that
other programs have used meanwhile are cold for it too. Medians of the rounds; one JSON line.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from result_line import print_result

from duckllm import LLM, SamplingParams

WARM_STEPS = 30
SETTLE_S = 1.0
PROMPT = "What is a duck?"
PARAMS = SamplingParams(temperature=0, max_tokens=1)
# A step of five tokens of H = 256 in f32, out and back; 6 layers of experts; about 1.5 MiB of weights a side.
OUT_BYTES, BACK_BYTES, EXCHANGES, WALK_BYTES = 5400, 5200, 6, 256 << 10
Times = tuple[float, float]  # of the first step, and the median of warm ones, ms


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def bare_c(idle_s: float) -> Iterator[subprocess.Popen[str]]:
    """after_sleep.c, compiled and waiting for a line."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "after_sleep"
        source = Path(__file__).with_name("after_sleep.c")
        subprocess.run(["cc", "-O2", "-o", str(program), str(source)], check=True)
        numbers = (idle_s, OUT_BYTES, BACK_BYTES, EXCHANGES, WALK_BYTES, WARM_STEPS)
        with subprocess.Popen(
            [str(program), *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            yield process


def time_bare_c(process: subprocess.Popen[str]) -> Times:
    """Its sleep, and the steps after it."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    first, *warm = (int(word) / 1e6 for word in process.stdout.readline().split())
    return first, statistics.median(warm)


def time_replies(llm: LLM, idle_s: float) -> tuple[Times, float]:
    """The same of replies, and the largest share of a core that a process of it used meanwhile."""

    def step_ms() -> float:
        start = time.perf_counter()
        llm.generate(PROMPT, PARAMS)
        return 1000 * (time.perf_counter() - start)

    for _ in range(WARM_STEPS):
        step_ms()
    pids = [os.getpid(), *llm.cluster_info().pids]
    time.sleep(SETTLE_S)
    before = [cpu_seconds(pid) for pid in pids]
    time.sleep(idle_s)
    used = max(cpu_seconds(pid) - then for pid, then in zip(pids, before, strict=True))
    first = step_ms()
    return (first, statistics.median(step_ms() for _ in range(WARM_STEPS))), used / idle_s


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
    times: dict[str, list[Times]] = {"bare C": [], "in process": [], "workers": []}
    shares = []
    with ExitStack() as stack:
        process = stack.enter_context(bare_c(arguments.idle_s))
        alone = stack.enter_context(LLM(workers=0))
        flock = stack.enter_context(LLM(workers=arguments.workers, spin_us=arguments.spin_us))
        answers = [llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids for llm in (alone, flock)]
        if answers[0] != answers[1]:
            raise SystemExit("workers answer otherwise than this process: nothing measured")
        for _ in range(arguments.rounds):
            times["bare C"].append(time_bare_c(process))
            times["in process"].append(time_replies(alone, arguments.idle_s)[0])
            measured, share = time_replies(flock, arguments.idle_s)
            times["workers"].append(measured)
            shares.append(share)
    print(f"idle: at most {max(shares):.2%} of a core in any process")
    figures: dict[str, object] = {"idle_share": round(max(shares), 5)}
    for name, values in times.items():
        first, warm = (statistics.median(column) for column in zip(*values, strict=True))
        print(f"{name:10s}: first step {first:.2f} ms, a warm one {warm:.2f} ms: {first / warm:.2f} times")
        figures[name] = {
            "first_ms": round(first, 3),
            "warm_ms": round(warm, 3),
            "ratio": round(first / warm, 3),
        }
    figures |= {name: getattr(arguments, name) for name in ("workers", "idle_s", "rounds", "spin_us")}
    print_result("idle", figures, arguments.json)


if __name__ == "__main__":
    main()
