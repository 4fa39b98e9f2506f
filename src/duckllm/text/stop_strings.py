"""Ends a text where a stop string is complete, and never shows a part of one. Called by the reply's text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for stop strings in a text that comes in pieces, at a cost that is linear in the text's length.

    The stop string that is complete first counts; of those that end at the same character, the longest. So it
    does not matter how the text is cut into pieces. What may be the beginning of one is held back.

    Args:
        strings: What to look for; none of them empty.
        include: Show the stop string too. Nothing needs to be held back then.

    Attributes:
        found: The stop string that ended the text, or None.

    Source: Knuth, Morris and Pratt, "Fast pattern matching in strings", SIAM J. Comput. 6 (1977).
    """

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        self.found: str | None = None
        self._strings, self._include = tuple(strings), include
        self._borders = [_borders(string) for string in self._strings]
        self._num_matched = [0] * len(self._strings)  # characters of each that the text ends with
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """What may be shown now that ``text`` follows.

        Args:
            text: The next piece; none may follow once a stop string is found.
            may_stop: Whether a stop string that is complete within this piece counts.
        """
        if not self._strings:
            return text
        num_before = len(self._held)
        whole = self._held + text
        for end, char in enumerate(text, start=num_before + 1):
            complete = self._advance(char)
            if complete is not None and may_stop:
                self.found, self._held = complete, ""
                return whole[: end if self._include else end - len(complete)]
        num_shown = len(whole) if self._include else len(whole) - max(self._num_matched)
        self._held = whole[num_shown:]
        return whole[:num_shown]

    def flush(self) -> str:
        """What is still held back, as no more text follows."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Takes one character further; the longest stop string that it completes."""
        complete = None
        for number, (string, borders) in enumerate(zip(self._strings, self._borders, strict=True)):
            matched = self._num_matched[number]
            while matched and string[matched] != char:
                matched = borders[matched - 1]
            matched += string[matched] == char
            if matched == len(string):
                matched = borders[-1]
                if complete is None or len(string) > len(complete):
                    complete = string
            self._num_matched[number] = matched
        return complete


def _borders(string: str) -> list[int]:
    """For each beginning of ``string``, the length of its longest end that is also a beginning of it."""
    borders = [0] * len(string)
    for end in range(1, len(string)):
        border = borders[end - 1]
        while border and string[border] != string[end]:
            border = borders[border - 1]
        borders[end] = border + (string[border] == string[end])
    return borders
