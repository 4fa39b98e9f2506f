"""A simulated flock: workers, cluster, transport and flock of a host, put together as a start does it.

Called by :mod:`duckllm.simulate.measure` and by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from duckllm import _native
from duckllm.cluster.plan import LayerPlan, WorkerPlan
from duckllm.cluster.static import StaticCluster
from duckllm.config import ClusterConfig
from duckllm.moe.dispatch import RemoteExperts, RemoteStep
from duckllm.simulate.nodes import ExpertLayers, Node, bytes_per_us
from duckllm.simulate.pattern import F32, ExpectedSums
from duckllm.simulate.workers import SimulatedWorker
from duckllm.transport.flock import Flock
from duckllm.transport.transport import Transport

_SHA256 = "0" * 64


@dataclass(frozen=True)
class Submitted:
    """A step in flight.

    Args:
        number: Its number.
        num_tokens: T.
        pending: Collects it.
    """

    number: int
    num_tokens: int
    pending: RemoteStep


class SimulatedFlock:
    """A host's dispatch to simulated workers.

    Args:
        model: The experts.
        workers: The workers, in order; then the spares.
        transport: To them.
        flock: Above it.
        network: The host's port.
        seed: Of the choice of experts.

    Attributes:
        expected: What steps' sums must be.
    """

    def __init__(
        self,
        model: ExpertLayers,
        workers: Sequence[SimulatedWorker],
        transport: Transport,
        flock: Flock,
        network: _native.SimulatedNetwork,
        seed: int = 0,
    ) -> None:
        self.model, self.workers, self.transport, self.flock = model, tuple(workers), transport, flock
        self._network = network
        self._experts = RemoteExperts(flock)
        slices = model.slices(len(transport.addresses))
        self.expected = ExpectedSums([first for first, _ in slices], model.hidden_size)
        self._generator = np.random.default_rng(seed)
        self._x = torch.from_numpy(
            self._generator.standard_normal((transport.max_step_tokens, model.hidden_size)).astype(np.float32)
        )
        self._number = 0

    def choose(self, num_tokens: int) -> torch.Tensor:
        """Experts of so many rows, each its own at random: [T, K] int32."""
        scores = self._generator.random((num_tokens, self.model.num_experts))
        chosen = np.argpartition(scores, self.model.top_k - 1, axis=1)[:, : self.model.top_k]
        return torch.from_numpy(np.ascontiguousarray(chosen, np.int32))

    def submit(self, topk_ids: torch.Tensor, layer: int | None = None, lane: int = 0) -> Submitted:
        """Sends a step, as a model does.

        Args:
            topk_ids: Experts of each row.
            layer: The layer; None for the first one.
            lane: The lane.
        """
        self._number += 1
        topk_weights = torch.full(topk_ids.shape, float(self._number), dtype=torch.float32)
        layer = self.model.layers[0] if layer is None else layer
        self._network.submitted(self._number)
        pending = self._experts.submit(layer, self._x[: len(topk_ids)], topk_ids, topk_weights, lane)
        return Submitted(self._number, len(topk_ids), pending)

    def wait(self, step: Submitted) -> F32:
        """The sum of a step's answers: [T, H] f32.

        Raises:
            WorkerLostError: As :meth:`duckllm.transport.flock.Flock.wait`.
        """
        total: F32 = step.pending.wait().numpy()
        return total

    def is_right(self, step: Submitted, total: F32) -> bool:
        """Whether a sum is that of all workers' answers to this step, to the last bit."""
        return np.array_equal(total, self.expected.of(step.number, step.num_tokens))


@contextmanager
def simulated_flock(
    model: ExpertLayers,
    nodes: Sequence[Node],
    *,
    max_step_tokens: int,
    host_gbit_per_s: float = 0.0,
    num_spares: int = 0,
    spin_us: int = 0,
    log: Callable[[str], None] = lambda line: None,
) -> Iterator[SimulatedFlock]:
    """Workers on these nodes, each with an even slice, greeted, prepared and ready for steps.

    Args:
        model: The experts.
        nodes: The workers' nodes, in order.
        max_step_tokens: Most rows of a step.
        host_gbit_per_s: The host's port, each direction; 0 takes no time.
        num_spares: Workers more, on nodes like the first, that wait for one to be lost.
        spin_us: How long the host reads without sleeping.
        log: Takes one line per event of a worker.

    Raises:
        ConfigError: More nodes than stripes.
        ClusterError: A worker could not be reached.
    """
    plans = _plans(model, len(nodes), max_step_tokens)
    network = _native.SimulatedNetwork(bytes_per_us(host_gbit_per_s))
    with ExitStack() as stack:
        workers = [
            stack.enter_context(SimulatedWorker(model, node, network, log))
            for node in (*nodes, *[nodes[0]] * num_spares)
        ]
        config = ClusterConfig(
            addresses=tuple(str(worker.address) for worker in workers),
            spares=num_spares,
            wire_dtype=model.wire_dtype,
            reply_dtype=model.reply_dtype,
            max_step_tokens=max_step_tokens,
            share_folder=False,
        )
        cluster = stack.enter_context(StaticCluster(config))
        transport = Transport(
            cluster.connect(plans),
            model.hidden_size,
            model.top_k,
            max_step_tokens=max_step_tokens,
            wire_dtype=model.wire_dtype,
            reply_dtype=model.reply_dtype,
            step_timeout_s=config.step_timeout_s,
            submit_timeout_s=config.worker_silence_s,
            spin_us=spin_us,
        )
        stack.enter_context(transport)
        flock = Flock(transport, cluster, config.worker_silence_s, config.worker_timeout_s)
        yield SimulatedFlock(model, workers, transport, flock, network)


def _plans(model: ExpertLayers, num_workers: int, max_step_tokens: int) -> list[WorkerPlan]:
    """Plans of a model without files."""
    return [
        WorkerPlan(
            model_hash=_SHA256,
            format="fp9",
            scale_layout="block",
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            num_experts=model.num_experts,
            top_k=model.top_k,
            total_stripes=model.num_stripes,
            unit_bytes=model.unit_bytes,
            first_stripe=first_stripe,
            num_stripes=num_stripes,
            layers=tuple(
                LayerPlan(layer, f"experts-{layer:05d}.safetensors", (_SHA256,) * num_stripes)
                for layer in model.layers
            ),
            folder="",
            max_step_tokens=max_step_tokens,
            wire_dtype=model.wire_dtype,
            reply_dtype=model.reply_dtype,
        )
        for first_stripe, num_stripes in model.slices(num_workers)
    ]
