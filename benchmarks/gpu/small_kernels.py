"""The small kernels of a host's decode step on a GPU, and the head, against the card's memory.

    python benchmarks/gpu/small_kernels.py [--rows 1 2 8]

Norms, gated activations, the router's gate and choice, dense linear layers, at DeepSeek-V3.2's and
Qwen3-30B-A3B's shapes. Each is verified, then timed in a captured graph of many calls, weights in turn that
together are far larger than the L2 cache. Beside the time of what reads weights: their bytes over a copy
kernel's bandwidth of the same run, and cuBLAS with x rounded to BF16 (which gives BF16). The other kernels
move some KB: an empty kernel's time in such a graph is their floor. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from fp8_linear import ROTATE_BYTES, copy_bytes_per_us, graph_us

from duckllm.bench.machine import commit
from duckllm.kernels.dense_linear import multiply_dense
from duckllm.kernels.route import route_by_sigmoid, route_by_softmax
from duckllm.kernels.rowwise import add_rms_norm, rms_norm, scale_by_sigmoid, silu_mul
from duckllm.kernels.workspace import Workspace

EPS = 1e-6
CALLS = 100


@dataclass(frozen=True)
class Dense:
    """A dense weight."""

    name: str
    out_features: int
    in_features: int
    dtype: torch.dtype = torch.bfloat16


DENSE = (
    Dense("DeepSeek head", 129280, 7168),
    Dense("Qwen3 head", 151936, 2048),
    Dense("DeepSeek gate", 256, 7168),
    Dense("DeepSeek gate, F32", 256, 7168, torch.float32),
    Dense("Qwen3 gate", 128, 2048),
    Dense("DeepSeek indexer weights", 64, 7168),
    Dense("Qwen3 q, k, v", 5120, 2048),
    Dense("Qwen3 o", 2048, 4096),
)


@triton.jit
def _nothing() -> None:
    pass


def assert_near(y: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Verifies within f32 arithmetic's rounding."""
    assert (y - wanted).norm() <= 1e-6 * wanted.norm(), f"{what} is wrong"


def measure_dense(dense: Dense, num_rows: int, workspace: Workspace) -> dict[str, float]:
    """Microseconds of each way, and the bytes of the weight."""
    shape = dense.out_features, dense.in_features
    num_bytes = shape[0] * shape[1] * dense.dtype.itemsize
    copies = max(2, min(CALLS, ROTATE_BYTES // num_bytes + 1))
    weights = [torch.randn(shape, device="cuda").to(dense.dtype) for _ in range(copies)]
    x = torch.randn(num_rows, shape[1], device="cuda")
    y = multiply_dense(x, weights[0], workspace)
    for first in range(0, shape[0], 1 << 14):
        rows = slice(first, first + (1 << 14))
        assert_near(y[:, rows], x.double() @ weights[0][rows].double().T, dense.name)
    rounded = x.to(dense.dtype)
    return {
        "us": graph_us([lambda w=w: multiply_dense(x, w, workspace) for w in weights]),
        "cublas_us": graph_us([lambda w=w: rounded @ w.T for w in weights]),
        "bytes": num_bytes,
    }


def small_kernels(num_rows: int) -> dict[str, Callable[[], object]]:
    """Calls of each kernel that reads no large weight, verified."""
    calls: dict[str, Callable[[], object]] = {"nothing": lambda: _nothing[(1,)]()}
    for width in (7168, 2048, 1536, 512):
        x, delta = torch.randn(2, num_rows, width, device="cuda")
        weight = torch.randn(width, device="cuda")
        wide = (x + delta).double()
        wanted = wide / (wide.square().mean(1, keepdim=True) + EPS).sqrt() * weight
        assert_near(add_rms_norm(x, (delta,), weight, EPS)[1].values, wanted, "the norm")
        assert_near(rms_norm(x + delta, weight, EPS).values, wanted, "the norm")
        calls[f"rms_norm {width}"] = lambda x=x, w=weight: rms_norm(x, w, EPS)
        if width in (7168, 2048):
            calls[f"add_rms_norm {width}"] = lambda x=x, d=delta, w=weight: add_rms_norm(x, (d,), w, EPS)
    for width in (2048, 18432):
        gate_up = torch.randn(num_rows, 2 * width, device="cuda")
        gate, up = gate_up.double().split(width, 1)
        assert_near(silu_mul(gate_up).values, gate * gate.sigmoid() * up, "the gated activation")
        calls[f"silu_mul {width}"] = lambda g=gate_up: silu_mul(g)
    y, gate = torch.randn(num_rows, 2048, device="cuda"), torch.randn(num_rows, 1, device="cuda")
    wanted = y * gate.double().sigmoid()
    scale_by_sigmoid(y, gate)
    assert_near(y, wanted, "the gate")
    calls["scale_by_sigmoid 2048"] = lambda: scale_by_sigmoid(y, gate)

    logits, bias = torch.randn(num_rows, 256, device="cuda"), torch.rand(256, device="cuda")
    choice = (logits.double().sigmoid() + bias).view(num_rows, 8, 32)
    groups = choice.topk(2)[0].sum(2).topk(4)[1]
    allowed = torch.full_like(choice, float("-inf")).scatter(
        1, groups[..., None].expand(-1, -1, 32), choice.gather(1, groups[..., None].expand(-1, -1, 32))
    )
    ids, weights = route_by_sigmoid(logits, bias, 8, 8, 4, True, 2.5)
    assert ids.tolist() == allowed.flatten(1).topk(8)[1].tolist(), "the router's choice is wrong"
    scores = logits.double().sigmoid().gather(1, ids.long())
    assert_near(weights, 2.5 * scores / scores.sum(1, keepdim=True), "the router's weights")
    calls["route_by_sigmoid 256"] = lambda: route_by_sigmoid(logits, bias, 8, 8, 4, True, 2.5)
    few = logits[:, :128]
    ids, weights = route_by_softmax(few, 8, True)
    assert ids.tolist() == few.topk(8)[1].tolist(), "the router's choice is wrong"
    assert_near(weights, few.double().gather(1, ids.long()).softmax(1), "the router's weights")
    calls["route_by_softmax 128"] = lambda: route_by_softmax(few, 8, True)
    return calls


def main() -> None:
    """Prints a table for each number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8])
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bytes_per_us()
    card = torch.cuda.get_device_name()
    print(f"{card}: a copy kernel moves {bandwidth / 1e6:.2f} TB/s, commit {commit()}")
    workspace = Workspace(torch.device("cuda"))
    result: dict[str, object] = {"benchmark": "gpu/small_kernels", "device": card, "commit": commit()}
    result["copy_tb_per_s"] = round(bandwidth / 1e6, 3)
    for num_rows in options.rows:
        print(f"\n{num_rows} rows: microseconds, of weights the floor of their bytes and cuBLAS beside them")
        times: dict[str, object] = {}
        for dense in DENSE:
            found = measure_dense(dense, num_rows, workspace)
            floor_us = found["bytes"] / bandwidth
            print(
                f"  {dense.name:26} {found['us']:8.2f}, floor {floor_us:.2f} ({floor_us / found['us']:.0%}), "
                f"cuBLAS {found['cublas_us']:.2f}",
                flush=True,
            )
            times[dense.name] = {"us": round(found["us"], 2), "share": round(floor_us / found["us"], 3)}
        for name, call in small_kernels(num_rows).items():
            us = graph_us([call] * CALLS)
            print(f"  {name:26} {us:8.2f}", flush=True)
            times[name] = round(us, 2)
        result[f"rows_{num_rows}"] = times
    print(json.dumps(result))


if __name__ == "__main__":
    main()
