"""Workers that Ray places on nodes and starts again: one actor a worker, the data over our own sockets.

Called by :mod:`duckllm.cluster`. Ray itself is imported by the process of :mod:`duckllm.cluster.ray_driver`
alone; this is the host's end of it.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import secrets
import selectors
import socket
import time
from typing import Any

from duckllm.cluster.address import Address, parse_address
from duckllm.cluster.base import Cluster
from duckllm.cluster.connect import Connection
from duckllm.cluster.frames import safe_text
from duckllm.cluster.local import Child, spawn_module
from duckllm.config import ClusterConfig
from duckllm.errors import ConfigError, InWords, MissingPackageError, WorkerUnavailableError

ADDRESS_VARIABLE = "RAY_ADDRESS"
CONNECT_TIMEOUT_S = 60.0  # to Ray, or of the start of one here; by itself it waits for two minutes
START_TIMEOUT_S = 90.0  # of Ray's actors with their workers
CLOSE_TIMEOUT_S = 15.0
_SLACK_S = 15.0  # for the driver's answer beyond the limit that it was given
_MAX_REPLY_BYTES = 1 << 22
_log = logging.getLogger("duckllm")


def find_ray(config: ClusterConfig) -> str:
    """What Ray's driver is to connect to: ``name:port``, or ``"auto"`` or ``"local"`` as it knows them.

    Raises:
        ConfigError: It is malformed.
        MissingPackageError: Ray is not installed.
    """
    field, text = "cluster", config.cluster.partition(":")[2] if config.cluster else ""
    if not text:
        field, text = ADDRESS_VARIABLE, os.environ.get(ADDRESS_VARIABLE, "")
    address = text or "auto"
    if address not in ("auto", "local"):
        address = str(parse_address(text, field))
    if importlib.util.find_spec("ray") is None:
        raise MissingPackageError("ray", "cluster", "ray")
    return address


class RayCluster(Cluster):
    """Workers on the nodes of a Ray cluster: ``config.workers`` of them, or for 0 one on each node.

    They go to the nodes with the resource ``duckllm_worker`` where there are such, else to those with a CPU.
    A lost worker, actor or node is replaced; a new epoch tells another process, which is to be prepared.

    Raises:
        ConfigError: The address is malformed, or Ray has no room for so many workers.
        MissingPackageError: Ray is not installed.
        WorkerUnavailableError: There is no such Ray, or a worker does not start.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._ray_address = find_ray(config)
        self._driver: _Driver | None = None
        self._num_here = 0
        token = secrets.token_hex(32)
        try:
            self._found = self._start(config, token, config.workers, START_TIMEOUT_S)
        except BaseException:
            self._stop_driver()
            raise
        self._used = [""] * len(self._found)  # epochs of the processes that were prepared
        super().__init__(config, [parse_address(each["address"]) for each in self._found], token)

    @property
    def num_here(self) -> int:
        """Those that Ray has put on this machine."""
        return self._num_here

    def wait_ready(self) -> list[Connection]:
        """As :meth:`Cluster.wait_ready`."""
        connections = super().wait_ready()
        self._used = [each["epoch"] for each in self._found]
        return connections

    def close(self) -> None:
        """Ends the actors and their workers, and lets go of Ray. Idempotent."""
        super().close()
        self._stop_driver()

    def _bring_back(self, worker: int, deadline: float, attempt_s: float, *, is_silent: bool) -> Connection:
        if self._driver is None:
            # With the driver all its actors went, and so the other workers; each is asked for in its turn.
            assert self._token is not None
            start_s = max(deadline - time.monotonic(), attempt_s)
            self._found = self._start(self.config, self._token, self.num_workers, start_s)
            self._used = [""] * len(self._found)
        request = {"do": "find", "worker": worker, "lost": self._used[worker], "limit_s": attempt_s}
        found = self._ask(request, attempt_s + _SLACK_S)
        self._found[worker] = found
        connection = self._prepare(
            worker, parse_address(found["address"]), deadline, self.config.connect_timeout_s
        )
        self._used[worker] = found["epoch"]
        return connection

    def _start(self, config: ClusterConfig, token: str, count: int, start_s: float) -> list[dict[str, Any]]:
        limit_s = min(config.connect_timeout_s, start_s)
        if ":" in self._ray_address:
            _check_listening(parse_address(self._ray_address), limit_s)
        # A session of its own: Ctrl-C at the terminal stops the host's reply, and not Ray.
        self._driver = _Driver(
            spawn_module("Ray's driver", ["duckllm.cluster.ray_driver"], {}, start_new_session=True)
        )
        self._ask({"do": "connect", "address": self._ray_address}, CONNECT_TIMEOUT_S)
        options = {"threads": config.threads_per_worker, "spin_us": config.spin_us, "prefill": config.prefill}
        request = {"do": "start", "count": count, "token": token, "options": options}
        answer = self._ask({**request, "limit_s": limit_s, "start_s": start_s}, limit_s + start_s + _SLACK_S)
        self._num_here = answer["here"]
        return list(answer["workers"])

    def _ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._driver is not None
        try:
            answer = self._driver.ask(request, timeout_s)
        except WorkerUnavailableError as error:
            self._driver.child.kill()
            self._driver = None
            raise WorkerUnavailableError(f"Ray {self._ray_address}: {error}") from error
        problem = answer.get("problem")
        if problem is None:
            return answer
        if request["do"] != "find":
            self._stop_driver()
        if answer.get("room") is not None:
            got = request["count"] or InWords("one on each node")
            raise ConfigError("workers", got, f"at most {answer['room']} on Ray {self._ray_address}", problem)
        raise WorkerUnavailableError(f"Ray {self._ray_address}: {safe_text(problem)}")

    def _stop_driver(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.child.stop(time.monotonic() + CLOSE_TIMEOUT_S)


class _Driver:
    """The process of :mod:`duckllm.cluster.ray_driver`, and what is said to and by it."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self._number, self._buffer = 0, b""

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Its answer.

        Raises:
            WorkerUnavailableError: It has ended, or does not answer.
        """
        process = self.child.process
        assert process.stdin is not None
        self._number += 1
        deadline = time.monotonic() + timeout_s
        try:
            process.stdin.write(json.dumps({"id": self._number, **request}).encode() + b"\n")
            process.stdin.flush()
        except OSError as error:
            raise WorkerUnavailableError(f"Ray's driver has ended: {self.child.last_words()}") from error
        while True:
            answer = json.loads(self._read_line(deadline, timeout_s))
            if answer["id"] == self._number:  # else one that Ctrl-C kept from being read
                return dict(answer)

    def _read_line(self, deadline: float, timeout_s: float) -> bytes:
        output = self.child.process.stdout
        assert output is not None
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    words = f"no answer within {timeout_s:g} s: {self.child.last_words()}"
                    raise WorkerUnavailableError(f"Ray's driver: {words}")
                chunk = os.read(output.fileno(), 1 << 16)
                self._buffer += chunk
                if not chunk or len(self._buffer) > _MAX_REPLY_BYTES:
                    raise WorkerUnavailableError(f"Ray's driver has ended: {self.child.last_words()}")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def _check_listening(address: Address, timeout_s: float) -> None:
    """Whether anything listens there: Ray itself takes two minutes to say that nothing does.

    Raises:
        WorkerUnavailableError: Nothing does.
    """
    try:
        socket.create_connection((address.name, address.port), timeout=timeout_s).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WorkerUnavailableError(f"no Ray at {address}: {reason}") from error
