"""A whole model in llama.cpp's Q8_0 beside ours: decode and prefill, one process and two workers.

    python benchmarks/peers/whole_model.py [--folder FOLDER] [--threads 2] [--rounds 7] [--prefill bf16]
    python benchmarks/peers/whole_model.py --folder FOLDER --format int4

The model has Qwen3-30B-A3B's layers, fewer of them, and random weights: FP8 with scales of 128 x 128
weights, as published checkpoints have them. Both engines get the same weights: ours the converted
checkpoint, llama.cpp these weights dequantised and quantised to Q8_0. At first use llama.cpp of llama-cpp-
python is built with RPC in the environment that experts.py has for peers; that needs the package index, a
C++ compiler and some minutes. The files take 21 GB while they are made and 17 GB then, in ``--folder``, where
they stay for the next run, or in a temporary folder. Then the program

1. compares both with a plain float32 forward pass in torch: our greedy reply has to be the likeliest tokens,
   with their log probabilities, and llama.cpp's logits behind the same tokens have to be near,
2. measures in turns, in every round, the read ceiling, a reply and a prompt of ours and of llama.cpp, which
   is stopped while it is not asked: first one process of ``--threads`` threads beside another, then
   ``--threads`` workers of one thread each beside as many RPC servers of one thread each. There all layers
   of llama.cpp, attention and head included, lie at the servers in equal parts, which is how its users
   divide a model; they are computed one after another. Our host computes attention and head while the
   workers wait,
3. prints medians beside what the bytes of a token allow at the rate of reading, and one line of JSON.

All programs run on the same ``--threads`` cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peer_install import LLAMA_CPP, LlamaCppLibraries, PeerEnvironment, PeerUnavailable, cache_folder
from peer_process import PeerProcess
from whole_checkpoint import FloatModel, shape_of, write_checkpoint
from whole_ours import (
    CONTEXT,
    GIVEN,
    OUR_FORMATS,
    PREFILL,
    PROMPT,
    REPLY,
    ROUNDED_TOLERANCE,
    VOCAB_SIZE,
    Ours,
)
from whole_report import Allowed, Bytes, Setting, line_of, table

from duckllm import _native
from duckllm.bench.ceilings import NUM_WINDOWS, MemoryCeilings, default_size_bytes
from duckllm.bench.machine import available_memory_bytes, commit, cpu_name, read_caches
from duckllm.config import available_cores
from duckllm.weights.convert import convert
from duckllm.worker.other_load import LoadMeter

HERE = Path(__file__).parent
PUBLISHED = HERE.parents[1] / "examples" / "configs" / "Qwen3-30B-A3B" / "config.json"
THEIR_TOLERANCE = 0.1  # of logits in the L2 norm: llama.cpp rounds weights and activations
LOAD_TIMEOUT_S = 600
READY = "complete"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, help="where the model's files stay; a temporary one if left out"
    )
    parser.add_argument("--threads", type=int, default=min(2, available_cores()), help="cores used by all")
    parser.add_argument("--rounds", type=int, default=7, help="for medians")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument(
        "--format", default="fp8", choices=OUR_FORMATS, help="of our experts; fp9 is a copy in memory"
    )
    parser.add_argument("--prefill", default="f32", choices=["f32", "bf16"], help="ours: duckllm's --prefill")
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    chosen = parser.parse_args(arguments)
    for name, most in (("threads", available_cores()), ("rounds", 1000), ("layers", 48)):
        if not 1 <= getattr(chosen, name) <= most:
            parser.error(f"--{name} is {getattr(chosen, name)}: expected 1 to {most}")
    return chosen


class ModelFiles:
    """The model's files: made where they are not there yet.

    Args:
        folder: Where they lie.
        num_layers: Of the model.
        progress: Told in a line what takes time now.
    """

    def __init__(self, folder: Path, num_layers: int, progress: Callable[[str], None]) -> None:
        self._folder, self._progress = folder / f"whole-model-{num_layers}-layers", progress
        self.gguf = self._folder / "q8_0.gguf"
        self.reference = self._folder / "reference.npz"
        self.config = shape_of(json.loads(PUBLISHED.read_text()), num_layers, VOCAB_SIZE)

    def ours(self, weight_format: str) -> Path:
        """The folder of our model whose experts are in a format, or in one that is recoded to it."""
        return self._folder / f"duckllm-{'fp8' if weight_format == 'fp9' else weight_format}"

    def make(self, python: Path) -> None:
        """Writes the checkpoint, converts it for both, computes the reference and deletes the checkpoint."""
        if (self._folder / READY).exists():
            return
        shutil.rmtree(self._folder, ignore_errors=True)
        checkpoint = self._folder / "checkpoint"
        self._folder.mkdir(parents=True)
        write_checkpoint(checkpoint, self.config, self._progress)
        for weight_format in ("fp8", *ROUNDED_TOLERANCE):
            self._progress(f"converting for duck-llm: {weight_format}")
            convert(checkpoint, self.ours(weight_format), weight_format=weight_format)
        self._progress("converting for llama.cpp")
        subprocess.run([python, HERE / "gguf_writer.py", checkpoint, self.gguf], check=True)
        self._progress("computing logits in float32")
        given = np.random.default_rng(5).integers(0, VOCAB_SIZE, GIVEN)
        with Ours(self.ours("fp8"), {"workers": 0}) as ours:
            reply = ours.greedy(given.tolist(), 1)[0]
        tokens = np.concatenate([given, reply])
        logits = FloatModel(checkpoint).logits(torch.from_numpy(tokens)).numpy()
        np.savez(self.reference, tokens=tokens, logits=logits)
        shutil.rmtree(checkpoint)
        (self._folder / READY).touch()


class Ceilings:
    """The rate of reading with one thread and with all.

    Args:
        threads: All.
    """

    def __init__(self, threads: int) -> None:
        size = default_size_bytes(read_caches(), available_memory_bytes())
        isa = _native.select_isa()
        self._loops = {
            count: MemoryCeilings(count, size, isa, huge_pages=True) for count in sorted({1, threads})
        }
        self._seconds: dict[tuple[int, str], list[float]] = {}
        for loops in self._loops.values():
            loops.verify()

    def sample(self) -> None:
        """One more of each."""
        for count, loops in self._loops.items():
            for variant in _native.CeilingLoops.variants("read"):
                self._seconds.setdefault((count, variant), []).append(loops.sample_cold_read(variant))

    def gb_per_s(self, threads: int) -> float:
        """The best loop's median."""
        window = self._loops[threads].used_bytes / NUM_WINDOWS
        return max(
            window / float(np.median(seconds)) / 1e9
            for (count, _), seconds in self._seconds.items()
            if count == threads
        )


