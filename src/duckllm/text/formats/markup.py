"""How a model's replies are marked: its thinking, its calls of tools. Data, and a call written by it.

The markup that a model was trained on is written by its chat template; what is known is listed in
:mod:`duckllm.text.formats.known`. One description serves to take replies apart
(:mod:`duckllm.text.formats.reply_parser`), to write earlier calls where a template cannot, and to make
grammars that calls must keep to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class ReasoningMarkup:
    """How thinking is marked.

    Args:
        begin: Before it; many templates end a prompt with this.
        end: Behind it.
        before: White space that may stand before ``begin``.
        after_begin: White space between ``begin`` and the thoughts.
        before_end: White space between the thoughts and ``end``.
        after_end: White space between ``end`` and the content.
    """

    begin: str = "<think>"
    end: str = "</think>"
    before: str = "\n"
    after_begin: str = "\n"
    before_end: str = "\n"
    after_end: str = "\n\n"


@dataclass(frozen=True)
class ParameterMarkup:
    """How one argument is written, where arguments are not one JSON object.

    Args:
        begin: Before its name.
        string: Between the name and a value that is a string, written as it is.
        json: Between the name and any other value, written as JSON. Where it equals ``string``, the tool's
            schema says which one a value is.
        end: Behind the value.
        between: Between two arguments.
    """

    begin: str
    string: str
    json: str
    end: str
    between: str = "\n"


@dataclass(frozen=True)
class ToolMarkup:
    """How calls of tools are written, to the character; replies may have other white space.

    A reply with calls is: content, ``before``, ``begin``, the calls with ``between`` between them, ``end``.
    A call is: ``call``, ``name_prefix``, the name, what ``name_suffix`` matches, ``name_end``, the arguments,
    ``call_end``. The arguments are a JSON object, or each one by ``parameter`` with its ``between`` between
    them. Control tokens in these texts are what the tokenizer makes of them.

    Args:
        name: What the documentation calls it.
        call: Before a call's name.
        name_end: Between the name and the arguments.
        call_end: Behind the arguments.
        parameter: How an argument is written; None for one JSON object.
        before: White space between content and the first call; no part of the content.
        begin: Before the first call.
        between: Between two calls.
        end: Behind the last call.
        name_prefix: Written before the name; may be missing in a reply.
        name_suffix: A regular expression of what is written behind the name, such as a number; empty for
            nothing. May be missing in a reply.
        number: ``name_suffix`` as earlier calls have it; ``{}`` is the call's number in the conversation.
        ends_thinking: Whether ``begin`` ends the thinking too: it is made of control tokens, which a model
            does not quote.
    """

    name: str
    call: str
    name_end: str
    call_end: str
    parameter: ParameterMarkup | None = None
    before: str = ""
    begin: str = ""
    between: str = ""
    end: str = ""
    name_prefix: str = ""
    name_suffix: str = ""
    number: str = ""
    ends_thinking: bool = False

    def write(self, name: str, arguments: Mapping[str, Any] | str, number: int = 0) -> str:
        """A call as the model would write it.

        Args:
            name: The function.
            arguments: By name, or the text of a JSON object, which stays as it is where it can.
            number: Of calls before it in the conversation.
        """
        return "".join(
            (
                self.call,
                self.name_prefix,
                name,
                self.number.format(number),
                self.name_end,
                self._write_arguments(arguments),
                self.call_end,
            )
        )

    def write_all(self, calls: list[str]) -> str:
        """Several written calls, with what is before, between and behind them."""
        return self.begin + self.between.join(calls) + self.end

    def _write_arguments(self, arguments: Mapping[str, Any] | str) -> str:
        if self.parameter is None:
            return arguments if isinstance(arguments, str) else to_json(arguments)
        values = json.loads(arguments) if isinstance(arguments, str) else arguments
        return self.parameter.between.join(self._write_one(*item) for item in values.items())

    def _write_one(self, name: str, value: Any) -> str:
        assert self.parameter is not None
        if isinstance(value, str):
            return f"{self.parameter.begin}{name}{self.parameter.string}{value}{self.parameter.end}"
        return f"{self.parameter.begin}{name}{self.parameter.json}{to_json(value)}{self.parameter.end}"

    def without_line_feeds(self, name: str) -> ToolMarkup:
        """The same with nothing where this has a line feed, under another name."""
        assert self.parameter is not None
        parameter = ParameterMarkup(
            *(
                text.replace("\n", "")
                for text in (
                    self.parameter.begin,
                    self.parameter.string,
                    self.parameter.json,
                    self.parameter.end,
                    self.parameter.between,
                )
            )
        )
        texts = {
            field: getattr(self, field).replace("\n", "")
            for field in ("call", "name_end", "call_end", "before", "begin", "between", "end")
        }
        return replace(self, name=name, parameter=parameter, **texts)


def to_json(value: Any) -> str:
    """JSON as models are shown it: spaces behind commas and colons, letters as they are."""
    return json.dumps(value, ensure_ascii=False)
