"""FP8 linear layers of DeepSeek-V3.2's host on a GPU, against the card's memory and against other libraries.

    python benchmarks/gpu/fp8_linear.py [--rows 1 2 16]

Each shape's product is verified against float64, then timed as a captured graph over several weights in
turn, which together are far larger than the L2 cache. The ceiling is a copy kernel's bandwidth, bytes read
and written, of the same run. Where a kernel may start before the one in front of it has ended (compute
capability 9.0), these do; "behind another kernel" is the time of a product and of the kernel that makes its
rows and lets it start, less that kernel's alone. Beside it: torch._scaled_mm with a scale for each row (its
weights are e4m3 too, its activations are rounded to e4m3), and cuBLAS with BF16 weights, which are twice
the bytes. Prints the share of the ceiling of each shape, and weighted by the bytes of all layers, of which
those of one input are one weight; behind them these one by one. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from duckllm.bench.machine import commit
from duckllm.kernels.fp8_linear import multiply, to_half_rows


@dataclass(frozen=True)
class Layer:
    """A weight of the host, and how many layers have it: none, where it is a part of another."""

    name: str
    out_features: int
    in_features: int
    count: int

    @property
    def num_bytes(self) -> int:
        """Of the weight."""
        return self.out_features * self.in_features


# Layers of one input are one weight: of those whose scales begin within a block of 128 rows, one is the last.
LAYERS = (
    Layer("q_a, indexer k, kv_a", 1536 + 128 + 576, 7168, 61),
    Layer("q_b, indexer q", 24576 + 8192, 1536, 61),
    Layer("o", 7168, 16384, 61),
    Layer("shared gate, up", 4096, 7168, 58),
    Layer("shared down", 7168, 2048, 58),
    Layer("dense gate, up", 36864, 7168, 3),
    Layer("dense down", 7168, 18432, 3),
)
SEPARATE_LAYERS = (
    Layer("q_a", 1536, 7168, 0),
    Layer("indexer k", 128, 7168, 0),
    Layer("kv_a", 576, 7168, 0),
    Layer("q_b", 24576, 1536, 0),
    Layer("indexer q", 8192, 1536, 0),
)
ROTATE_BYTES = 400_000_000  # several times any card's L2 cache
REPEATS = 15
WARM_SECONDS = 0.03


def graph_us(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one call, microseconds, in a graph of all of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    # The first milliseconds after other work are up to a tenth slower.
    deadline = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < deadline:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 1000 * statistics.median(times) / len(calls)


def copy_bytes_per_us() -> float:
    """Bytes that a kernel reads and writes."""
    source = torch.ones(1 << 29, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_us([lambda: torch.add(source, 1.0, out=target)])


def measure(layer: Layer, num_rows: int) -> dict[str, float]:
    """Microseconds of each way."""
    out_features, in_features = layer.out_features, layer.in_features
    copies = max(2, ROTATE_BYTES // layer.num_bytes + 1)
    codes = [
        torch.randint(0, 120, (out_features, in_features), dtype=torch.uint8, device="cuda")
        for _ in range(copies)
    ]
    scales = torch.rand(-(-out_features // 128), -(-in_features // 128), device="cuda")
    x = torch.randn(num_rows, in_features, device="cuda").bfloat16()
    rows = to_half_rows(x)

    spread = scales.double().repeat_interleave(128, 0)[:out_features].repeat_interleave(128, 1)
    weight = codes[0].view(torch.float8_e4m3fn).double() * spread[:, :in_features]
    wanted = x.double() @ weight.T
    y = multiply(rows, codes[0], scales, torch.float32)
    assert (y - wanted).norm() <= 1e-6 * wanted.norm(), "the product is wrong"
    del weight, wanted, spread

    bf16 = torch.bfloat16
    times = {"ours": graph_us([lambda w=w: multiply(rows, w, scales, bf16) for w in codes])}
    both = graph_us([lambda w=w: multiply(to_half_rows(x), w, scales, bf16) for w in codes])
    times["x to f16"] = graph_us([lambda: to_half_rows(x)] * 20)
    times["behind another kernel"] = both - times["x to f16"]
    fp8 = [w.view(torch.float8_e4m3fn) for w in codes]
    padded = torch.zeros(max(16, -(-num_rows // 16) * 16), in_features, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones(padded.shape[0], 1, device="cuda")
    per_row = torch.ones(1, out_features, device="cuda")
    try:
        times["torch._scaled_mm"] = graph_us(
            [lambda w=w: torch._scaled_mm(padded, w.T, one, per_row, out_dtype=bf16) for w in fp8]
        )
    except RuntimeError as error:
        print(f"torch._scaled_mm refuses {layer.name}: {str(error).splitlines()[0]}")
    del fp8
    wide = [torch.randn(out_features, in_features, device="cuda", dtype=bf16) for _ in range(copies)]
    times["BF16 cuBLAS"] = graph_us([lambda w=w: x @ w.T for w in wide])
    return times


def main() -> None:
    """Prints a table for each number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 16])
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bytes_per_us()
    card = torch.cuda.get_device_name()
    print(f"{card}: a copy kernel moves {bandwidth / 1e6:.2f} TB/s, commit {commit()}")
    result: dict[str, object] = {"benchmark": "gpu/fp8_linear", "device": card, "commit": commit()}
    result["copy_tb_per_s"] = round(bandwidth / 1e6, 3)
    for num_rows in options.rows:
        print(f"\nM = {num_rows}: microseconds, and the share of the copy bandwidth")
        total_us = total_bytes = 0.0
        shares = {}
        for layer in LAYERS + SEPARATE_LAYERS:
            times = measure(layer, num_rows)
            floor_us = layer.num_bytes / bandwidth
            shares[layer.name] = round(floor_us / times["ours"], 3)
            others = ", ".join(f"{name} {us:.2f}" for name, us in times.items() if name != "ours")
            print(
                f"  {layer.name:20} [{layer.out_features}, {layer.in_features}]: floor {floor_us:.2f}, "
                f"ours {times['ours']:.2f} ({floor_us / times['ours']:.0%}), {others}",
                flush=True,
            )
            total_us += layer.count * times["ours"]
            total_bytes += layer.count * layer.num_bytes
        weighted = total_bytes / bandwidth / total_us
        print(f"  all layers, by their bytes: {total_us / 1000:.2f} ms, {weighted:.0%} of the copy bandwidth")
        result[f"rows_{num_rows}"] = {"weighted_share": round(weighted, 3), "shares": shares}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
