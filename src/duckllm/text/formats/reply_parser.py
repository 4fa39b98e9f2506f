"""Takes the text of a reply apart: thinking, content, calls of tools.

Made by :mod:`duckllm.text.chat_format`; knows what :mod:`duckllm.text.formats.markup` describes, and no
family by name. It reads more than it would write: white space between the parts of markup may be another, a
closing mark may be missing. A call begins once its arguments do: what is wrong before that is content, as it
was. What is wrong behind that ends the call, whose arguments are then unfinished, and is content from there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal

from duckllm.text.chat import ContentDelta, ReasoningDelta, ReplyDelta, Tool, ToolCallDelta
from duckllm.text.formats.json_text import Kind, StringScan, kind_of, read_object, value_text
from duckllm.text.formats.markup import ParameterMarkup, ReasoningMarkup, ToolMarkup, to_json
from duckllm.text.formats.reader import WHITE_SPACE, Reader, Reading

# Parts between which white space may stand: marks, words in quotes, JSON's own characters, the rest.
_PARTS = re.compile(r'<[^<>\s]*>?|\[[A-Z_]+\]|"\w+"|[{}\[\]:,"]|[^\s<{}\[\]:,"]+')

_Given = Literal["reasoning", "content", "name", "arguments"]

# Such as no text has by chance.
_MARK = re.compile(r"<.+|\[[A-Z_]+\]")

# What is held back for markup that may turn out to be none, in characters: of white space, of a name.
_MAX_SPACE = 64
_MAX_NAME = 256

# A value that may be JSON is held back until its end; a longer one is a string.
_MAX_VALUE = 1 << 20

# How far a reply is read ahead, in characters, for values whose strings have what ends a value.
_MAX_AHEAD = 4 << 20


class MarkupParser:
    """A :class:`duckllm.text.chat.ReplyParser` for any markup that is described.

    Args:
        reasoning: How thinking is marked; None where a reply has none.
        markup: How calls are; None where a reply is to have none, and marks are content.
        tools: Their schemas say what the values of arguments are, where the markup does not.
        begins_in_reasoning: Whether the prompt ended within the thinking.
        parallel_tool_calls: Whether there may be several calls; if not, later ones are left out.
        content_has_form: Whether content is of a form, such as JSON, in which a mark begins no call: where
            there are calls, they are all that there is behind the thinking.

    Threading: one parser belongs to one reply; it is not shared.
    """

    def __init__(
        self,
        reasoning: ReasoningMarkup | None,
        markup: ToolMarkup | None,
        tools: Sequence[Tool] = (),
        *,
        begins_in_reasoning: bool = False,
        parallel_tool_calls: bool = True,
        content_has_form: bool = False,
    ) -> None:
        self._reasoning, self._markup = reasoning, markup
        self._parameters: dict[str, Mapping[str, Any]] = {tool.name: tool.parameters for tool in tools}
        self._begins_in_reasoning, self._parallel = begins_in_reasoning, parallel_tool_calls
        self._content_has_form = content_has_form
        self._num_calls = 0  # whether given or left out
        self._ahead = _MAX_AHEAD
        self._reader = Reader()
        self._given: list[tuple[_Given, list[str]]] = []  # since the last deltas
        self._index = -1  # of the call whose arguments are given
        self._reading = self._read_reply()

    @property
    def num_tool_calls(self) -> int:
        """Calls so far."""
        return self._num_calls if self._parallel else min(self._num_calls, 1)

    def push(self, text: str) -> list[ReplyDelta]:
        """What ``text`` adds; what may be the beginning of markup is held back."""
        self._reader.feed(text)
        return self._advance()

    def finish(self) -> list[ReplyDelta]:
        """What was held back, as no text follows; markup that is not whole is content, once."""
        self._reader.end()
        return self._advance()

    def _advance(self) -> list[ReplyDelta]:
        next(self._reading, None)
        return self._as_deltas()

    def _read_reply(self) -> Reading[None]:
        if self._reasoning is not None:
            yield from self._read_thinking(self._reasoning)
        if self._markup is not None:
            yield from self._read_content(self._markup)
        else:
            yield from self._reader.pass_all(self._give_content)

    def _read_thinking(self, marks: ReasoningMarkup) -> Reading[None]:
        reader = self._reader
        if not self._begins_in_reasoning:
            yield from reader.skip(marks.before)
            if not (yield from reader.first_of(marks.begin)):
                yield from reader.skip(marks.after_end)
                return
        yield from reader.skip(marks.after_begin)
        ends = (marks.end, marks.before_end + marks.end)
        calls = call_marks(self._markup) if self._markup and self._markup.ends_thinking else ()
        found = yield from reader.pass_until(ends + calls, self._give_reasoning)
        if found in calls:
            reader.unread(found or "")
        else:
            yield from reader.skip(marks.after_end)

    def _read_content(self, markup: ToolMarkup) -> Reading[None]:
        marks = call_marks(markup)
        parts = _parts(markup.begin + markup.call)
        if self._content_has_form:
            found = yield from self._reader.first_of(*marks)
            if found is None:
                return (yield from self._reader.pass_all(self._give_content))
            self._reader.unread(found)
        while found := (yield from self._reader.pass_until(marks, self._give_content)):
            # A mark that other markup should precede is taken without it.
            rest = parts[parts.index(found.strip()) + 1 :]
            self._reader.mark()
            begins = yield from self._begin_call(markup, rest)
            if begins is None:
                self._reader.rewind()
                self._give_content(found)
                continue
            while begins is not None and (yield from self._finish_call(markup, begins)):
                begins = yield from self._next_call(markup)

    def _next_call(self, markup: ToolMarkup) -> Reading[_Begun | None]:
        """Another call of the same kind, or the end of the calls read."""
        reader = self._reader
        yield from reader.skip(WHITE_SPACE)
        reader.mark()
        yield from self._skip_parts(_parts(markup.between))
        begins = yield from self._begin_call(markup, _parts(markup.call))
        if begins is None:
            reader.rewind()
            yield from self._skip_parts(_parts(markup.end))
        return begins

    def _begin_call(self, markup: ToolMarkup, parts: Sequence[str]) -> Reading[_Begun | None]:
        """Reads a call up to its arguments and gives its name; None, with the mark kept, where it is none."""
        name = ""
        if (yield from self._match(parts)):
            yield from self._skip_space()
            name = yield from self._reader.take_while(_is_of_name, _MAX_NAME)
            name = name.removeprefix(markup.name_prefix)
            name = re.sub(f"(?:{markup.name_suffix})\\Z", "", name) if markup.name_suffix else name
        if not name or not (yield from self._match(_parts(markup.name_end))):
            return None
        yield from self._skip_space()
        if markup.parameter is None:
            begins = (yield from self._reader.peek()) == "{"
            first = None
        else:
            first = yield from self._first_of_parameters(markup, markup.parameter)
            begins = first is not None
        if not begins:
            return None
        self._reader.forget()
        self._num_calls += 1
        self._give("name", name)
        return _Begun(name, first)

    def _finish_call(self, markup: ToolMarkup, begun: _Begun) -> Reading[bool]:
        """Reads the arguments and the end of a call; whether the arguments were whole."""
        if markup.parameter is None:
            if not (yield from read_object(self._reader, self._give_arguments)):
                return False
            yield from self._skip_id()
            yield from self._skip_parts(_parts(markup.call_end))
        else:
            if not (yield from self._read_parameters(markup, markup.parameter, begun)):
                return False
            yield from self._skip_parts(_parts(markup.call_end)[1:])
        return True

    def _first_of_parameters(self, markup: ToolMarkup, parameter: ParameterMarkup) -> Reading[str | None]:
        return (yield from self._reader.first_of(_parts(parameter.begin)[0], _parts(markup.call_end)[0]))

    def _read_parameters(
        self, markup: ToolMarkup, parameter: ParameterMarkup, begun: _Begun
    ) -> Reading[bool]:
        """Reads arguments that are written one by one, and gives them as one JSON object."""
        reader, schema = self._reader, self._parameters.get(begun.name, {})
        begin, *rest = _parts(parameter.begin)
        found, names = begun.first, set[str]()
        self._give_arguments("{")
        while found == begin:
            reader.unread(begin)
            reader.mark()
            yield from reader.first_of(begin)
            header = yield from self._read_parameter_name(parameter, rest)
            if header is None or header[0] in names:
                reader.rewind()
                return False
            reader.forget()
            name, kind = header
            self._give_arguments(f"{', ' if names else ''}{to_json(name)}: ")
            names.add(name)
            if not (yield from self._read_value(parameter, kind or kind_of(schema, name))):
                return False
            reader.mark()
            yield from self._skip_space()
            found = yield from self._first_of_parameters(markup, parameter)
            if found is None:
                reader.rewind()
                return False
            reader.forget()
        self._give_arguments("}")
        return True

    def _read_parameter_name(
        self, parameter: ParameterMarkup, parts: Sequence[str]
    ) -> Reading[tuple[str, Kind | None] | None]:
        """An argument's name, and its kind where the markup says it; None where there is none."""
        if not (yield from self._match(parts)):
            return None
        name = yield from self._reader.take_while(_is_of_argument, _MAX_NAME)
        *before, string = parameter.string.split()
        json_part = parameter.json.split()[-1]
        if not name or not (yield from self._match(before)):
            return None
        yield from self._skip_space()
        says = string != json_part
        found = yield from self._reader.first_of(string, json_part, *([string[-1]] if says else []))
        if found is None:
            return None
        if parameter.string.endswith("\n"):
            yield from self._reader.first_of("\n")
        kinds: dict[str, Kind] = {string: "string", json_part: "json"} if says else {}
        return name, kinds.get(found)

    def _read_value(self, parameter: ParameterMarkup, kind: Kind) -> Reading[bool]:
        """Reads a value and its end, and gives it as JSON; whether it came to its end."""
        ends = tuple({parameter.end, parameter.end.lstrip("\n")})
        found = None
        if kind != "string":
            text, found = yield from self._read_json_up_to(ends)
            if len(text) <= _MAX_VALUE:
                self._give_arguments(text if found is None else value_text(text, kind))
                return found is not None
            self._give_arguments(to_json(text)[:-1])
        else:
            self._give_arguments('"')
        if found is None:
            found = yield from self._reader.pass_until(
                ends, lambda piece: self._give_arguments(to_json(piece)[1:-1])
            )
        if found is not None:
            self._give_arguments('"')
        return found is not None

    def _read_json_up_to(self, ends: tuple[str, ...]) -> Reading[tuple[str, str | None]]:
        """A value and which of ``ends`` is behind it: the first one that is not in a string of its JSON.

        Of what is no JSON after all, or is too long, the first end counts.
        """
        texts: list[str] = []
        size = 0
        scan = StringScan()

        def take(text: str) -> None:
            nonlocal size
            texts.append(text)
            scan.push(text)
            size += len(text)

        self._reader.mark()
        found = yield from self._reader.pass_until(ends, take, _MAX_VALUE)
        if found is None or not scan.is_open:
            self._reader.forget()
            return "".join(texts), found
        first, end = "".join(texts), found
        num_ahead = size
        while found is not None and scan.is_open and size <= _MAX_VALUE and size - num_ahead <= self._ahead:
            take(found)
            most = min(_MAX_VALUE - size, self._ahead - (size - num_ahead))
            found = yield from self._reader.pass_until(ends, take, most)
        is_within = size <= _MAX_VALUE and size - num_ahead <= self._ahead
        # The same however the text is cut: not what came with the piece that was too much.
        self._ahead -= max(0, min(size - num_ahead, self._ahead, _MAX_VALUE - num_ahead))
        text = "".join(texts)
        if found is not None and not scan.is_open and is_within and value_text(text, "json") == text.strip():
            self._reader.forget()
            return text, found
        self._reader.rewind()
        yield from self._reader.pass_until(ends, lambda text: None)
        return first, end

    def _match(self, parts: Sequence[str]) -> Reading[bool]:
        """Whether all of these come next, with any white space before each; read as far as they do."""
        for part in parts:
            yield from self._skip_space()
            if not (yield from self._reader.first_of(part)):
                return False
        return True

    def _skip_parts(self, parts: Sequence[str]) -> Reading[None]:
        """Reads over those of these that come next, in this order, and white space around them."""
        for part in parts:
            yield from self._reader.skip(WHITE_SPACE)
            yield from self._reader.first_of(part)
        yield from self._reader.skip(WHITE_SPACE)

    def _skip_space(self) -> Reading[None]:
        yield from self._reader.take_while(WHITE_SPACE.__contains__, _MAX_SPACE)

    def _skip_id(self) -> Reading[None]:
        """Reads over an id that is written behind the arguments: calls are given other ones."""
        self._reader.mark()
        if (yield from self._match((",", '"id"', ":", '"'))):
            yield from self._reader.take_while(_is_of_name, _MAX_NAME)
            if (yield from self._reader.first_of('"')):
                return self._reader.forget()
        return self._reader.rewind()

    def _give_reasoning(self, text: str) -> None:
        self._give("reasoning", text)

    def _give_content(self, text: str) -> None:
        self._give("content", text)

    def _give_arguments(self, text: str) -> None:
        self._give("arguments", text)

    def _give(self, kind: _Given, text: str) -> None:
        """Notes more of the reply; of the same kind, it is more of the same delta."""
        if kind in ("name", "arguments") and self._num_calls > 1 and not self._parallel:
            return
        if not self._given or kind == "name" or self._given[-1][0] != kind:
            self._given.append((kind, []))
        self._given[-1][1].append(text)

    def _as_deltas(self) -> list[ReplyDelta]:
        deltas: list[ReplyDelta] = []
        for kind, texts in self._given:
            text = "".join(texts)
            if kind == "reasoning":
                deltas.append(ReasoningDelta(text))
            elif kind == "content":
                deltas.append(ContentDelta(text))
            elif kind == "name":
                self._index += 1
                deltas.append(ToolCallDelta(self._index, text))
            elif deltas and isinstance(deltas[-1], ToolCallDelta):
                deltas[-1] = ToolCallDelta(self._index, deltas[-1].name, text)
            else:
                deltas.append(ToolCallDelta(self._index, None, text))
        self._given = []
        return deltas


def call_marks(markup: ToolMarkup) -> tuple[str, ...]:
    """What says that calls begin, also with the white space that separates it from the content."""
    marks = takewhile(_MARK.fullmatch, _parts(markup.begin + markup.call))
    return tuple(space + mark for mark in marks for space in dict.fromkeys(("", markup.before)))


class _Begun:
    """A call whose arguments come next."""

    def __init__(self, name: str, first: str | None) -> None:
        self.name, self.first = name, first


def _parts(markup: str) -> list[str]:
    return _PARTS.findall(markup)


def _is_of_name(char: str) -> bool:
    return not char.isspace() and char not in '"<>{}[]'


def _is_of_argument(char: str) -> bool:
    return char not in '"<>\n'
