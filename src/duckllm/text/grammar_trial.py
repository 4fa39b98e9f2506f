"""Tries grammars out in a process of its own, before this one compiles them.

Used by :mod:`duckllm.text.grammar`: a schema, an expression or a grammar may come from anybody, and the
library's own limits do not bound what it makes of them. 40 patterns of one string keep it busy for minutes,
10000 properties for 20 seconds, and a chain of 3000 rules overflows its stack, which ends the process.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

# However busy the machine is; what the process may take of it is :mod:`duckllm.text.try_grammars`' to say.
_MAX_WALL_S = 60


class GrammarTrial:
    """The process, started with the first grammar and again behind one that has ended it.

    Threading: may be used by several threads; they wait for each other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end: Callable[[], object] = lambda: None

    def why_not(self, source: str) -> str:
        """Why a grammar in the library's form cannot be used; empty where it can."""
        with self._lock:
            answer = self._ask(source)
            # What others left of its memory may have been too little: that counts in a process of its own.
            if not answer and self._process is not None and self._process.wait() != -signal.SIGXCPU:
                answer = self._ask(source)
            if not answer:
                return "it takes more than a second to compile, or too much memory or depth"
            return str(json.loads(answer))

    def _ask(self, source: str) -> str:
        """The answer's line; empty where the process has ended over it."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(_MAX_WALL_S, process.kill)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(source) + "\n")
                process.stdin.flush()
            return process.stdout.readline()
        except BaseException:
            self._end()  # it may answer later what is no longer asked
            raise
        finally:
            timer.cancel()

    def _start(self) -> None:
        self._end()
        command = [sys.executable, "-m", "duckllm.text.try_grammars"]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, text=True)
        self._end = weakref.finalize(self, _end, self._process)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):
            stream.close()
