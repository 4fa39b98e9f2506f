"""The actor that keeps one worker process on a node of Ray: starts it, and another after its loss.

Made by :mod:`duckllm.cluster.ray_driver`, run by Ray on the nodes, where this package must be installed too.
No step's data goes through it. Imports Ray in its methods alone, and no torch.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Mapping
from typing import Any

from duckllm.cluster.address import Address
from duckllm.cluster.local import CLOSE_TIMEOUT_S, START_TIMEOUT_S, Child, spawn_worker, wait_until_listening
from duckllm.config import available_cores
from duckllm.errors import DuckError


class WorkerActor:
    """Keeps a worker process on the node that Ray has put it on.

    Args:
        token: The cluster token.
        options: ``threads`` and ``spin_us`` as in :class:`duckllm.worker.config.WorkerConfig`, and
            ``prefill``.
        host_node: Ray's id of the node where the host computes.
    """

    def __init__(self, token: str, options: Mapping[str, Any], host_node: str) -> None:
        self._token, self._options, self._host_node = token, dict(options), host_node
        self._child: Child | None = None
        self._epoch = ""

    def node(self) -> str:
        """Ray's id of the node that this is on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def find(self, lost_epoch: str, others: Mapping[str, int]) -> dict[str, Any]:
        """Where the worker is; one that is not there, or was lost, is started first.

        Ray may repeat this on a new actor after this one's death, so it says the same when it is repeated.

        Args:
            lost_epoch: The process that was lost, stopped or not; empty for none.
            others: How many other workers are on each node, which share its cores.

        Returns:
            ``address``, ``epoch`` (another for each process) and ``node``; or ``problem``, in words.
        """
        import ray

        name = str(ray.util.get_node_ip_address())
        if self._child is not None:
            status = self._child.process.poll()
            if status is not None or self._epoch == lost_epoch:
                words = "" if status is None else f" ended with status {status}: {self._child.last_words()}"
                print(f"worker {self._epoch} is lost{words}", file=sys.stderr)  # into Ray's log of this actor
                self._child.kill()
                self._child = None
        node = self.node()
        try:
            if self._child is None:
                self._child = self._start(name, others.get(node, 0) + 1, node == self._host_node)
                self._epoch = secrets.token_hex(8)
            deadline = time.monotonic() + START_TIMEOUT_S
            address = wait_until_listening(self._child, f"the worker on {name}", deadline)
        except DuckError as error:  # with arguments of its own, it may not survive Ray's serialisation
            return {"problem": str(error)}
        return {"address": str(address), "epoch": self._epoch, "node": node}

    def stop(self) -> None:
        """Ends the worker process and waits for its end."""
        child, self._child = self._child, None
        if child is not None:
            child.stop(time.monotonic() + CLOSE_TIMEOUT_S)

    def _start(self, name: str, sharing: int, with_host: bool) -> Child:
        threads = self._options["threads"] or max(1, available_cores() // sharing)
        options = ["--listen", str(Address(name, 0)), "--threads", str(threads)]
        options += ["--spin-us", str(self._options["spin_us"]), "--prefill", self._options["prefill"]]
        if with_host:
            options.append("--no-pin")
        # Ray calls methods of such an actor in its main thread, so the parent that counts is the process.
        options.append("--die-with-parent")
        return spawn_worker("a worker", options, self._token, start_new_session=True)
