"""How fast workers without any weights get their slices from the host, and how fast they start again.

    python benchmarks/offline/fetch_weights.py [--workers 2] [--megabytes 400] [--repeats 3]

Random bytes in the shape of DeepSeek-V3.2's experts, workers on this machine that may not open the host's
folder, and three starts in turns, each with new worker processes: with an empty node cache, with a full one,
and with ``share_folder``. A worker hashes every byte on one thread, so SHA-256 of one thread is the ceiling,
times the workers while there are cores for them. It verifies that the first start moves every byte once and
the others none. CPU seconds are told beside the wall's, as they mean something on a busy machine too. One
JSON line at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from duckllm.bench.machine import commit, cpu_name
from duckllm.cluster.local import LocalCluster
from duckllm.config import ClusterConfig, available_cores
from duckllm.moe.placement import plan_workers
from duckllm.weights import formats
from duckllm.weights.cache_folder import CACHE_VARIABLE
from duckllm.weights.manifest import ExpertLayer, Manifest
from duckllm.weights.safetensors_file import build_header

HIDDEN, EXPERTS, STRIPES, TOP_K = 7168, 64, 8, 8


def make_model(folder: Path, num_layers: int) -> Manifest:
    """A manifest of expert files of random bytes, of which nothing is ever computed."""
    unit_bytes = formats.unit_bytes(HIDDEN, "fp9")
    layers = {}
    for layer in range(num_layers):
        data = np.random.default_rng(layer).bytes(EXPERTS * STRIPES * unit_bytes)
        units = np.frombuffer(data, np.uint8).reshape(EXPERTS, STRIPES, unit_bytes)
        path = folder / f"experts-{layer:05d}.safetensors"
        path.write_bytes(build_header({"units": ("U8", units.shape)}, {}, 4096) + units.tobytes())
        hashes = (hashlib.sha256(units[:, stripe].tobytes()).hexdigest() for stripe in range(STRIPES))
        layers[layer] = ExpertLayer(path.name, path.stat().st_size, tuple(hashes))
    return Manifest(
        folder=folder,
        format="fp9",
        architecture="Random",
        model_type="random",
        source={},
        hidden_size=HIDDEN,
        moe_intermediate_size=16 * STRIPES,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        num_stripes=STRIPES,
        unit_bytes=unit_bytes,
        config_sha256="",
        host_files={},
        expert_layers=layers,
        created_by="benchmark",
    )


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start(manifest: Manifest, workers: int, share_folder: bool) -> dict[str, float]:
    """Seconds from the plans to the last READY, CPU seconds meanwhile, and bytes sent."""
    # The stored format, so that no format is measured on what is no weight.
    plans = plan_workers(manifest, workers, max_step_tokens=8, weight_format="fp9")
    with LocalCluster(ClusterConfig(workers=workers, share_folder=share_folder)) as cluster:
        before_s = [cpu_s(pid) for pid in cluster.pids]
        host_s, start_s = time.process_time(), time.perf_counter()
        connections = cluster.connect(plans)
        figures = {
            "s": time.perf_counter() - start_s,
            "host_cpu_s": time.process_time() - host_s,
            "workers_cpu_s": sum(map(cpu_s, cluster.pids)) - sum(before_s),
            "bytes": sum(connection.fetched_bytes for connection in connections),
        }
        for connection in connections:
            connection.close()
    return figures


def sha256_gb_per_s() -> float:
    """The best of some hashes of 32 MiB on one thread."""
    data, seconds = bytes(32 << 20), []
    for _ in range(10):
        start_s = time.perf_counter()
        hashlib.sha256(data)
        seconds.append(time.perf_counter() - start_s)
    return len(data) / min(seconds) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, cache = Path(name) / "model", Path(name) / "cache"
        folder.mkdir()
        os.environ[CACHE_VARIABLE] = str(cache)
        layer_bytes = EXPERTS * STRIPES * formats.unit_bytes(HIDDEN, "fp9")
        manifest = make_model(folder, max(1, round(arguments.megabytes * 1e6 / layer_bytes)))
        num_bytes = layer_bytes * len(manifest.expert_layers)
        ceiling = sha256_gb_per_s()
        cores = min(arguments.workers, available_cores())
        print(f"{num_bytes / 1e6:.0f} MB; SHA-256 {ceiling:.2f} GB/s a thread, {cores} at once")
        runs: dict[str, list[dict[str, float]]] = {"fetched": [], "cached": [], "shared": []}
        for _ in range(arguments.repeats):
            shutil.rmtree(cache, ignore_errors=True)
            for kind, results in runs.items():
                figures = start(manifest, arguments.workers, kind == "shared")
                assert figures["bytes"] == (num_bytes if kind == "fetched" else 0), (kind, figures)
                results.append(figures)
    result: dict[str, object] = {
        "benchmark": "offline/fetch_weights",
        "commit": commit(),
        "machine": cpu_name(),
        "workers": arguments.workers,
        "repeats": arguments.repeats,
        "bytes": num_bytes,
        "sha256_gb_per_s": round(ceiling, 2),
    }
    for kind, results in runs.items():
        middle = {name: median(each[name] for each in results) for name in results[0]}
        rate = num_bytes / middle["s"] / 1e9
        per_gb = {name: middle[name] / num_bytes * 1e9 for name in ("host_cpu_s", "workers_cpu_s")}
        print(
            f"{kind}: {middle['s']:.2f} s, {rate:.2f} GB/s, {rate / ceiling / cores:.0%} of the ceiling; for "
            f"each GB {per_gb['host_cpu_s']:.2f} CPU s here, {per_gb['workers_cpu_s']:.2f} of the workers"
        )
        result[kind] = {"s": round(middle["s"], 3)} | {name: round(each, 3) for name, each in per_gb.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
