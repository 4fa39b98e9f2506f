"""Keeps what people write in messages from becoming control tokens, such as one that ends a turn.

Called by :mod:`duckllm.text.tokenizer`. A tokenizer turns the spelling of a control token into that token
wherever it stands. Here a mark is put inside such spellings in messages before the template writes them, so
that whatever the template does to a message, the tokenizer finds no control token in it. Knows text only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# A marker, in brackets: some of DeepSeek-V3's are not flagged as special, as the one that begins a question.
_MARKER = re.compile(r"[<\[\uff1c\u3008\u3010].+[>\]\uff1e\u3009\u3011]", re.DOTALL)


def control_texts(tokens: Iterable[tuple[str, bool]], template: str) -> tuple[str, ...]:
    """The spellings of the tokens that steer the model, among the tokens that were added to a vocabulary.

    These are the special ones, those in brackets, and those that the chat template writes. The others (words,
    runs of spaces) are text like any other.

    Args:
        tokens: Spelling of each added token, and whether it is flagged as special.
        template: The chat template's source; empty if there is none.
    """
    return tuple(
        text
        for text, special in tokens
        # One character can be no marker, and has no inside to put a mark into.
        if len(text) > 1 and (special or _MARKER.fullmatch(text) or (text.strip() and text in template))
    )


def spelled_in(message: Any, controls: Iterable[str]) -> set[str]:
    """Which of ``controls`` are spelled in a message: in its content or another of its texts."""
    found: set[str] = set()
    for text in texts_of(message):
        found.update(control for control in controls if control in text)
    return found


def free_mark(texts: Iterable[str], char: str = "\ue000") -> str:
    """A string that none of ``texts`` holds: more private characters than are in a row anywhere."""
    runs = (run for text in texts for run in re.findall(f"{char}+", text))
    return char * (1 + max(map(len, runs), default=0))


def put_marks(message: Mapping[str, Any], controls: Iterable[str], mark: str) -> dict[str, Any]:
    """A message with ``mark`` behind the first character of every one of ``controls`` that is spelled in it.

    Its role stays as it is.
    """
    # One character at a time, so that spellings that overlap are all found.
    parts = [f"{re.escape(control[0])}(?={re.escape(control[1:])})" for control in controls]
    if not parts:
        return dict(message)
    pattern = re.compile("|".join(parts))

    def marked(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda found: found[0] + mark, value)
        if isinstance(value, Mapping):
            return {marked(key): marked(item) for key, item in value.items()}
        return [marked(item) for item in value] if isinstance(value, list | tuple) else value

    return {key: item if key == "role" else marked(item) for key, item in message.items()}


def texts_of(message: Mapping[str, Any]) -> Iterator[str]:
    """Every text of a message but its role, those in lists and objects and their keys included."""
    waiting = [item for key, item in message.items() if key != "role"]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value
