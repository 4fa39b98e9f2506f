"""What it costs a decode step on a GPU to have the host compute its experts, without the computing.

    python benchmarks/gpu/round_trip.py [--layers 58] [--hidden 7168] [--top-k 8] [--rows 1 2]

Layers in one captured graph, each of which hands its activations, experts and weights to the host and takes
the sum back; an echo answers. What comes back of the last layer must be what was sent by the first. Beside it
the same layers with Python between them: copies to pinned memory, an event, and a copy back. Medians over
replays, us for each round trip. The floor is printed too: what a kernel takes in a graph, and the bytes over
the bus at the speed of a large copy of this run. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from fp8_linear import graph_us

from duckllm import _native
from duckllm.bench.machine import commit
from duckllm.kernels import exchange as kernels
from duckllm.moe.device_experts import DeviceExperts, Mailboxes

REPEATS = 50


class Echo:
    """An executor of CPU tensors that returns what it gets."""

    def submit(  # noqa: D102 - as ExpertExecutor
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, lane: int = 0
    ) -> Echo:
        self._x = x
        return self

    def wait(self) -> torch.Tensor:  # noqa: D102 - as PendingStep
        return self._x


def median_us(call: Callable[[], None], count: int) -> tuple[float, float]:
    """Time of one of ``count`` round trips of a call, microseconds: the median and the 95th percentile."""
    times = []
    for _ in range(REPEATS + 5):
        start = time.perf_counter()
        call()
        torch.cuda.current_stream().synchronize()
        times.append((time.perf_counter() - start) * 1e6 / count)
    ordered = sorted(times[5:])
    return statistics.median(ordered), ordered[round(0.95 * (len(ordered) - 1))]


def copy_us(num_bytes: int) -> float:
    """A copy of pinned memory to the device and back, microseconds, by the size's share of large ones."""
    host = torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    large_us = graph_us(
        [lambda: device.copy_(host, non_blocking=True), lambda: host.copy_(device, non_blocking=True)]
    )
    return 2 * large_us * num_bytes / host.nbytes


def main() -> None:
    """Prints a line for each number of rows, and one in JSON."""
    parser = argparse.ArgumentParser(description="Round trips of a captured graph's layers to the host.")
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    torch.manual_seed(0)
    card = torch.cuda.get_device_name()
    print(f"{card}, {options.layers} layers, hidden size {options.hidden}, commit {commit()}")
    result: dict[str, object] = {
        "benchmark": "gpu/round_trip",
        "device": card,
        "commit": commit(),
        **vars(options),
    }
    word = torch.zeros(1, device="cuda")
    launch_us = graph_us([word.zero_] * 100)
    print(f"a kernel in a graph takes {launch_us:.2f} us; there are two for each layer")
    for rows in options.rows:
        boxes = Mailboxes.new(1, rows, options.hidden, options.top_k, torch.device("cuda"))
        exchange = boxes.exchange(_native.echo_server(zeros=False))
        experts = DeviceExperts(Echo(), boxes, exchange, kernels)
        x = torch.randn(rows, options.hidden, device="cuda")
        ids = torch.randint(0, 256, (rows, options.top_k), device="cuda", dtype=torch.int32)
        weights = torch.rand(rows, options.top_k, device="cuda")

        def layers(count: int = options.layers) -> torch.Tensor:
            y = x  # noqa: B023
            for layer in range(count):
                y = experts.submit(layer, y, ids, weights).wait()  # noqa: B023
            return y

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), experts.record() as program:
            y = layers()

        def captured(*arguments: object) -> None:
            experts.run(program, (rows,), graph.replay)  # noqa: B023

        captured()
        assert torch.equal(y, x), "something else came back than was sent"
        bus_us = copy_us(x.nbytes)
        (us, p95), (python_us, _) = (
            median_us(captured, options.layers),
            median_us(lambda: layers(), options.layers),
        )
        print(
            f"  {rows} rows, {x.nbytes} bytes each way: {us:.1f} us (95 %: {p95:.1f}), with Python and "
            f"events {python_us:.1f} us; bytes over the bus {bus_us:.1f} us",
            flush=True,
        )
        result[f"{rows} rows"] = {
            "us": round(us, 2),
            "p95_us": round(p95, 2),
            "python_us": round(python_us, 2),
            "bus_us": round(bus_us, 2),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
