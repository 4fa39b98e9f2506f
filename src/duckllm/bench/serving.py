"""A server under load: requests sent as they are planned, and the times of their replies.

Called by cli/bench_serve.py. In an open loop a request is due when it arrives, whether or not those before it
have been answered, and its latency counts from that moment: a server that stalls is not spared the requests
that it keeps waiting ("coordinated omission"). In a closed loop one is sent when another has ended.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from duckllm.bench.load import Load, PromptWriter, Wanted, arrivals
from duckllm.bench.machine import commit, cpu_name
from duckllm.bench.model_runs import Progress, percentiles_of
from duckllm.bench.stream_client import Outcome, StreamClient
from duckllm.config import available_cores
from duckllm.errors import without_credentials

_FEW_WORDS, _MANY_WORDS = 16, 144


@dataclass(frozen=True)
class LoadResult:
    """What one load gave.

    Args:
        load: How requests came.
        outcomes: What became of each, in the order of arrival.
        start: The first moment, by the clock of the outcomes.
    """

    load: Load
    outcomes: tuple[Outcome, ...]
    start: float

    @property
    def answered(self) -> list[Outcome]:
        """Those that came to their end."""
        return [outcome for outcome in self.outcomes if not outcome.error]

    @property
    def errors(self) -> dict[str, int]:
        """How many failed in each way, most first; messages that differ in numbers alone are one way."""
        first: dict[str, str] = {}
        counts = Counter(
            first.setdefault(re.sub(r"(?<!HTTP )\b\d+", "0", outcome.error), outcome.error)
            for outcome in self.outcomes
            if outcome.error
        )
        return dict(counts.most_common())

    @property
    def seconds(self) -> float:
        """From the first moment to the end of the last request."""
        return max(outcome.end for outcome in self.outcomes) - self.start

    @property
    def offered_per_s(self) -> float | None:
        """Requests a second that arrived; None where they came all at once, or as others ended."""
        last = max(outcome.intended for outcome in self.outcomes) - self.start
        return None if self.load.is_closed or last <= 0 else len(self.outcomes) / last

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens of whole replies a second."""
        return sum(outcome.num_tokens for outcome in self.answered) / self.seconds

    def times_s(self, name: str) -> list[float]:
        """Times of requests that were answered: first, first_after_sending, between, per_token or whole."""
        own = self.answered
        if name == "between":
            return [gap for outcome in own for gap in outcome.gaps_s]
        if name == "first_after_sending":
            return [outcome.pieces[0] - outcome.sent for outcome in own]
        if name == "per_token":
            return [each for outcome in own if (each := outcome.per_token_s) is not None]
        return [outcome.first_s if name == "first" else outcome.whole_s for outcome in own]

    @property
    def sent_late_s(self) -> list[float]:
        """How long after its arrival each request was sent: the client's own delay, or a full house."""
        return [outcome.sent - outcome.intended for outcome in self.outcomes]

    @property
    def most_under_way(self) -> int:
        """Most requests that were sent and not yet over."""
        events = sorted(
            [(outcome.sent, 1) for outcome in self.outcomes]
            + [(outcome.end, -1) for outcome in self.outcomes]
        )
        most = now = 0
        for _, change in events:
            now += change
            most = max(most, now)
        return most

    def to_json(self) -> dict[str, Any]:
        """The load as one object, seconds."""
        own = self.answered
        counted = [outcome for outcome in own if outcome.prompt_tokens is not None]
        prompt_tokens = sum(outcome.prompt_tokens or 0 for outcome in own)
        rate = self.load.request_rate
        return {
            "load": str(self.load),
            "request_rate": None if rate is None or rate == float("inf") else rate,
            "burstiness": self.load.burstiness,
            "max_concurrency": self.load.max_concurrency,
            "loop": "closed" if self.load.is_closed else "open",
            "num_prompts": len(self.outcomes),
            "completed": len(own),
            "errors": self.errors,
            "short_replies": sum(outcome.num_tokens < outcome.output_len for outcome in own),
            "duration_s": round(self.seconds, 3),
            "offered_requests_per_s": _rounded(self.offered_per_s),
            "requests_per_s": _rounded(len(own) / self.seconds),
            "output_tokens_per_s": _rounded(self.output_tokens_per_s),
            "total_tokens_per_s": _rounded(self.output_tokens_per_s + prompt_tokens / self.seconds)
            if len(counted) == len(own)
            else None,
            "most_under_way": self.most_under_way,
            "prompt_tokens": _mean([outcome.prompt_tokens or 0 for outcome in counted]),
            "cached_prompt_tokens": _mean([outcome.cached_tokens or 0 for outcome in counted]),
            "reply_tokens": _mean([outcome.num_tokens for outcome in own]),
            "pieces_per_reply": _mean([len(outcome.pieces) for outcome in own]),
            "time_to_first_token_s": summary(self.times_s("first")),
            "time_to_first_token_after_sending_s": summary(self.times_s("first_after_sending")),
            "inter_token_s": summary(self.times_s("between")),
            "time_per_output_token_s": summary(self.times_s("per_token")),
            "end_to_end_s": summary(self.times_s("whole")),
            "sent_late_s": summary(self.sent_late_s),
        }


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and the most; None of no values."""
    found = percentiles_of(values)
    return None if found is None else {"mean": fmean(values), **found, "max": max(values)}


def _mean(values: Sequence[float]) -> float | None:
    return round(fmean(values), 1) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


@dataclass
class ServingRun:
    """All loads of one benchmark.

    Args:
        base_url: The server, without a password.
        backend: The API that was asked.
        model: What the server calls the model.
        seed: Of lengths and arrivals.
        load_average: Of the client's machine before it began.
        results: One for each load.
        notes: What the figures do not say.
    """

    base_url: str
    backend: str
    model: str
    seed: int
    load_average: float
    results: list[LoadResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The run as one object."""
        return {
            "benchmark": "bench serve",
            "commit": commit(),
            "client_machine": f"{cpu_name()}, {available_cores()} cores",
            "load_average_before": round(self.load_average, 2),
            "base_url": self.base_url,
            "backend": self.backend,
            "model": self.model,
            "seed": self.seed,
            "runs": [result.to_json() for result in self.results],
            "notes": self.notes,
        }


