"""The load of a server benchmark: how long prompts and replies are, and when requests arrive.

Called by cli/bench_serve.py and serving.py; opens no connection.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from duckllm.errors import ConfigError, InWords

MAX_REQUESTS = 1_000_000
_MAX_TOKENS = 10_000_000
_MAX_SECONDS = 30 * 86_400.0  # of a load, from the first arrival to the last
# What traces of others call the same; their time stamps are milliseconds.
_INPUT_NAMES, _OUTPUT_NAMES = ("input_len", "input_length"), ("output_len", "output_length")
_WORDS = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work number night
point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law
car city name team minute idea body back parent face level door
"""


@dataclass(frozen=True)
class Wanted:
    """A request as it is planned.

    Args:
        input_len: Tokens of its prompt.
        output_len: Tokens of its reply.
        arrival_s: When it arrives, seconds after the first moment; None where the trace does not say.
        prompt: Its text; None for random words.
    """

    input_len: int
    output_len: int
    arrival_s: float | None = None
    prompt: str | None = None


@dataclass(frozen=True)
class Load:
    """How requests come.

    Args:
        request_rate: Requests a second, whatever becomes of those before (an open loop); infinity for all at
            once, or for as many as ``max_concurrency`` lets through; None for the arrivals of a trace.
        burstiness: Shape of the gamma distribution of the times between: 1 is a Poisson process, less is
            burstier.
        max_concurrency: Most requests under way; None for any number.
    """

    request_rate: float | None
    burstiness: float = 1.0
    max_concurrency: int | None = None

    @property
    def is_closed(self) -> bool:
        """Whether a request is sent when another has ended, so that a slow server is asked less."""
        return self.request_rate == math.inf and self.max_concurrency is not None

    def __str__(self) -> str:
        if self.is_closed:
            return f"{self.max_concurrency} at a time"
        if self.request_rate is None:
            words = "arrivals of the trace"
        elif self.request_rate == math.inf:
            words = "all at once"
        else:
            words = f"{self.request_rate:g} req/s"
        return words if self.max_concurrency is None else f"{words}, at most {self.max_concurrency}"


def random_lengths(
    num_prompts: int, input_len: int, output_len: int, range_ratio: float, seed: int
) -> list[Wanted]:
    """Requests whose lengths lie anywhere between (1 - range_ratio) and (1 + range_ratio) times those given.

    Raises:
        ConfigError: A value is out of range.
    """
    for field, value, most in (
        ("num_prompts", num_prompts, MAX_REQUESTS),
        ("random_input_len", input_len, _MAX_TOKENS),
        ("random_output_len", output_len, _MAX_TOKENS),
    ):
        if not 1 <= value <= most:
            raise ConfigError(field, value, f"a number from 1 to {most}")
    if not 0 <= range_ratio < 1:
        raise ConfigError("random_range_ratio", range_ratio, "at least 0 and below 1")
    check_seed(seed)
    generator = np.random.default_rng(seed)

    def draw(length: int) -> list[int]:
        least, most = max(1, math.floor(length * (1 - range_ratio))), math.ceil(length * (1 + range_ratio))
        return [int(value) for value in generator.integers(least, most + 1, num_prompts)]

    return [Wanted(*pair) for pair in zip(draw(input_len), draw(output_len), strict=True)]


def check_seed(seed: int) -> None:
    """Refuses a seed that numpy would.

    Raises:
        ConfigError: It is below 0.
    """
    if seed < 0:
        raise ConfigError("seed", seed, "a number of at least 0")


