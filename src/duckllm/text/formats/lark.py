"""Writes a grammar in llguidance's dialect of Lark: texts with control tokens, free text up to a mark.

Called by :mod:`duckllm.text.formats.reply_grammar`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from duckllm.sampling_params import StructuredOutputsParams
from duckllm.text.grammar import as_regex

# Any text, which is whole characters.
_ANY = "/(?s:.*)/"


class LarkWriter:
    """A grammar without its start.

    Args:
        control_parts: Cuts a text at the control tokens that it spells, as the model's tokenizer does.
    """

    def __init__(self, control_parts: Callable[[str], list[int | str]]) -> None:
        self._control_parts = control_parts
        self._lines: list[str] = []
        self._terminals: dict[str, str] = {}
        self._parts: dict[str, StructuredOutputsParams] = {}
        self._controls: set[int] = set()

    def exact(self, text: str) -> str:
        """What matches this text alone; its control tokens as such, not spelled out."""
        return " ".join(self._symbol(piece) for piece in self._control_parts(text))

    def spelled(self, text: str) -> str:
        """What matches this text alone, without any control token."""
        return _string(text)

    def some_of(self, chars: str) -> str:
        """What matches as many of these characters or fewer, in any order."""
        return f"/({'|'.join(map(as_regex, dict.fromkeys(chars)))}){{0,{len(chars)}}}/" if chars else ""

    def rule(self, name: str, body: str) -> str:
        """A rule's name, for what it matches; ``name`` must be a new one."""
        self._lines.append(f"{name}: {body}")
        return name

    def part(self, params: StructuredOutputsParams) -> str:
        """What matches a form of its own."""
        name = f"part_{len(self._parts)}"
        self._parts[name] = params
        return f"@{name}"

    def text(self, *, without: Iterable[str] = (), like: Iterable[str] = ()) -> str:
        """What matches any text of no control tokens, also none.

        Args:
            without: Strings that are nowhere in it.
            like: Terminals that the whole text matches each.
        """
        return self._terminal(_text(without, like))

    def text_up_to(self, mark: str, *, without: Iterable[str] = (), like: Iterable[str] = ()) -> str:
        """What matches any such text and then ``mark``, which begins with one of ``without``."""
        first, *others = self._control_parts(mark)
        # The lexer takes as much as it can for one terminal, so what is text of the mark is of the same one.
        if isinstance(first, str):
            text = self._terminal(f"({_text(without, like)}) {_string(first)}")
        else:
            text, others = self._terminal(_text(without, like)), [first, *others]
        return " ".join([text, *map(self._symbol, others)])

    def params(self, start: str) -> StructuredOutputsParams:
        """The whole, which begins with the rule's body ``start``."""
        lines = [
            f"start: {start}",
            *self._lines,
            *(f"{name}: {body}" for body, name in self._terminals.items()),
        ]
        controls = tuple(sorted(self._controls))
        return StructuredOutputsParams(
            grammar="\n".join(lines), parts=self._parts, control_token_ids=controls
        )

    def _symbol(self, piece: int | str) -> str:
        if isinstance(piece, str):
            return _string(piece)
        self._controls.add(piece)
        return f"<[{piece}]>"

    def _terminal(self, body: str) -> str:
        return self._terminals.setdefault(body, f"TEXT_{len(self._terminals)}")


def _string(text: str) -> str:
    return json.dumps(text)


def _text(without: Iterable[str], like: Iterable[str]) -> str:
    left_out = "|".join(map(as_regex, without))
    limits = [*like, *([f"~/(?s:.*)({left_out})(?s:.*)/"] if left_out else [])]
    return " & ".join([_ANY, *limits])