async def measure_serving(
    client: StreamClient,
    base_url: str,
    backend: str,
    loads: Sequence[Load],
    wanted: Sequence[Wanted],
    *,
    seed: int,
    num_warmups: int,
    progress: Progress,
) -> ServingRun:
    """Sends all requests once for each load.

    Raises:
        ConfigError: No server answers there.
    """
    due = [arrivals(load, wanted, seed) for load in loads]
    shown = without_credentials(base_url)
    run = ServingRun(shown, backend, await client.find_model(), seed, os.getloadavg()[0])
    writer = PromptWriter(int.from_bytes(os.urandom(8)))
    texts = [writer.words(count) for count in (_FEW_WORDS, _MANY_WORDS)]
    counts = [await client.count_tokens(text) for text in texts]
    if None in counts:
        run.notes.append("the server counts no tokens: a word is taken for one, and a piece of a reply")
    else:
        few, many = (count or 0 for count in counts)
        writer.calibrate([(_FEW_WORDS, few), (_MANY_WORDS, many)])
    for number, (load, times) in enumerate(zip(loads, due, strict=True)):
        prompts = [writer.text(each.input_len) if each.prompt is None else each.prompt for each in wanted]
        for warmup in range(num_warmups):
            each = wanted[warmup % len(wanted)]
            prompt = each.prompt if each.prompt is not None else writer.text(each.input_len)
            await client.stream(Outcome(time.perf_counter(), each.input_len, each.output_len), prompt)
        finished = 0

        def count(name: str = str(load), before: int = number) -> None:
            nonlocal finished
            finished += 1
            progress(name, before * len(wanted) + finished, len(loads) * len(wanted))

        run.results.append(await send_load(client, load, wanted, times, prompts, count))
    return run


async def send_load(
    client: StreamClient,
    load: Load,
    wanted: Sequence[Wanted],
    due: Sequence[float],
    prompts: Sequence[str],
    on_end: Callable[[], None] = lambda: None,
) -> LoadResult:
    """Sends requests as a load has them, and waits for all.

    Args:
        client: The way to the server.
        load: How they come.
        wanted: Their lengths.
        due: When each arrives, seconds after the first moment.
        prompts: Their texts.
        on_end: Called when one is over.
    """
    outcomes = [Outcome(0.0, each.input_len, each.output_len) for each in wanted]
    start = time.perf_counter()

    async def send(number: int) -> None:
        await client.stream(outcomes[number], prompts[number])
        on_end()

    async def take_turns(numbers: Iterator[int]) -> None:
        for number in numbers:
            outcomes[number].intended = time.perf_counter()
            await send(number)

    async def arrive(number: int, slots: asyncio.Semaphore | None) -> None:
        outcomes[number].intended = start + due[number]
        await asyncio.sleep(max(0.0, outcomes[number].intended - time.perf_counter()))
        if slots is None:
            return await send(number)
        async with slots:  # in the order of arrival
            await send(number)

    if load.is_closed:
        numbers = iter(range(len(wanted)))
        await asyncio.gather(*(take_turns(numbers) for _ in range(load.max_concurrency or 1)))
    else:
        slots = None if load.max_concurrency is None else asyncio.Semaphore(load.max_concurrency)
        await asyncio.gather(*(arrive(number, slots) for number in range(len(wanted))))
    return LoadResult(load, tuple(outcomes), start)
