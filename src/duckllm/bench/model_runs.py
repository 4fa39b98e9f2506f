"""Whole models measured setting by setting: tokens verified, loads in turns, each beside its ceiling.

Called by cli/bench_model.py. Loads what settings ask for, drives :mod:`duckllm.bench.model_samples` through
the grid, and gives one line for each setting and load.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from duckllm.bench.grid import Cell, GridConfig, Prompts, Setting
from duckllm.bench.machine import available_memory_bytes, commit, cpu_name
from duckllm.bench.model_samples import Sample, decode_once, prefill_once
from duckllm.bench.token_ceilings import LinkFacts, MachineRates, StepCeiling, link_facts, step_ceiling
from duckllm.config import available_cores
from duckllm.device import find_device
from duckllm.outputs import percentile
from duckllm.weights.formats import is_lossless

if TYPE_CHECKING:
    from duckllm import LLM
    from duckllm.assembly_experts import ClusterInfo
    from duckllm.models.inspection import Inspection

Progress = Callable[[str, float, float], None]
PERCENTILES = (50, 90, 99)
# Several models side by side take no more than this of the memory there is.
_SHARE_OF_MEMORY = 0.5
_CACHE_MARGIN = 1.1


@dataclass(frozen=True)
class Loaded:
    """A setting's model while it is loaded.

    Args:
        setting: How it is run.
        llm: The model.
        info: Who computes its experts.
    """

    setting: Setting
    llm: LLM
    info: ClusterInfo

    def sample(self, what: str, prompts: list[list[int]], output_len: int) -> Sample:
        """One iteration of a load."""
        return (
            decode_once(self.llm, prompts, output_len)
            if what == "decode"
            else prefill_once(self.llm, prompts)
        )


@dataclass(frozen=True)
class Line:
    """What was measured of one load in one setting.

    Args:
        setting: The setting.
        info: Who computed its experts.
        cell: The load.
        output_len: Tokens of each reply.
        samples: One for each iteration, without those that warm up.
        ceiling: What a step takes at least.
        link: The way to the workers.
    """

    setting: Setting
    info: ClusterInfo
    cell: Cell
    output_len: int
    samples: tuple[Sample, ...]
    ceiling: StepCeiling
    link: LinkFacts

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each iteration."""
        return [sample.tokens_per_s for sample in self.samples]

    @property
    def tokens_per_s(self) -> float:
        """Their median."""
        return median(self.rates)

    @property
    def tokens_per_step(self) -> float:
        """Measured tokens for each step of the engine: more than the batch where guesses are right."""
        return sum(each.num_tokens for each in self.samples) / sum(each.num_steps for each in self.samples)

    @property
    def ceiling_tokens_per_s(self) -> float | None:
        """Tokens a second at best, at so many tokens a step; None where a speed is unknown."""
        step_s = self.ceiling.step_s
        return None if step_s is None else self.tokens_per_step / step_s

    @property
    def acceptance(self) -> float | None:
        """The share of guesses that were right; None where there were none."""
        guesses = sum(sample.num_draft_tokens for sample in self.samples)
        return sum(sample.num_accepted_tokens for sample in self.samples) / guesses if guesses else None

    @property
    def step_parts_s(self) -> dict[str, float]:
        """Where a step's time went, seconds, on the average; parts that took none are left out."""
        steps = sum(sample.num_steps for sample in self.samples)
        sums = {
            name: sum(sample.parts_s[name] for sample in self.samples) / steps
            for name in self.samples[0].parts_s
        }
        return {name: value for name, value in sums.items() if value > 0}

    def percentiles(self, name: str) -> dict[str, float] | None:
        """p50, p90 and p99 of ``first_s`` or ``gaps_s`` over all requests and iterations; None of none."""
        return percentiles_of([value for sample in self.samples for value in getattr(sample, name)])

    def to_json(self) -> dict[str, Any]:
        """The line, seconds and tokens a second."""
        ceiling, best = self.ceiling, self.ceiling_tokens_per_s
        return {
            **self.setting.names,
            "num_workers": self.info.num_workers,
            "weight_format": self.info.weight_format,
            "isas": list(self.info.isas),
            "input_len": self.cell.input_len,
            "output_len": self.output_len,
            "batch_size": self.cell.batch_size,
            "tokens_per_s": round(self.tokens_per_s, 2),
            "slowest_tokens_per_s": round(min(self.rates), 2),
            "fastest_tokens_per_s": round(max(self.rates), 2),
            "iterations_tokens_per_s": [round(rate, 2) for rate in self.rates],
            "time_to_first_token_s": self.percentiles("first_s"),
            "inter_token_s": self.percentiles("gaps_s"),
            "tokens_per_step": round(self.tokens_per_step, 3),
            "acceptance": self.acceptance,
            "step_parts_s": self.step_parts_s,
            "ceiling_tokens_per_s": None if best is None else round(best, 2),
            "of_ceiling": None if best is None else round(self.tokens_per_s / best, 4),
            "ceiling": {
                "bound": ceiling.bound,
                "rows": round(ceiling.rows, 2),
                "expert_bytes": round(ceiling.expert_bytes),
                "host_bytes": ceiling.host_bytes,
                "flop": ceiling.flop,
                "request_bytes": round(ceiling.request_bytes),
                "reply_bytes": round(ceiling.reply_bytes),
                "link": self.link.words,
                "link_gbit_per_s": self.link.gbit_per_s,
                "memory_s": ceiling.memory_s,
                "compute_s": ceiling.compute_s,
                "wire_s": ceiling.wire_s,
            },
        }


