"""Grammars of replies, in each markup: whatever the logits say, a reply is read as calls of its tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from duckllm import StructuredOutputsParams
from duckllm.engine.request import Request
from duckllm.errors import ConfigError
from duckllm.text.chat import ChatOptions, ContentDelta, ReasoningDelta, ReplyDelta, Tool, ToolCallDelta
from duckllm.text.formats.known import KNOWN
from duckllm.text.formats.markup import ReasoningMarkup, ToolMarkup
from duckllm.text.formats.reply_grammar import reply_grammar
from duckllm.text.formats.reply_parser import MarkupParser
from duckllm.text.grammar import GrammarTable
from support.grammars import new_request

EOS = 0
THINK = ReasoningMarkup()
CONTROLS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>"),
    *("</arg_value>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "｜DSML｜"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<|tool_call_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "[TOOL_CALLS]"),
    *("[ARGS]", "<|im_end|>"),
]
# Such as go over the borders of markup.
PIECES = [
    '{"',
    '"}',
    "}}",
    "}\n",
    '",',
    '": ',
    "</",
    ">\n",
    '">',
    "get",
    "_call",
    "<tool",
    "</parameter",
    "\n\n",
]
PIECES += ["think>", "true", "null", " a", "ab", "é", "🦆", "\n</", "<parameter=", "DSML", "｜", "▁"]
TEXTS = [b"", *(bytes([byte]) for byte in range(256)), *(piece.encode() for piece in PIECES)]
# Where the marks are tokens, and where they are text like any other.
TOKENS = {True: [*TEXTS, *(b"" for _ in CONTROLS)], False: TEXTS}
TABLES = {has_controls: GrammarTable(tokens) for has_controls, tokens in TOKENS.items()}
IDS = {text: len(TEXTS) + number for number, text in enumerate(CONTROLS)}
SPELLED = re.compile(f"({'|'.join(map(re.escape, sorted(CONTROLS, key=len, reverse=True)))})")

Parts = Callable[[str], list[int | str]]
PARTS: dict[bool, Parts] = {
    True: lambda text: [IDS.get(piece, piece) for piece in SPELLED.split(text) if piece],
    False: lambda text: [text] if text else [],
}
NAMES = {markup.name: markup for markup in KNOWN}


def text_of(token_ids: Sequence[int]) -> str:
    """With the spelling of control tokens, as a reply has it whose special tokens are not skipped."""
    pieces = [
        TEXTS[each] if each < len(TEXTS) else CONTROLS[each - len(TEXTS)].encode() for each in token_ids
    ]
    return b"".join(pieces).decode()


def logits(seed: int, size: int) -> Iterator[torch.Tensor]:
    """Random ones, which like what ends things."""
    numbers = np.random.default_rng(seed)
    bias = np.zeros(size, np.float32)
    for liked in b'"}]<\n':
        bias[1 + liked] = 4
    bias[EOS], bias[len(TEXTS) :] = 5, 5
    while True:
        yield torch.from_numpy(bias + 3 * numbers.standard_normal(size).astype(np.float32))


class Reply:
    """A reply of random logits, and what it is read as."""

    def __init__(
        self,
        markup: ToolMarkup,
        options: ChatOptions,
        *,
        seed: int,
        has_controls: bool = True,
        begins_in_reasoning: bool = False,
        content: StructuredOutputsParams | None = None,
        reasoning: ReasoningMarkup | None = THINK,
    ) -> None:
        outputs = reply_grammar(
            PARTS[has_controls], reasoning, markup, options, content, begins_in_reasoning=begins_in_reasoning
        )
        assert outputs is not None
        table = TABLES[has_controls]
        self.request: Request = new_request(
            table, outputs, eos=(EOS,), max_tokens=900, temperature=1.0, seed=seed
        )
        rows = logits(seed, table.end)
        while self.request.finish_reason is None:
            self.request.advance(next(rows))
        self.is_whole = self.request.finish_reason == "stop"
        assert self.request.finish_reason != "error", self.request.stop_reason
        ids = [each for each in self.request.output_token_ids if each != EOS]
        assert "<|im_end|>" not in [text_of([each]) for each in ids if each >= len(TEXTS)]
        self.text = text_of(ids) if self.is_whole else ""
        parser = MarkupParser(
            reasoning,
            markup if options.tools and options.tool_choice != "none" else None,
            options.tools,
            begins_in_reasoning=begins_in_reasoning,
            content_has_form=content is not None,
        )
        deltas: list[ReplyDelta] = [*parser.push(self.text), *parser.finish()]
        self.content = "".join(each.text for each in deltas if isinstance(each, ContentDelta))
        self.reasoning = "".join(each.text for each in deltas if isinstance(each, ReasoningDelta))
        self.calls: list[tuple[str, str]] = []
        for each in deltas:
            if isinstance(each, ToolCallDelta):
                if each.name is not None:
                    self.calls.append((each.name, ""))
                name, arguments = self.calls[each.index]
                self.calls[each.index] = name, arguments + each.arguments


TEXTS_IN_SCHEMAS = st.sampled_from(
    ["a", "", "é🦆", 'say "x"', "<|im_end|>", "</parameter>", "a\nb", "true", "12", "</think>", "tool", "\\"]
)
LEAVES = st.one_of(
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 9)),
    st.builds(lambda least: {"type": "string", "minLength": least, "maxLength": 6}, st.integers(0, 5)),
    st.just({"type": "string", "pattern": "^[a-f]+[0-9]$", "maxLength": 9}),
    st.builds(lambda texts: {"enum": texts}, st.lists(TEXTS_IN_SCHEMAS, min_size=1, max_size=3, unique=True)),
    st.builds(lambda text: {"const": text, "description": "one"}, TEXTS_IN_SCHEMAS),
    st.builds(lambda low: {"type": "integer", "minimum": low, "maximum": low + 150}, st.integers(-200, 90)),
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"enum": [1, "a", None]},
            {"$ref": "#/$defs/pair"},
            {"$ref": "#/$defs/word"},
        ]
    ),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.builds(lambda one: {"anyOf": [one, {"type": "null"}]}, inner),
        st.builds(
            lambda one: {
                "type": "object",
                "properties": {"k": one},
                "required": ["k"],
                "additionalProperties": False,
            },
            inner,
        ),
    ),
    max_leaves=3,
)
DEFINITIONS = {
    "pair": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
    "word": {"type": "string", "enum": ["quack", "honk"]},
}


@st.composite
def tools_of(draw: st.DrawFn) -> list[Tool]:
    tools = []
    for name in draw(st.lists(st.sampled_from(["get", "get_all", "put-2"]), min_size=1, unique=True)):
        properties = draw(
            st.dictionaries(st.sampled_from(["x", "xy", "city name", "é"]), SCHEMAS, max_size=3)
        )
        required = [each for each in properties if draw(st.booleans())]
        schema = {"type": "object", "properties": properties, "required": required}
        tools.append(Tool(name, "", schema | {"additionalProperties": False, "$defs": DEFINITIONS}))
    return tools


def check_calls(reply: Reply, tools: Sequence[Tool]) -> None:
    schemas = {tool.name: tool.parameters for tool in tools}
    for name, arguments in reply.calls:
        value = json.loads(arguments)
        jsonschema.validate(value, schemas[name], jsonschema.Draft202012Validator)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(
    tools=tools_of(),
    seed=st.integers(0, 2**20),
    has_controls=st.booleans(),
    begins_in_reasoning=st.booleans(),
    parallel=st.booleans(),
    named=st.booleans(),
)
def test_calls_that_are_required_are_read_as_calls(
    name: str,
    tools: list[Tool],
    seed: int,
    has_controls: bool,
    begins_in_reasoning: bool,
    parallel: bool,
    named: bool,
) -> None:
    options = ChatOptions(
        tools=tools,
        tool_choice="required",
        named_tool=tools[-1].name if named else None,
        parallel_tool_calls=parallel,
        # What random letters would hardly spell is not asked for.
        enable_thinking=None if has_controls else False,
    )
    begins_in_reasoning = begins_in_reasoning and has_controls
    how: dict[str, Any] = {"has_controls": has_controls, "begins_in_reasoning": begins_in_reasoning}
    if not begins_in_reasoning:
        how["reasoning"] = [THINK, ReasoningMarkup(after_end=""), None][seed % 3]
    try:
        reply = Reply(NAMES[name], options, seed=seed, **how)
    except ConfigError as error:
        # Of an enum, nothing that can be written.
        assume(not re.search("no string that can be written|Unsatisfiable", str(error)))
        raise
    if reply.is_whole:
        assert reply.content == "", reply.text
        assert len(reply.calls) >= 1
        assert parallel or len(reply.calls) == 1
        assert not named or {called for called, _ in reply.calls} == {tools[-1].name}
        check_calls(reply, tools)


STRICT = Tool(
    "get",
    "",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    strict=True,
)
LOOSE = Tool("put", "", {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}})


@pytest.mark.parametrize("name", NAMES)
def test_a_reply_may_call_where_it_must_not(name: str) -> None:
    """With strict tools it is free text until a call begins, which ends it."""
    num_free, num_calls = 0, []
    for seed in range(8):
        options = ChatOptions(tools=[LOOSE, STRICT], parallel_tool_calls=seed % 2 == 0)
        reply = Reply(NAMES[name], options, seed=seed, begins_in_reasoning=seed > 4)
        if reply.is_whole:
            check_calls(reply, [STRICT, Tool("put", "", {"type": "object"})])
            assert seed % 2 == 0 or len(reply.calls) <= 1
            assert not reply.calls or reply.text.endswith((NAMES[name].end or NAMES[name].call_end).strip())
            num_free += bool(reply.content.strip())
            num_calls.append(len(reply.calls))
    assert num_free >= 1
    assert len(num_calls) >= 4
    # In a text of words "<" is rare, and here it must follow "\n\n": see the forced calls above.
    assert any(num_calls) or name == "deepseek-v3.2"


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "deepseek-v3.2", "kimi-k2"])
def test_content_of_a_form_behind_thinking_or_a_call(name: str) -> None:
    content = StructuredOutputsParams(
        json={
            "type": "object",
            "properties": {"digits": {"type": "string", "pattern": "^[0-9]{3}$"}},
            "required": ["digits"],
            "additionalProperties": False,
        }
    )
    called, written, thought = 0, 0, 0
    for seed in range(12):
        options = ChatOptions(tools=[STRICT] if seed % 2 else [])
        begins = seed % 3 == 0
        reply = Reply(NAMES[name], options, seed=seed, begins_in_reasoning=begins, content=content)
        assert reply.is_whole
        thought += bool(reply.reasoning)
        if reply.calls:
            assert reply.content.strip() == ""
            check_calls(reply, [STRICT])
            called += 1
        else:
            assert re.fullmatch("[0-9]{3}", json.loads(reply.content)["digits"])
            written += 1
    assert called >= 1
    assert written >= 6
    assert thought >= 2


def grammar_of(markup: ToolMarkup, *tools: Tool, **options: Any) -> StructuredOutputsParams | None:
    return reply_grammar(
        PARTS[True], THINK, markup, ChatOptions(tools=tools, **options), None, begins_in_reasoning=False
    )


def test_replies_are_free_where_nothing_asks_for_more() -> None:
    markup = NAMES["hermes"]
    assert grammar_of(markup) is None
    assert grammar_of(markup, LOOSE) is None
    assert grammar_of(markup, STRICT, tool_choice="none") is None
    assert grammar_of(markup, LOOSE, parallel_tool_calls=False) is not None
    # Content alone, and no thinking that a form could stand behind.
    content = StructuredOutputsParams(regex="a")
    found = reply_grammar(PARTS[True], None, markup, ChatOptions(), content, begins_in_reasoning=False)
    assert found == StructuredOutputsParams(regex="a", label="structured_outputs.regex")


def with_property(schema: dict[str, Any], *, strict: bool) -> Tool:
    return Tool("f", "", {"type": "object", "properties": {"x": schema}, "required": ["x"]}, strict)


@pytest.mark.parametrize(
    ("markup", "tool", "message"),
    [
        ("hermes", Tool("f", "", {"type": "string"}), "a schema of an object"),
        ("qwen3-coder", Tool("f", "", {"type": "array"}), "a schema of an object"),
        ("hermes", with_property({"uniqueItems": True}, strict=True), "uniqueItems"),
        ("glm-4.5", with_property({"type": "array", "uniqueItems": True}, strict=True), "uniqueItems"),
        ("glm-4.5", with_property({"type": "string", "format": "date"}, strict=True), "x: more than"),
        ("glm-4.5", with_property({"type": "string", "pattern": "(?=a)"}, strict=True), "x: more than"),
        ("qwen3-coder", with_property({"enum": [""]}, strict=False), "x is no string"),
        ("qwen3-coder", with_property({"enum": ["a</parameter>"]}, strict=False), "x is no string"),
        ("deepseek-v3.2", Tool("f", "", {"minProperties": 1}, strict=True), "minProperties beside"),
        ("qwen3-coder", Tool("f", "", {"properties": {'"': {}}}, strict=True), "an argument's name"),
        ("qwen3-coder", Tool("f", "", {"properties": {"<": {}}, "required": ["<"]}), "an argument's name"),
        (
            "qwen3-coder",
            Tool("f", "", {"required": ["y"], "additionalProperties": False}),
            "'y' in properties",
        ),
    ],
)
def test_what_calls_cannot_keep_to_is_refused_by_the_tools_name(
    markup: str, tool: Tool, message: str
) -> None:
    other = Tool("other")
    with pytest.raises(ConfigError, match=message) as raised:
        Reply(NAMES[markup], ChatOptions(tools=[other, tool], tool_choice="required"), seed=1)
    assert raised.value.field == "tools[1].function.parameters"


@pytest.mark.parametrize(
    ("markup", "schema"),
    [
        ("hermes", {"type": "array", "uniqueItems": True}),
        ("qwen3-coder", {"type": "array", "uniqueItems": True}),
        ("glm-4.5", {"type": "string", "format": "date"}),
        ("glm-4.7", {"allOf": [{"type": "string"}, {"minLength": 2}]}),
        ("deepseek-v3.2", {"type": "string", "format": "date", "maxLength": 3}),
    ],
)
def test_what_need_not_be_kept_to_is_let_go(markup: str, schema: dict[str, Any]) -> None:
    tool = with_property(schema, strict=False)
    replies = [
        Reply(NAMES[markup], ChatOptions(tools=[tool], tool_choice="required"), seed=seed)
        for seed in range(4)
    ]
    assert any(reply.is_whole for reply in replies)
    for reply in replies:
        if reply.is_whole:
            check_calls(reply, [Tool("f", "", {"type": "object"})])


def may_say(outputs: StructuredOutputsParams | None, *pieces: str | int) -> bool:
    """Whether a reply may begin so: control tokens as such where a piece is one, else the longest tokens."""
    assert outputs is not None
    grammar = TABLES[True].grammar(outputs, [EOS])
    for piece in pieces:
        ids = [piece] if isinstance(piece, int) else [IDS[piece]] if piece in IDS else []
        for token_id in ids or longest(str(piece).encode()):
            if not grammar.allowed[token_id]:
                return False
            grammar.accept(token_id)
    return True


def longest(text: bytes) -> list[int]:
    """Tokens of a text, each the longest that there is."""
    ids = []
    while text:
        token = max((each for each in TEXTS if each and text.startswith(each)), key=len)
        ids.append(TEXTS.index(token))
        text = text.removeprefix(token)
    return ids


def test_marks_come_as_tokens_and_are_not_spelled() -> None:
    spelled = ("<tool", "_call>")
    free = grammar_of(NAMES["hermes"], STRICT)
    assert may_say(free, "Hm", "<tool_call>", '\n{"name": "get", ')
    assert may_say(free, "Hm", *spelled[:1])
    assert not may_say(free, "Hm", *spelled)
    assert not may_say(free, "Hm", "</tool_call>")
    assert not may_say(free, "Hm", "<|im_end|>")
    # A thought ends by its mark alone, and holds what it likes beside that.
    must = grammar_of(NAMES["hermes"], STRICT, tool_choice="required")
    assert may_say(must, "<think>", "a", *spelled, "</think>", "\n\n", "<tool_call>")
    assert not may_say(must, "<think>", "a", "</", "think>")
    assert not may_say(must, "<think>", "a", EOS)
    assert not may_say(must, "<think>", "a", "<tool_call>")
    assert not may_say(must, "Hm")
    assert not may_say(must, "<tool_call>", '\n{"name": "put')
    # With a markup that ends thoughts, its marks are not spelled there.
    must = grammar_of(NAMES["kimi-k2"], STRICT, tool_choice="required")
    assert may_say(must, "<think>", "a", "<|tool_call_begin|")
    assert not may_say(must, "<think>", "a", "<|tool_call_begin", "|>")
    # One call where there may not be several.
    call = ("<tool_call>", '\n{"name": "get", "arguments": {"city": "a", "days": 1}}\n', "</tool_call>")
    assert may_say(grammar_of(NAMES["hermes"], STRICT), *call, "\n", *call, EOS)
    one = grammar_of(NAMES["hermes"], STRICT, parallel_tool_calls=False)
    assert may_say(one, "Hm", *call)
    assert not may_say(one, *call, "\n")


def test_values_are_written_as_they_will_be_read() -> None:
    def of(schema: dict[str, Any], markup: str = "qwen3-coder") -> StructuredOutputsParams | None:
        tool = with_property(schema, strict=True)
        return grammar_of(NAMES[markup], tool, tool_choice="required")

    begin, end = ("<tool_call>", "\n<function=f>\n<parameter=x>\n"), "\n</parameter>\n</function>\n"
    maybe = of({"anyOf": [{"type": "string"}, {"type": "null"}]})
    for value, may in (("duck", True), ("null", True), ('"null"', True), ("12", False), ("nul", False)):
        assert may_say(maybe, *begin, value + end) == may, value
    assert may_say(of({"type": "string"}), *begin, "12" + end)
    assert not may_say(of({"type": "string", "minLength": 3}), *begin, "12" + end)
    assert not may_say(of({"enum": ["a", "b"]}), *begin, "ab")
    found = of({"type": "string", "pattern": "k+$"})
    assert may_say(found, *begin, "quackk" + end)
    assert not may_say(found, *begin, "quacks" + end)
    begin = ("<", "｜DSML｜", "function_calls>\n<", "｜DSML｜", 'invoke name="f">\n<', "｜DSML｜")
    close = ("parameter>\n</", "｜DSML｜", "invoke>\n")
    dsml = of({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "deepseek-v3.2")
    assert may_say(dsml, *begin, 'parameter name="x" string="true">12</', "｜DSML｜", *close)
    assert may_say(dsml, *begin, 'parameter name="x" string="false">12</', "｜DSML｜", *close)
    assert not may_say(dsml, *begin, 'parameter name="x" string="false">a')
    date = of({"type": "string", "format": "date"}, "deepseek-v3.2")
    assert may_say(date, *begin, 'parameter name="x" string="false">"2026-11-30"</', "｜DSML｜")
    assert not may_say(date, *begin, 'parameter name="x" string="t')
