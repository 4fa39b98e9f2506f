"""How long a step takes on a flock, by part, and what a second of such steps gives.

Called by ``duckllm plan`` and by :mod:`duckllm.forecast.what_if`. Pure arithmetic on a model's load
(:mod:`duckllm.forecast.load`), hardware (:mod:`duckllm.forecast.flock`) and what software makes of it
(:mod:`duckllm.forecast.coefficients`); docs/planning.md derives every formula and lists what is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from duckllm.forecast.coefficients import Coefficients
from duckllm.forecast.flock import Computer, Flock
from duckllm.forecast.load import ModelLoad

WEIGHTS, CACHE, LAYERS = "host's weights", "KV cache", "host's layers, fixed"
EXPERTS, WIRE, EXCHANGE = "experts", "fan-out, wire, incast", "hand-over"
GUESSES, STEP, HIDDEN = "guesses", "step, fixed", "hidden by lanes"
PARTS = (WEIGHTS, CACHE, LAYERS, EXPERTS, WIRE, EXCHANGE, GUESSES, STEP, HIDDEN)
# A frame of Ethernet of 1500 bytes carries 1448 of TCP with time stamps, in 1538 on the cable.
WIRE_OVERHEAD = 1538 / 1448


@dataclass(frozen=True)
class Setting:
    """What the flock is asked to do.

    Args:
        weight_format: Format of the experts.
        batch: Requests that are answered together.
        context: Tokens of each.
        lanes: Whether the host computes one half of a step while the workers compute the other.
        drafts: Tokens guessed ahead; 0 for none.
        acceptance: Share of guesses that are right, 0 to 1.
        x_bytes: Bytes of an activation on the wire.
        reply_bytes: Likewise of a partial sum.
        multicast: Whether a request passes the host's port once for all nodes.
    """

    weight_format: str
    batch: int = 1
    context: int = 1024
    lanes: bool = False
    drafts: int = 0
    acceptance: float = 0.0
    x_bytes: int = 4
    reply_bytes: int = 4
    multicast: bool = False

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.batch * (1 + self.drafts)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step gives: each request's own, and its guesses as far as all before were right."""
        return self.batch * sum(self.acceptance**count for count in range(self.drafts + 1))


@dataclass(frozen=True)
class Prediction:
    """A step.

    Args:
        setting: Of what.
        parts_us: Microseconds of a step by part, in the order of :data:`PARTS`; what lanes hide is negative.
        tokens_per_s: Of all requests together.
    """

    setting: Setting
    parts_us: Mapping[str, float]
    tokens_per_s: float

    @property
    def step_us(self) -> float:
        """The whole step."""
        return sum(self.parts_us.values())

    @property
    def bottleneck(self) -> str:
        """The part that takes most."""
        return max(self.parts_us, key=lambda name: self.parts_us[name])


@dataclass(frozen=True)
class _Exchange:
    """A layer's experts for some rows, microseconds."""

    experts_us: float
    wire_us: float
    exchange_us: float
    links_us: float  # of the port, in one direction, that is busy longest

    @property
    def total_us(self) -> float:
        return self.experts_us + self.wire_us + self.exchange_us


