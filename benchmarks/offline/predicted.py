"""What ``duckllm plan`` predicts beside what is measured: tokens a second in 16 settings on this machine.

    sudo python benchmarks/offline/predicted.py [--rounds 7] [--steps 20] [--layers 4] [--experts 32]
                                                [--no-network] [--json FILE]

Settings are workers (1 to 3 of one thread), formats, requests together, contexts, lanes, and links of 200 to
1000 Mbit/s between network namespaces (namespaces_network.py; needs root, ``ip`` and ``tc``). The program

1. makes a random model with the widths of Qwen3-30B-A3B in ``--layers`` layers of ``--experts`` experts,
2. verifies that settings with the same number of workers give the same tokens,
3. measures in turns, ``--rounds`` times: what calibrates the forecast (plain reads, the expert kernel alone,
   steps through one worker with one request, with eight and with a long context, the demo model through
   one worker and three, small messages over the links), and each setting. None of these calibrates,
4. prints for each setting the prediction, the median that was measured, their ratio, the ratio by the fastest
   tenth of all samples (of a shared machine it says more), and the ceiling: all bytes of a step at the speed
   of a plain read; then how many predictions are within 15 %, and one JSON line.

Host and workers share this machine's cores and memory with everything else on it: run it in a quiet hour.
Seven rounds take some five minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "transport"))

from lanes import make_model
from namespaces_network import HOST, Network, burst_bytes, check_rights, inside

from duckllm import LLM, SamplingParams
from duckllm.bench.machine import commit, cpu_name
from duckllm.cluster.address import parse_address
from duckllm.cluster.survey import survey
from duckllm.cluster.token import TOKEN_VARIABLE
from duckllm.config import available_cores
from duckllm.forecast.coefficients import Coefficients
from duckllm.forecast.flock import Flock
from duckllm.forecast.load import ModelLoad, model_load
from duckllm.forecast.measure import MEDIAN, Decode, Probes, decode
from duckllm.forecast.step import Prediction, Setting, predict
from duckllm.models.inspection import inspect_model
from duckllm.models.registry import load_config
from duckllm.weights.convert import convert
from duckllm.worker.other_load import LoadMeter

MTU, PING_BYTES, PINGS = 1500, 16, 40
WITHIN, CHECK_TOKENS = 0.15, 12
FASTEST = 0.1  # of all samples: where others use the machine these say more
# On a busy machine a worker may be silent for long.
OPTIONS = {"host_threads": 1, "draft": "off", "device": "cpu", "worker_silence_s": 20.0}


@dataclass(frozen=True)
class Case:
    """A setting: workers of one thread on this machine, or behind links of so many Mbit/s."""

    workers: int
    weight_format: str = "fp9"
    batch: int = 1
    context: int = 64
    lanes: bool = False
    mbit_per_s: int = 0

    def __str__(self) -> str:
        words = f"{self.workers} x {self.weight_format}, batch {self.batch}, context {self.context}"
        words += ", lanes" if self.lanes else ""
        return words + (f", {self.mbit_per_s} Mbit/s" if self.mbit_per_s else "")

    @property
    def key(self) -> tuple[int, str, bool, bool]:
        """Settings that one LLM serves."""
        return self.workers, self.weight_format, self.lanes, self.mbit_per_s > 0


LOCAL = (
    Case(2),
    Case(3),
    Case(1, "fp8"),
    Case(2, "fp8"),
    Case(3, "fp8"),
    Case(2, batch=2),
    Case(2, batch=4),
    Case(2, context=1024),
    Case(2, context=3000),
    Case(1, batch=4, context=1024),
    Case(2, batch=4, lanes=True),
)
LINKED = (
    Case(1, mbit_per_s=1000),
    Case(2, mbit_per_s=1000),
    Case(2, mbit_per_s=200),
    Case(3, batch=2, mbit_per_s=500),
    Case(2, batch=4, lanes=True, mbit_per_s=500),
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="decode steps of a setting in a round")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--no-network", action="store_true", help="leave the settings with links out")
    parser.add_argument("--json", type=Path, help="append the JSON line to this file")
    return parser.parse_args()


@contextmanager
def worker(folder: Path, token: str, machine: str | None, listen: str) -> Iterator[str]:
    """The address of a worker of one thread, on a machine of the network or on this one."""
    words = ["-m", "duckllm.worker", "--json", "--exit-with-stdin", "--threads", "1", "--speed", "0"]
    words += ["--no-pin", "--model", str(folder), "--listen", listen]
    with nullcontext() if machine is None else inside(machine):
        process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, TOKEN_VARIABLE: token},
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker on {machine or 'this machine'} does not start: nothing measured")
        yield json.loads(line)["address"]
    finally:
        process.kill()
        process.communicate()


class Links:
    """The network, its workers' addresses by LLM, and what a small message takes."""

    def __init__(self, stack: ExitStack, folder: Path, cases: Sequence[Case]) -> None:
        self.token = secrets.token_hex(16)
        keys = sorted({case.key for case in cases})
        self._network = stack.enter_context(Network(sum(key[0] for key in keys), 1000))
        self._network.set_mtu(MTU)
        free = list(self._network.workers)
        self.addresses: dict[tuple[int, str, bool, bool], list[str]] = {}
        for key in keys:
            machines = [free.pop() for _ in range(key[0])]
            self.addresses[key] = [
                stack.enter_context(
                    worker(folder, self.token, machine, f"{self._network.address(machine)}:0")
                )
                for machine in machines
            ]
        here = stack.enter_context(worker(folder, self.token, None, "127.0.0.1:0"))
        self._ends = {"here": here, "there": self.addresses[keys[0]][0]}
        self._pings_us: dict[str, list[float]] = {name: [] for name in self._ends}

    def set_speed(self, mbit_per_s: int) -> None:
        """Sets the speed of every link."""
        self._network.mbit_per_s = mbit_per_s
        self._network.set_mtu(MTU)

    def sample(self) -> None:
        """Sends small messages to a worker of this machine, and to one behind a link."""
        for name, address in self._ends.items():
            with nullcontext() if name == "here" else inside(HOST):
                [(_, trip)] = survey([parse_address(address)], self.token, PING_BYTES, PINGS)
            self._pings_us[name].append(trip.median_us)

    @property
    def more_us(self) -> float:
        """What a message takes longer over a link, bytes aside."""
        there, here = (statistics.median(self._pings_us[name]) for name in ("there", "here"))
        return max(0.0, there - here)


