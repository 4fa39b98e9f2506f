"""Simulated workers: the worker's own server, handshake and step loop, with a stand-in for its experts.

Called by :mod:`duckllm.simulate.flock`. Nothing is loaded: a plan's files need not exist. Each worker has two
threads, which sleep.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from duckllm import _native
from duckllm.cluster.address import Address
from duckllm.cluster.frames import ControlChannel
from duckllm.cluster.plan import WorkerPlan
from duckllm.simulate.nodes import ExpertLayers, Node, bytes_per_us
from duckllm.weights.choice import FormatChoice
from duckllm.worker.config import WorkerConfig
from duckllm.worker.server import WorkerServer
from duckllm.worker.session import Prepared, Sessions, WeightMemory

_CONFIG = WorkerConfig(listen="127.0.0.1:0", threads=1, spin_us=0, pin=False, speed=0)


class _SimulatedSessions(Sessions):
    """Sessions whose experts are a stand-in."""

    def __init__(
        self, log: Callable[[str], None], model: ExpertLayers, node: Node, network: _native.SimulatedNetwork
    ) -> None:
        super().__init__(_CONFIG, log)
        self._model, self._node, self._network = model, node, network

    def _prepare(self, plan: WorkerPlan, channel: ControlChannel) -> tuple[Prepared, int, int]:
        model, node = self._model, self._node
        server = _native.SimulatedServer(
            hidden_size=plan.hidden_size,
            intermediate_size=plan.intermediate_size,
            num_experts=plan.num_experts,
            top_k=plan.top_k,
            first_stripe=plan.first_stripe,
            num_stripes=plan.num_stripes,
            max_step_tokens=plan.max_step_tokens,
            layers=[each.layer for each in plan.layers],
            network=self._network,
            fixed_us=node.fixed_us,
            expert_us=model.expert_us(node, plan.num_stripes),
            row_us=model.row_us(node, plan.num_stripes),
            link_bytes_per_us=bytes_per_us(node.link_gbit_per_s),
            delay_us=node.delay_us,
            request_row_bytes=model.request_row_bytes,
            reply_row_bytes=model.reply_row_bytes,
        )
        choice = FormatChoice(plan.format, f"{plan.format}, simulated")
        return Prepared(server, choice, WeightMemory("", 0, 0)), 0, 0


class SimulatedWorker:
    """A worker on a free port of loopback, served by threads of this process; a context manager.

    Args:
        model: The experts that it stands in for.
        node: What it takes for them.
        network: The host's port.
        log: Takes one line per event.
    """

    def __init__(
        self,
        model: ExpertLayers,
        node: Node,
        network: _native.SimulatedNetwork,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._server = WorkerServer(_CONFIG, log, _SimulatedSessions(log, model, node, network))
        self._thread = threading.Thread(target=self._server.serve, daemon=True)
        self._thread.start()

    @property
    def address(self) -> Address:
        """Where it listens."""
        return self._server.address

    def stop(self) -> None:
        """Ends it, in the middle of a step if there is one, as the loss of a node would. Idempotent."""
        if self._thread.is_alive():
            self._server.stop()
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
