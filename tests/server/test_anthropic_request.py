"""Requests of the Anthropic API as conversations, options and sampling."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from duckllm.sampling_params import SamplingParams
from duckllm.server.anthropic_request import chat_messages, hides_thinking, sampling_params
from duckllm.server.anthropic_request import chat_options as options_of
from duckllm.server.anthropic_types import MessagesBody
from duckllm.server.errors import ApiError
from duckllm.server.opaque import to_opaque
from duckllm.text.chat import ChatMessage, ChatOptions, Tool, ToolCall

CALL = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a b"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "file"}
TOOL = {"name": "read", "description": "reads", "input_schema": {"type": "object"}}


def body(*messages: Any, **fields: Any) -> MessagesBody:
    given = [{"role": "user", "content": each} if isinstance(each, str) else each for each in messages]
    return MessagesBody.model_validate(
        {"model": "m", "max_tokens": 5, "messages": given or [{"role": "user", "content": "a"}], **fields}
    )


def chat_options(given: MessagesBody, *, can_think: bool = True, knows_effort: bool = True) -> ChatOptions:
    return options_of(given, can_think=can_think, knows_effort=knows_effort)


def reply(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **fields}


def test_a_conversation_with_every_kind_of_block() -> None:
    ephemeral = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
    turn = [text("before"), {**RESULT, "is_error": True, "cache_control": ephemeral}, text("c"), text("d")]
    thinking = {"type": "thinking", "thinking": "hm", "signature": "x"}
    found = chat_messages(
        body(
            "hello",
            reply(thinking, text("I ", citations=None), text("read"), CALL),
            {"role": "user", "content": turn},
            {"role": "system", "content": "later"},
            "go on",
            system=[text("first"), text("second", cache_control=ephemeral)],
        )
    )
    assert found == [
        ChatMessage("system", "first\n\nsecond"),
        ChatMessage("user", "hello"),
        ChatMessage("assistant", "I read", "hm", (ToolCall("toolu_1", "read", '{"path": "a b"}'),)),
        ChatMessage("tool", "Error: file", tool_call_id="toolu_1"),
        ChatMessage("user", "before\n\nc\n\nd"),
        ChatMessage("system", "later"),
        ChatMessage("user", "go on"),
    ]


def test_thinking_that_the_client_has_not_seen_comes_back_by_its_signature() -> None:
    hidden = {"type": "thinking", "thinking": "", "signature": to_opaque("hm \N{DUCK}")}
    [_, answer, _] = chat_messages(body("a", reply(hidden, text("b")), "c"))
    assert answer.reasoning_content == "hm \N{DUCK}"


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("all", ["1", "2"]),
        ({"type": "all"}, ["1", "2"]),
        ({"type": "thinking_turns", "value": 1}, [None, "2"]),
        (None, [None, "2"]),
    ],
)
def test_thinking_is_cleared_as_asked(keep: Any, kept: list[str | None]) -> None:
    edit = {"type": "clear_thinking_20251015"} | ({} if keep is None else {"keep": keep})
    turns = [reply({"type": "thinking", "thinking": each, "signature": ""}, text("b")) for each in "12"]
    found = chat_messages(body("a", turns[0], "a", turns[1], "a", context_management={"edits": [edit]}))
    assert [each.reasoning_content for each in found if each.role == "assistant"] == kept


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([reply(text("a"))], "messages[0].role: got 'assistant', expected 'user' as the last one"),
        (
            [{"role": "user", "content": [CALL]}],
            "messages[0].content[0].type: got 'tool_use', expected text or tool_result in a message of",
        ),
        (
            [reply(CALL), {"role": "user", "content": [{**RESULT, "tool_use_id": "toolu_2"}]}],
            "messages[1].content[0].tool_use_id: got 'toolu_2', expected the id of a tool_use block",
        ),
        (
            ["a", reply(CALL), {"role": "user", "content": [RESULT, RESULT]}],
            "messages[2].content[1].tool_use_id: got 'toolu_1', expected the id of a tool_use block",
        ),
        (
            ["a", reply(CALL), "b", {"role": "user", "content": [RESULT]}],
            "messages[3].content[0].tool_use_id: got 'toolu_1', expected the id of a tool_use block",
        ),
        (
            ["a", reply(CALL), reply(text("b")), {"role": "user", "content": [RESULT]}],
            "messages[3].content[0].tool_use_id: got 'toolu_1', expected the id of a tool_use block",
        ),
    ],
)
def test_what_cannot_be_a_conversation_is_refused(messages: list[Any], said: str) -> None:
    with pytest.raises(ApiError) as error:
        chat_messages(body(*messages))
    assert error.value.message.startswith(said)


def test_deferred_tools_are_there_once_a_result_refers_to_them() -> None:
    later = {**TOOL, "name": "write", "defer_loading": True}
    reference = {"type": "tool_reference", "tool_name": "write"}
    before, after = (
        ["a"],
        ["a", reply(CALL), {"role": "user", "content": [{**RESULT, "content": [reference]}]}],
    )
    assert [tool.name for tool in chat_options(body(*before, tools=[TOOL, later])).tools] == ["read"]
    referred = body(*after, tools=[TOOL, later])
    assert [tool.name for tool in chat_options(referred).tools] == ["read", "write"]
    assert chat_messages(referred)[-1].content == "The tool write is available now."


def test_options() -> None:
    schema = {"type": "object"}
    options = chat_options(
        body(
            tools=[{**TOOL, "strict": True, "type": "custom", "eager_input_streaming": True}],
            tool_choice={"type": "tool", "name": "read", "disable_parallel_tool_use": True},
            thinking={"type": "adaptive", "display": "omitted"},
            output_config={"effort": "xhigh", "format": {"type": "json_schema", "schema": schema}},
        )
    )
    assert options.tools == [Tool("read", "reads", {"type": "object"}, strict=True)]
    assert (options.tool_choice, options.named_tool, options.parallel_tool_calls) == (
        "required",
        "read",
        False,
    )
    assert (options.enable_thinking, options.reasoning_effort) == (True, "xhigh")
    assert options.response_format is not None
    assert options.response_format.json == schema


@pytest.mark.parametrize(
    ("choice", "expected"),
    [(None, "auto"), ("auto", "auto"), ("any", "required"), ("none", "none")],
)
def test_choices_of_tools(choice: str | None, expected: str) -> None:
    given = {} if choice is None else {"tool_choice": {"type": choice}}
    options = chat_options(body(tools=[TOOL], **given))
    assert (options.tool_choice, options.named_tool, options.parallel_tool_calls) == (expected, None, True)


@pytest.mark.parametrize(
    ("thinking", "can_think", "expected", "hidden"),
    [
        (None, True, None, False),
        ({"type": "disabled"}, True, False, False),
        ({"type": "disabled"}, False, False, False),
        ({"type": "adaptive"}, True, True, False),
        ({"type": "adaptive", "display": "omitted"}, False, None, True),
        ({"type": "enabled", "budget_tokens": 4}, True, True, False),
        ({"type": "enabled", "budget_tokens": 1}, False, None, False),
    ],
)
def test_thinking(thinking: Any, can_think: bool, expected: bool | None, hidden: bool) -> None:
    given = body(thinking=thinking)
    assert chat_options(given, can_think=can_think).enable_thinking is expected
    assert hides_thinking(given) is hidden


def test_a_budget_that_nothing_keeps_to_is_refused() -> None:
    with pytest.raises(ApiError) as error:
        chat_options(body(thinking={"type": "enabled", "budget_tokens": 3}))
    assert error.value.message.startswith("thinking.budget_tokens: got 3, expected at least max_tokens - 1,")


def test_effort_is_told_to_models_that_know_it() -> None:
    given = body(output_config={"effort": "max"})
    assert chat_options(given).reasoning_effort == "max"
    assert chat_options(given, knows_effort=False).reasoning_effort is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [TOOL, TOOL]}, "tools[1].name: got 'read', expected a name that no"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name: got 'x'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type: got 'any', expected auto or none"),
    ],
)
def test_tools_that_do_not_fit_together_are_refused(fields: Any, said: str) -> None:
    with pytest.raises(ApiError) as error:
        chat_options(body(**fields))
    assert error.value.message.startswith(said)


def test_sampling() -> None:
    defaults = SamplingParams(temperature=0.7, top_p=0.9)
    given = body(temperature=0.2, top_k=3, stop_sequences=["x", "y"])
    expected = SamplingParams(temperature=0.2, top_k=3, top_p=0.9, max_tokens=5, stop=["x", "y"])
    assert sampling_params(given, defaults) == expected
    assert sampling_params(body(), defaults) == SamplingParams(temperature=0.7, top_p=0.9, max_tokens=5)


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, ("messages", 0, "content", 0)),
        ({"tools": [{**TOOL, "type": "web_search_20250305"}]}, ("tools", 0, "type")),
        ({"tools": [{**TOOL, "input_examples": [{}]}]}, ("tools", 0, "input_examples")),
        ({"mcp_servers": []}, ("mcp_servers",)),
        ({"speed": "fast"}, ("speed",)),
        ({"stop_sequences": [""]}, ("stop_sequences", 0)),
        ({"max_tokens": 0}, ("max_tokens",)),
        ({"thinking": {"type": "between_tools"}}, ("thinking",)),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            ("context_management", "edits", 0, "type"),
        ),
    ],
)
def test_what_is_not_honoured_is_refused_where_it_stands(fields: Any, place: tuple[Any, ...]) -> None:
    with pytest.raises(ValidationError) as error:
        body(**fields)
    [found] = error.value.errors()
    assert found["loc"] == place
