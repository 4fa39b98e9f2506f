"""JSON of calls: an object that is read as it comes, and values whose kind the tool's schema says.

Called by :mod:`duckllm.text.formats.reply_parser`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from duckllm.text.formats.markup import to_json
from duckllm.text.formats.reader import WHITE_SPACE, Reader, Reading

_SPACE = re.compile(f"[{WHITE_SPACE}]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_QUOTES = re.compile(r'"|\\.?', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_HEX = frozenset("0123456789abcdefABCDEF")
_SIMPLE_ESCAPES = tuple("\\" + char for char in '"\\/bfnrt')

# Digits of a number; a double has at most 309 before its point.
_MAX_NUMBER = 1000

# How deep a schema's references and choices are followed.
_MAX_SCHEMA_STEPS = 64

Kind = Literal["string", "json", "either"]


def read_object(reader: Reader, give: Callable[[str], None]) -> Reading[bool]:
    """Reads a JSON object and gives its text as it comes; returns whether it came to its end.

    It stops before what cannot follow. A line feed or another control character within a string is given as
    its escape: models write them, and JSON allows none.
    """
    closing: list[str] = []  # of the objects and arrays that are open
    state = "value"
    while True:
        if space := (yield from reader.run(_SPACE)):
            give(space)
            continue
        char = yield from reader.peek()
        if state == "value" and char in ("{", "[") and (char == "{" or closing):
            give((yield from reader.first_of(char)) or "")
            closing.append("}" if char == "{" else "]")
            state = "first key" if char == "{" else "first value"
            continue
        if char and closing and char == closing[-1] and state in ("first key", "first value", "comma"):
            give((yield from reader.first_of(char)) or "")
            closing.pop()
            if not closing:
                return True
            state = "comma"
        elif state in ("first key", "key"):
            if char != '"' or not (yield from _read_string(reader, give)):
                return False
            state = "colon"
        elif state in ("colon", "comma"):
            if char != (":" if state == "colon" else ","):
                return False
            give((yield from reader.first_of(char)) or "")
            state = "key" if state == "comma" and closing[-1] == "}" else "value"
        elif state == "first value":
            state = "value"
        else:
            if not closing or not (yield from _read_scalar(reader, give, char)):
                return False
            state = "comma"


def _read_scalar(reader: Reader, give: Callable[[str], None], char: str) -> Reading[bool]:
    if char == '"':
        return (yield from _read_string(reader, give))
    if char in ("t", "f", "n"):
        word = yield from reader.first_of("true", "false", "null")
        give(word or "")
        return word is not None
    reader.mark()
    digits = yield from reader.take_while("+-.0123456789eE".__contains__, _MAX_NUMBER)
    if not _NUMBER.fullmatch(digits):
        reader.rewind()
        return False
    reader.forget()
    give(digits)
    return True


def _read_string(reader: Reader, give: Callable[[str], None]) -> Reading[bool]:
    give((yield from reader.first_of('"')) or "")
    while char := (yield from reader.peek()):
        if char == '"':
            give((yield from reader.first_of('"')) or "")
            return True
        if char != "\\":
            give((yield from reader.run(_PLAIN)) or to_json((yield from reader.run(_CONTROL)))[1:-1])
        elif escape := (yield from _read_escape(reader)):
            give(escape)
        else:
            return False
    return False


def _read_escape(reader: Reader) -> Reading[str | None]:
    """An escape; None, and nothing read, where there is none."""
    if simple := (yield from reader.first_of(*_SIMPLE_ESCAPES)):
        return simple
    reader.mark()
    if (yield from reader.first_of("\\u")):
        digits = yield from reader.take_while(_HEX.__contains__, 4)
        if len(digits) == 4:
            reader.forget()
            return "\\u" + digits
    reader.rewind()
    return None


class StringScan:
    """Whether an object or array that comes in pieces is within one of its strings; other text has none.

    Attributes:
        is_open: Whether it is.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._is_json: bool | None = None  # until something is there
        self._is_escaped = False  # what comes next

    def push(self, text: str) -> None:
        """Takes the next piece."""
        if self._is_json is None and (first := text.lstrip()[:1]):
            self._is_json = first in "[{"
        if not self._is_json or not text:
            return
        start, self._is_escaped = int(self._is_escaped), False
        for found in _QUOTES.finditer(text, start):
            if found[0] == '"':
                self.is_open = not self.is_open
            self._is_escaped = found[0] == "\\"


def value_text(text: str, kind: Kind) -> str:
    """The JSON of a value that is written as text: itself where it is JSON and may be, else a string."""
    if kind == "string":
        return to_json(text)
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return to_json(text)
    return text.strip()


def _refuse(name: str) -> None:
    raise ValueError(name)


def kind_of(parameters: Mapping[str, Any], name: str) -> Kind:
    """Whether a tool's schema has a string for an argument, something else, or either."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    kinds: set[Kind] = set()
    waiting: list[Any] = [schema]
    for _ in range(_MAX_SCHEMA_STEPS):
        if not waiting:
            break
        kinds |= _kinds_of(waiting.pop(), parameters, waiting)
    if waiting or len(kinds) != 1:
        return "either"
    return kinds.pop()


def _kinds_of(schema: Any, parameters: Mapping[str, Any], waiting: list[Any]) -> set[Kind]:
    """What one schema says; what it refers to goes to ``waiting``."""
    if not isinstance(schema, Mapping):
        return {"either"}
    types = schema.get("type")
    if types is not None:
        listed = types if isinstance(types, list) else [types]
        return {"string" if each == "string" else "json" for each in listed}
    values = schema["enum"] if isinstance(schema.get("enum"), list) else None
    if "const" in schema:
        values = [schema["const"]]
    if values is not None:
        return {"string" if isinstance(each, str) else "json" for each in values}
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list) and schema[word]:
            waiting.extend(schema[word])
            return set()
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found: Any = parameters
        for part in reference[2:].split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        waiting.append(found)
        return set()
    return {"either"}
