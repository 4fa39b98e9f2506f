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


def spelled_in(value: Any, controls: Iterable[str]) -> set[str]:
    """Which of ``controls`` are spelled in a message: in its content or another of its texts."""
    found: set[str] = set()
    for text in texts_of(value):
        found.update(control for control in controls if control in text)
    return found


def free_mark(texts: Iterable[str]) -> str:
    """A string that none of ``texts`` holds: more private characters than are in a row anywhere."""
    runs = (run for text in texts for run in re.findall("\ue000+", text))
    return "\ue000" * (1 + max(map(len, runs), default=0))


def put_marks(value: Any, controls: Iterable[str], mark: str) -> Any:
    """A message with ``mark`` behind the first character of every one of ``controls`` that is spelled in it.

    Roles stay as they are.
    """
    if isinstance(value, str):
        # One character at a time, so that spellings that overlap are all found.
        pattern = "|".join(f"{re.escape(control[0])}(?={re.escape(control[1:])})" for control in controls)
        return re.sub(pattern, lambda found: found[0] + mark, value) if pattern else value
    if isinstance(value, Mapping):
        return {
            key: item if key == "role" else put_marks(item, controls, mark) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [put_marks(item, controls, mark) for item in value]
    return value


def texts_of(value: Any) -> Iterator[str]:
    """Every text of a message but its role."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key != "role":
                yield from texts_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_of(item)