def predict(
    load: ModelLoad,
    flock: Flock,
    stripes: Sequence[int],
    coefficients: Coefficients,
    setting: Setting,
) -> Prediction:
    """A step of this model on this flock.

    Args:
        load: The model.
        flock: The hardware.
        stripes: Stripes of every expert on each node.
        coefficients: The software.
        setting: What is asked.
    """
    model = _Model(load, flock, tuple(stripes), coefficients, setting)
    lanes = [setting.rows]
    if setting.lanes and setting.rows >= 2:
        lanes = [setting.rows // 2, setting.rows - setting.rows // 2]
    parts = dict.fromkeys(PARTS, 0.0)
    hosts, exchanges, one_by_one = [], [], 0.0
    for rows in lanes:
        host = model.host_layer_us(rows, setting.batch * rows / setting.rows)
        for name, microseconds in host.items():
            parts[name] += microseconds * load.num_layers
        exchange = model.exchange(rows)
        exchanges.append(exchange)
        parts[EXPERTS] += exchange.experts_us * load.num_moe_layers
        parts[WIRE] += exchange.wire_us * load.num_moe_layers
        parts[EXCHANGE] += exchange.exchange_us * load.num_moe_layers
        shared_us = model.read_us(load.shared_bytes)
        hosts.append(sum(host.values()) + shared_us / load.num_moe_layers)
        if coefficients.hides_shared:
            shared_us = max(0.0, shared_us - exchange.total_us * load.num_moe_layers)
        parts[WEIGHTS] += shared_us
        one_by_one += sum(host.values()) + shared_us / load.num_moe_layers + exchange.total_us
    parts[WEIGHTS] += model.read_us(load.head_bytes)
    parts[STEP] = coefficients.step_us + coefficients.step_request_us * (setting.batch - 1)
    parts[GUESSES] = model.guesses_us()
    if len(lanes) == 2:
        parts[HIDDEN] = load.num_moe_layers * (model.laned_us(hosts, exchanges, lanes) - one_by_one)
    step_us = sum(parts.values())
    return Prediction(setting, parts, setting.tokens_per_step / step_us * 1e6)


@dataclass(frozen=True)
class _Model:
    load: ModelLoad
    flock: Flock
    stripes: tuple[int, ...]
    coefficients: Coefficients
    setting: Setting

    @property
    def host_gb_per_s(self) -> float:
        card = self.flock.card
        return self.flock.host.read_gb_per_s if card is None else card.gb_per_s

    def read_us(self, num_bytes: float) -> float:
        """Dense weights that the host reads."""
        return num_bytes / (self.host_gb_per_s * self.coefficients.dense_share) / 1e3

    def host_layer_us(self, rows: float, requests: float) -> dict[str, float]:
        """The host's part of one layer, means over all layers."""
        load, coefficients = self.load, self.coefficients
        cache_us = 0.0
        for attention in load.attention:
            num_bytes = requests * attention.cache_bytes(self.setting.context, load.on_card)
            read_us = num_bytes / (self.host_gb_per_s * coefficients.cache_share) / 1e3
            flop_us = 0.0
            if coefficients.attention_flop_share and not load.on_card:
                speed = self.flock.host.gflop_per_s * coefficients.attention_flop_share
                flop_us = rows * attention.operations(self.setting.context) / speed / 1e3
            cache_us += max(read_us, flop_us)
        return {
            WEIGHTS: self.read_us(load.layer_bytes) / load.num_layers,
            CACHE: cache_us / load.num_layers,
            LAYERS: coefficients.layer_us + coefficients.layer_row_us * (rows - 1),
        }

    def node_us(self, node: Computer, stripes: int, rows: float) -> float:
        """One node's experts of one layer."""
        load, coefficients = self.load, self.coefficients
        weight_format = self.setting.weight_format
        num_bytes = load.distinct_experts(rows) * stripes * load.unit_bytes[weight_format]
        share = coefficients.share_of(node.isa, weight_format)
        read_us = num_bytes / (node.read_gb_per_s * share) / 1e3
        flop = rows * load.top_k * load.expert_flop * stripes / load.num_stripes
        flop_us = flop / (node.gflop_per_s * coefficients.expert_flop_share) / 1e3
        return max(read_us, flop_us) * self._crowding(node) + coefficients.node_step_us

    def _crowding(self, node: Computer) -> float:
        """How much slower workers of one machine are together than one alone."""
        machine = self.flock.machines.get(node.machine)
        if machine is None:
            return 1.0
        all_there = [each for each in self.flock.nodes if each.machine == node.machine]
        by_cores = sum(each.cores for each in all_there) / machine.cores
        return max(1.0, by_cores, sum(each.read_gb_per_s for each in all_there) / machine.read_gb_per_s)

    def exchange(self, rows: float) -> _Exchange:
        """One layer's experts: out, computed, back."""
        nodes, coefficients = self.flock.nodes, self.coefficients
        times = [self.node_us(node, stripes, rows) for node, stripes in zip(nodes, self.stripes, strict=True)]
        end_us = self._end_us(times, rows)
        trips = [
            coefficients.exchange_us if node.round_trip_us is None else node.round_trip_us for node in nodes
        ]
        # Sending to one worker and taking its answer are in its round trip already.
        handing_us = max(0.0, max(trips) - coefficients.worker_us)
        return _Exchange(max(times), end_us - max(times), handing_us, self._links_us(rows))

    def _wire_bytes(self, rows: float) -> tuple[float, float]:
        """A request and a reply of one layer, with headers."""
        request = self.load.request_bytes(rows, self.setting.x_bytes)
        reply = self.load.reply_bytes(rows, self.setting.reply_bytes)
        return request * WIRE_OVERHEAD, reply * WIRE_OVERHEAD

    def _is_here(self, node: Computer) -> bool:
        return not is_away(self.flock, node)

    def _sent_us(self, node: Computer, num_bytes: float) -> float:
        """What the host takes for one message to or from a worker: its port's time, or its own."""
        own_us = self.coefficients.worker_us / 2
        return own_us if self._is_here(node) else max(own_us, _pass_us(num_bytes, self.flock.host))

    def _end_us(self, times: Sequence[float], rows: float) -> float:
        """When the last answer is taken: requests leave the host one by one, and answers are taken so."""
        request, reply = self._wire_bytes(rows)
        start_us, left_us = 0.0, 0.0
        answers: list[tuple[float, float, float]] = []
        for node, time_us in zip(self.flock.nodes, times, strict=True):
            if not answers or not self.setting.multicast:
                start_us = left_us
                left_us += self._sent_us(node, request)
            there = 0.0 if self._is_here(node) else 1.0
            ready_us = max(left_us, start_us + there * _pass_us(request, node)) + time_us
            answers.append((ready_us, self._sent_us(node, reply), there * _pass_us(reply, node)))
        end_us = max(ready_us + pass_us for ready_us, _, pass_us in answers)
        # From any moment on the host has to take all answers that are sent after it.
        answers.sort()
        taking_us = 0.0
        for ready_us, taken_us, _ in reversed(answers):
            taking_us += taken_us
            end_us = max(end_us, ready_us + taking_us)
        return end_us

    def _links_us(self, rows: float) -> float:
        """How long the port that is busiest in one direction is busy, or the host with its messages."""
        request, reply = self._wire_bytes(rows)
        nodes = self.flock.nodes
        own = max(0.0 if self._is_here(node) else _pass_us(max(request, reply), node) for node in nodes)
        out = [self._sent_us(node, request) for node in nodes]
        sent_us = max(out) if self.setting.multicast else sum(out)
        return max(own, sent_us, sum(self._sent_us(node, reply) for node in nodes))

    def guesses_us(self) -> float:
        """Guessing: a layer more and the head again, for each token ahead."""
        if not self.setting.drafts:
            return 0.0
        total = 0.0
        for number in range(self.setting.drafts):
            # The first follows what was accepted: a row for each of its tokens.
            rows = self.setting.batch * (1.0 if number else 1.0 + self.setting.acceptance)
            total += self.read_us(self.load.draft_bytes + self.load.head_bytes)
            total += self.coefficients.layer_us + self.exchange(rows).total_us
        return total

    def laned_us(
        self, hosts: Sequence[float], exchanges: Sequence[_Exchange], lanes: Sequence[float]
    ) -> float:
        """One layer of two lanes: no shorter than host, node or port is busy, or than a lane by itself."""
        nodes = sum(each.experts_us for each in exchanges)
        links = sum(each.links_us for each in exchanges)
        alone = max(host + each.total_us for host, each in zip(hosts, exchanges, strict=True))
        return max(sum(hosts), nodes, links, alone, self._cores_us(hosts, lanes))

    def _cores_us(self, hosts: Sequence[float], lanes: Sequence[float]) -> float:
        """What both lanes take of the cores that host and workers share."""
        host = self.flock.host
        machine = self.flock.machines.get(host.machine)
        if machine is None:
            return 0.0
        work = sum(hosts) * host.cores
        for rows in lanes:
            for node, stripes in zip(self.flock.nodes, self.stripes, strict=True):
                if node.machine == host.machine:
                    alone_us = self.node_us(node, stripes, rows) / self._crowding(node)
                    work += alone_us * node.cores
        return work / machine.cores


def is_away(flock: Flock, node: Computer) -> bool:
    """Whether there is a wire between the host and a node; there is none within a machine."""
    return not node.machine or node.machine != flock.host.machine or node.wired


def _pass_us(num_bytes: float, port: Computer) -> float:
    """How long a port is busy with so many bytes."""
    return max(0.0, num_bytes - port.burst_bytes) * 8 / port.link_gbit_per_s / 1e3