def flock_of(case: Case, flock: Flock, coefficients: Coefficients, links: Links | None) -> Flock:
    """The hardware of a setting."""
    if links is None or not case.mbit_per_s:
        return flock
    speed = {"link_gbit_per_s": case.mbit_per_s / 1000, "burst_bytes": burst_bytes(MTU)}
    trip_us = coefficients.exchange_us + links.more_us
    nodes = tuple(replace(node, wired=True, round_trip_us=trip_us, **speed) for node in flock.nodes)
    return replace(flock, host=replace(flock.host, **speed), nodes=nodes)


def prediction_of(
    case: Case,
    load: ModelLoad,
    stripes: Sequence[int],
    probes: Probes,
    links: Links | None,
    steps: int,
    share: float = MEDIAN,
) -> tuple[Prediction, float]:
    """The prediction of a setting, and tokens a second if all its bytes came at the speed of plain reads."""
    coefficients = probes.coefficients(share)
    flock = flock_of(case, probes.flock(case.workers, share), coefficients, links)
    # Contexts grow while they are measured.
    setting = Setting(case.weight_format, case.batch, case.context + steps // 2, case.lanes)
    made = predict(load, flock, stripes, coefficients, setting)
    experts = load.num_moe_layers * load.distinct_experts(case.batch) * load.num_stripes
    experts *= load.unit_bytes[case.weight_format]
    cache = sum(case.batch * each.cache_bytes(setting.context, False) for each in load.attention)
    host = load.layer_bytes + load.shared_bytes + load.head_bytes + cache
    every = next(iter(flock.machines.values())).read_gb_per_s
    of_workers = min(every, case.workers * flock.host.read_gb_per_s)
    seconds = host / flock.host.read_gb_per_s / 1e9 + experts / of_workers / 1e9
    return made, case.batch / seconds


def verify(llms: dict[tuple[int, str, bool, bool], LLM]) -> None:
    """LLMs with as many workers give the same tokens."""
    params = SamplingParams(temperature=0, max_tokens=CHECK_TOKENS, ignore_eos=True)
    first: dict[int, list[tuple[int, ...]]] = {}
    prompts = [list(range(300, 332)), list(range(900, 920))]
    for key, llm in llms.items():
        tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        if first.setdefault(key[0], tokens) != tokens:
            raise SystemExit(f"{key}: other tokens with as many workers: nothing measured")


def start_llms(
    stack: ExitStack, model: Path, cases: Sequence[Case], links: Links | None
) -> dict[tuple[int, str, bool, bool], LLM]:
    """An LLM for each key of the settings, and for what calibrates."""
    llms: dict[tuple[int, str, bool, bool], LLM] = {}
    for key in sorted({case.key for case in cases} | {Case(1).key}):
        workers, weight_format, lanes, linked = key
        options = {**OPTIONS, "lanes": "on" if lanes else "off", "weight_format": weight_format}
        if linked:
            assert links is not None
            own = {"workers": links.addresses[key], "cluster_token": links.token}
        else:
            own = {"workers": workers, "threads_per_worker": 1}
        with inside(HOST) if linked else nullcontext():
            llms[key] = stack.enter_context(LLM(model, **own, **options))
    return llms


class Bench:
    """Everything that is measured, in turns.

    Args:
        cases: The settings.
        llms: The LLM of each key.
        probes: What calibrates.
        links: The network, if there is one.
        load: The model.
        steps: Decode steps of a setting in a round.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        llms: dict[tuple[int, str, bool, bool], LLM],
        probes: Probes,
        links: Links | None,
        load: ModelLoad,
        steps: int,
    ) -> None:
        self._cases, self._llms, self._probes, self._links = cases, llms, probes, links
        self._load, self._steps = load, steps
        self._decodes = {case: Decode() for case in cases}
        self.within = self.fastest_within = 0

    def run(self) -> None:
        """Measures everything once more."""
        self._probes.sample()
        if self._links is not None:
            self._links.sample()
        for case in self._cases:
            if case.mbit_per_s and self._links is not None:
                self._links.set_speed(case.mbit_per_s)
            decode(self._llms[case.key], case.batch, case.context, self._steps, self._decodes[case])

    def report(self) -> list[dict[str, object]]:
        """Prints the table; its figures for programs."""
        print(
            f"{'setting':52s}{'predicted':>10s}{'measured':>10s}{'ratio':>7s}{'fastest':>9s}{'ceiling':>9s}"
            "  bottleneck"
        )
        return [self._line(case) for case in self._cases]

    def _line(self, case: Case) -> dict[str, object]:
        own = self._decodes[case]
        stripes = self._llms[case.key].cluster_info().stripes
        made, ceiling = self._predict(case, stripes, MEDIAN)
        fast, _ = self._predict(case, stripes, FASTEST)
        tokens_per_s = case.batch / own.step_us() * 1e6
        ratio = made.tokens_per_s / tokens_per_s
        fast_ratio = fast.tokens_per_s * own.step_us(FASTEST) / case.batch / 1e6
        self.within += abs(ratio - 1) <= WITHIN
        self.fastest_within += abs(fast_ratio - 1) <= WITHIN
        print(
            f"{case!s:52s}{made.tokens_per_s:10.1f}{tokens_per_s:10.1f}{ratio:7.2f}{fast_ratio:9.2f}"
            f"{ceiling:9.1f}  {made.bottleneck}"
        )
        return {
            "setting": str(case),
            "predicted": round(made.tokens_per_s, 2),
            "measured": round(tokens_per_s, 2),
            "fastest_ratio": round(fast_ratio, 3),
            "ceiling": round(ceiling, 2),
            "parts_us": {name: round(value) for name, value in made.parts_us.items()},
            "measured_parts_us": {name: round(own.part_us(name)) for name in own.parts},
            "fastest_parts_us": {name: round(value) for name, value in fast.parts_us.items()},
            "fastest_measured_parts_us": {
                name: round(own.part_us(name, share=FASTEST)) for name in own.parts
            },
        }

    def _predict(self, case: Case, stripes: Sequence[int], share: float) -> tuple[Prediction, float]:
        return prediction_of(case, self._load, stripes, self._probes, self._links, self._steps, share)


def main() -> None:
    arguments = parse_arguments()
    cases = LOCAL if arguments.no_network else LOCAL + LINKED
    if not arguments.no_network:
        check_rights()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # namespaces are removed then too
    start_s, meter = time.monotonic(), LoadMeter()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = scratch / "fp9"
        convert(make_model(scratch / "random", arguments.layers, arguments.experts), model)
        links = None if arguments.no_network else Links(stack, model, LINKED)
        llms = start_llms(stack, model, cases, links)
        small = {
            count: stack.enter_context(LLM(workers=count, threads_per_worker=1, lanes="off", **OPTIONS))
            for count in (1, 3)
        }
        verify(llms)
        load = model_load(inspect_model(model), load_config(model), on_card=False)
        probes = Probes(load, llms[Case(1).key], ("fp9", "fp8"), small, steps=arguments.steps)
        print(f"{cpu_name()}, {available_cores()} cores; verified in {time.monotonic() - start_s:.0f} s")
        bench = Bench(cases, llms, probes, links, load, arguments.steps)
        for number in range(arguments.rounds):
            bench.run()
            elapsed_s = time.monotonic() - start_s
            print(f"round {number + 1} of {arguments.rounds}, {elapsed_s:.0f} s", file=sys.stderr)
        told = {}
        for name, share in (("median", MEDIAN), ("fastest", FASTEST)):
            coefficients = probes.coefficients(share)
            told[name] = {
                key: value
                for key, value in (vars(coefficients) | coefficients.expert_share).items()
                if isinstance(value, float) and key not in ("expert_flop_share", "attention_flop_share")
            }
            told[name]["read_gb_per_s"] = probes.flock(1, share).host.read_gb_per_s
            print(f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in told[name].items()))
        figures = bench.report()
    other = meter.read()
    print(
        f"within {WITHIN:.0%}: {bench.within} of {len(cases)}, by the fastest {FASTEST:.0%} of samples "
        f"{bench.fastest_within}; other programs used {other.programs:.1f} cores"
    )
    summary = {
        "benchmark": "offline/predicted",
        "commit": commit(),
        "machine": f"{cpu_name()}, {available_cores()} cores",
        "model": f"random, {arguments.layers} layers, {arguments.experts} experts",
        "rounds": arguments.rounds,
        "other_load_cores": round(other.programs + other.hypervisor, 2),
        "seconds": round(time.monotonic() - start_s),
        "coefficients": {
            name: {key: round(value, 4) for key, value in values.items()} for name, values in told.items()
        },
        "within_15_percent": bench.within,
        "fastest_within_15_percent": bench.fastest_within,
        "settings": figures,
    }
    line = json.dumps(summary)
    print(line)
    if arguments.json is not None:
        with arguments.json.open("a") as lines:
            lines.write(line + "\n")


if __name__ == "__main__":
    main()
