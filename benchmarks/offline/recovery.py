"""How long a reply stands still when a worker is lost in the middle of it.

    python benchmarks/offline/recovery.py [--rounds 7] [--model FOLDER]

Two workers answer, one of them is lost after some tokens, and the program

1. verifies that the tokens are those of the undisturbed reply,
2. takes the longest pause between two tokens, with the fault and without, in turns over ways to come back:
   ``local``: workers of the host; killed by SIGKILL, a new process takes the place
   ``local spare``: the same, with a spare
   ``local stopped``: stopped by SIGSTOP, so that only its silence tells; a new process takes the place
   ``restart``: workers at addresses; killed, and started again at once at the same address
   ``static spare``: workers at addresses; killed, and a spare takes the place
   ``stopped spare``: workers at addresses; stopped, and a spare takes the place
3. prints one JSON line: medians in seconds.

Everything runs on this machine, and files are in its page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from duckllm import LLM, SamplingParams
from duckllm.bench.machine import commit, cpu_name

PROMPT = "What is a duck?"
PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=48)
LOST_AFTER = 16  # tokens


class Node:
    """A worker at an address, which may be started again there."""

    def __init__(self, stack: ExitStack, at: str = "127.0.0.1:0") -> None:
        command = [sys.executable, "-m", "duckllm.worker", "--json", "--exit-with-stdin", "--threads", "1"]
        self.process = subprocess.Popen(
            [*command, "--listen", at],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(self.end)
        self.at = at

    def wait(self) -> Node:
        """Waits until it listens."""
        assert self.process.stdout is not None
        self.at = json.loads(self.process.stdout.readline())["address"]
        return self

    def end(self) -> None:
        """Kills it."""
        self.process.kill()
        self.process.wait()


def longest_pause(llm: LLM, lose: Callable[[], object] | None) -> tuple[float, list[int]]:
    """The longest time between two tokens, seconds, and the tokens."""
    tokens: list[int] = []
    pause, last = 0.0, 0.0
    for output in llm.stream(PROMPT, PARAMS):
        now = time.perf_counter()
        pause = max(pause, now - last if tokens else 0.0)
        tokens += output.token_ids
        if lose is not None and len(tokens) == LOST_AFTER:
            lose()
        last = time.perf_counter()
    return pause, tokens


def measure(model: str | None, mode: str) -> tuple[float, float]:
    """The longest pause without a fault and with one, seconds."""
    options: dict[str, Any] = {"lanes": "off", "draft": "off", "max_model_len": 256, "shares": "even"}
    with ExitStack() as stack:
        nodes: Sequence[Node] = ()
        workers: int | list[str] = 2
        if mode in ("restart", "static spare", "stopped spare"):
            num_spares = int(mode != "restart")
            nodes = [Node(stack) for _ in range(2 + num_spares)]
            workers = [node.wait().at for node in nodes]
            options["spares"] = num_spares
        elif mode == "local spare":
            options["spares"] = 1
        llm = stack.enter_context(LLM(model, workers=workers, **options))
        usual, expected = longest_pause(llm, None)
        usual, again = longest_pause(llm, None)

        def lose() -> None:
            if "stopped" in mode:
                os.kill(llm.cluster_info().pids[1], signal.SIGSTOP)
            elif nodes:
                nodes[1].end()
            else:
                os.kill(llm.cluster_info().pids[1], signal.SIGKILL)
            if mode == "restart":
                Node(stack, nodes[1].at)

        if mode == "local spare":
            time.sleep(1.0)  # until it has started, as after any while
        pause, tokens = longest_pause(llm, lose)
        if not expected == again == tokens:
            raise SystemExit(f"{mode}: got tokens {tokens}, expected {expected}")
        return usual, pause


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model's folder; the demo model if left out")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    modes = ("local", "local spare", "local stopped", "restart", "static spare", "stopped spare")
    found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
    for _ in range(arguments.rounds):
        for mode in modes:
            found[mode].append(measure(arguments.model, mode))
    result = {
        mode: {
            "usual_pause_s": round(statistics.median(usual for usual, _ in pairs), 4),
            "pause_s": round(statistics.median(pause for _, pause in pairs), 4),
            "worst_s": round(max(pause for _, pause in pairs), 4),
        }
        for mode, pairs in found.items()
    }
    print(json.dumps({"cpu": cpu_name(), "commit": commit(), "rounds": arguments.rounds, **result}))


if __name__ == "__main__":
    main()