def read_trace(path: Path, num_prompts: int | None = None) -> list[Wanted]:
    """Requests from a file of one JSON object a line, in the order of their arrival.

    ``{"arrival_s": 0.5, "input_len": 900, "output_len": 120}``, and ``"prompt"`` with a text in place of
    ``input_len``. ``timestamp`` in milliseconds, ``input_length`` and ``output_length`` are taken too.

    Args:
        path: The file.
        num_prompts: Take the first so many; None for all.

    Raises:
        ConfigError: It cannot be read, a line is something else, or some lines have arrivals and some not.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text in JSON may hold other line ends
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError("dataset_path", str(path), f"a trace that can be read ({reason})") from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_wanted(json.loads(line)))
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                expected = '{"arrival_s": 0.5, "input_len": 900, "output_len": 120} in each line'
                raise ConfigError("dataset_path", f"{path}:{number}", expected, str(error)) from error
    arrivals = [wanted.arrival_s for wanted in found if wanted.arrival_s is not None]
    if not found or len(arrivals) not in (0, len(found)):
        raise ConfigError("dataset_path", str(path), "a request at least, and arrivals in all lines or none")
    if arrivals:
        first = min(arrivals)
        found = sorted(
            (
                Wanted(each.input_len, each.output_len, (each.arrival_s or 0.0) - first, each.prompt)
                for each in found
            ),
            key=lambda each: each.arrival_s or 0.0,
        )
    return found[:num_prompts]


def _wanted(values: Any) -> Wanted:
    if not isinstance(values, dict):
        raise TypeError("not an object")
    prompt = values.get("prompt")
    if prompt is not None and not isinstance(prompt, str):
        raise TypeError("prompt is no text")
    if prompt is not None:
        prompt.encode()  # half of a pair of surrogates cannot be sent
    input_len = 0 if prompt is not None else _length(values, _INPUT_NAMES)
    arrival = values.get("arrival_s")
    if arrival is None and values.get("timestamp") is not None:
        arrival = float(values["timestamp"]) / 1e3
    if arrival is not None and (isinstance(arrival, bool) or not math.isfinite(float(arrival))):
        raise ValueError("the arrival is no time")
    return Wanted(
        input_len, _length(values, _OUTPUT_NAMES), None if arrival is None else float(arrival), prompt
    )


def _length(values: dict[str, Any], names: Sequence[str]) -> int:
    value = next((values[name] for name in names if name in values), None)
    if type(value) is not int or not 1 <= value <= _MAX_TOKENS:
        raise ValueError(f"{names[0]} is no number of tokens")
    return value


def arrivals(load: Load, wanted: Sequence[Wanted], seed: int) -> list[float]:
    """When each request arrives, seconds after the first moment.

    Raises:
        ConfigError: The load takes a trace's arrivals, and there are none; or they take longer than a month.
    """
    if load.request_rate is None:
        own = [each.arrival_s for each in wanted]
        if any(time is None for time in own):
            raise ConfigError("request_rate", None, "a rate, as the requests have no arrivals of their own")
        times = [time or 0.0 for time in own]
    elif load.request_rate == math.inf:
        return [0.0] * len(wanted)
    else:
        gaps = np.random.default_rng([seed, 1]).gamma(load.burstiness, 1.0, len(wanted))
        with np.errstate(over="ignore"):
            times = [float(time) for time in np.cumsum(gaps / load.burstiness / load.request_rate)]
    if times and not times[-1] <= _MAX_SECONDS:
        what = f"{len(times)} requests over {times[-1] / 86_400:.3g} days"
        raise ConfigError(
            "request_rate", InWords(what), f"all of them within {_MAX_SECONDS / 86_400:.0f} days"
        )
    return times


class PromptWriter:
    """Texts of about so many tokens: random words, none like another.

    How many tokens a word has is the model's to say: :meth:`calibrate` takes it from two prompts whose tokens
    the server has counted.

    Args:
        nonce: Another one gives other words, so that no KV cache has anything of an earlier run's prompts.
    """

    def __init__(self, nonce: int) -> None:
        self._generator, self._words = np.random.default_rng(nonce), _WORDS.split()
        self._tokens_per_word, self._more_tokens = 1.0, 0.0

    def words(self, count: int) -> str:
        """So many words."""
        return " ".join(self._generator.choice(self._words, max(1, count)))

    def text(self, num_tokens: int) -> str:
        """A text of about so many tokens, what the server adds to it included."""
        return self.words(round((num_tokens - self._more_tokens) / self._tokens_per_word))

    def calibrate(self, counted: Sequence[tuple[int, int]]) -> None:
        """Takes over what words are in tokens.

        Args:
            counted: Words and tokens of a short prompt and of a longer one.
        """
        (few_words, few_tokens), (many_words, many_tokens) = counted
        ratio = (many_tokens - few_tokens) / (many_words - few_words)
        if ratio > 0:
            self._tokens_per_word, self._more_tokens = ratio, max(0.0, few_tokens - few_words * ratio)