@contextmanager
def rpc_servers(python: Path, libraries: LlamaCppLibraries, count: int, log: Path) -> Iterator[list[str]]:
    """Addresses of llama.cpp's servers with one thread each."""
    with ExitStack() as stack:
        addresses = []
        output = stack.enter_context(log.open("wb"))
        for _ in range(count):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{probe.getsockname()[1]}"
            command = [python, HERE / "rpc_server.py", libraries.folder, address, "1"]
            server = subprocess.Popen(command, stdout=output, stderr=output)
            stack.callback(server.wait)
            stack.callback(server.kill)
            _wait_for(address, server)
            addresses.append(address)
        yield addresses


def _wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    name, port = address.split(":")
    for _ in range(300):
        if server.poll() is not None:
            raise PeerUnavailable(f"the RPC server ended with {server.returncode}")
        try:
            socket.create_connection((name, int(port)), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise PeerUnavailable(f"the RPC server at {address} does not listen after 30 s")


def start_llama(
    environment: PeerEnvironment,
    libraries: LlamaCppLibraries,
    files: ModelFiles,
    threads: int,
    servers: list[str],
) -> PeerProcess:
    """llama.cpp with the model.

    Raises:
        PeerUnavailable: It does not run, or its logits are wrong.
    """
    job = {
        "gguf": str(files.gguf),
        "libraries": str(libraries.folder),
        "threads": threads,
        "servers": servers,
        "reference": str(files.reference),
        "tolerance": THEIR_TOLERANCE,
        "context": CONTEXT,
        "prompt": PROMPT,
        "reply": REPLY,
        "vocab_size": VOCAB_SIZE,
    }
    command = [str(environment.python), str(HERE / "whole_llama_peer.py"), json.dumps(job)]
    variables = {"OPENBLAS_NUM_THREADS": "1", **libraries.environment}
    return PeerProcess(command, variables, cache_folder() / "whole-peer.log", LOAD_TIMEOUT_S)


def measure(
    name: str,
    at_workers: bool,
    files: ModelFiles,
    ours: Ours,
    peer: PeerProcess,
    ceilings: Ceilings,
    rounds: int,
    weight_format: str,
) -> dict[str, Setting]:
    """Decode and prefill of both in turns."""
    if weight_format in ROUNDED_TOLERANCE:
        error = ours.rounding_error(files.reference, ROUNDED_TOLERANCE[weight_format])
    else:
        error = ours.error(files.reference)
    found = {
        what: Setting(name, at_workers, what, peer.description, error, peer.error)
        for what in ("decode", "prefill")
    }
    for count in range(rounds + 1):  # the first one warms up
        for what, rows in (("decode", 1), ("prefill", PREFILL)):
            ceilings.sample()
            seconds = ours.seconds(rows), peer.sample(rows)[0]
            if count:
                found[what].ours.append(seconds[0] / rows)
                found[what].theirs.append(seconds[1] / rows)
    return found


def run(arguments: argparse.Namespace, folder: Path, progress: Callable[[str], None]) -> None:
    environment = PeerEnvironment(cache_folder(), progress)
    environment.prepare()
    libraries = environment.llama_cpp_with_rpc()
    files = ModelFiles(folder, arguments.layers, progress)
    files.make(environment.python)
    threads, ceilings = arguments.threads, Ceilings(arguments.threads)
    meter, times, start = LoadMeter(), os.times(), time.monotonic()
    settings: list[Setting] = []
    for workers in (0, threads):
        name = f"{threads} workers, 1 thread each" if workers else f"1 process, {threads} threads"
        progress(f"measuring: {name}")
        options: dict[str, Any] = {
            "workers": workers,
            "weight_format": arguments.format,
            "prefill": arguments.prefill,
        }
        with ExitStack() as stack:
            servers: list[str] = []
            if workers:
                options["threads_per_worker"] = 1
                log = cache_folder() / "rpc-server.log"
                servers = stack.enter_context(rpc_servers(environment.python, libraries, workers, log))
            peer = stack.enter_context(start_llama(environment, libraries, files, threads, servers))
            ours = stack.enter_context(Ours(files.ours(arguments.format), options))
            found = measure(
                name, workers > 0, files, ours, peer, ceilings, arguments.rounds, arguments.format
            )
            settings += found.values()
    # What was measured is no other program; its processes have ended and count as our children's.
    now, seconds = os.times(), time.monotonic() - start
    measured_s = sum(
        getattr(now, name) - getattr(times, name) for name in ("children_user", "children_system")
    )
    load = meter.read()
    others = max(0.0, load.programs - measured_s / seconds)
    size, rate = Bytes.of(files.config, arguments.format), ceilings.gb_per_s
    # Layers at RPC servers are computed one after another, each by one thread.
    allowed = [Allowed.of(size, rate(threads), rate(1 if each.at_workers else threads)) for each in settings]
    if not arguments.json:
        print(f"{cpu_name()}, {threads} cores, {_native.select_isa()}; {arguments.layers} layers")
        print("\n".join(table(settings, allowed)))
        print(
            f"meanwhile other programs used {others:.2f} cores, other virtual machines {load.hypervisor:.2f}"
        )
    print(
        json.dumps(
            {
                "benchmark": "peers/whole_model",
                "commit": commit(),
                "machine": cpu_name(),
                "cores": threads,
                "isa": _native.select_isa(),
                "layers": arguments.layers,
                "vocab_size": VOCAB_SIZE,
                "format": arguments.format,
                "prefill": arguments.prefill,
                "tokens": {"prompt": PREFILL, "before_reply": PROMPT, "reply": REPLY},
                "rounds": arguments.rounds,
                "seconds": round(seconds),
                "other_load": {"programs": round(others, 2), "hypervisor": round(load.hypervisor, 2)},
                "version": LLAMA_CPP,
                "bytes": asdict(size),
                "read_gb_per_s": {count: round(rate(count), 1) for count in sorted({1, threads})},
                "runs": [line_of(*each) for each in zip(settings, allowed, strict=True)],
            }
        )
    )


def main() -> None:
    arguments = parse_arguments()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        if arguments.folder is not None:
            run(arguments, arguments.folder, progress)
            return
        with tempfile.TemporaryDirectory(prefix="duckllm-whole-model-") as folder:
            run(arguments, Path(folder), progress)
    except PeerUnavailable as problem:
        sys.exit(f"whole_model.py: llama.cpp cannot be compared: {problem}")


if __name__ == "__main__":
    main()
