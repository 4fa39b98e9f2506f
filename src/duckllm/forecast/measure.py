"""What this machine makes of a model: the coefficients of a forecast, measured.

Called by ``duckllm plan --measure`` and by benchmarks/offline/predicted.py. Reads, expert kernels and a few
decode steps through one worker of one thread are measured in turns; every figure is a median, or another
quantile of them where the machine is shared with others. Parts are measured, never the whole that is to be
predicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from duckllm import _native
from duckllm.bench.expert_step import ExpertStep, RandomExperts, SliceShape
from duckllm.config import available_cores, total_memory_bytes
from duckllm.forecast.coefficients import ON_CPU, Coefficients
from duckllm.forecast.flock import GIB, Computer, Flock, Machine
from duckllm.forecast.load import ModelLoad
from duckllm.sampling_params import SamplingParams
from duckllm.worker.read_speed import measure_read_speed

if TYPE_CHECKING:
    from duckllm.llm import LLM

HERE = "here"
SHORT_CONTEXT, LONG_CONTEXT, MANY = 32, 1536, 8
MEDIAN = 0.5
_KERNEL_SAMPLES = 8  # of a round; a sample is a few steps
_KERNEL_BYTES, _FIRST_TOKEN, _LAST_TOKEN = 384 << 20, 10, 8000
_LEAST_SHARE, _MOST_SHARE = 0.01, 1.5
# Of a step's parts, those of the host beside attention's reading of the cache.
_HOST_PARTS = ("attention_s", "dense_s", "dispatch_s", "combine_s")


def quantile(values: Sequence[float], share: float) -> float:
    """The value that such a share of all are below; the median for a half."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass
class Decode:
    """Decode steps: seconds of each, and by part."""

    seconds: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)

    def step_us(self, share: float = MEDIAN) -> float:
        """A step's time, that a share of all are below."""
        return 1e6 * quantile(self.seconds, share)

    def part_us(self, *names: str, share: float = MEDIAN) -> float:
        """Likewise of the sum of parts."""
        sums = map(sum, zip(*(self.parts[name] for name in names), strict=True))
        return 1e6 * quantile(list(sums), share)


def decode(llm: LLM, batch: int, context: int, steps: int, into: Decode | None = None) -> Decode:
    """Times decode steps of random prompts; no prompt's step and no first reply is among them.

    Args:
        llm: Computes them.
        batch: Requests together.
        context: Tokens of each prompt.
        steps: How many.
        into: What they are added to.
    """
    made = Decode() if into is None else into
    generator = np.random.default_rng((batch, context))
    params = SamplingParams(temperature=0, max_tokens=steps + 4, ignore_eos=True)
    last = min(_LAST_TOKEN, llm.tokenizer.max_token_id)
    prompts = generator.integers(_FIRST_TOKEN, last, (batch, context)).tolist()
    requests = [request for prompt in prompts for request in llm.new_requests(prompt, params)]
    pool = llm.new_pool()
    pool.add(requests)
    try:
        while any(request.num_given_tokens < 2 for request in requests):
            pool.step()
        before = llm.stats().total_step_parts_s
        for _ in range(steps):
            if len(pool) < batch:
                break
            start_s = time.perf_counter()
            pool.step()
            made.seconds.append(time.perf_counter() - start_s)
            after = llm.stats().total_step_parts_s
            for name, seconds in after.items():
                made.parts.setdefault(name, []).append(seconds - before[name])
            before = after
    finally:
        pool.abort(requests)
    return made


