"""Reads a text that comes in pieces, as if it were there as a whole.

Called by :mod:`duckllm.text.formats.reply_parser`. A parser is a generator that asks a :class:`Reader` what
comes next, and stops wherever more text is needed to tell; so how the text is cut cannot change what it says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

Result = TypeVar("Result")

# A parser or a part of one: it yields where it needs more text, and returns what it found.
Reading = Generator[None, None, Result]

WHITE_SPACE = " \t\r\n"


class Reader:
    """Text that has come and was not read yet, and what was read since :meth:`mark`.

    Every method that returns a :data:`Reading` waits until the text that has come decides its answer, and
    keeps no more of it for that than its strings are long, or its limit.
    """

    def __init__(self) -> None:
        self._text, self._start = "", 0
        self._marked: int | None = None
        self._ended = False

    def feed(self, text: str) -> None:
        """Adds the next piece."""
        first = self._start if self._marked is None else self._marked
        self._text, self._start = self._text[first:] + text, self._start - first
        if self._marked is not None:
            self._marked = 0

    def end(self) -> None:
        """Says that no more text comes."""
        self._ended = True

    def mark(self) -> None:
        """Keeps what is read from here on, until :meth:`rewind` or :meth:`forget`."""
        self._marked = self._start

    def rewind(self) -> None:
        """Goes back to the mark."""
        assert self._marked is not None
        self._start, self._marked = self._marked, None

    def forget(self) -> None:
        """Takes the mark away."""
        self._marked = None

    def unread(self, text: str) -> None:
        """Goes back by ``text``, which was just read."""
        self._start -= len(text)

    def peek(self) -> Reading[str]:
        """The next character, not read; empty at the end."""
        while self._start == len(self._text) and not self._ended:
            yield
        return self._text[self._start : self._start + 1]

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """What has come of a run of ``pattern``'s characters, read; empty where none comes next."""
        if not (yield from self.peek()):
            return ""
        found = pattern.match(self._text, self._start)
        self._start = found.end() if found else self._start
        return found[0] if found else ""

    def first_of(self, *strings: str) -> Reading[str | None]:
        """Which of ``strings`` comes next, read; the longest where several do; None for none of them."""
        longest = max(map(len, strings))
        while True:
            rest = self._text[self._start : self._start + longest]
            if self._ended or not any(len(rest) < len(each) and each.startswith(rest) for each in strings):
                break
            yield
        found = max((each for each in strings if rest.startswith(each)), key=len, default=None)
        self._start += len(found or "")
        return found

    def skip(self, chars: str) -> Reading[None]:
        """Reads over all of ``chars`` that come next."""
        while (char := (yield from self.peek())) and char in chars:
            self._start += 1

    def take_while(self, allowed: Callable[[str], bool], limit: int) -> Reading[str]:
        """The next characters that are ``allowed``, read, but at most ``limit`` of them."""
        taken = ""
        while len(taken) < limit and (char := (yield from self.peek())) and allowed(char):
            self._start += 1
            taken += char
        return taken

    def pass_all(self, give: Callable[[str], None]) -> Reading[None]:
        """Gives all text that comes."""
        while (yield from self.peek()):
            give(self._text[self._start :])
            self._start = len(self._text)

    def pass_until(
        self, strings: tuple[str, ...], give: Callable[[str], None], limit: int | None = None
    ) -> Reading[str | None]:
        """Gives all text before the first of ``strings``, reads that, and returns which; None at the end.

        At the same place the longest counts. It ends without one where more than ``limit`` was given.
        """
        longest, pattern = max(map(len, strings)), _any_of(strings)
        given = 0
        while True:
            found = pattern.search(self._text, self._start)
            held = len(self._text)
            if not self._ended:
                # What comes last may be the beginning of one, or of a longer one.
                for place in range(max(self._start, held - longest + 1), held):
                    rest = self._text[place:]
                    if any(len(rest) < len(each) and each.startswith(rest) for each in strings):
                        held = place
                        break
            if found is not None and found.start() >= held:
                found = None
            stop = held if found is None else found.start()
            if stop > self._start:
                give(self._text[self._start : stop])
                given += stop - self._start
                self._start = stop
            if found is not None:
                self._start = found.end()
                return found[0]
            if self._ended or (limit is not None and given > limit):
                return None
            yield


@lru_cache(64)
def _any_of(strings: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(each) for each in sorted(strings, key=len, reverse=True)))
