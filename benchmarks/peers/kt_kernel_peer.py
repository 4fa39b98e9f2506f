"""kt-kernel's experts (KTransformers) as a peer: started by experts.py with its environment's Python.

The extension module is loaded by itself, for the package around it needs PyTorch and this does not. A step
goes through CPUInfer (submit and sync), as KTransformers calls it. Its workers keep a core each; the thread
that feeds them spins, and is given the cores that are left, where there are any.
"""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from block_formats import F32, GGML_TYPES, I64, RAWINT4_GROUP, Expert, from_bf16, to_bf16
from peer_side import Job, serve

# Operator by format and ISA; those of "avx512" are named after AMX and run without it.
OPERATORS = {
    ("FP8", "avx512"): "AMXFP8_MOE",
    ("FP8", "avx2"): "AVX2FP8_MOE",
    ("BF16", "avx512"): "AMXBF16_MOE",
    ("BF16", "avx2"): "AVX2BF16_MOE",
    ("INT8", "avx512"): "AMXInt8_MOE",
    ("RAWINT4", "avx512"): "AMXInt4_KGroup_MOE",
    ("RAWINT4", "avx2"): "AVX2RawInt4_MOE",
}
# The package's own order, most capable first, with the CPU flags that it asks for; AMX is left out.
AVX512_VARIANTS = {
    "avx512_bf16": {"avx512_vbmi", "avx512_bf16"},
    "avx512_vbmi": {"avx512_vbmi"},
    "avx512_vnni": {"avx512_vnni"},
    "avx512_base": set(),
}
BIND_TIMEOUT_S = 2.0
TOLERANCES = {"FP8": 2e-2, "BF16": 2e-2, "INT8": 6e-2, "RAWINT4": 3e-2, "Q8_0": 3e-2, "Q4_K": 3e-2}


def cpu_flags() -> set[str]:
    """The processor's, with avx512vbmi spelt as the package does."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return {flag.replace("avx512vbmi", "avx512_vbmi") for flag in line.split(":")[1].split()}
    return set()


def variant_of(isa: str, flags: set[str]) -> str:
    """The build of the extension for an ISA on a CPU with these flags."""
    if isa == "avx2":
        return "avx2"
    return next(name for name, needed in AVX512_VARIANTS.items() if needed <= flags)


def load(library: str, variant: str) -> ModuleType:
    """The extension module of the installed package in the folder ``library``."""
    path = next(Path(library).glob(f"_kt_kernel_ext_{variant}.*.so"))
    spec = importlib.util.spec_from_file_location("kt_kernel_ext", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} is no extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def leave_cores_to_workers(num_workers: int) -> None:
    """Keeps the other threads of this process off the cores that the pool's workers bind themselves to."""
    workers: dict[int, set[int]] = {}
    tasks: dict[int, str] = {}
    deadline = time.monotonic() + BIND_TIMEOUT_S
    while len(workers) < num_workers or any(len(cores) > 1 for cores in workers.values()):
        if time.monotonic() > deadline:
            return  # where they bind themselves to nothing there is nothing to keep clear of
        time.sleep(1e-3)  # they take their names and cores when they first run
        tasks = {int(task.name): (task / "comm").read_text() for task in Path("/proc/self/task").iterdir()}
        workers = {
            thread: os.sched_getaffinity(thread) for thread, name in tasks.items() if name.startswith("numa_")
        }
    free = os.sched_getaffinity(0).difference(*workers.values())
    if free:
        for thread in tasks.keys() - workers.keys():
            os.sched_setaffinity(thread, free)


