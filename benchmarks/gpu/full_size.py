"""Decode steps of full-size models: the host on a GPU, the experts on this machine's CPU cores.

    python benchmarks/gpu/full_size.py --model qwen3 [--workers 2 4] [--folder /dev/shm] [--batch 1 2 4]
    python benchmarks/gpu/full_size.py --model deepseek [--distinct 8] [--threads 16] [--batch 1 2]

Weights are random (random_model.py), FP8 experts at full size. The program

1. with ``qwen3`` writes a converted Qwen3-30B-A3B, starts local workers for it, ``--workers``, ``2x7`` being
   two of 7 threads, and has :class:`duckllm.LLM` answer ``--batch`` prompts at a time, lanes off and on,
2. with ``deepseek`` makes DeepSeek-V3.2's host part on the GPU and the experts of ``--distinct`` layers in
   memory, which all MoE layers use in turn: more than any cache holds. Each step is computed whole, then with
   nobody at the other end of the hand-over, and then without experts; these are also computed alone,
3. prints medians beside what the bytes of the experts allow at the rate at which the cores read memory in
   the same run (``duckllm bench roofline``'s loops), and one JSON line.

To try the program, layers and experts can be cut (``--layers``, ``--experts``), and the host can be a CPU
(``--device cpu``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_experts import ExpertsHere, NoExperts, asked
from random_model import FORMAT, RandomTensors, cut, random_layers, write_model

from duckllm import LLM, SamplingParams, _native
from duckllm.assembly_experts import experts_of_gpu
from duckllm.bench.ceilings import read_ceiling
from duckllm.bench.machine import commit, cpu_name
from duckllm.config import available_cores
from duckllm.device import find_device
from duckllm.engine.stats import Choices
from duckllm.layers.step import SequenceStep
from duckllm.models.causal_lm import CausalLM
from duckllm.models.registry import load_config, load_model
from duckllm.moe.device_experts import DeviceExperts
from duckllm.moe.executor import ExpertExecutor
from duckllm.weights.architectures import layout_of
from duckllm.weights.checkpoint import load_json
from duckllm.weights.formats import num_stripes, unit_bytes
from duckllm.weights.layout import ModelLayout

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
MODELS = {"qwen3": "Qwen3-30B-A3B", "deepseek": "DeepSeek-V3.2"}
PAGE_TOKENS = 16
LANES = {"off": 1, "on": 2}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, help="of the model; all if left out")
    parser.add_argument("--experts", type=int, help="of a layer; all if left out")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, default=48, help="of each reply")
    parser.add_argument("--context", type=int, default=32, help="tokens before the reply")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workers", nargs="+", default=["2", "4"], help="numbers of them: 2, or 2x7")
    parser.add_argument("--folder", type=Path, help="where the model is written; a temporary one if left out")
    parser.add_argument("--distinct", type=int, default=8, help="layers of experts in memory")
    parser.add_argument("--threads", type=int, nargs="+", default=[available_cores()], help="of experts here")
    parser.add_argument("--ask", action="store_true", help="read a line from the input before measuring")
    return parser.parse_args()


@dataclass
class Bench:
    """What both models' measurements need.

    Args:
        arguments: The command line.
        device: torch's name of the host's.
        config: The model's config.json.
        layout: Of the same.
        read_gb_per_s: What all cores read; measured once all is loaded, like the rest.
    """

    arguments: argparse.Namespace
    device: str
    config: dict[str, Any]
    layout: ModelLayout
    read_gb_per_s: float = 0.0

    def ready(self) -> None:
        """Says that all is loaded and captured, waits if that was asked for, and measures what cores read."""
        print("ready", flush=True)
        if self.arguments.ask:
            input()
        cores = available_cores()
        self.read_gb_per_s = read_ceiling(cores).rate.median
        print(f"{cores} cores read {self.read_gb_per_s:.1f} GB/s", flush=True)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        stripes = num_stripes(self.layout.moe_intermediate_size)
        return stripes * unit_bytes(self.layout.hidden_size, FORMAT)

    def judge(self, batch: int, num_experts: float, tokens_per_s: float) -> dict[str, float]:
        """Figures of steps that read so many experts, beside what the bytes allow."""
        read_ms = num_experts * self.expert_bytes / self.read_gb_per_s / 1e6
        allowed = 1e3 * batch / read_ms
        return {
            "tokens_per_s": round(tokens_per_s, 2),
            "step_ms": round(1e3 * batch / tokens_per_s, 3),
            "gb_per_step": round(num_experts * self.expert_bytes / 1e9, 3),
            "allowed_tokens_per_s": round(allowed, 2),
            "share": round(tokens_per_s / allowed, 3),
        }


def show(what: str, figures: dict[str, float], parts: dict[str, float]) -> dict[str, Any]:
    """Prints one measurement; it and its parts, as the JSON line has them."""
    print(
        f"  {what}: {figures['tokens_per_s']:.1f} tok/s, {figures['step_ms']:.2f} ms a step; "
        f"{figures['gb_per_step']:.2f} GB of experts allow {figures['allowed_tokens_per_s']:.1f}, "
        f"{figures['share']:.0%} of it; " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in parts.items()),
        flush=True,
    )
    return {**figures, "parts_ms": {name: round(ms, 3) for name, ms in parts.items()}}


def answer(llm: LLM, batch: int, context: int, num_tokens: int) -> tuple[float, dict[str, float]]:
    """Seconds of the decode steps of prompts answered together, and milliseconds of a step's parts."""
    rng = np.random.default_rng(batch)
    prompts = [rng.integers(0, 8192, context).tolist() for _ in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    llm._engine.kv_cache.clear()
    stats = llm._engine.stats
    first, start = stats.num_steps, time.perf_counter()
    llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    steps = list(stats._steps)[first - stats.num_steps :]
    # The first token comes from the prompts' step.
    seconds -= sum(step.seconds for step in steps if step.num_prompt_tokens)
    decode = [step for step in steps if not step.num_prompt_tokens]
    parts = {
        name.removesuffix("_s"): 1e3 * statistics.fmean(getattr(step.times, name) for step in decode)
        for name in vars(decode[0].times)
        if name.endswith("_s") and not name.startswith("_")
    }
    return seconds, {name: ms for name, ms in parts.items() if ms >= 0.005}


def measure_workers(bench: Bench) -> dict[str, Any]:
    """Qwen3 through LLM, for each number of workers, batch, and lanes off and on."""
    arguments, results = bench.arguments, {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as parent:
        start = time.perf_counter()
        folder = Path(parent) / "model"
        write_model(folder, bench.config)
        print(f"written in {time.perf_counter() - start:.1f} s", flush=True)
        for spec in arguments.workers:
            workers, _, threads = spec.partition("x")
            start = time.perf_counter()
            with LLM(
                folder,
                workers=int(workers),
                threads_per_worker=int(threads or 0),
                device=bench.device,
                weight_format=FORMAT,
                max_model_len=arguments.context + arguments.tokens + PAGE_TOKENS,
                max_num_seqs=max(arguments.batch),
                draft="off",
                lanes="off",
            ) as llm:
                info = llm.cluster_info()
                print(
                    f"{workers} workers of {info.threads} threads, {'+'.join(set(info.isas))}, ready in "
                    f"{time.perf_counter() - start:.1f} s",
                    flush=True,
                )
                ways = [(batch, lanes) for batch in arguments.batch for lanes in list(LANES)[: min(2, batch)]]
                for batch, lanes in ways:  # captures
                    llm._engine.choices = Choices("off", lanes)
                    answer(llm, batch, arguments.context, 3)
                if not results:
                    bench.ready()
                for batch, lanes in ways:
                    llm._engine.choices = Choices("off", lanes)
                    what = f"{spec} workers, batch {batch}, lanes {lanes}"
                    results[what] = answers(bench, llm, batch, what)
    return results


def answers(bench: Bench, llm: LLM, batch: int, what: str) -> dict[str, Any]:
    """Medians of one way to decode."""
    context, num_tokens = bench.arguments.context, bench.arguments.tokens
    with asked(llm._engine.model) as watched:
        answer(llm, batch, context, 3)
    num_experts = watched.num_experts(batch) / 2  # in two steps after the prompts'
    runs = [answer(llm, batch, context, num_tokens) for _ in range(bench.arguments.runs)]
    seconds = statistics.median(each for each, _ in runs)
    parts = {name: statistics.median(own.get(name, 0.0) for _, own in runs) for name in runs[0][1]}
    times = llm.worker_times()
    if times.compute_us:
        parts["slowest worker's compute"] = sum(max(each) for each in times.compute_us) / 1e3
        parts["round trips"] = sum(max(each) for each in times.round_trip_us) / 1e3
    return show(what, bench.judge(batch, num_experts, batch * (num_tokens - 1) / seconds), parts)


def decode(model: CausalLM, cache: Any, batch: int, num_lanes: int, context: int, num_tokens: int) -> float:
    """Seconds of greedy decode steps of contexts side by side, from ``context`` tokens on."""
    pages_each = -(-(context + num_tokens) // PAGE_TOKENS)
    pages = np.arange(batch * pages_each, dtype=np.int32).reshape(batch, pages_each)
    token_ids = torch.arange(1, batch + 1)
    start = time.perf_counter()
    for position in range(context, context + num_tokens):
        lanes = [
            (
                token_ids[rows[0] : rows[-1] + 1],
                [
                    SequenceStep.of(
                        place, position, 1, pages[row, : position // PAGE_TOKENS + 1], PAGE_TOKENS
                    )
                    for place, row in enumerate(rows)
                ],
            )
            for rows in np.array_split(np.arange(batch), num_lanes)
        ]
        token_ids = model.compute_logits(model.forward_lanes(lanes, cache)).argmax(-1)
    return time.perf_counter() - start


def measure_here(bench: Bench) -> dict[str, Any]:
    """DeepSeek with experts in this process: decode steps, and what their time goes to."""
    arguments, layout, results = bench.arguments, bench.layout, {}
    start = time.perf_counter()
    layers = random_layers(layout, arguments.distinct)
    num_bytes = sum(layer.nbytes for layer in layers)
    print(f"{num_bytes / 1e9:.1f} GB of experts made in {time.perf_counter() - start:.1f} s", flush=True)
    start = time.perf_counter()
    tensors = RandomTensors(bench.config, layout, bench.device)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(bench.config))
        parsed = load_config(Path(folder))
    max_tokens = arguments.context + arguments.tokens + PAGE_TOKENS

    def load(experts: ExpertExecutor) -> tuple[CausalLM, Any]:
        model = load_model(
            parsed,
            tensors,
            experts,
            max_tokens=max_tokens,
            device=torch.device(bench.device),  # type: ignore[arg-type]
        )
        cache = model.new_kv_cache(max(arguments.batch) * max_tokens)
        for own in cache:
            for each in own:
                each.normal_()
        return model, cache

    here = ExpertsHere(layout, layers, max(arguments.threads))
    ways: dict[str, tuple[CausalLM, Any]] = {"without experts": load(NoExperts())}
    if bench.device != "cpu":

        def on_gpu(server: _native.LaneServer) -> DeviceExperts:
            sizes = layout.hidden_size, layout.num_experts_per_tok
            return experts_of_gpu(here, server, *sizes, torch.device(bench.device))

        ways["nobody answers"] = load(on_gpu(_native.echo_server()))
        for threads in arguments.threads:
            ways[f"{threads} threads"] = load(on_gpu(here.server(threads)))
    else:
        ways[f"{max(arguments.threads)} threads"] = load(here)
    print(f"host loaded {len(ways)} times in {time.perf_counter() - start:.1f} s", flush=True)
    shapes = [(batch, lanes) for batch in arguments.batch for lanes in list(LANES)[: min(2, batch)]]
    for model, cache in ways.values():  # captures
        for batch, lanes in shapes:
            decode(model, cache, batch, LANES[lanes], arguments.context, 2)
    bench.ready()
    for batch, lanes in shapes:
        results |= split(bench, here, ways, batch, LANES[lanes], f"batch {batch}, lanes {lanes}")
    return results


def split(
    bench: Bench,
    here: ExpertsHere,
    ways: dict[str, tuple[CausalLM, Any]],
    batch: int,
    num_lanes: int,
    what: str,
) -> dict[str, Any]:
    """Medians of a step in each way, and of its experts alone."""
    arguments, results = bench.arguments, {}
    parts: dict[str, float] = {}
    model, cache = next(reversed(ways.values()))
    with asked(model) as watched:
        decode(model, cache, batch, num_lanes, arguments.context, 1)
    num_experts = watched.num_experts(batch)
    alone = []
    for _ in range(arguments.runs):
        start = time.perf_counter()
        for layer, x, ids, weights in watched.steps:
            here.submit(layer, x, ids, weights).wait()
        alone.append(1e3 * (time.perf_counter() - start))
    parts["experts alone"] = statistics.median(alone)
    for way, (model, cache) in ways.items():
        shape = model, cache, batch, num_lanes, arguments.context
        decode(*shape, 2)
        seconds = [decode(*shape, arguments.tokens) for _ in range(arguments.runs)]
        step_ms = 1e3 * statistics.median(seconds) / arguments.tokens
        if "threads" in way:
            figures = bench.judge(batch, num_experts, 1e3 * batch / step_ms)
            results[f"{what}, {way}"] = show(f"{what}, {way}", figures, parts)
        else:
            parts[way] = step_ms
    return results


def main() -> None:
    """Prints a line for each measurement, and one in JSON."""
    arguments = parse_arguments()
    device = find_device(arguments.device)
    config = cut(
        load_json(CONFIGS / MODELS[arguments.model] / "config.json"), arguments.layers, arguments.experts
    )
    cores = available_cores()
    print(
        f"{device.title}; {cpu_name()}, {cores} cores; {MODELS[arguments.model]}, "
        f"{config['num_hidden_layers']} layers, commit {commit()}",
        flush=True,
    )
    bench = Bench(arguments, device.name, config, layout_of(config, {}))
    results = measure_workers(bench) if arguments.model == "qwen3" else measure_here(bench)
    summary = {
        "benchmark": "gpu/full_size",
        "commit": commit(),
        "device": device.title,
        "machine": f"{cpu_name()}, {cores} cores",
        "model": MODELS[arguments.model],
        "layers": config["num_hidden_layers"],
        "read_gb_per_s": round(bench.read_gb_per_s, 2),
        "context": arguments.context,
        "tokens": arguments.tokens,
        "runs": arguments.runs,
        "results": results,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
