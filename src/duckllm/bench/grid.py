"""What a benchmark of a whole model goes through: settings, context lengths, batches, and its prompts.

Called by model_runs.py, cli/bench_model.py and the reports; knows nothing of how a setting is run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from duckllm.config import parse_whole
from duckllm.errors import ConfigError, InWords

SHORTEST_INPUT = 128
# What stands for the longest prompt that leaves room for the reply.
LONGEST = "max"
_MOST = 1_000_000
_PAGE_TOKENS = 16


@dataclass(frozen=True)
class Setting:
    """One way to run the model.

    Args:
        names: What was asked for, by option: workers, format, draft, lanes, wire_dtype.
        arguments: The same, and all other options, as :class:`duckllm.LLM` takes them.
    """

    names: Mapping[str, str]
    arguments: Mapping[str, Any]

    @property
    def uses_addresses(self) -> bool:
        """Whether its workers run already, each for one host at a time."""
        return isinstance(self.arguments.get("workers"), tuple)


def differing(settings: Sequence[Setting]) -> list[str]:
    """The options in which settings differ; the workers, where there is only one."""
    names = settings[0].names if settings else {}
    return [name for name in names if len({each.names[name] for each in settings}) > 1] or ["workers"]


def label(setting: Setting, settings: Sequence[Setting]) -> str:
    """What tells a setting from the others, in words."""
    words = {"workers": "{} workers", "format": "{}", "wire_dtype": "{} on the wire"}
    return ", ".join(
        "1 worker"
        if name == "workers" and setting.names[name] == "1"
        else words.get(name, name + " {}").format(setting.names[name])
        for name in differing(settings)
    )


@dataclass(frozen=True)
class Cell:
    """One load.

    Args:
        input_len: Tokens of each prompt.
        batch_size: Requests that are computed together.
    """

    input_len: int
    batch_size: int


@dataclass(frozen=True)
class GridConfig:
    """What is measured of each setting; names as in ``vllm bench latency``.

    Args:
        what: ``"decode"`` or ``"prefill"``.
        input_lens: Tokens of a prompt, each in turn.
        output_len: Tokens of a reply; 1 for prefill.
        batch_sizes: Requests together, each in turn.
        num_iters: Rounds that are measured.
        num_iters_warmup: Rounds before them, which verify and are not measured.
        seed: Of random prompts.

    Raises:
        ConfigError: A value is out of range.
    """

    what: str
    input_lens: tuple[int, ...]
    output_len: int
    batch_sizes: tuple[int, ...]
    num_iters: int = 5
    num_iters_warmup: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for field, values, least in (
            ("input_len", self.input_lens, 1),
            ("batch_size", self.batch_sizes, 1),
            ("output_len", (self.output_len,), 2 if self.what == "decode" else 1),
            ("num_iters", (self.num_iters,), 1),
            ("num_iters_warmup", (self.num_iters_warmup,), 1),
            ("seed", (self.seed,), 0),
        ):
            if not values:
                raise ConfigError(field, InWords("none"), f"a number from {least} to {_MOST}, or several")
            for value in values:
                if not least <= value <= _MOST:
                    raise ConfigError(field, value, f"a number from {least} to {_MOST}")

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All loads, the longest prompts last."""
        return tuple(Cell(length, size) for length in self.input_lens for size in self.batch_sizes)

    @property
    def load_tokens(self) -> list[int]:
        """Tokens that the KV cache must hold for each load: the last page of a request is its own."""
        return [
            cell.batch_size * (-(-(cell.input_len + self.output_len) // _PAGE_TOKENS) + 2) * _PAGE_TOKENS
            for cell in self.cells
        ]


def parse_input_lens(text: str, longest: int) -> tuple[int, ...]:
    """Lengths of prompts from ``"128,1024,max"``; from an empty text 128, 512, 2048 and so on to the longest.

    Args:
        text: What was asked for.
        longest: Tokens of the longest prompt that leaves room for the reply.

    Raises:
        ConfigError: It is something else, or longer than ``longest``.
    """
    if not text.strip():
        lengths, length = [], SHORTEST_INPUT
        while length < longest:
            lengths.append(length)
            length *= 4
        return (*lengths, longest)
    found = []
    for word in (part.strip() for part in text.split(",")):
        number = longest if word == LONGEST else parse_whole(word)
        if number is None:
            raise ConfigError("input_len", text, "lengths with commas between, like 128,1024,max")
        if not 1 <= number <= longest:
            raise ConfigError("input_len", number, f"1 to {longest}, what the context holds beside the reply")
        found.append(number)
    return tuple(dict.fromkeys(found))


class Prompts:
    """Prompts of any length: random tokens, or pieces of a text.

    Args:
        vocab_size: V.
        avoided: Tokens that random prompts have none of, such as those that end a reply.
        seed: Another one gives other prompts.
        text_ids: A text's tokens; pieces of it, from the beginning again at its end, are the prompts.

    Raises:
        ConfigError: The text has no token.
    """

    def __init__(
        self, vocab_size: int, avoided: Collection[int], seed: int, text_ids: Sequence[int] | None = None
    ) -> None:
        self._ordinary = np.setdiff1d(np.arange(vocab_size), np.fromiter(avoided, np.int64, len(avoided)))
        self._seed = seed
        self._text = None if text_ids is None else np.asarray(text_ids, np.int64)
        if self._text is not None and not len(self._text):
            raise ConfigError("text_file", "", "a text of a token at least")

    def batch(self, cell: Cell, iteration: int) -> list[list[int]]:
        """A load's prompts; each iteration has others, and the same ones at every call."""
        return [self._prompt(cell, iteration, index) for index in range(cell.batch_size)]

    def _prompt(self, cell: Cell, iteration: int, index: int) -> list[int]:
        seed = [self._seed, cell.input_len, cell.batch_size, iteration, index]
        generator = np.random.default_rng(seed)
        if self._text is None:
            return [int(token) for token in generator.choice(self._ordinary, cell.input_len)]
        places = (int(generator.integers(len(self._text))) + np.arange(cell.input_len)) % len(self._text)
        return [int(token) for token in self._text[places]]
