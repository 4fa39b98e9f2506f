"""Words are wrapped at the terminal's width, whatever pieces they come in."""

from __future__ import annotations

import io
import os
import pty
import sys
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duckllm.cli import terminal
from duckllm.cli.common import tell
from duckllm.cli.main import _report
from duckllm.cli.terminal import ReplyWriter, WordWrap, terminal_width
from duckllm.errors import DuckError


def wrapped(pieces: list[str] | str, width: int) -> str:
    wrap = WordWrap(lambda: width)
    return "".join(wrap.push(piece) for piece in pieces) + wrap.flush()


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("one two three", 20, "one two three"),
        ("one two three", 8, "one two \nthree"),
        ("one two three", 7, "one two\nthree"),
        ("one two", 6, "one \ntwo"),
        ("one\n\ntwo", 4, "one\n\ntwo"),
        ("    if x:\n        y", 20, "    if x:\n        y"),
        ("abcdefgh i", 4, "abcdefgh\ni"),
        ("a bcdefgh", 4, "a \nbcdefgh"),
        ("abcdef gh", 4, "abcdef \ngh"),
        ("\u9d28\u9d28\u9d28", 5, "\u9d28\u9d28\n\u9d28"),
        ("a\tb cd", 10, "a\tb \ncd"),
        ("", 10, ""),
    ],
)
def test_breaks_are_between_words(text: str, width: int, shown: str) -> None:
    assert wrapped(text, width) == shown


def test_a_word_is_shown_when_it_is_whole() -> None:
    wrap = WordWrap(lambda: 10)
    assert [wrap.push(piece) for piece in ("du", "ck", " go", "ose")] == ["", "", "duck ", ""]
    assert wrap.flush() == "goose"
    assert wrap.flush() == ""


def test_a_width_that_changes_counts_from_the_next_word() -> None:
    widths = [20]
    wrap = WordWrap(lambda: widths[-1])
    assert wrap.push("one two ") == "one two "
    widths.append(9)
    assert wrap.push("three ") == "\nthree "


@given(st.text(alphabet="ab \t\n", max_size=60), st.integers(2, 12), st.data())
def test_only_spaces_become_breaks_and_pieces_do_not_matter(
    text: str, width: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(text)))
    shown = wrapped([text[:cut], text[cut:]], width)
    assert shown == wrapped(text, width)
    assert "".join(shown.split()) == "".join(text.split())
    if all(len(word) <= width for word in text.split()):
        assert shown.split() == text.split()
        assert all(len(line) <= width for line in shown.split("\n"))


def test_what_is_no_terminal_gets_the_text_as_it_is() -> None:
    out = io.StringIO()
    with ReplyWriter(out) as writer:
        writer.write("word " * 50 + "\x1b[2J")
    assert out.getvalue() == "word " * 50 + "\x1b[2J\n"


def test_nothing_shown_leaves_no_line() -> None:
    out = io.StringIO()
    with ReplyWriter(out) as writer:
        writer.write("")
    assert out.getvalue() == ""


def test_a_terminal_is_asked_for_its_width() -> None:
    other, inner = pty.openpty()
    with os.fdopen(inner, "w") as out:
        termios.tcsetwinsize(inner, (10, 12))
        assert terminal_width(out) == 12
        with ReplyWriter(out) as writer:
            writer.write("a duck is a bird")
        shown = b""
        while not shown.endswith(b"bird\r\n"):
            shown += os.read(other, 100)
        assert shown == b"a duck is a \r\nbird\r\n"
        termios.tcsetwinsize(inner, (0, 0))
        assert terminal_width(out) == 80
    os.close(other)
    assert terminal_width(io.StringIO()) == 80


def test_what_is_told_and_errors_break_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(terminal, "terminal_width", lambda out: 30)
    for show in (
        lambda: tell("a sentence of many words to tell"),
        lambda: _report(DuckError("a sentence of many words to tell")),
    ):
        monkeypatch.setattr(sys, "stderr", Terminal())
        show()
        assert sys.stderr.getvalue() == "duckllm: a sentence of many \nwords to tell\n"
    assert terminal.wrapped("a sentence of many words, to a file", io.StringIO()).count("\n") == 0
    assert terminal.wrapped("to nobody", None) == "to nobody"