class KtKernel:
    """One layer's experts in kt-kernel."""

    def __init__(self, job: Job, experts: list[Expert]) -> None:
        variant = variant_of(job.isa, cpu_flags())
        kt = load(job.library, variant)
        self.description = f"kt-kernel, {variant}"
        self.tolerance = TOLERANCES[job.weight_format]
        pool = kt.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [job.threads]
        self._infer = kt.CPUInfer(pool)
        leave_cores_to_workers(job.threads)
        self._on_gpu = np.zeros(job.num_experts, np.bool_)
        config = kt.moe.MOEConfig(
            job.num_experts, job.top_k, job.hidden_size, job.channels, self._on_gpu.ctypes.data
        )
        config.layer_idx, config.pool, config.max_len = 0, self._infer.backend_, max(job.most_rows, 32)
        self._source: list[object] = []
        self._moe = self._make(kt, config, job, experts)
        order = np.arange(job.num_experts, dtype=np.int64)
        self._infer.submit(self._moe.load_weights_task(order.ctypes.data))
        self._infer.sync()
        if job.weight_format not in GGML_TYPES:  # of those it does not make a copy of its own
            self._source.clear()

        rows = job.most_rows
        self._rows = np.zeros(1, np.int32)
        self._top_k = job.top_k
        self._ids = np.zeros((rows, job.top_k), np.int64)
        self._weights = np.full((rows, job.top_k), 1 / job.top_k, np.float32)
        self._x = to_bf16(np.random.default_rng(5).standard_normal((rows, job.hidden_size), np.float32))
        self._y = np.zeros((rows, job.hidden_size), np.uint16)

    def _make(self, kt: ModuleType, config: Any, job: Job, experts: list[Expert]) -> Any:
        """The operator with its source of weights, which must live until they are loaded."""
        names = ("gate", "up", "down")
        order = [expert % len(experts) for expert in range(job.num_experts)]
        if job.weight_format in GGML_TYPES:
            if job.channels % 256:
                raise ValueError(f"its GGUF path wants channels in 256s (QK_K), not {job.channels}")
            config.m_block, config.group_min_len, config.group_max_len = 32, 10, config.max_len
            config.hidden_type = kt.kvcache.ggml_type.BF16
            for which, name in enumerate(names):
                layer = np.stack([experts[number].stored[which] for number in order])
                setattr(config, f"{name}_proj", layer.ctypes.data)
                setattr(config, f"{name}_type", getattr(kt.kvcache.ggml_type, job.weight_format))
                self._source.append(layer)
            return kt.moe.MOE(config)
        operator = OPERATORS.get((job.weight_format, job.isa))
        if operator is None:
            raise ValueError(f"no {job.weight_format} operator for {job.isa}")
        if job.weight_format == "FP8" and job.channels % 128:
            raise ValueError(f"its FP8 path wants channels in 128s, not {job.channels}")
        if job.weight_format == "INT8":
            for which, name in enumerate(names):
                layer = np.stack([experts[number].stored[which] for number in order])
                setattr(config, f"{name}_proj", layer.ctypes.data)
                self._source.append(layer)
        else:
            for which, name in enumerate(names):
                setattr(
                    config, f"{name}_projs", [[experts[number].stored[which].ctypes.data for number in order]]
                )
                scales = [
                    experts[number].scales[which].ctypes.data if experts[0].scales else 0 for number in order
                ]
                setattr(config, f"{name}_scales", [scales])
            if job.weight_format == "FP8":
                config.quant_config.bits, config.quant_config.group_size = 8, 128
                config.quant_config.zero_point = False
            elif job.weight_format == "RAWINT4":
                config.quant_config.bits, config.quant_config.group_size = 4, RAWINT4_GROUP
                config.quant_config.zero_point = False
        return getattr(kt.moe, operator)(config)

    def _run(self, rows: int) -> None:
        self._rows[0] = rows
        where = (self._ids.ctypes.data, self._weights.ctypes.data, self._x.ctypes.data, self._y.ctypes.data)
        self._infer.submit(self._moe.forward_task(self._rows.ctypes.data, self._top_k, *where, False))
        self._infer.sync()

    def step(self, x: F32, ids: I64, weights: F32) -> F32:
        """The routed experts' weighted sum, of x rounded to bf16 and rounded to bf16."""
        rows = len(x)
        self._x[:rows], self._ids[:rows], self._weights[:rows] = to_bf16(x), ids, weights
        self._run(rows)
        return from_bf16(self._y[:rows])

    def timed(self, rows: int, ids: I64) -> float:
        """Seconds of a step."""
        self._ids[:rows] = ids
        start = time.perf_counter()
        self._run(rows)
        return time.perf_counter() - start


if __name__ == "__main__":
    serve(KtKernel)