def percentiles_of(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90 and p99; None of no values."""
    if not values:
        return None
    return {f"p{percent}": percentile(values, percent) or 0.0 for percent in PERCENTILES}


@dataclass
class GridRun:
    """All that was measured.

    Args:
        config: What was asked for.
        model: The model's name.
        in_turns: Whether all settings were loaded side by side and took turns; else one after the other.
        load_average: Of the machine before anything was loaded.
        read_gb_per_s: What the machine reads; None before anything was measured.
        gflop_per_s: What it computes in f32.
        lines: What was measured.
        notes: What was left out, and what the figures do not say.
    """

    config: GridConfig
    model: str
    in_turns: bool
    load_average: float
    read_gb_per_s: float = 0.0
    gflop_per_s: float = 0.0
    lines: list[Line] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The run as one object."""
        return {
            "benchmark": f"bench {self.config.what}",
            "commit": commit(),
            "machine": f"{cpu_name()}, {available_cores()} cores",
            "load_average_before": round(self.load_average, 2),
            "model": self.model,
            "num_iters": self.config.num_iters,
            "num_iters_warmup": self.config.num_iters_warmup,
            "seed": self.config.seed,
            "settings_in_turns": self.in_turns,
            "read_gb_per_s": round(self.read_gb_per_s, 2),
            "gflop_per_s": round(self.gflop_per_s, 1),
            "runs": [line.to_json() for line in self.lines],
            "notes": self.notes,
        }


class GridMeasurement:
    """Measures settings on loads.

    Args:
        config: The loads.
        settings: The settings.
        model: The model, from outside.
        name: What it is called in the report.
        open_llm: Loads a model from a setting's arguments.
        interface_of: What the system says of the interface that leads to a machine.
        worker_speeds: GB/s of each address's node, None for one that does not say, asked before loading;
            None for workers that are started here.
        text: The text that prompts are pieces of; None for random tokens.
        rates: What the machine does at best; measured by default.
    """

    def __init__(
        self,
        config: GridConfig,
        settings: Sequence[Setting],
        model: Inspection,
        name: str,
        *,
        open_llm: Callable[..., LLM],
        interface_of: Callable[[str], LinkFacts],
        worker_speeds: Callable[[Setting], Sequence[float | None] | None],
        text: str | None = None,
        rates: MachineRates | None = None,
    ) -> None:
        self._config, self._settings, self._model = config, settings, model
        self._open, self._interface_of, self._speeds = open_llm, interface_of, worker_speeds
        self._text = text
        self._rates = rates
        self._tokens: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._run = GridRun(config, name, self._fit_together(), os.getloadavg()[0])

    def measure(self, progress: Progress) -> GridRun:
        """Measures all of it.

        Raises:
            RuntimeError: Replies differ that may not: nothing of them is measured.
        """
        rates = self._rates or MachineRates(available_cores())
        groups = [self._settings] if self._run.in_turns else [[each] for each in self._settings]
        for number, group in enumerate(groups):
            share = 1 / len(groups)

            def report(name: str, done: float, at: float = number * share, of: float = share) -> None:
                progress(name, at + done * of, 1)

            self._measure_group(group, rates, report)
        self._run.read_gb_per_s, self._run.gflop_per_s = rates.read_gb_per_s, rates.gflop_per_s
        return self._run

    def _fit_together(self) -> bool:
        """Whether all settings may be loaded at a time."""
        if len(self._settings) == 1 or any(each.uses_addresses for each in self._settings):
            return len(self._settings) == 1
        if any(find_device(each.arguments.get("device", "auto")).is_cuda for each in self._settings):
            return False
        host = sum(part.loaded_bytes for part in self._model.parts)
        each = host + self._model.expert_bytes("fp9", drafts=True) + self._cache_bytes()
        return len(self._settings) * each < _SHARE_OF_MEMORY * available_memory_bytes()

    def _cache_bytes(self) -> int:
        """A KV cache on the CPU that keeps the prompts of all loads, or holds the largest load at least."""
        elements = self._model.cache_elements_per_token + self._model.draft_cache_elements
        token_bytes = _CACHE_MARGIN * 4 * elements
        tokens = self._config.load_tokens
        all_bytes = token_bytes * sum(tokens)
        fits = len(self._settings) * all_bytes < _SHARE_OF_MEMORY / 2 * available_memory_bytes()
        return int(all_bytes if fits else token_bytes * max(tokens))

    def _load(self, stack: ExitStack, setting: Setting) -> Loaded:
        arguments = dict(setting.arguments)
        if len(self._settings) > 1 and self._run.in_turns and arguments.get("kv_cache_bytes") is None:
            arguments["kv_cache_bytes"] = self._cache_bytes()  # by default one model takes most of the memory
        llm = stack.enter_context(self._open(**arguments))
        return Loaded(setting, llm, llm.cluster_info())

    def _measure_group(
        self, group: Sequence[Setting], rates: MachineRates, progress: Callable[[str, float], None]
    ) -> None:
        config = self._config
        speeds = [self._speeds(setting) for setting in group]
        with ExitStack() as stack:
            loaded = [self._load(stack, setting) for setting in group]
            prompts = self._prompts(loaded[0].llm)
            work = [(cell, each) for cell in config.cells for each in range(len(loaded))]
            work = [(cell, each) for cell, each in work if self._has_room(loaded[each], cell)]
            samples: dict[tuple[Cell, int], list[Sample]] = {place: [] for place in work}
            rounds = config.num_iters_warmup + config.num_iters
            for number in range(rounds):
                rates.sample()
                # Whoever comes first in one round comes last in the next.
                for place, (cell, each) in enumerate(work if number % 2 else reversed(work)):
                    done = (number + place / max(1, len(work))) / rounds
                    progress(f"{cell.input_len} tokens x {cell.batch_size}", done)
                    # A reply goes on from the same prompt each time; a prompt may not be in the KV cache.
                    iteration = 0 if config.what == "decode" else number
                    sample = loaded[each].sample(
                        config.what, prompts.batch(cell, iteration), config.output_len
                    )
                    self._verify(loaded[each], cell, iteration, sample)
                    if number >= config.num_iters_warmup:
                        samples[cell, each].append(sample)
            links = [link_facts(each.info, self._interface_of) for each in loaded]
        for cell, each in work:
            own = tuple(samples[cell, each])
            ceiling = self._ceiling(loaded[each], own, rates, speeds[each], links[each])
            self._run.lines.append(
                Line(
                    loaded[each].setting,
                    loaded[each].info,
                    cell,
                    config.output_len,
                    own,
                    ceiling,
                    links[each],
                )
            )

    def _prompts(self, llm: LLM) -> Prompts:
        text_ids = None if self._text is None else llm.tokenizer.encode(self._text)
        avoided = llm.tokenizer.eos_token_ids
        return Prompts(self._model.vocab_size, avoided, self._config.seed, text_ids)

    def _has_room(self, loaded: Loaded, cell: Cell) -> bool:
        """Whether context and KV cache hold a load; else a note says so."""
        llm, pages = loaded.llm, loaded.llm.state().cache
        total = pages.used + pages.reusable + pages.free
        tokens = cell.input_len + self._config.output_len
        if tokens <= llm.max_model_len and cell.batch_size * (-(-tokens // 16) + 1) <= total:
            return True
        self._run.notes.append(
            f"left out: {cell.batch_size} contexts of {tokens} tokens, as the KV cache holds {16 * total} "
            f"tokens and a context {llm.max_model_len} (--kv-cache-bytes, --max-model-len)"
        )
        return False

    def _verify(self, loaded: Loaded, cell: Cell, iteration: int, sample: Sample) -> None:
        """Holds replies against those of settings whose sums have the same order, and of other iterations."""
        if loaded.llm.device.is_cuda:  # its sums may have another order in another batch
            return
        names, computed_in = loaded.setting.names, loaded.info.weight_format
        weights = "lossless" if all(map(is_lossless, computed_in.split("+"))) else computed_in
        key = (loaded.info.stripes, names["wire_dtype"], weights, cell, iteration)
        if self._tokens.setdefault(key, sample.token_ids) != sample.token_ids:
            raise RuntimeError(
                f"{dict(names)}, {cell.input_len} tokens, {cell.batch_size} requests: other replies than in "
                "another iteration or setting of the same workers: nothing measured"
            )

    def _ceiling(
        self,
        loaded: Loaded,
        samples: Sequence[Sample],
        rates: MachineRates,
        speeds: Sequence[float | None] | None,
        link: LinkFacts,
    ) -> StepCeiling:
        steps = sum(sample.num_steps for sample in samples)
        rejected = sum(sample.num_draft_tokens - sample.num_accepted_tokens for sample in samples)
        rows = (sum(sample.num_tokens for sample in samples) + rejected) / steps
        ended = sum(len(sample.token_ids) for sample in samples) / steps
        arguments = loaded.setting.arguments
        return step_ceiling(
            self._model,
            loaded.info,
            rows,
            logit_rows=rows if self._config.what == "decode" else ended,
            wire_dtype=arguments.get("wire_dtype", "f32"),
            reply_dtype=arguments.get("reply_dtype", "f32"),
            multicast=arguments.get("multicast", "off") != "off",
            is_cuda=loaded.llm.device.is_cuda,
            is_bf16=arguments.get("prefill", "f32") == "bf16",
            read_gb_per_s=rates.read_gb_per_s,
            gflop_per_s=rates.gflop_per_s,
            worker_gb_per_s=speeds,
            link=link,
        )
