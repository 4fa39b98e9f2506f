"""The routed experts of kt-kernel (KTransformers) and llama.cpp beside ours, on this machine.

    python benchmarks/peers/experts.py [--shape qwen3] [--threads 2] [--isa avx2] [--rows 1 512] [--json]

At first use the program makes an environment of its own for the peers under the user's cache folder, installs
kt-kernel and builds the CPU part of the ggml that llama-cpp-python carries; that needs the package index, a
C++ compiler and a few minutes. Then, for each peer, format and number of threads, it

1. starts the peer in a process of its own with as many experts as a layer has, of random weights, and
   compares its output with float64 made from these weights; what cannot run is a line that says why,
2. measures in turns, in every round: the read ceiling, ours (verified, too; int4 beside 4-bit formats; fp9,
   fp8 and int8 beside the others, int4 beside all where there are several rows), and the peer, which is
   stopped while it is not asked. With one row each step takes the next experts, so that no expert is read
   again before all the others of the layer were, several last-level caches; with several rows each chooses
   its own,
3. prints medians and, in brackets, what the fastest samples of each say, which is more where the machine is
   shared, and last one line of JSON.

Threads are compute threads. kt-kernel's steps go through a thread that spins beside them, so with all cores
it competes with its own workers: all run with one thread less, too, beside ours with as many.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from block_formats import bits_per_weight
from comparison import FOUR_BIT_FORMATS, Comparison, Refusal, Way, summary, table
from peer_install import KT_KERNEL, LLAMA_CPP, PeerEnvironment, PeerUnavailable, cache_folder
from peer_process import PeerProcess

from duckllm import _native
from duckllm.bench.ceilings import FEWEST_REPEATS, MemoryCeilings, default_size_bytes
from duckllm.bench.expert_step import ExpertStep, RandomExperts, SliceShape
from duckllm.bench.kernel import SHAPES
from duckllm.bench.machine import available_memory_bytes, commit, cpu_name, read_caches
from duckllm.bench.memory import U8
from duckllm.config import available_cores
from duckllm.worker.other_load import LoadMeter

HERE = Path(__file__).parent
PEER_SHAPES = {
    "qwen3": SHAPES["qwen3"],
    "deepseek-16": SliceShape("DeepSeek-V3.2 cut 16 ways", 7168, 8),
    "deepseek-32": SHAPES["deepseek-32"],
}
PEER_FORMATS = {
    "kt-kernel": ("FP8", "Q8_0", "INT8", "BF16", "RAWINT4", "Q4_K"),
    "llama.cpp": ("Q8_0", "Q4_0", "Q4_K"),
}
OUR_FORMATS = ("fp9", "fp8", "int8", "int4")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3", choices=list(PEER_SHAPES))
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--isa", default=_native.select_isa(), choices=["avx512", "avx2"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 512], help="rows of a step")
    parser.add_argument("--repeats", type=int, default=FEWEST_REPEATS, help="rounds, for medians")
    parser.add_argument("--peer", nargs="+", default=list(PEER_FORMATS), choices=list(PEER_FORMATS))
    parser.add_argument("--format", nargs="+", help="formats of the peers by name; all if left out")
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    chosen = parser.parse_args(arguments)
    for name in ("threads", "repeats"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name} is {getattr(chosen, name)}: expected 1 or more")
    if min(chosen.rows) < 1:
        parser.error(f"--rows has {min(chosen.rows)}: expected 1 or more")
    known = sorted({each for formats in PEER_FORMATS.values() for each in formats})
    for each in chosen.format or []:
        if each not in known:
            parser.error(f"--format is {each!r}: expected one of {', '.join(known)}")
    return chosen


def ways(peers: list[str], formats: list[str] | None, threads: int) -> Iterator[Way]:
    """What is measured, in order."""
    for peer in peers:
        for weight_format in PEER_FORMATS[peer]:
            if formats is not None and weight_format not in formats:
                continue
            for count in range(threads, max(0, threads - 2), -1):
                yield Way(peer, weight_format, count)


def formats_beside(weight_format: str, rows: int) -> tuple[str, ...]:
    """Ours that a peer's format is compared with: of as many bits, where bits are what counts."""
    if weight_format in FOUR_BIT_FORMATS:
        return ("int4",)
    return OUR_FORMATS if rows > 1 else ("fp9", "fp8", "int8")


