"""Our end of a peer's process: started, asked for samples, and stopped dead in between.

Called by experts.py; peer_side.py is the other end.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
from pathlib import Path
from types import TracebackType

from peer_install import PeerUnavailable, last_words

ANSWER_TIMEOUT_S = 180


class PeerProcess:
    """A peer with its weights loaded and its output verified.

    Threads that spin between steps take cores from whatever is measured next, so the process is stopped
    (SIGSTOP) except while it answers.

    Args:
        command: The program and its arguments.
        environment: Variables beside our own.
        timeout_s: How long it may take to load, and to answer.

    Raises:
        PeerUnavailable: It refuses, dies or does not answer; the message says why.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], log: Path, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        self._timeout_s, self._log = timeout_s, log
        self._pending = b""
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **environment},
            )
        try:
            hello = self._answer()
            if "refused" in hello:
                raise PeerUnavailable(str(hello["refused"]))
            self.description, self.error = str(hello["description"]), float(hello["error"])
        except BaseException:
            self.close()
            raise
        self._process.send_signal(signal.SIGSTOP)

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def sample(self, rows: int) -> list[float]:
        """Seconds of each of a few steps of ``rows`` rows."""
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"rows": rows}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as gone:
            raise PeerUnavailable(self._why_it_died()) from gone
        seconds = self._answer()["seconds"]
        self._process.send_signal(signal.SIGSTOP)
        return [float(each) for each in seconds]

    def _answer(self) -> dict[str, object]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(self._timeout_s):
                    raise PeerUnavailable(f"no answer in {self._timeout_s:.0f} s")
                more = os.read(self._process.stdout.fileno(), 1 << 16)
                if not more:
                    raise PeerUnavailable(self._why_it_died())
                self._pending += more
        line, _, self._pending = self._pending.partition(b"\n")
        answer = json.loads(line)
        return dict(answer)

    def _why_it_died(self) -> str:
        code = self._process.wait()
        if code < 0:
            return f"it died of {signal.Signals(-code).name}"
        return f"it ended with {code}: {last_words(self._log.read_text(errors='replace'))}"
