"""Replies taken apart: the same however they are cut, and nothing lost or doubled whatever is in them."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from duckllm.text.chat import Tool, ToolCallDelta
from duckllm.text.formats.known import (
    DEEPSEEK_V3,
    DEEPSEEK_V3_2,
    GLM_4_5,
    HERMES,
    KIMI_K2,
    KNOWN,
    MISTRAL,
    QWEN3_CODER,
)
from duckllm.text.formats.markup import ReasoningMarkup, ToolMarkup, to_json
from duckllm.text.formats.reply_parser import MarkupParser
from support.replies import Part, parse

PROPERTIES = {
    "path": {"type": "string"},
    "count": {"type": "integer"},
    "what": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "color": {"$ref": "#/$defs/color"},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "$defs": {"color": {"enum": ["1", "2"]}}}
TOOLS = [Tool("look", parameters=SCHEMA), Tool("wait")]
each_markup = pytest.mark.parametrize("markup", KNOWN, ids=lambda markup: markup.name)


def parser_of(markup: ToolMarkup | None, **options: Any) -> MarkupParser:
    return MarkupParser(ReasoningMarkup(), markup, TOOLS, **options)


def read(markup: ToolMarkup | None, text: str, **options: Any) -> list[Part]:
    """What a reply is, once it is known that it is the same character by character."""
    whole = parse(parser_of(markup, **options), [text])
    assert parse(parser_of(markup, **options), text) == whole
    return whole


def calls(markup: ToolMarkup, *called: tuple[str, dict[str, Any]]) -> str:
    written = [markup.write(name, arguments, number) for number, (name, arguments) in enumerate(called)]
    return markup.write_all(written)


@each_markup
def test_a_whole_reply(markup: ToolMarkup) -> None:
    look = {"path": 'a "b"\n</c>é🦆', "count": 3, "what": None, "color": "1", "list": [1, {"x": "y"}]}
    text = f"<think>\nhm\n</think>\n\nI look.{markup.before}{calls(markup, ('look', look), ('wait', {}))}\n"
    parts = read(markup, text)
    assert parts[:2] == [("reasoning", "hm"), ("content", "I look.")]
    assert [(kind, name, json.loads(arguments)) for kind, name, arguments in parts[2:]] == [
        ("call", "look", look),
        ("call", "wait", {}),
    ]


@each_markup
def test_content_before_and_behind_calls(markup: ToolMarkup) -> None:
    call = calls(markup, ("wait", {}))
    assert read(markup, f"One.{markup.before}{call} Two.{markup.before}{call}\n\nThree.") == [
        ("content", "One."),
        ("call", "wait", "{}"),
        ("content", "Two."),
        ("call", "wait", "{}"),
        ("content", "Three."),
    ]


@each_markup
def test_without_tools_calls_are_content(markup: ToolMarkup) -> None:
    text = calls(markup, ("wait", {}))
    assert read(None, text) == [("content", text)]


@each_markup
def test_only_the_first_of_calls_that_may_not_be_parallel(markup: ToolMarkup) -> None:
    text = calls(markup, ("wait", {}), ("look", {"path": "a"}))
    assert read(markup, text, parallel_tool_calls=False) == [("call", "wait", "{}")]


@each_markup
def test_a_reply_that_is_cut_keeps_what_there_was(markup: ToolMarkup) -> None:
    text = "Yes" + markup.before + calls(markup, ("look", {"path": "a b"}))
    whole = json.dumps({"path": "a b"})
    for length in range(len(text)):
        parts = read(markup, text[:length])
        if parts and parts[-1][0] == "call":
            # What may be the end of a value may belong to the value too.
            assert whole.startswith(parts[-1][2]) or parts[-1][2].startswith(whole[:-2])
            assert parts[:-1] == [("content", "Yes")]
        elif len(parts) == 3:
            # Markup that is not whole.
            assert whole.startswith(parts[1][2])
            assert parts[2][1] in text
        else:
            assert "".join(part[1] for part in parts) == text[:length]


WORDS = [f"w{number}x" for number in range(12)]
KEYS = ["path", "count", "what", "color", "list"]
values = st.one_of(
    st.sampled_from(WORDS),
    st.integers(),
    st.lists(
        st.sampled_from([*WORDS, "</parameter>", "</arg_value>", "</｜DSML｜parameter>", '"']), max_size=3
    ),
    st.text(max_size=6),
    st.sampled_from(["", "\n", " a\n", '"', "\\", "</", "<tool_call>", "null", "1"]),
    st.dictionaries(st.sampled_from(WORDS), st.none() | st.booleans(), max_size=2),
)
arguments = st.dictionaries(st.sampled_from(KEYS), values, max_size=3)
texts = st.lists(st.sampled_from([*WORDS, " ", "\n", "<", "</", "{", "é", "🦆"]), max_size=6).map("".join)


@st.composite
def replies(draw: st.DrawFn, markup: ToolMarkup) -> str:
    """Well formed, or with parts left out, doubled and exchanged."""
    text = draw(st.sampled_from(["", "<think>", "<think>\nw0x</think>", "\n\n"])) + draw(texts)
    for _ in range(draw(st.integers(0, 2))):
        called = draw(st.lists(st.tuples(st.sampled_from(["look", "wait", "w1x"]), arguments), max_size=2))
        text += draw(st.sampled_from(["", markup.before])) + calls(markup, *called) + draw(texts)
    if draw(st.booleans()):
        pieces = re.findall(r"\w+|\s+|[^\w\s]", text)
        for _ in range(draw(st.integers(1, 3))):
            place = draw(st.integers(0, len(pieces)))
            change = draw(st.sampled_from(["drop", "double", "cut", "mark"]))
            if change == "drop":
                del pieces[place : place + draw(st.integers(1, 4))]
            elif change == "double":
                pieces[place:place] = pieces[place : place + 3]
            elif change == "mark":
                pieces[place:place] = [
                    draw(st.sampled_from([markup.call, markup.call_end, markup.begin, "\n"]))
                ]
            else:
                del pieces[place:]
        text = "".join(pieces)
    return text


def cut(text: str, places: list[float]) -> list[str]:
    at = sorted({0, len(text), *(int(place * len(text)) for place in places)})
    return [text[start:stop] for start, stop in pairwise(at)]


@each_markup
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_cuts_change_nothing(markup: ToolMarkup, data: st.DataObject) -> None:
    text = data.draw(replies(markup))
    begins = data.draw(st.booleans())
    places = data.draw(st.lists(st.floats(0, 1), max_size=6))
    whole = parse(parser_of(markup, begins_in_reasoning=begins), [text])
    assert parse(parser_of(markup, begins_in_reasoning=begins), cut(text, places)) == whole
    assert parse(parser_of(markup, begins_in_reasoning=begins), text) == whole


@pytest.mark.parametrize("markup", [GLM_4_5, DEEPSEEK_V3_2], ids=lambda markup: markup.name)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_cuts_change_nothing_at_limits(markup: ToolMarkup, data: st.DataObject) -> None:
    limits = {"_MAX_VALUE": 40, "_MAX_AHEAD": 30, "_MAX_NAME": 5, "_MAX_SPACE": 2}
    with mock.patch.multiple("duckllm.text.formats.reply_parser", **limits):
        text = data.draw(replies(markup))
        places = data.draw(st.lists(st.floats(0, 1), max_size=6))
        whole = parse(parser_of(markup), [text])
        assert parse(parser_of(markup), cut(text, places)) == whole
        assert parse(parser_of(markup), text) == whole


@each_markup
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_nothing_is_lost_and_nothing_doubled(markup: ToolMarkup, data: st.DataObject) -> None:
    text = data.draw(replies(markup))
    parts = parse(parser_of(markup), [text])
    shown = " ".join(field for part in parts for field in part[1:])
    assert Counter(re.findall(r"w\d+x", shown)) == Counter(re.findall(r"w\d+x", text))


@each_markup
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_written_is_read(markup: ToolMarkup, data: st.DataObject) -> None:
    called = data.draw(
        st.lists(st.tuples(st.sampled_from(["look", "wait"]), arguments), min_size=1, max_size=3)
    )
    if markup.parameter is not None:
        # A string cannot have what ends it, nor can what the schema takes for one.
        assume(not any(markup.parameter.end.strip() in to_json(given) for _, given in called))
    parts = parse(parser_of(markup), [calls(markup, *called)])
    assert [part[:2] for part in parts] == [("call", name) for name, _ in called]
    if markup.parameter is None:
        assert [json.loads(part[2]) for part in parts] == [given for _, given in called]


MALFORMED = {
    "no JSON": (HERMES, "<tool_call>\nlook\n</tool_call>"),
    "no name": (HERMES, '<tool_call>{"arguments": {"path": "a"}}</tool_call>'),
    "arguments that are none": (HERMES, '<tool_call>{"name": "look", "arguments": "{}"}</tool_call>'),
    "a mark alone": (HERMES, "a <tool_call> b <tool_call"),
    "a section without calls": (KIMI_K2, "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
    "a parameter elsewhere": (
        DEEPSEEK_V3_2,
        '<｜DSML｜parameter name="a" string="true">b</｜DSML｜parameter>',
    ),
    "no separator": (DEEPSEEK_V3, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look"),
    "a name of several words": (GLM_4_5, "<tool_call>look at this</tool_call>"),
    "an end alone": (QWEN3_CODER, "</function>\n</tool_call>"),
    "an empty list": (MISTRAL, "[TOOL_CALLS] []"),
    "a name without end": (HERMES, '<tool_call>{"name": "' + "a" * 5000),
    "white space without end": (HERMES, "<tool_call>" + " " * 5000),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_markup_is_content_once(case: str) -> None:
    markup, text = MALFORMED[case]
    assert read(markup, f"Hm {text} so.") == [("content", f"Hm {text} so.")]


TOLERATED = {
    "white space": (HERMES, ' <tool_call>{ "name" : "look" ,\n"arguments":{"path" :"a"} } </tool_call> '),
    "no closing mark": (HERMES, '<tool_call>\n{"name": "look", "arguments": {"path": "a"}}'),
    "no closing brace": (HERMES, '<tool_call>\n{"name": "look", "arguments": {"path": "a"}\n</tool_call>'),
    "no section": (
        KIMI_K2,
        '<|tool_call_begin|>look<|tool_call_argument_begin|>{"path": "a"}<|tool_call_end|>',
    ),
    "no outer mark": (QWEN3_CODER, "<function=look><parameter=path>a</parameter></function>"),
    "no kind": (
        DEEPSEEK_V3_2,
        '<｜DSML｜invoke name="look"><｜DSML｜parameter name="path">a</｜DSML｜parameter></｜DSML｜invoke>',
    ),
    "an id": (MISTRAL, '[TOOL_CALLS][{"name": "look", "arguments": {"path": "a"}, "id": "abc456789"}]'),
}


@pytest.mark.parametrize("case", TOLERATED)
def test_small_errors_are_tolerated(case: str) -> None:
    markup, text = TOLERATED[case]
    [(kind, name, given_arguments)] = [part for part in read(markup, text) if part[1].strip()]
    assert (kind, name, json.loads(given_arguments)) == ("call", "look", {"path": "a"})


def test_a_call_that_breaks_off_keeps_its_beginning_and_the_rest_is_content() -> None:
    text = '<tool_call>{"name": "look", "arguments": {"path": nope}}</tool_call>'
    assert read(HERMES, text) == [("call", "look", '{"path": '), ("content", "nope}}</tool_call>")]
    begin = '<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="path" string="true">a</｜DSML｜parameter>'
    assert read(DEEPSEEK_V3_2, begin + "\nhm</｜DSML｜invoke>") == [
        ("call", "look", '{"path": "a"'),
        ("content", "\nhm</｜DSML｜invoke>"),
    ]


def test_the_next_call_behind_a_broken_one_is_read() -> None:
    good = HERMES.write("wait", {})
    assert read(HERMES, f'<tool_call>{{"name": "look", x\n{good}')[-1] == ("call", "wait", "{}")
    broken = '<tool_call>{"name": "look", "arguments": {]'
    assert read(HERMES, f"{broken}\n{good}") == [
        ("call", "look", "{"),
        ("content", "]"),
        ("call", "wait", "{}"),
    ]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("path", "1", "1"),
        ("path", ' {"a": 1}\n', ' {"a": 1}\n'),
        ("count", " 5 ", 5),
        ("count", "five", "five"),
        ("count", "NaN", "NaN"),
        ("what", "null", None),
        ("what", "nothing", "nothing"),
        ("color", "1", "1"),
        ("unknown", "[1, 2]", [1, 2]),
        ("unknown", "[1, 2", "[1, 2"),
    ],
)
def test_the_schema_says_what_a_value_is(key: str, value: str, expected: object) -> None:
    text = f"<tool_call>look\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    [(_, _, given_arguments)] = read(GLM_4_5, text)
    assert json.loads(given_arguments) == {key: expected}


def test_markup_that_says_what_a_value_is_goes_before_the_schema() -> None:
    text = calls(DEEPSEEK_V3_2, ("look", {"path": 1, "count": "1"}))
    assert read(DEEPSEEK_V3_2, text) == [("call", "look", '{"path": 1, "count": "1"}')]


def test_arguments_come_as_they_are_written() -> None:
    parser = parser_of(HERMES)
    assert parser.push('<tool_call>\n{"name": "look", "arguments": {"pa') == [
        ToolCallDelta(0, "look", '{"pa')
    ]
    assert parser.push('th": "a b') == [ToolCallDelta(0, None, 'th": "a b')]
    assert parser.push('"}') == [ToolCallDelta(0, None, '"}')]
    assert parser.push("}\n</tool") == []
    assert parser.push("_call>") == []
    assert parser.finish() == []


def test_values_of_arguments_come_as_they_are_written() -> None:
    parser = parser_of(QWEN3_CODER)
    parser.push("<tool_call>\n<function=look>\n<parameter=path>\n")
    assert parser.push('a "b') == [ToolCallDelta(0, None, 'a \\"b')]
    assert parser.push("\n</par") == []
    assert parser.push("k\n") == [ToolCallDelta(0, None, "\\n</park")]


def test_a_line_feed_within_a_string_is_escaped() -> None:
    text = '<tool_call>{"name": "look", "arguments": {"path": "a\nb\tc"}}</tool_call>'
    assert read(HERMES, text) == [("call", "look", '{"path": "a\\nb\\tc"}')]


@pytest.mark.parametrize(
    ("text", "begins", "expected"),
    [
        ("<think>a</think>b", False, [("reasoning", "a"), ("content", "b")]),
        ("\n<think>\na\n\n</think>\n\n\nb\n", False, [("reasoning", "a\n"), ("content", "b\n")]),
        ("a</think>b", True, [("reasoning", "a"), ("content", "b")]),
        ("a</think>b", False, [("content", "a</think>b")]),
        ("a<think>b", False, [("content", "a<think>b")]),
        ("a\n</thin", True, [("reasoning", "a\n</thin")]),
        ("<think></think>", False, []),
        ("<thi", False, [("content", "<thi")]),
        ("", True, []),
    ],
)
def test_thinking(text: str, begins: bool, expected: list[Part]) -> None:
    assert read(HERMES, text, begins_in_reasoning=begins) == expected


def test_control_tokens_of_calls_end_the_thinking() -> None:
    text = "<think>hm" + calls(KIMI_K2, ("wait", {}))
    assert read(KIMI_K2, text) == [("reasoning", "hm"), ("call", "wait", "{}")]
    text = "<think>hm" + calls(HERMES, ("wait", {}))
    assert read(HERMES, text) == [("reasoning", text.removeprefix("<think>"))]


def test_a_long_value_is_a_string(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duckllm.text.formats.reply_parser._MAX_VALUE", 8)
    value = [1, 2, 3, 4]
    text = calls(GLM_4_5, ("look", {"list": value, "count": 12345678}))
    [(_, _, given_arguments)] = read(GLM_4_5, text)
    assert json.loads(given_arguments) == {"list": json.dumps(value), "count": 12345678}


def test_the_cost_is_linear() -> None:
    """Parts that are looked at again and again would take minutes."""
    hostile = "<tool_call>" * 10_000 + '{"name": "look", "arguments": {' + '"a": "' + "b\\n" * 40_000
    parts = parse(parser_of(HERMES), [hostile])
    assert parts[0] == ("content", "<tool_call>" * 9_999)
    assert parts[1][1] == "look"


@pytest.mark.parametrize("markup", [QWEN3_CODER, GLM_4_5, DEEPSEEK_V3_2], ids=lambda markup: markup.name)
def test_the_end_of_a_value_may_stand_in_its_strings(markup: ToolMarkup) -> None:
    assert markup.parameter is not None
    end = markup.parameter.end
    look = {"list": [f'a "{end}', {end: end}], "count": 3, "path": "x"}
    assert read(markup, calls(markup, ("look", look))) == [("call", "look", to_json(look))]
    # Of what is no JSON the first end counts, and what is behind it is read as ever.
    broken = calls(markup, ("look", {"count": 3, "path": 'say "x"'})).replace("3", '["a')
    [(_, name, arguments)] = read(markup, broken)
    assert (name, json.loads(arguments)) == ("look", {"count": '["a', "path": 'say "x"'})


def test_a_quote_that_is_left_open_does_not_take_the_next_call() -> None:
    text = calls(GLM_4_5, ("look", {"count": '"'}), ("look", {"path": '"'}))
    assert read(GLM_4_5, text) == [("call", "look", '{"count": "\\""}'), ("call", "look", '{"path": "\\""}')]


def test_values_are_read_ahead_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    look = {"list": ["</arg_value>" * 3], "count": 1}
    text = calls(GLM_4_5, ("look", look))
    assert read(GLM_4_5, text) == [("call", "look", to_json(look))]
    monkeypatch.setattr("duckllm.text.formats.reply_parser._MAX_AHEAD", 20)
    assert read(GLM_4_5, text)[0] == ("call", "look", '{"list": "[\\""')
    monkeypatch.undo()
    monkeypatch.setattr("duckllm.text.formats.reply_parser._MAX_VALUE", 20)
    assert read(GLM_4_5, text)[0] == ("call", "look", '{"list": "[\\""')


def test_reading_ahead_is_linear() -> None:
    value = '<arg_key>a{}</arg_key>\n<arg_value>["' + '\\"</arg_value>' * 40 + "</arg_value>\n"
    text = "<tool_call>look\n" + "".join(value.replace("{}", str(number)) for number in range(400))
    assert parse(parser_of(GLM_4_5), [text])[0][1] == "look"
    text = '<tool_call>look\n<arg_key>list</arg_key>\n<arg_value>["' + "</arg_value>" * 50_000
    [(_, _, given_arguments), *_] = parse(parser_of(GLM_4_5), [text])
    assert given_arguments == '{"list": "[\\""'


def test_marks_within_content_of_a_form_are_content() -> None:
    content = json.dumps({"text": "<tool_call>look</tool_call>"})
    assert read(GLM_4_5, content)[1] == ("call", "look", "{}")
    assert read(GLM_4_5, content, content_has_form=True) == [("content", content)]
    text = f"<think>hm</think>\n\n{content}"
    assert read(GLM_4_5, text, content_has_form=True) == [("reasoning", "hm"), ("content", content)]
    text = "<think>hm</think>\n\n" + calls(GLM_4_5, ("look", {"count": 3}), ("wait", {}))
    assert [part[0] for part in read(GLM_4_5, text, content_has_form=True)] == ["reasoning", "call", "call"]