class KernelProbe:
    """The expert kernel on one thread, cold, with all and with a quarter of a token's experts.

    Args:
        load: The model.
        weight_format: ``"fp9"`` or ``"fp8"``.
    """

    def __init__(self, load: ModelLoad, weight_format: str) -> None:
        self._weight_format = weight_format
        shape = SliceShape("model", load.hidden_size, load.num_stripes, load.top_k, load.num_experts)
        self._expert_bytes = shape.expert_bytes(weight_format)
        count = max(4 * load.top_k, min(_KERNEL_BYTES // self._expert_bytes, 4096))
        random = RandomExperts(shape)
        units = random.fill(count, weight_format, huge_pages=True)
        self._steps = {
            top_k: ExpertStep(
                random, units, num_tokens=1, top_k=top_k, threads=1, isa="auto", weight_format=weight_format
            )
            for top_k in sorted({max(1, load.top_k // 4), load.top_k})
        }
        for step in self._steps.values():
            step.verify()

    def sample(self) -> None:
        """Times a few steps of each."""
        for _ in range(_KERNEL_SAMPLES):
            for step in self._steps.values():
                step.sample()

    def line(self, share: float = MEDIAN) -> tuple[float, float]:
        """GB/s of its bytes, and microseconds of a step beside them, by a quantile of the times."""
        points = [
            (top_k * self._expert_bytes, quantile(step.seconds, share)) for top_k, step in self._steps.items()
        ]
        num_bytes, seconds = points[-1]
        if len(points) == 1 or seconds <= points[0][1]:
            return num_bytes / seconds / 1e9, 0.0
        slope = (seconds - points[0][1]) / (num_bytes - points[0][0])
        fixed_s = max(0.0, seconds - slope * num_bytes)
        return num_bytes / (seconds - fixed_s) / 1e9, 1e6 * fixed_s


class Probes:
    """Everything that is measured here for a forecast.

    Args:
        load: The model, its host part on the CPU.
        llm: The model through one worker of one thread, one thread for the host, no guesses, no lanes.
        formats: Formats of the experts.
        small: The demo model through different numbers of such workers: what a worker more costs.
        long_context: Tokens of the context that shows what the KV cache costs.
        steps: Decode steps of a sample.
    """

    def __init__(
        self,
        load: ModelLoad,
        llm: LLM,
        formats: tuple[str, ...],
        small: Mapping[int, LLM],
        *,
        long_context: int = LONG_CONTEXT,
        steps: int = 16,
    ) -> None:
        self._load, self._llm, self._small, self._steps = load, llm, small, steps
        self._long = long_context
        self._format = llm.cluster_info().weight_format
        self._kernels = {each: KernelProbe(load, each) for each in {*formats, self._format}}
        self._reads: dict[int, list[float]] = {1: [], available_cores(): []}
        self._decodes = {"one": Decode(), "many": Decode(), "long": Decode()}
        self._small_decodes = {count: Decode() for count in small}

    def sample(self) -> None:
        """Measures everything once more."""
        for threads, rates in self._reads.items():
            rates.append(measure_read_speed(threads))
        for kernel in self._kernels.values():
            kernel.sample()
        for name, batch, context in (
            ("one", 1, SHORT_CONTEXT),
            ("many", MANY, SHORT_CONTEXT),
            ("long", 1, self._long),
        ):
            decode(self._llm, batch, context, self._steps, self._decodes[name])
        for count, llm in self._small.items():
            decode(llm, 1, SHORT_CONTEXT, 2 * self._steps, self._small_decodes[count])

    def flock(self, num_workers: int, share: float = MEDIAN) -> Flock:
        """This machine as host and as so many workers of a thread each, which divide its memory."""
        one, every = (quantile(self._reads[threads], 1 - share) for threads in (1, available_cores()))
        gib = total_memory_bytes() / GIB / (1 + num_workers)
        isa = _native.select_isa()
        node = Computer(HERE, 1, one, 1000.0, gib, 1.0, isa, machine=HERE)
        return Flock(
            node, (node,) * num_workers, machines={HERE: Machine(available_cores(), max(one, every))}
        )

    def coefficients(self, share: float = MEDIAN) -> Coefficients:
        """What was measured so far, as medians, or as times that such a share of all are below."""
        load = self._load
        gb_per_s = quantile(self._reads[1], 1 - share)
        isa = _native.select_isa().partition("+")[0]
        lines = {each: kernel.line(share) for each, kernel in self._kernels.items()}
        shares = {f"{isa} {each}": _share(line[0] / gb_per_s) for each, line in lines.items()}
        one, many, long = (self._decodes[name] for name in ("one", "many", "long"))
        head_us = one.part_us("head_s", share=share)
        dense_share = _share(load.head_bytes / (head_us * 1e3) / gb_per_s)
        weights_us = (load.layer_bytes + load.shared_bytes) / (gb_per_s * dense_share) / 1e3
        host_us = one.part_us(*_HOST_PARTS, share=share)
        rows_us = many.part_us(*_HOST_PARTS, share=share) - host_us
        attention_us = [each.part_us("attention_s", share=share) for each in (one, long)]
        cache_us = max(1.0, attention_us[1] - attention_us[0])
        tokens = self._long - SHORT_CONTEXT
        per_token = sum(each.cache_bytes(self._long, False) / self._long for each in load.attention)
        expert_us, fixed_us = self._expert_us(lines[self._format])
        exchange_us = one.part_us("wait_s", share=share) / load.num_moe_layers - expert_us
        # What no part names, and choosing tokens; with many rows the head's own time grows too.
        step_us = one.step_us(share) - one.part_us(*one.parts, share=share)
        step_us += one.part_us("sampling_s", share=share)
        many_us = many.step_us(share) - many.part_us(*many.parts, share=share)
        many_us += many.part_us("sampling_s", "head_s", share=share) - head_us
        source = "measured here"
        return Coefficients(
            "duckllm as measured here",
            expert_share=shares,
            expert_flop_share=ON_CPU.expert_flop_share,
            node_step_us=fixed_us,
            dense_share=dense_share,
            cache_share=_share(tokens * per_token / (cache_us * 1e3) / gb_per_s),
            attention_flop_share=0.0,
            layer_us=max(0.0, host_us - weights_us) / load.num_layers,
            layer_row_us=max(0.0, rows_us) / (MANY - 1) / load.num_layers,
            step_us=max(0.0, step_us),
            step_request_us=max(0.0, many_us - step_us) / (MANY - 1),
            exchange_us=max(0.0, exchange_us),
            worker_us=self._worker_us(share),
            sources=dict.fromkeys(
                (
                    *("expert_share", "node_step_us", "dense_share", "cache_share", "layer_us"),
                    *("layer_row_us", "step_us", "step_request_us", "exchange_us", "worker_us"),
                ),
                source,
            )
            | {"expert_flop_share": ON_CPU.sources["expert_flop_share"]},
        )

    def _expert_us(self, line: tuple[float, float]) -> tuple[float, float]:
        """A layer's experts of one row by one thread, and what of it is not bytes."""
        gb_per_s, fixed_us = line
        load = self._load
        num_bytes = load.top_k * load.num_stripes * load.unit_bytes[self._format]
        return num_bytes / gb_per_s / 1e3 + fixed_us, fixed_us

    def _worker_us(self, share: float) -> float:
        """What each worker more costs in a layer, where computing costs next to nothing."""
        counts = sorted(self._small)
        if len(counts) < 2:
            return ON_CPU.worker_us
        first, last = counts[0], counts[-1]
        took = {count: self._small_decodes[count].part_us("dispatch_s", "wait_s") for count in (first, last)}
        layers = len(self._small[first].worker_times().layers)
        # Each more delays the last one's start by half of it; its answer is taken while others compute.
        return 2 * max(0.0, took[last] - took[first]) / (last - first) / max(1, layers)


def _share(value: float) -> float:
    return min(_MOST_SHARE, max(_LEAST_SHARE, value))


def measured(
    probes: Probes, rounds: int, tell: Callable[[int], object] | None = None
) -> tuple[Flock, Coefficients]:
    """This machine with one worker, and its coefficients, after so many rounds."""
    for number in range(rounds):
        probes.sample()
        if tell is not None:
            tell(number + 1)
    return probes.flock(1), probes.coefficients()
