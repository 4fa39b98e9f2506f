"""``duckllm serve`` as a process, and clients of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai


@dataclass
class ServerProcess:
    """``duckllm serve`` as a process, and a client of it."""

    process: subprocess.Popen[str]
    url: str
    line: str
    clients: ExitStack

    def __post_init__(self) -> None:
        self.http = self.clients.enter_context(httpx.Client(base_url=self.url, timeout=60))

    def openai(self) -> openai.OpenAI:
        """Another client, closed at the latest with the server."""
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        return self.clients.enter_context(client)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(20)


@contextmanager
def running_server(
    stderr: Path, *options: str, variables: Sequence[tuple[str, str]] = ()
) -> Iterator[ServerProcess]:
    """A server on a free port, ready."""
    command = [sys.executable, "-m", "duckllm", "serve", "--port", "0", "--kv-cache-bytes", "64MiB", *options]
    with stderr.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **dict(variables)}
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        assert line.startswith("Serving "), stderr.read_text()
        url = line.split(" at ")[1].split(",")[0]
        with ExitStack() as clients:
            yield ServerProcess(process, url, line, clients)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        process.stdout.close()
        process.wait()
