"""What it costs a decode step on a GPU to have the host compute its experts, without the computing.

    python benchmarks/gpu/round_trip.py [--layers 58] [--hidden 7168] [--top-k 8] [--rows 1 2]

Layers in one captured graph, each of which hands its activations, experts and weights to the host and takes
the sum back. An echo answers: what comes back of the last layer must be what was sent by the first. Beside it
an answer of zeros, for which the CPU reads nothing, and the same layers with Python between them: copies to
pinned memory, an event, and a copy back. Medians over replays, us for each round trip; the launch of the
graph and the wake-up of the thread are in it. The floor is printed too: what a kernel takes in a graph, and
the bytes over the bus at the speed of a large copy of this run. One JSON line at the end.
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


def median_us(call: Callable[[], object], count: int) -> tuple[float, float]:
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


class RoundTrips:
    """Layers that have nothing but experts, which the host computes.

    Args:
        num_rows: T.
        num_layers: In the graph.
        hidden_size: H.
        top_k: K.
        server: Answers.
    """

    def __init__(
        self, num_rows: int, num_layers: int, hidden_size: int, top_k: int, server: _native.LaneServer
    ) -> None:
        boxes = Mailboxes.new(1, num_rows, hidden_size, top_k, torch.device("cuda"))
        self._experts = DeviceExperts(Echo(), boxes, boxes.exchange(server), kernels)
        self.x = torch.randn(num_rows, hidden_size, device="cuda")
        self._ids = torch.randint(0, 256, (num_rows, top_k), device="cuda", dtype=torch.int32)
        self._weights = torch.rand(num_rows, top_k, device="cuda")
        self._num_rows, self._num_layers = num_rows, num_layers
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph), self._experts.record() as self._program:
            self.y = self.layers()

    def layers(self) -> torch.Tensor:
        """Each layer's experts take what the last one's gave."""
        y = self.x
        for layer in range(self._num_layers):
            y = self._experts.submit(layer, y, self._ids, self._weights).wait()
        return y

    def replay(self) -> None:
        """The same in one graph."""
        self._experts.run(self._program, (self._num_rows,), self._graph.replay)


def main() -> None:
    """Prints a line for each number of rows, and one in JSON."""
    parser = argparse.ArgumentParser(description="Round trips of a captured graph's layers to the host.")
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    torch.manual_seed(0)
    card, sizes = torch.cuda.get_device_name(), (options.layers, options.hidden, options.top_k)
    print(f"{card}, {options.layers} layers, hidden size {options.hidden}, commit {commit()}")
    word = torch.zeros(1, device="cuda")
    launch_us = graph_us([word.zero_] * 100)
    print(f"a kernel in a graph takes {launch_us:.2f} us; there are two for each layer")
    result: dict[str, object] = {"benchmark": "gpu/round_trip", "device": card, "commit": commit()}
    result |= {**vars(options), "launch_us": round(launch_us, 2)}
    for rows in options.rows:
        echo = RoundTrips(rows, *sizes, _native.echo_server(zeros=False))
        echo.replay()
        assert torch.equal(echo.y, echo.x), "something else came back than was sent"
        zeros = RoundTrips(rows, *sizes, _native.echo_server())
        zeros.replay()
        assert not zeros.y.any(), "something else than zeros came back"
        bus_us = copy_us(echo.x.nbytes)
        (echo_us, echo_95), (zeros_us, zeros_95), (python_us, python_95) = (
            median_us(call, options.layers) for call in (echo.replay, zeros.replay, echo.layers)
        )
        print(
            f"  {rows} rows, {echo.x.nbytes} bytes each way: echo {echo_us:.1f} us (95 %: {echo_95:.1f}), "
            f"zeros {zeros_us:.1f} us ({zeros_95:.1f}), with Python and events {python_us:.1f} us "
            f"({python_95:.1f}); bytes over the bus {bus_us:.1f} us",
            flush=True,
        )
        measured = {"echo_us": echo_us, "zeros_us": zeros_us, "python_us": python_us, "bus_us": bus_us}
        result[f"{rows} rows"] = {name: round(value, 2) for name, value in measured.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
