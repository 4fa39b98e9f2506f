"""Nodes and links of a simulated flock, and what a step takes there.

Used by :mod:`duckllm.simulate.flock`, which gives stand-ins these times, and by
:mod:`duckllm.simulate.timeline`, which puts a whole step together. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from duckllm.config import WIRE_DTYPES
from duckllm.errors import ConfigError
from duckllm.forecast.coefficients import ON_CPU
from duckllm.forecast.presets import COMPUTERS
from duckllm.forecast.step import WIRE_OVERHEAD
from duckllm.models.inspection import Inspection
from duckllm.moe.placement import plan_slices

# Of a small message through a switch and two network stacks: half of a round trip of about 50 us.
DELAY_US = 25.0
_WIRE_BYTES = dict(zip(WIRE_DTYPES, (4, 2), strict=True))


@dataclass(frozen=True)
class Node:
    """A node with one worker.

    Args:
        read_gb_per_s: What its expert kernels read, GB/s.
        gflop_per_s: What they multiply and add, 10^9 a second; 0 leaves that out.
        fixed_us: What a step takes beside.
        link_gbit_per_s: Its port, each direction; 0 takes no time.
        delay_us: Of a message, each way.
    """

    read_gb_per_s: float
    gflop_per_s: float = 0.0
    fixed_us: float = 0.0
    link_gbit_per_s: float = 0.0
    delay_us: float = 0.0

    def slower(self, factor: float) -> Node:
        """The same, computing so many times as long."""
        return replace(
            self,
            read_gb_per_s=self.read_gb_per_s / factor,
            gflop_per_s=self.gflop_per_s / factor,
            fixed_us=self.fixed_us * factor,
        )


@dataclass(frozen=True)
class ExpertLayers:
    """A model's experts, as far as steps are concerned.

    Args:
        hidden_size: H.
        intermediate_size: I.
        num_experts: E.
        top_k: K.
        layers: Numbers of the layers that have experts.
        unit_bytes: A stripe of an expert, the mean over layers where these differ.
        num_stripes: Stripes of a whole expert.
        wire_dtype: Activations on the wire.
        reply_dtype: Partial sums on the wire.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    layers: tuple[int, ...]
    unit_bytes: int
    num_stripes: int
    wire_dtype: str = "f32"
    reply_dtype: str = "f32"

    @property
    def request_row_bytes(self) -> int:
        """A row of a request."""
        return _WIRE_BYTES[self.wire_dtype] * self.hidden_size + 8 * self.top_k

    @property
    def reply_row_bytes(self) -> int:
        """A row of a reply."""
        return _WIRE_BYTES[self.reply_dtype] * self.hidden_size

    def distinct_experts(self, num_tokens: int) -> float:
        """How many different experts so many rows choose on average, each its own at random."""
        return self.num_experts * (1.0 - (1.0 - self.top_k / self.num_experts) ** num_tokens)

    def expert_us(self, node: Node, num_stripes: int) -> float:
        """Reading so many stripes of one expert."""
        return self.unit_bytes * num_stripes / node.read_gb_per_s / 1e3

    def row_us(self, node: Node, num_stripes: int) -> float:
        """Multiplying one row with them."""
        operations = 2 * 3 * self.hidden_size * 16 * num_stripes
        return operations / node.gflop_per_s / 1e3 if node.gflop_per_s > 0 else 0.0

    def compute_us(self, node: Node, num_stripes: int, num_tokens: int) -> float:
        """A step of so many rows, each of which chooses its own experts."""
        reading = self.distinct_experts(num_tokens) * self.expert_us(node, num_stripes)
        return node.fixed_us + max(reading, num_tokens * self.top_k * self.row_us(node, num_stripes))

    def slices(self, num_workers: int) -> tuple[tuple[int, int], ...]:
        """First stripe and stripes of each of so many workers, even ones.

        Raises:
            ConfigError: More workers than stripes.
        """
        return tuple(
            (part.first_stripe, part.num_stripes) for part in plan_slices(self.num_stripes, num_workers)
        )


