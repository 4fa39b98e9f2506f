"""What two lanes are worth, with workers behind links of their own.

    sudo python benchmarks/offline/lanes.py [--workers 1 2] [--requests 2 4] [--gbit 2.5] [--rounds 7]

The program

1. makes a random model with the widths of Qwen3-30B-A3B in ``--layers`` layers of ``--experts`` experts (or
   takes ``--model``), and one network namespace for each worker, linked to this one at ``--gbit`` Gbit/s in
   each direction (tbf); with ``--gbit 0`` the workers are on loopback, without namespaces and root,
2. verifies that lanes give the tokens that are given without them,
3. measures in turns, lanes on and off: several requests answered together, and one long prompt. The ceiling
   is what would be left if the shorter of host's and workers' time, as measured without lanes, were hidden
   whole behind the longer one; each lane reads the host's weights for itself, which it leaves out,
4. prints one JSON line. Medians of the rounds. It takes its namespaces away again.

Host and workers share this machine's cores and memory: on machines of their own they hinder each other less.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from duckllm import LLM, SamplingParams
from duckllm.bench.machine import commit, cpu_name
from duckllm.config import available_cores
from duckllm.demo import CHECKPOINT
from duckllm.weights.architectures import layout_of
from duckllm.weights.layout import PROJECTIONS

VOCABULARY = 8192
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
# The names carry this process's number, so that two runs do not meet.
PREFIX = f"lanes{os.getpid()}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model's folder; a random one is made if left out")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the long prompt")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each reply")
    parser.add_argument("--gbit", type=float, default=2.5)
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def make_model(folder: Path, num_layers: int, num_experts: int) -> Path:
    """A random checkpoint: FP8 experts, BF16 for the host."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCABULARY,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": num_experts,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    }
    layout = layout_of(config, {})
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in layout.host_shapes.items():
        values = torch.randn(shape, generator=generator)
        tensors[name] = (1 + values / 10 if len(shape) == 1 else values * shape[-1] ** -0.5).bfloat16()
    for layer in layout.moe_layers:
        for expert in range(num_experts):
            for projection in PROJECTIONS:
                shape = layout.expert_shape(projection)
                values = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
                name = layout.expert_weight(layer, expert, projection)
                blocks = tuple(-(-size // 128) for size in shape)
                tensors[name], tensors[f"{name}_scale_inv"] = values, torch.full(blocks, shape[-1] ** -0.5)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in TOKENIZER_FILES:
        if (CHECKPOINT / name).is_file():
            (folder / name).write_bytes((CHECKPOINT / name).read_bytes())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def command(*words: str) -> None:
    subprocess.run(words, check=True)


@contextmanager
def linked_worker(number: int, gbit: float, token_file: Path) -> Iterator[str]:
    """The address of a worker: in a namespace of its own behind a link of this speed, on loopback for 0."""
    if gbit == 0:
        with _worker([], f"127.0.0.1:{7500 + number}", token_file) as address:
            yield address
        return
    space, here, there = f"{PREFIX}-{number}", f"dl{number}h", f"dl{number}w"
    network, rate = f"10.213.{number}", f"{round(1000 * gbit)}mbit"
    shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
    command("ip", "netns", "add", space)
    try:
        command("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", space)
        command("ip", "addr", "add", f"{network}.1/30", "dev", here)
        command("ip", "link", "set", here, "up")
        command("ip", "-n", space, "addr", "add", f"{network}.2/30", "dev", there)
        command("ip", "-n", space, "link", "set", there, "up")
        command("tc", "qdisc", "add", "dev", here, *shape)
        command("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", there, *shape)
        with _worker(["ip", "netns", "exec", space], f"{network}.2:7411", token_file) as address:
            yield address
    finally:
        command("ip", "netns", "del", space)


@contextmanager
def _worker(prefix: list[str], address: str, token_file: Path) -> Iterator[str]:
    words = [*prefix, sys.executable, "-m", "duckllm", "worker", "--listen", address]
    options = [
        "--threads",
        "1",
        "--no-pin",
        "--speed",
        "0",
        "--format",
        "fp9",
        "--token-file",
        str(token_file),
        "--json",
    ]
    worker = subprocess.Popen([*words, *options], stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None
        if not worker.stdout.readline():
            raise SystemExit(f"the worker at {address} does not start: nothing measured")
        yield address
    finally:
        worker.terminate()
        worker.wait()


def batch(llm: LLM, requests: int, num_tokens: int) -> tuple[float, list[tuple[int, ...]], float]:
    """Tokens a second of requests together, the tokens, and the share of time that waits for workers."""
    rng = np.random.default_rng(requests)
    prompts = [rng.integers(0, VOCABULARY, 8).tolist() for _ in range(requests)]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    llm._engine.kv_cache.clear()
    engine_stats = llm._engine.stats
    first = engine_stats.num_steps
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    steps = list(engine_stats._steps)[first - engine_stats.num_steps :]
    waited = sum(step.times.wait_s for step in steps) / sum(step.seconds for step in steps)
    tokens = [output.outputs[0].token_ids for output in outputs]
    return sum(map(len, tokens)) / seconds, tokens, waited


def prompt(llm: LLM, length: int) -> tuple[float, list[tuple[int, ...]], float]:
    """Prompt tokens a second, the first token, and the share of time that waits for workers."""
    rng = np.random.default_rng(length)
    llm._engine.kv_cache.clear()
    [output] = llm.generate(
        [rng.integers(0, VOCABULARY, length).tolist()], SamplingParams(temperature=0, max_tokens=1)
    )
    [last] = list(llm._engine.stats._steps)[-1:]
    seconds = output.metrics.time_to_first_token_s
    assert seconds is not None
    return length / seconds, [output.outputs[0].token_ids], last.times.wait_s / last.seconds


def measure(llms: dict[str, LLM], arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """For each load, tokens a second with lanes and without, and the share of waiting without."""
    loads = {f"{count} requests": (batch, (count, arguments.tokens)) for count in arguments.requests}
    loads[f"prompt of {arguments.prompt}"] = (prompt, (arguments.prompt,))
    figures = {}
    for load, (function, options) in loads.items():
        speeds: dict[str, list[float]] = {name: [] for name in llms}
        waits = []
        for _ in range(arguments.rounds + 1):
            tokens = {}
            for name, llm in llms.items():
                speed, tokens[name], waited = function(llm, *options)
                speeds[name].append(speed)
                if name == "off":
                    waits.append(waited)
            if any(each != tokens["off"] for each in tokens.values()):
                raise SystemExit(f"{load}: lanes give other tokens: nothing measured")
        # The first round warms up.
        figures[load] = {name: statistics.median(own[1:]) for name, own in speeds.items()}
        figures[load]["waited"] = statistics.median(waits[1:])
    return figures


def main() -> None:
    arguments = parse_arguments()
    results = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = Path(arguments.model or make_model(folder / "random", arguments.layers, arguments.experts))
        token_file = folder / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(secrets.token_hex(16))
        links = f"links of {arguments.gbit} Gbit/s" if arguments.gbit else "loopback"
        print(f"{cpu_name()}, {available_cores()} cores; {links}")
        print(
            f"{'workers':>7s} {'':>14s} {'off tok/s':>10s} {'on':>8s} {'x':>6s} {'ceiling x':>10s} "
            f"{'of it':>6s} {'auto':>8s}"
        )
        for count in arguments.workers:
            with ExitStack() as session:
                options = {"cluster_token": token_file.read_text(), "host_threads": 1, "draft": "off"}
                llms = {}
                for place, lanes in enumerate(("off", "on", "auto")):
                    # A worker serves one host at a time.
                    addresses = [
                        session.enter_context(linked_worker(number, arguments.gbit, token_file))
                        for number in range(place * count, (place + 1) * count)
                    ]
                    llms[lanes] = session.enter_context(LLM(model, workers=addresses, lanes=lanes, **options))
                figures = measure(llms, arguments)
            for load, own in figures.items():
                gain, ceiling = own["on"] / own["off"], 1 / max(own["waited"], 1 - own["waited"])
                print(
                    f"{count:7d} {load:>14s} {own['off']:10.1f} {own['on']:8.1f} {gain:6.2f} {ceiling:10.2f} "
                    f"{gain / ceiling:6.0%} {own['auto']:8.1f}"
                )
            results[str(count)] = {
                load: {key: round(value, 3) for key, value in own.items()} for load, own in figures.items()
            }
    summary = {
        "benchmark": "offline/lanes",
        "commit": commit(),
        "machine": f"{cpu_name()}, {available_cores()} cores",
        "model": arguments.model or f"random, {arguments.layers} layers, {arguments.experts} experts",
        "gbit": arguments.gbit,
        "rounds": arguments.rounds,
        "workers": results,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
