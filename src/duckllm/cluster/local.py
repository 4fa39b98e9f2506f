"""Workers as child processes on this machine: the default, and what the demo runs on.

Called by :mod:`duckllm.cluster`, and by the Ray cluster for processes of its own.

Each child listens on a free loopback port, with a random token in its environment, and says where in one line
on its standard output. It leaves when its standard input ends, so that nothing is left behind, whatever
happens to this process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from duckllm.cluster.address import Address, parse_address
from duckllm.cluster.base import Cluster
from duckllm.cluster.connect import Connection
from duckllm.cluster.frames import safe_text
from duckllm.cluster.shared_memory import SharedChannel
from duckllm.cluster.token import TOKEN_VARIABLE
from duckllm.config import ClusterConfig, available_cores
from duckllm.errors import ConfigError, WorkerUnavailableError

START_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0
_SPIN_US_WITH_SPARE_CORES = 100
_MAX_LISTENING_LINE_BYTES = 4096
_LOOK_AGAIN_S = 0.02
_log = logging.getLogger("duckllm")


@dataclass
class Child:
    """A process of ours and its standard error, kept in a file without a name.

    ``address`` is None until it has said where it listens.
    """

    process: subprocess.Popen[bytes]
    stderr: IO[bytes]
    address: Address | None = None
    is_unused: bool = True
    shared: SharedChannel | None = None

    def last_words(self) -> str:
        """The end of what it wrote to its standard error, on one line."""
        self.stderr.seek(0, os.SEEK_END)
        self.stderr.seek(max(0, self.stderr.tell() - 4096))
        lines = self.stderr.read().decode("utf-8", errors="replace").strip().splitlines()
        words = " / ".join(line.strip() for line in lines[-5:])
        return safe_text(words) or "it wrote nothing to its standard error"

    def end_input(self) -> None:
        """Has the process leave by itself."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def stop(self, deadline: float) -> None:
        """Ends the process: by the end of its input until then, by SIGTERM, by SIGKILL. Waits for its end."""
        self.end_input()
        if self.process.stdout is not None:
            self.process.stdout.close()
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                self.process.send_signal(number)
            try:
                self.process.wait(timeout=max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
            break
        self.stderr.close()
        self._close_shared()

    def kill(self) -> None:
        """Ends the process, stopped or not, and waits for its end. Harmless when repeated."""
        for pipe in (self.process.stdin, self.process.stdout, self.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self.process.kill()
        self.process.wait()
        self._close_shared()

    def _close_shared(self) -> None:
        if self.shared is not None:
            self.shared.close()


class LocalCluster(Cluster):
    """``config.workers`` workers started here, and ``config.spares`` that wait; :meth:`close` stops them.

    In the place of a lost worker, whose process is killed if it is still there, comes a spare or else a new
    process.

    Raises:
        WorkerUnavailableError: A worker did not start; the message holds its last lines.
    """

    def __init__(self, config: ClusterConfig) -> None:
        token = secrets.token_hex(32)
        self._children: list[Child] = []
        self._spares: list[Child] = []
        try:
            for _ in range(config.workers):
                self._children.append(_spawn(config, token))
            for _ in range(config.spares):
                self._spares.append(_spawn(config, token))
            deadline = time.monotonic() + START_TIMEOUT_S
            addresses = [
                wait_until_listening(child, f"local worker {worker}", deadline)
                for worker, child in enumerate(self._children)
            ]
        except BaseException:
            self._stop_children()
            raise
        for child in self._children:
            child.is_unused = False
        super().__init__(config, addresses, token)

    def _shared(self, worker: int) -> SharedChannel | None:
        return self._children[worker].shared

    @property
    def num_here(self) -> int:
        """All of them."""
        return self.num_workers

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers, in worker order."""
        return tuple(child.process.pid for child in self._children)

    def peak_rss_bytes(self) -> tuple[int, ...]:
        """Most memory that each worker ever had resident, mapped weights included; 0 for one that is gone."""
        return tuple(_peak_rss_bytes(pid) for pid in self.pids)

    def close(self) -> None:
        """Stops the workers: end of input, then SIGTERM, then SIGKILL; each is waited for. Idempotent."""
        super().close()
        self._stop_children()

    def find_silent(self, workers: Sequence[int], timeout_s: float) -> list[int]:
        """As :meth:`Cluster.find_silent`, by what the system says of the processes.

        One that has nothing but work, on a machine that has too much of it, may say nothing for long and is
        not stopped; one that is stopped all the time, or has ended, is silent.
        """
        deadline = time.monotonic() + timeout_s
        silent = [worker for worker in workers if _stands_still(self._children[worker].process.pid)]
        while silent and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN_S)
            silent = [worker for worker in silent if _stands_still(self._children[worker].process.pid)]
        return silent

    def _bring_back(self, worker: int, deadline: float, attempt_s: float, *, is_silent: bool) -> Connection:
        assert self._token is not None
        child = self._children[worker]
        # One that is still starting, or preparing, since the last attempt gets on with it.
        if not child.is_unused or child.process.poll() is not None:
            child.kill()
            child = self._spares.pop(0) if self._spares else _spawn(self.config, self._token)
            self._children[worker] = child
        address = wait_until_listening(child, f"local worker {worker}", deadline)
        timeout_s = self.config.connect_timeout_s
        connection = self._prepare(worker, address, deadline, timeout_s, child.shared)
        child.is_unused = False
        # The next spare starts while the step goes on; nobody waits for it.
        if len(self._spares) < self.config.spares:
            try:
                self._spares.append(_spawn(self.config, self._token))
            except WorkerUnavailableError as error:
                _log.warning("spare: %s", error)
        return connection

    def _stop_children(self) -> None:
        children, self._children, self._spares = self._children + self._spares, [], []
        for child in children:
            child.end_input()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for child in children:
            child.stop(deadline)


def _spawn(config: ClusterConfig, token: str) -> Child:
    cores = available_cores()
    threads = config.threads_per_worker or max(1, cores // config.workers)
    spin_us = config.spin_us
    if spin_us < 0:
        spin_us = _SPIN_US_WITH_SPARE_CORES if threads * config.workers < cores else 0
    options = [
        *("--listen", "127.0.0.1:0", "--threads", str(threads), "--spin-us", str(spin_us)),
        # Not pinned: the host computes on the same cores.
        *("--no-pin", "--prefill", config.prefill),
        # They are all alike.
        *("--speed", "0"),
    ]
    shared = _shared_channel() if config.shared_memory else None
    inherited = () if shared is None else shared.descriptors
    if shared is not None:
        options += ["--shared-memory", *(str(each) for each in inherited)]
    try:
        # A session of its own: Ctrl-C at the terminal stops the host's reply, not its workers.
        child = spawn_worker("a local worker", options, token, start_new_session=True, pass_fds=inherited)
    except WorkerUnavailableError:
        if shared is not None:
            shared.close()
        raise
    child.shared = shared
    return child


def _shared_channel() -> SharedChannel | None:
    """Memory for a worker's steps; None where the system gives none, and its connection carries them."""
    try:
        return SharedChannel()
    except OSError as error:
        _log.warning("no shared memory for a local worker: %s", error.strerror)
        return None


def spawn_worker(name: str, options: Sequence[str], token: str, **how: Any) -> Child:
    """A worker process that leaves when this one does; :func:`wait_until_listening` tells where it is.

    Args:
        name: What it is called in messages.
        options: Its command line.
        token: The cluster token, which goes into its environment.
        **how: More for :class:`subprocess.Popen`.

    Raises:
        WorkerUnavailableError: It cannot be started.
    """
    module = ["duckllm.worker", *options, "--json", "--exit-with-stdin"]
    return spawn_module(name, module, {TOKEN_VARIABLE: token}, **how)


def spawn_module(name: str, module: Sequence[str], variables: Mapping[str, str], **how: Any) -> Child:
    """``python -m`` with that module and its arguments, and pipes to and from it; else as above."""
    try:
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
    except OSError as error:
        raise WorkerUnavailableError(f"{name} could not be started: {error}") from error
    try:
        process = subprocess.Popen(
            # -P: a file of the user's working folder must not stand in for a module of the same name.
            [sys.executable, "-P", "-m", *module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **variables},
            **how,
        )
    except OSError as error:
        stderr.close()
        raise WorkerUnavailableError(f"{name} could not be started: {error}") from error
    return Child(process, stderr)


def wait_until_listening(child: Child, name: str, deadline: float) -> Address:
    """Where a worker listens, once it does.

    Raises:
        WorkerUnavailableError: It does not by then, or ends; the message holds its last lines.
    """
    if child.address is not None:
        return child.address
    started = time.monotonic()
    output = child.process.stdout
    assert output is not None
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                waited_s = round(max(0.0, deadline - started), 1)
                raise WorkerUnavailableError(
                    f"{name} did not start within {waited_s:g} s: {child.last_words()}"
                )
            chunk = os.read(output.fileno(), _MAX_LISTENING_LINE_BYTES)
            line += chunk
            if not chunk or len(line) > _MAX_LISTENING_LINE_BYTES:
                raise WorkerUnavailableError(f"{name} ended at its start: {child.last_words()}")
    output.close()
    try:
        child.address = parse_address(json.loads(line)["address"])
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise WorkerUnavailableError(f"{name} said {line!r}, expected its address") from error
    return child.address


def _stands_still(pid: int) -> bool:
    """Whether a process is stopped, or has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as status:
            return status.read().rpartition(")")[2].split()[0] in ("T", "t", "Z", "X")
    except OSError:
        return True


def _peak_rss_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