def expert_layers(
    model: Inspection, weight_format: str, wire_dtype: str = "f32", reply_dtype: str = "f32"
) -> ExpertLayers:
    """The experts of a model that was looked at from outside."""
    layout = model.layout
    return ExpertLayers(
        layout.hidden_size,
        layout.moe_intermediate_size,
        layout.num_experts,
        layout.num_experts_per_tok,
        tuple(layer for layer in layout.moe_layers if layer < model.num_hidden_layers),
        model.stripe_bytes(weight_format) // (layout.num_experts * max(1, model.num_moe_layers)),
        model.num_stripes,
        wire_dtype,
        reply_dtype,
    )


def bytes_per_us(gbit_per_s: float) -> float:
    """Bytes of TCP that pass a port in a microsecond; 0 for a port that takes no time."""
    return gbit_per_s * 1e3 / 8 / WIRE_OVERHEAD


@dataclass(frozen=True)
class HostCost:
    """What the host's own thread needs for one worker, microseconds.

    Args:
        send_us: Until its request is sent.
        receive_us: From its reply to its share of the sum.
    """

    send_us: float = 0.0
    receive_us: float = 0.0


def step_us(
    model: ExpertLayers,
    nodes: Sequence[Node],
    num_tokens: int,
    host_gbit_per_s: float = 0.0,
    cost: HostCost | None = None,
) -> float:
    """A layer's step from its submission to its sum, as the stand-ins' links and nodes have it.

    Requests leave one after the other, over the host's port and the node's; replies come back likewise and
    are taken one at a time. csrc/simulate/stand_in.h has the same rules, for real time.

    Args:
        model: The experts.
        nodes: The workers' nodes, in order; slices are even.
        num_tokens: T.
        host_gbit_per_s: The host's port, each direction; 0 takes no time.
        cost: What the host's thread needs; None for a host that needs nothing.
    """
    cost = HostCost() if cost is None else cost
    host_rate = bytes_per_us(host_gbit_per_s)
    request, reply = num_tokens * model.request_row_bytes, num_tokens * model.reply_row_bytes
    host_request, host_reply = _over(request, host_rate), _over(reply, host_rate)
    sent_us = port_us = 0.0
    replies = []
    for node, (_, num_stripes) in zip(nodes, model.slices(len(nodes)), strict=True):
        node_rate = bytes_per_us(node.link_gbit_per_s)
        sent_us += cost.send_us
        port_us = max(port_us, sent_us) + host_request
        arrived_us = port_us + max(0.0, _over(request, node_rate) - host_request) + node.delay_us
        done_us = arrived_us + model.compute_us(node, num_stripes, num_tokens)
        replies.append((done_us, done_us + _over(reply, node_rate), node.delay_us))
    port_us = taken_us = 0.0
    for done_us, left_us, delay_us in sorted(replies):
        port_us = max(port_us, done_us) + host_reply
        taken_us = max(taken_us, max(left_us, port_us) + delay_us, sent_us) + cost.receive_us
    return taken_us


def _over(num_bytes: int, rate: float) -> float:
    return num_bytes / rate if rate > 0 else 0.0


def node_of(name: str, weight_format: str) -> Node:
    """A computer of :mod:`duckllm.forecast.presets`, with what our kernels reach of it.

    Args:
        name: The preset's.
        weight_format: Format of the experts.

    Raises:
        ConfigError: There is none, or duckllm does not run on it.
    """
    preset = COMPUTERS.get(name)
    if preset is None or preset.refused:
        known = ", ".join(each for each, computer in COMPUTERS.items() if not computer.refused)
        hint = "" if preset is None else preset.refused
        raise ConfigError("node", name, f"one of {known}", hint)
    return Node(
        read_gb_per_s=preset.read_gb_per_s * ON_CPU.share_of(preset.isa, weight_format),
        gflop_per_s=preset.gflop_per_s * ON_CPU.expert_flop_share,
        fixed_us=ON_CPU.node_step_us,
        link_gbit_per_s=preset.link_gbit_per_s,
        delay_us=DELAY_US,
    )
