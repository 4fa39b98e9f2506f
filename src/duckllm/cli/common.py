"""What several verbs share: options in common, a sign of life while loading, the line of facts.

Called by the verbs; knows what a chat needs of a model (:class:`ChatModel`) and no tensors.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from duckllm.cli.terminal import printable, wrapped
from duckllm.cluster.address import parse_addresses
from duckllm.config import (
    LOSSLESS_FORMATS,
    MAX_WORKERS,
    SHARES,
    count_of,
    parse_decimal,
    parse_whole,
    show_size,
)
from duckllm.errors import HIDDEN, ConfigError, InWords, without_credentials

if TYPE_CHECKING:
    from rich.status import Status

    from duckllm.outputs import EngineMetrics, RequestMetrics, StreamOutput
    from duckllm.sampling_params import SamplingParams


class ClusterInfo(Protocol):
    """What is said of the workers in the line of facts."""

    @property
    def num_workers(self) -> int:
        """How many there are."""

    @property
    def weight_format(self) -> str:
        """The format of their expert weights."""

    @property
    def layer_formats(self) -> str:
        """Which layers are computed in which format; empty where all are in the same."""

    @property
    def isas(self) -> Sequence[str]:
        """The instruction set that each computes with."""

    @property
    def links(self) -> Sequence[str]:
        """How each is spoken with."""

    @property
    def own_memory_bytes(self) -> Sequence[int]:
        """How much of its weights each has copied into its own memory."""

    @property
    def huge_page_bytes(self) -> Sequence[int]:
        """How much of that lies in huge pages."""


class ChatConversation(Protocol):
    """What a chat needs of :class:`duckllm.conversation.Conversation`."""

    def stream(
        self, text: str, sampling_params: SamplingParams | None = None
    ) -> Generator[StreamOutput, None, None]:
        """The reply to a message, as it comes."""

    def reset(self) -> None:
        """Begins anew."""


# Options whose parameters have other names.
_FIELDS = {"weight_format": "format", "as_json": "json"}
_BEST_LINK = "shared memory"
EMPTY_REPLY = "[empty reply]"
_STEP_PARTS = {
    "attention_s": "attention",
    "dense_s": "dense layers",
    "dispatch_s": "sending to workers",
    "wait_s": "waiting for experts",
    "combine_s": "adding up",
    "head_s": "rating all words",
    "sampling_s": "choosing one",
    "draft_s": "guessing",
}


class ChatModel(Protocol):
    """What a chat needs of :class:`duckllm.LLM`."""

    def conversation(self, system: str | None = None) -> ChatConversation:
        """A new conversation."""

    def cluster_info(self) -> ClusterInfo:
        """The workers."""

    def memory(self) -> object:
        """What memory goes to; its text says so."""

    def stats(self) -> EngineMetrics:
        """What was computed so far, and how long it took."""


def parse_workers(text: str) -> int | tuple[str, ...]:
    """A number of workers to start here, or the addresses of running ones.

    Raises:
        ConfigError: ``text`` is neither, or an address is malformed or there twice.
    """
    expected = "a number of at least 0, or addresses: name:port,name:port"
    number = parse_whole(text)
    if number is not None:
        return number
    addresses = tuple(part.strip() for part in text.split(","))
    if not all(":" in address for address in addresses):
        raise ConfigError("workers", text, expected)
    if len(addresses) > MAX_WORKERS:
        raise ConfigError("workers", InWords(f"{len(addresses)} addresses"), f"at most {MAX_WORKERS}")
    return tuple(str(address) for address in parse_addresses(addresses, "workers"))


def looks_for_nodes(cluster: str | None) -> bool:
    """Whether ``--cluster`` asks for nodes that announce themselves."""
    return (cluster or "").startswith("discover")


def refuse_unused(verb: Callable[..., object], given: Mapping[str, object], expected: str) -> None:
    """Refuses options that were given, and that would change nothing as other options are.

    Args:
        verb: The verb, whose defaults stand for what was not given.
        given: The options by their parameters' names.
        expected: What is expected of them: ``"nothing without --suite"``.

    Raises:
        ConfigError: One is not as by default.
    """
    parameters = inspect.signature(verb).parameters
    for name, value in given.items():
        if value != parameters[name].default:
            shown = str(value) if isinstance(value, Path) else value
            raise ConfigError(_FIELDS.get(name, name), shown, expected)


def parse_shares(text: str) -> str | tuple[float, ...]:
    """``"auto"``, ``"even"``, or a number for each worker.

    Raises:
        ConfigError: ``text`` is none of these.
    """
    text = text.strip()
    if text in SHARES:
        return text
    found = [parse_decimal(part) for part in text.split(",")]
    shares = tuple(each for each in found if each is not None)
    if len(shares) < len(found):
        raise ConfigError("shares", text, "auto, even, or a number for each worker: 1,2,4")
    return shares


def describe_shares(stripes: Sequence[int]) -> str:
    """Who has how much of the experts, where that is not the same; empty where it is."""
    if not stripes or max(stripes) - min(stripes) <= 1:
        return ""
    return f"stripes of each worker: {', '.join(map(str, stripes))} of {sum(stripes)}"


def describe_layers(info: ClusterInfo, asked: str) -> str:
    """Which layers are computed in which format, where they differ; empty where they do not.

    Args:
        info: The workers.
        asked: The ``--format`` that was asked for.
    """
    if not info.layer_formats:
        return ""
    words = f"experts are computed in {info.layer_formats}"
    if asked in LOSSLESS_FORMATS:
        words += f": --format {asked} is for layers stored in fp9 or fp8, others stay as they were rounded"
    return words


def describe_links(info: ClusterInfo) -> str:
    """How the workers are spoken with, and what could not be had; empty where all is at its best."""
    words = []
    links = [link for link in info.links if link != _BEST_LINK]
    for link in dict.fromkeys(links):
        words.append(f"{count_of(links.count(link), 'worker')} by {link}")
    small_bytes = sum(info.own_memory_bytes) - sum(info.huge_page_bytes)
    if 2 * small_bytes > sum(info.own_memory_bytes):
        words.append(
            f"{show_size(small_bytes)} of weights in small pages, as the system gave no huge ones "
            "(duckllm doctor there says why)"
        )
    return "; ".join(words)


def describe_workers(info: ClusterInfo) -> str:
    """Number, format and instruction sets of the workers, for people."""
    count = count_of(info.num_workers, "worker") if info.num_workers else "no workers"
    return f"{count}, {info.weight_format}, {'+'.join(sorted(set(info.isas)))}"


def describe_facts(info: ClusterInfo, metrics: RequestMetrics, ending: str = "") -> str:
    """The line of facts below a reply; ``ending`` says why it is not whole."""
    facts = [describe_workers(info), count_of(metrics.num_generated_tokens, "token")]
    if metrics.decode_tokens_per_s is not None:
        facts.append(f"{metrics.decode_tokens_per_s:.1f} tok/s")
    if metrics.time_to_first_token_s is not None:
        facts.append(f"first token after {metrics.time_to_first_token_s:.2f} s")
    if metrics.num_cached_tokens:
        facts.append(f"{metrics.num_cached_tokens} of {metrics.num_prompt_tokens} prompt tokens cached")
    if metrics.num_draft_tokens:
        facts.append(f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens} guesses right")
    if ending:
        facts.append(ending)
    return "[" + ", ".join(facts) + "]"


def describe_stats(stats: EngineMetrics) -> str:
    """What the engine's last steps were and where their time went, in three lines; empty before the first."""
    if not stats.window_steps:
        return ""
    parts = ", ".join(
        f"{_STEP_PARTS[name]} {1000 * seconds:.2f}" for name, seconds in stats.step_parts_s.items() if seconds
    )
    rates = []
    if stats.prefill_tokens_per_s is not None:
        rates.append(f"{stats.prefill_tokens_per_s:.0f} tok/s of prompts")
    if stats.decode_tokens_per_s is not None:
        rates.append(f"{stats.decode_tokens_per_s:.1f} tok/s of replies")
    if stats.acceptance is not None:
        rates.append(f"{stats.acceptance:.0%} of guesses right")
    for name, median, most in (
        ("first token", stats.time_to_first_token_p50_s, stats.time_to_first_token_p99_s),
        ("between tokens", stats.inter_token_p50_s, stats.inter_token_p99_s),
    ):
        if median is not None and most is not None:
            rates.append(f"{name} {1000 * median:.1f} ms, 99 of 100 within {1000 * most:.1f}")
    return (
        f"Last {count_of(stats.window_steps, 'step')}, {1000 * stats.step_s:.2f} ms each: {parts}\n"
        f"{'; '.join(rates)}\n"
        f"In all: {count_of(stats.num_prompt_tokens, 'token')} of prompts computed, "
        f"{stats.num_generated_tokens} generated, "
        f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} guesses right"
    )


