"""What a terminal needs: text wrapped at its width, nothing in them that commands it, keys kept unseen.

Called by the verbs and by the conversation; knows text and file descriptors, no models.
"""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from rich.cells import cell_len

if TYPE_CHECKING:
    from rich.console import Console

_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
_DEFAULT_WIDTH = 80
_TAB = 8
# Columns of tables in a file or a pipe.
TABLE_WIDTH = 120


def printable(text: str) -> str:
    """``text`` without control characters, which a terminal might obey."""
    return text.translate(_CONTROLS)


def plain_title(text: str) -> str:
    """``text`` as matplotlib draws it unchanged: two dollar signs are a formula to it."""
    return printable(text.replace("\n", " ")).replace("$", r"\$")


def table_console() -> Console:
    """Where verbs print tables: rich's, which passes on what a terminal would obey, without that.

    Names in a trace, a server's words and names of files may hold anything. In a file or a pipe it is wide
    enough to cut no table.
    """
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    console = Plain(soft_wrap=False, highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = TABLE_WIDTH
    return console


class WordWrap:
    """Breaks text that comes in pieces between words, so that no line is longer than the terminal is wide.

    A word is held back until it is whole, or longer than a line: then the terminal breaks it. A wide
    character (as of Chinese) may stand on either side of a break.

    Args:
        width: The terminal's width in cells; asked anew for each word, as it may change.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        self._word = ""

    def push(self, text: str) -> str:
        """What of the text so far can be shown now."""
        return "".join(self._push(character) for character in text)

    def flush(self) -> str:
        """The last word, whole or not."""
        word, self._word = self._word, ""
        cells, width = cell_len(word), self._width()
        gap = "\n" if word and self._column > 0 and self._column + cells > width else ""
        self._column = (cells if gap else self._column + cells) if cells <= width else cells % width
        return gap + word

    def _push(self, character: str) -> str:
        if character == "\n":
            shown = self.flush() + "\n"
            self._column = 0
            return shown
        if character in " \t":
            shown = self.flush()
            cells = 1 if character == " " else _TAB - self._column % _TAB
            if self._column + cells > self._width():
                self._column = self._width()
                return shown  # the break that comes stands for it
            self._column += cells
            return shown + character
        before = self.flush() if cell_len(character) > 1 else ""
        self._word += character
        if cell_len(character) > 1 or cell_len(self._word) > self._width():
            return before + self.flush()
        return before


class ReplyWriter:
    """Shows a reply on ``out``: as it is, or fit for a terminal where ``out`` is one.

    A context manager: at its end, whatever ended it, the line is ended too if there is anything on it.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._wrap = WordWrap(lambda: terminal_width(out)) if out.isatty() else None
        self._has_written = False
        self.is_empty = True  # as far as anybody can see

    def __enter__(self) -> ReplyWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._has_written:
            self._out.write((self._wrap.flush() if self._wrap else "") + "\n")
            self._out.flush()

    def write(self, text: str) -> None:
        """Shows ``text``, of a word that has begun perhaps later."""
        if not text:
            return
        self._has_written = True
        self.is_empty = self.is_empty and not text.strip()
        self._out.write(self._wrap.push(printable(text)) if self._wrap else text)
        self._out.flush()


def wrapped(text: str, out: TextIO | None) -> str:
    """``text``, broken between words where ``out`` is a terminal; there may be none."""
    if out is None or not out.isatty():
        return text
    wrap = WordWrap(lambda: terminal_width(out))
    return wrap.push(text) + wrap.flush()


def terminal_width(out: TextIO) -> int:
    """The width of the terminal behind ``out`` in cells; 80 where it does not say."""
    try:
        return os.get_terminal_size(out.fileno()).columns or _DEFAULT_WIDTH
    except (OSError, ValueError):
        return _DEFAULT_WIDTH


@contextmanager
def keys_unseen() -> Iterator[None]:
    """Lets the terminal keep the keys that are pressed, unseen until something reads them.

    Otherwise keys pressed while a model loads or a reply comes would show up inside what is shown, and a
    Ctrl-D among them be lost. Ctrl-C stays an interrupt. The terminal is as before afterwards.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    changed = termios.tcgetattr(sys.stdin)
    changed[3] &= ~(termios.ICANON | termios.ECHO)
    try:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, changed)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
