"""What a step costs the host of a simulated flock, by its own thread, and what follows for a real one.

Called by ``duckllm simulate``. Every step's sum is checked. CPU time is the thread's own clock, so that it
holds on a machine whose cores the stand-ins share; wall time does not (docs/simulator.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from duckllm.config import count_of
from duckllm.simulate.flock import SimulatedFlock, Submitted, simulated_flock
from duckllm.simulate.nodes import ExpertLayers, HostCost, Node, step_us

PARTS = ("pack", "send", "sleep", "receive", "combine")  # csrc/transport/host_time.h
WARM_UP_STEPS = 20
Progress = Callable[[str, float, float], None]


class WrongSumError(RuntimeError):
    """A step's sum is not that of its workers' answers: a fault of ours."""

    def __init__(self, num_workers: int, num_tokens: int) -> None:
        super().__init__(
            f"sum: got other numbers than {num_workers} workers answered for {num_tokens} rows, "
            "expected the same to the last bit"
        )


@dataclass(frozen=True)
class Point:
    """Steps of one size on one number of workers, medians, microseconds.

    Args:
        num_workers: W.
        num_tokens: T.
        cpu_us: CPU time of the host's thread by part, in :data:`PARTS`.
        host_us: All of them.
        python_us: Its CPU time around the transport, which a host with captured graphs has not.
        wall_us: From a step's submission to its sum.
        others_us: CPU time of this process's other threads, the stand-ins.
        num_sleeps: How often the host slept in a step.
        flock_us: The step by the model of nodes and links alone.
        with_host_us: Likewise with the host's CPU time, on a core of its own.
    """

    num_workers: int
    num_tokens: int
    cpu_us: dict[str, float]
    host_us: float
    python_us: float
    wall_us: float
    others_us: float
    num_sleeps: float
    flock_us: float
    with_host_us: float

    @property
    def cost(self) -> HostCost:
        """What the host needs for one worker."""
        send = self.cpu_us["pack"] + self.cpu_us["send"]
        return HostCost(send / self.num_workers, max(0.0, self.host_us - send) / self.num_workers)


@dataclass(frozen=True)
class Bend:
    """From how many workers on a step of so many rows gets no faster.

    Args:
        num_tokens: T.
        flock_workers: With the nodes and links alone.
        flock_us: The step then.
        host_workers: With the host's CPU time too.
        host_us: The step then.
        nearest_measured: The measured number of workers that is nearest to those: where they lie outside of
            all measured ones, the host's cost is of it.
        is_between: Whether they lie among the measured ones.
    """

    num_tokens: int
    flock_workers: int
    flock_us: float
    host_workers: int
    host_us: float
    nearest_measured: int
    is_between: bool


@dataclass(frozen=True)
class Layers:
    """Layers one after the other, of which the host computes its own part for ``layer_us`` each.

    Args:
        num_workers: W.
        num_tokens: T.
        one_us: Wall time of a layer, all rows in one step.
        lanes_us: With half of the rows in each of two lanes.
    """

    num_workers: int
    num_tokens: int
    one_us: float
    lanes_us: float


def measure_point(
    flock: SimulatedFlock, nodes: Sequence[Node], num_tokens: int, num_steps: int, host_gbit_per_s: float
) -> Point:
    """Measures steps of one size.

    Args:
        flock: On these nodes.
        nodes: The nodes.
        num_tokens: T.
        num_steps: Steps that count.
        host_gbit_per_s: The flock's.

    Raises:
        WrongSumError: A sum is wrong.
        WorkerLostError: A worker is lost for good.
    """
    transport = flock.transport
    for _ in range(WARM_UP_STEPS):
        _check(flock, flock.submit(flock.choose(num_tokens)))
    parts: dict[str, list[float]] = {name: [] for name in PARTS}
    totals, pythons, walls, others, sleeps = [], [], [], [], []
    transport.measure_host_time(True)
    try:
        for _ in range(num_steps):
            topk_ids = flock.choose(num_tokens)
            before = transport.host_time()
            process, thread, start = time.process_time(), time.thread_time(), time.perf_counter()
            step = flock.submit(topk_ids)
            total = flock.wait(step)
            wall_us = 1e6 * (time.perf_counter() - start)
            thread_us = 1e6 * (time.thread_time() - thread)
            process_us = 1e6 * (time.process_time() - process)
            if not flock.is_right(step, total):
                raise WrongSumError(len(nodes), num_tokens)
            spent = [
                (now[0] - then[0], now[2] - then[2])
                for now, then in zip(transport.host_time(), before, strict=True)
            ]
            for name, (cpu_ns, _) in zip(PARTS, spent, strict=True):
                parts[name].append(cpu_ns / 1e3)
            totals.append(sum(cpu_ns for cpu_ns, _ in spent) / 1e3)
            sleeps.append(float(spent[PARTS.index("sleep")][1]))
            pythons.append(max(0.0, thread_us - totals[-1]))
            walls.append(wall_us)
            others.append(max(0.0, process_us - thread_us))
    finally:
        transport.measure_host_time(False)
    measured = Point(
        len(nodes),
        num_tokens,
        {name: median(values) for name, values in parts.items()},
        median(totals),
        median(pythons),
        median(walls),
        sum(others) / len(others),  # the kernel counts what other threads do in ticks
        sum(sleeps) / len(sleeps),
        step_us(flock.model, nodes, num_tokens, host_gbit_per_s),
        0.0,
    )
    with_host_us = step_us(flock.model, nodes, num_tokens, host_gbit_per_s, measured.cost)
    return Point(**{**measured.__dict__, "with_host_us": with_host_us})


def measure_layers(
    flock: SimulatedFlock, num_tokens: int, num_layers: int, layer_us: float, *, lanes: bool
) -> float:
    """Microseconds of a layer where the host's own part takes so long, which is slept through.

    Args:
        flock: The flock.
        num_tokens: T, two at least with lanes.
        num_layers: Layers, all of them checked.
        layer_us: The host's part for all rows; a lane's takes as long, as it reads the same weights.
        lanes: Whether half of the rows are on the workers while the host has the others.

    Raises:
        WrongSumError: A sum is wrong.
    """
    halves = [num_tokens // 2, num_tokens - num_tokens // 2] if lanes else [num_tokens]
    topk_ids = [[flock.choose(rows) for rows in halves] for _ in range(num_layers)]
    layers = flock.model.layers
    in_flight: list[Submitted | None] = [None] * len(halves)
    start = time.perf_counter()
    for number in range(num_layers):
        for lane in range(len(halves)):
            before = in_flight[lane]
            if before is not None:
                _check(flock, before)
            time.sleep(layer_us / 1e6)
            in_flight[lane] = flock.submit(topk_ids[number][lane], layers[number % len(layers)], lane)
    for step in in_flight:
        if step is not None:
            _check(flock, step)
    return 1e6 * (time.perf_counter() - start) / num_layers


def measure(
    model: ExpertLayers,
    node: Node,
    workers: Sequence[int],
    tokens: Sequence[int],
    *,
    host_gbit_per_s: float,
    num_steps: int,
    layer_us: float = 0.0,
    slow: dict[int, float] | None = None,
    progress: Progress = lambda name, done, total: None,
) -> tuple[list[Point], list[Layers]]:
    """Measures each number of workers with each size of steps.

    Args:
        model: The experts.
        node: Every worker's node.
        workers: Numbers of workers.
        tokens: Rows of a step.
        host_gbit_per_s: The host's port; 0 takes no time.
        num_steps: Steps of each.
        layer_us: The host's own part of a layer; above 0, lanes are measured too where there are two rows.
        slow: How many times as long workers compute, by their number; those that are not there are left out.
        progress: Told what is measured now, and how much is done.

    Raises:
        ConfigError: More workers than stripes.
        WrongSumError: A sum is wrong.
    """
    points: list[Point] = []
    layers: list[Layers] = []
    total = len(workers) * len(tokens)
    for num_workers in workers:
        factors = [(slow or {}).get(worker, 1.0) for worker in range(num_workers)]
        nodes = [node.slower(factor) for factor in factors]
        with simulated_flock(
            model, nodes, max_step_tokens=max(tokens), host_gbit_per_s=host_gbit_per_s
        ) as flock:
            for num_tokens in tokens:
                progress(
                    f"{count_of(num_workers, 'worker')}, {count_of(num_tokens, 'row')}", len(points), total
                )
                points.append(measure_point(flock, nodes, num_tokens, num_steps, host_gbit_per_s))
                if layer_us > 0 and num_tokens >= 2:
                    one, two = (
                        measure_layers(flock, num_tokens, num_steps, layer_us, lanes=lanes)
                        for lanes in (False, True)
                    )
                    layers.append(Layers(num_workers, num_tokens, one, two))
    return points, layers


def find_bends(
    model: ExpertLayers, node: Node, points: Sequence[Point], host_gbit_per_s: float
) -> list[Bend]:
    """From how many workers on steps get no faster, by size.

    The host's cost of a worker is taken between measured numbers of them by a straight line, and beyond as at
    the last one.
    """
    bends = []
    for num_tokens in sorted({point.num_tokens for point in points}):
        known = sorted(
            (point for point in points if point.num_tokens == num_tokens), key=lambda each: each.num_workers
        )
        flock, host = [], []
        for num_workers in range(1, model.num_stripes + 1):
            nodes = [node] * num_workers
            flock.append((step_us(model, nodes, num_tokens, host_gbit_per_s), num_workers))
            cost = _cost_of(known, num_workers)
            host.append((step_us(model, nodes, num_tokens, host_gbit_per_s, cost), num_workers))
        (flock_us, flock_workers), (host_us, host_workers) = min(flock), min(host)
        measured = [point.num_workers for point in known]
        nearest = min(measured, key=lambda count: abs(count - host_workers))
        is_between = measured[0] <= host_workers <= measured[-1]
        bends.append(Bend(num_tokens, flock_workers, flock_us, host_workers, host_us, nearest, is_between))
    return bends


def _cost_of(known: Sequence[Point], num_workers: int) -> HostCost:
    below = [point for point in known if point.num_workers <= num_workers]
    above = [point for point in known if point.num_workers >= num_workers]
    first, last = (below or above)[-1 if below else 0], (above or below)[0 if above else -1]
    if first.num_workers == last.num_workers:
        return first.cost
    share = (num_workers - first.num_workers) / (last.num_workers - first.num_workers)
    return HostCost(
        first.cost.send_us + share * (last.cost.send_us - first.cost.send_us),
        first.cost.receive_us + share * (last.cost.receive_us - first.cost.receive_us),
    )


def _check(flock: SimulatedFlock, step: Submitted) -> None:
    if not flock.is_right(step, flock.wait(step)):
        raise WrongSumError(len(flock.transport.addresses), step.num_tokens)