def describe_ending(output: StreamOutput, params: SamplingParams) -> str:
    """Why the reply that ends with ``output`` is not whole; empty if it is."""
    if output.finish_reason is None:
        return "stopped"
    if output.finish_reason != "length":
        return ""
    metrics = output.metrics
    if metrics.num_generated_tokens == params.max_tokens:
        return f"cut at max_tokens={params.max_tokens}"
    num_tokens = metrics.num_prompt_tokens + metrics.num_generated_tokens
    return f"cut at the context's end ({num_tokens} tokens)"


def tell(text: str) -> None:
    """A line about what is going on, on stderr where there is one."""
    if sys.stderr is not None:
        print(wrapped(f"duckllm: {printable(text)}", sys.stderr), file=sys.stderr)


class Waiting:
    """A spinner on stderr while something takes longer than a moment; nothing where stderr is no terminal.

    Args:
        text: What is going on.
        after_s: Shown only when it takes longer than this, seconds.
    """

    def __init__(self, text: str, after_s: float = 2.0) -> None:
        self._text = text
        self._lock = threading.Lock()
        self._over = False
        self._status: Status | None = None
        self._timer = threading.Timer(after_s, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Waiting:
        if sys.stderr.isatty():
            from duckllm.weights.console import on_bar

            on_bar.append(self._end)
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer.ident is not None:
            from duckllm.weights.console import on_bar

            on_bar.remove(self._end)
        self._end()

    def _end(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._status is not None:
                self._status.stop()

    def _show(self) -> None:
        from rich.console import Console
        from rich.text import Text

        # As Text: a folder's name may hold what rich takes for its markup.
        text = Text(printable(without_credentials(self._text, HIDDEN)))
        with self._lock:
            if not self._over:
                self._status = Console(file=sys.stderr).status(text)
                self._status.start()
