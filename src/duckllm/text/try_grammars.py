"""Compiles grammars to see what comes of it: ``python -m duckllm.text.try_grammars``.

Started by :mod:`duckllm.text.grammar_trial`, and may end at any of them. Reads a grammar in the library's
form from each line of its input, a JSON text, and answers with why it cannot be used, empty where it can.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
import threading
import time

import numpy as np

from duckllm.text.grammar import GrammarTable, in_short

MAX_COMPILE_CPU_S = 1  # the system counts whole seconds and ends the process up to one later
MAX_STEP_CPU_S = 0.25
MAX_MEMORY_BYTES = 2 << 30

# No vocabulary is larger.
NUM_TOKENS = 1 << 19

# Less than any thread has that compiles what went well here.
STACK_BYTES = 2 << 20

# Beginnings of replies that are tried out, and their tokens.
NUM_WALKS, NUM_STEPS = 3, 8


def main() -> None:
    """Answers until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's, meant for the other process
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    # Which texts the tokens are makes little difference to compiling; a grammar may name any by its number.
    table = GrammarTable([*(bytes([byte]) for byte in range(256)), *[b""] * (NUM_TOKENS - 256)])
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit_s = int(used.ru_utime + used.ru_stime) + 1 + MAX_COMPILE_CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))
        answers: list[str] = []
        thread = threading.Thread(target=lambda: answers.append(_try_out(table, json.loads(line))))  # noqa: B023
        thread.start()
        thread.join()
        print(json.dumps(answers[0]), flush=True)


def _try_out(table: GrammarTable, source: str) -> str:
    """Why a grammar cannot be used, empty where it can: what is too large shows in a reply's first tokens."""
    matcher, reason = table.compile(source)
    order = random.Random(0)
    for _ in range(0 if reason else NUM_WALKS):
        state = matcher.deep_copy()
        for _ in range(NUM_STEPS):
            begin_s = time.thread_time()
            bits = np.frombuffer(state.compute_bitmask(), np.uint8)
            if time.thread_time() - begin_s > MAX_STEP_CPU_S:
                return f"a token of it takes more than {MAX_STEP_CPU_S} seconds"
            allowed = np.flatnonzero(np.unpackbits(bits, count=table.end, bitorder="little"))
            if state.is_error() or not allowed.size or not state.consume_token(int(order.choice(allowed))):
                break
        if state.is_error():
            return in_short(state.get_error())
    return reason


if __name__ == "__main__":
    main()