class Ours:
    """Our steps of each number of rows, and the read ceiling, with one number of threads."""

    def __init__(
        self, arguments: argparse.Namespace, threads: int, units: dict[str, U8], random: RandomExperts
    ) -> None:
        shape = self._shape = random.shape
        self.steps = {
            rows: {
                name: ExpertStep(
                    random,
                    units[name],
                    num_tokens=rows,
                    top_k=shape.top_k,
                    threads=threads,
                    isa=arguments.isa,
                    weight_format=name,
                    layer_experts=None if rows == 1 else shape.num_experts,
                )
                for name in OUR_FORMATS
            }
            for rows in arguments.rows
        }
        for steps in self.steps.values():
            for step in steps.values():
                step.verify()
        size_bytes = default_size_bytes(read_caches(), available_memory_bytes())
        self.ceilings = MemoryCeilings(threads, size_bytes, arguments.isa, huge_pages=True)
        self.ceilings.verify()

    def beside(self, peer: PeerProcess, way: Way, rows: int, repeats: int) -> Comparison:
        """Measures in turns."""
        steps = {name: self.steps[rows][name] for name in formats_beside(way.weight_format, rows)}
        for step in steps.values():
            step.seconds.clear()
        theirs: list[float] = []
        peer.sample(rows)  # it finds out how many steps make a sample

        def sample() -> None:
            for step in steps.values():
                step.sample()
            theirs.extend(peer.sample(rows))

        ceiling = self.ceilings.cold("read", repeats, between=sample)
        shape = self._shape
        return Comparison(
            way=way,
            description=peer.description,
            rows=rows,
            error=peer.error,
            weights_per_row=shape.top_k * shape.expert_weights,
            bits=bits_per_weight(way.weight_format),
            seconds=tuple(theirs),
            ours={name: tuple(step.seconds) for name, step in steps.items()},
            read_gb_per_s=ceiling.rate.median,
        )


def start_peer(
    environment: PeerEnvironment, way: Way, shape: SliceShape, isa: str, most_rows: int
) -> PeerProcess:
    """The process of a way.

    Raises:
        PeerUnavailable: It cannot run here.
    """
    library = environment.kt_kernel() if way.peer == "kt-kernel" else environment.llama_cpp(isa)
    job = {
        "weight_format": way.weight_format,
        "hidden_size": shape.hidden_size,
        "channels": shape.channels,
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "threads": way.threads,
        "isa": isa,
        "most_rows": most_rows,
        "library": str(library),
    }
    program = HERE / ("kt_kernel_peer.py" if way.peer == "kt-kernel" else "llama_cpp_peer.py")
    variables = {"OPENBLAS_NUM_THREADS": "1"}
    if way.peer == "llama.cpp":  # a core each, as ours; kt-kernel binds its workers itself
        variables["OMP_PROC_BIND"] = "true"
    log = cache_folder() / "peer.log"
    return PeerProcess([str(environment.python), str(program), json.dumps(job)], variables, log)


def main() -> None:
    arguments = parse_arguments()

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    environment = PeerEnvironment(cache_folder(), progress)
    shape = PEER_SHAPES[arguments.shape]
    planned = list(ways(arguments.peer, arguments.format, arguments.threads))
    outcomes: list[Comparison | Refusal] = []
    try:
        environment.prepare()
    except PeerUnavailable as problem:
        sys.exit(f"experts.py: the peers' environment could not be made: {problem}")
    for peer in arguments.peer:  # what takes minutes comes before what is measured
        try:
            environment.kt_kernel() if peer == "kt-kernel" else environment.llama_cpp(arguments.isa)
        except PeerUnavailable as problem:
            refused = [way for way in planned if way.peer == peer]
            outcomes += [Refusal(way, str(problem)) for way in refused]
            planned = [way for way in planned if way.peer != peer]
    random = RandomExperts(shape)
    units = {name: random.fill(shape.num_experts, name, huge_pages=True) for name in OUR_FORMATS}
    ours: dict[int, Ours] = {}
    meter, started = LoadMeter(), (time.monotonic(), os.times())
    for way in planned:
        progress(f"{way.peer} {way.weight_format}, {way.threads} threads")
        if way.threads not in ours:
            ours[way.threads] = Ours(arguments, way.threads, units, random)
        try:
            with start_peer(environment, way, shape, arguments.isa, max(arguments.rows)) as peer:
                for rows in arguments.rows:
                    outcomes.append(ours[way.threads].beside(peer, way, rows, arguments.repeats))
        except PeerUnavailable as problem:
            outcomes.append(Refusal(way, str(problem)))
    load = meter.read()
    # The peers are not other programs; they have ended, so that their time counts as our children's.
    wall_s, now = time.monotonic() - started[0], os.times()
    peers_s = sum(
        getattr(now, name) - getattr(started[1], name) for name in ("children_user", "children_system")
    )
    others = max(0.0, load.programs - peers_s / wall_s)
    if not arguments.json:
        print(f"{cpu_name()}, {arguments.isa}; {shape.name}, {shape.top_k} of {shape.num_experts} experts")
        print(
            f"meanwhile other programs used {others:.2f} cores, other virtual machines {load.hypervisor:.2f}"
        )
        print("\n".join(table(outcomes)))
    print(
        json.dumps(
            {
                "benchmark": "peers/experts",
                "commit": commit(),
                "machine": cpu_name(),
                "cores": len(os.sched_getaffinity(0)),
                "isa": arguments.isa,
                "shape": arguments.shape,
                "hidden_size": shape.hidden_size,
                "channels": shape.channels,
                "experts": shape.num_experts,
                "top_k": shape.top_k,
                "repeats": arguments.repeats,
                "other_load": {"programs": round(others, 2), "hypervisor": round(load.hypervisor, 2)},
                "versions": {"kt-kernel": KT_KERNEL, "llama.cpp": LLAMA_CPP},
                "runs": [each.as_json() for each in outcomes],
                "summary": summary(outcomes),
            }
        )
    )


if __name__ == "__main__":
    main()
