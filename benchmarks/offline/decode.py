"""Decode speed of a whole model with workers on this machine, and the memory it takes.

    python benchmarks/offline/decode.py [--model FOLDER] [--workers 1 2] [--tokens 128] [--rounds 7]

The program

1. starts one LLM per number of workers, and verifies that all of them, and the experts in this process, give
   the same tokens,
2. measures in turns, a reply of ``--tokens`` tokens each, and takes medians: what else the machine does then
   falls on all alike,
3. prints the ceiling that memory sets: the bytes that a token reads (host weights, units of the
   chosen experts) at the speed of a plain read by one thread, measured in the same rounds. A small model is
   far below it: its time goes into starting several hundred small operations, and into waking workers. Other
   programs on the machine show as a gap between the fastest round and the median,
4. prints peak memory (VmHWM, mapped weights included) of the host and of each worker, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import time
from pathlib import Path

import numpy as np

from duckllm import LLM, SamplingParams
from duckllm.bench.machine import commit, cpu_name
from duckllm.config import available_cores
from duckllm.weights.host_tensors import HostTensors
from duckllm.weights.manifest import Manifest
from duckllm.weights.resolve import resolve_model

QUESTION = [{"role": "user", "content": "List all prime numbers below 400."}]
READ_BYTES = 512 << 20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="model folder; the demo model if left out")
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, 2], help="numbers of workers to compare"
    )
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a reply")
    parser.add_argument("--rounds", type=int, default=7, help="replies measured for each number of workers")
    parser.add_argument("--wire-dtype", default="f32", choices=["f32", "bf16"])
    return parser.parse_args()


def bytes_per_token(folder: Path) -> tuple[int, int]:
    """What one token reads: the host's weights, and the units of its experts in all layers.

    The host reads FP8 and BF16 matrices as they are stored, and the rest in float32: norms and the key and
    value up-projections, and what a checkpoint stores in another type.
    """
    manifest = Manifest.load(folder)
    config = json.loads((folder / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    used = ("model.norm", "lm_head", *(f"model.layers.{layer}." for layer in range(num_layers)))
    tensors = HostTensors(folder)
    names = [name for name in tensors.names() if name.startswith(used) and "scale" not in name]
    host = sum(_bytes_read(tensors, name) for name in names)
    moe_layers = sum(layer < num_layers for layer in manifest.expert_layers)
    experts = moe_layers * manifest.num_experts_per_tok * manifest.num_stripes * manifest.unit_bytes
    return host, experts


def _bytes_read(tensors: HostTensors, name: str) -> int:
    size = math.prod(tensors.shape(name))
    if "norm" in name or name.endswith("kv_b_proj.weight"):
        return 4 * size
    return min(tensors.get(name).element_size(), 4) * size


def read_gb_per_s(memory: np.ndarray) -> float:
    start = time.perf_counter()
    memory.max()
    return memory.nbytes / (time.perf_counter() - start) / 1e9


def peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    arguments = parse_arguments()
    folder = resolve_model(arguments.model)
    params = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
    host_bytes, expert_bytes = bytes_per_token(folder)
    llms = {
        workers: LLM(folder, workers=workers, wire_dtype=arguments.wire_dtype)
        for workers in arguments.workers
    }
    try:
        with LLM(folder, workers=0) as reference:
            expected = reference.chat(QUESTION, params)[0].outputs[0].token_ids
        for workers, llm in llms.items():
            if (
                arguments.wire_dtype == "f32"
                and llm.chat(QUESTION, params)[0].outputs[0].token_ids != expected
            ):
                raise SystemExit(f"{workers} workers give other tokens than this process: nothing measured")
        host_peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        memory = np.ones(READ_BYTES, np.uint8)  # not zeros, whose pages would all be the same one
        speeds: dict[int, list[float]] = {workers: [] for workers in llms}
        firsts: dict[int, list[float]] = {workers: [] for workers in llms}
        reads = []
        for _ in range(arguments.rounds):
            reads.append(read_gb_per_s(memory))
            for workers, llm in llms.items():
                metrics = llm.chat(QUESTION, params)[0].metrics
                speeds[workers].append(metrics.decode_tokens_per_s or 0.0)
                firsts[workers].append(metrics.time_to_first_token_s or 0.0)
        peaks = {
            workers: [peak_bytes(pid) for pid in llm.cluster_info().pids] for workers, llm in llms.items()
        }
    finally:
        for llm in llms.values():
            llm.close()
    read = statistics.median(reads)
    ceiling = read * 1e9 / (host_bytes + expert_bytes)
    isa = next(iter(llms.values())).cluster_info().isas[0]
    print(f"{cpu_name()}, {available_cores()} cores, {isa}; {len(expected)} tokens a reply, verified")
    print(f"a token reads {host_bytes / 1e6:.1f} MB on the host and {expert_bytes / 1e6:.1f} MB of experts;")
    print(f"at {read:.1f} GB/s (one thread) that allows {ceiling:.0f} tok/s")
    print("workers  tok/s  of ceiling  (fastest)  first token ms  peak MB of each worker")
    lines = []
    for workers in llms:
        speed = statistics.median(speeds[workers])
        line = {
            "workers": workers,
            "tokens_per_s": round(speed, 1),
            "fastest_tokens_per_s": round(max(speeds[workers]), 1),
            "of_ceiling": round(speed / ceiling, 3),
            "time_to_first_token_s": round(statistics.median(firsts[workers]), 4),
            "worker_peak_bytes": peaks[workers],
        }
        lines.append(line)
        megabytes = " ".join(f"{peak / 1e6:.0f}" for peak in peaks[workers])
        print(
            f"{workers:7d} {speed:6.1f} {speed / ceiling:11.1%} {max(speeds[workers]):10.1f}"
            f" {1e3 * statistics.median(firsts[workers]):15.1f}  {megabytes}"
        )
    print(f"peak memory of the host with {len(llms)} models loaded: {host_peak_bytes / 1e6:.0f} MB")
    summary = {
        "benchmark": "offline/decode",
        "commit": commit(),
        "machine": f"{cpu_name()}, {available_cores()} cores",
        "isa": isa,
        "model": folder.name,
        "wire_dtype": arguments.wire_dtype,
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "read_gb_per_s": round(read, 1),
        "ceiling_tokens_per_s": round(ceiling, 1),
        "host_peak_bytes": host_peak_bytes,
        "runs": lines,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
