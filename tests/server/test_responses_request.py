"""Requests of the Responses API as conversations, options and sampling."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from duckllm.sampling_params import SamplingParams
from duckllm.server.errors import ApiError
from duckllm.server.opaque import to_opaque
from duckllm.server.responses_request import (
    LOGPROBS,
    chat_messages,
    chat_options,
    namespaces,
    sampling_params,
)
from duckllm.server.responses_types import ResponsesBody
from duckllm.text.chat import ChatMessage, Tool, ToolCall

CALL = {"type": "function_call", "call_id": "call_1", "name": "read", "arguments": '{"path": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "file"}
READ = {"type": "function", "name": "read", "description": "reads", "parameters": {"type": "object"}}


def body(items: Any = "a", **fields: Any) -> ResponsesBody:
    return ResponsesBody.model_validate({"model": "m", "input": items, **fields})


def message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def said(*texts: str) -> dict[str, Any]:
    parts = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return message("assistant", parts, type="message", id="msg_1", status="completed")


def thought(**fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], **fields}


def test_a_text_alone_is_a_users_message() -> None:
    assert chat_messages(body("a")) == [ChatMessage("user", "a")]


def test_items_of_a_reply_make_one_message() -> None:
    found = chat_messages(
        body(
            [
                message("developer", "rules"),
                message(
                    "user", [{"type": "input_text", "text": "he"}, {"type": "input_text", "text": "llo"}]
                ),
                thought(content=[{"type": "reasoning_text", "text": "hm"}]),
                said("I ", "read"),
                CALL,
                {**CALL, "call_id": "call_2", "namespace": "mcp__files", "name": "list"},
                OUTPUT,
                {**OUTPUT, "call_id": "call_2", "output": [{"type": "input_text", "text": "none"}]},
                thought(summary=[{"type": "summary_text", "text": "so"}]),
                message("assistant", [{"type": "refusal", "refusal": "no"}]),
                message("user", "why"),
            ],
            instructions="first",
        )
    )
    calls = (ToolCall("call_1", "read", '{"path": 1}'), ToolCall("call_2", "mcp__files__list", '{"path": 1}'))
    assert found == [
        ChatMessage("system", "first"),
        ChatMessage("system", "rules"),
        ChatMessage("user", "hello"),
        ChatMessage("assistant", "I read", "hm", calls),
        ChatMessage("tool", "file", tool_call_id="call_1"),
        ChatMessage("tool", "none", tool_call_id="call_2"),
        ChatMessage("assistant", "no", "so"),
        ChatMessage("user", "why"),
    ]


def test_thinking_behind_a_reply_begins_the_next_one() -> None:
    found = chat_messages(body([said("a"), thought(encrypted_content=to_opaque("hm")), CALL, OUTPUT]))
    assert found[:2] == [
        ChatMessage("assistant", "a"),
        ChatMessage("assistant", "", "hm", (ToolCall("call_1", "read", '{"path": 1}'),)),
    ]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([said("a")], "input[0]: got an item of a reply as the last one"),
        ([CALL, {**OUTPUT, "call_id": "call_2"}], "input[1].call_id: got 'call_2'"),
        ([CALL, OUTPUT, OUTPUT], "input[2].call_id: got 'call_1'"),
        ([CALL, {"role": "user", "content": "a"}, OUTPUT], "input[2].call_id: got 'call_1'"),
        ([CALL, OUTPUT, {**CALL, "call_id": "call_2"}, OUTPUT], "input[3].call_id: got 'call_1'"),
        (
            [thought(encrypted_content="gAAAA"), message("user", "a")],
            "input[0].encrypted_content: got another server's",
        ),
    ],
)
def test_what_cannot_be_a_conversation_is_refused(items: Any, expected: str) -> None:
    with pytest.raises(ApiError) as error:
        chat_messages(body(items))
    assert error.value.message.startswith(expected)


def test_options() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    namespace = {"type": "namespace", "name": "mcp__x__", "description": "Of x.", "tools": [READ]}
    given = body(
        tools=[
            {**READ, "strict": True},
            namespace,
        ],
        tool_choice={"type": "function", "name": "read"},
        parallel_tool_calls=False,
        text={"format": form},
        reasoning={"effort": "low", "summary": "auto"},
    )
    options = chat_options(given)
    assert options.tools == [
        Tool("read", "reads", {"type": "object"}, strict=True),
        Tool("mcp__x__read", "Of x.\n\nreads", {"type": "object"}),
    ]
    assert namespaces(given) == {"mcp__x__read": ("mcp__x__", "read")}
    assert (options.tool_choice, options.named_tool, options.parallel_tool_calls) == (
        "required",
        "read",
        False,
    )
    assert (options.enable_thinking, options.reasoning_effort) == (None, "low")
    assert options.response_format is not None
    assert options.response_format.json == schema
    plain = chat_options(body(text={"format": {"type": "json_object"}}))
    assert plain.response_format is not None
    assert plain.response_format.json_object is True
    assert (plain.tool_choice, plain.enable_thinking, plain.parallel_tool_calls) == ("auto", None, True)


def test_sampling() -> None:
    defaults = SamplingParams(temperature=0.7)
    given = body(max_output_tokens=9, top_p=0.5, top_logprobs=2, include=["message.output_text.logprobs"])
    assert sampling_params(given, defaults) == SamplingParams(
        temperature=0.7, top_p=0.5, max_tokens=9, logprobs=2
    )
    with pytest.raises(ApiError) as error:
        sampling_params(body(top_logprobs=2), defaults)
    assert error.value.message == f"top_logprobs: got 2, expected none without {LOGPROBS} in include"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tools": [READ, READ]}, "tools[1].name: got 'read', expected a name that no"),
        ({"tools": [READ], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name: got 'x'"),
        ({"tool_choice": "required"}, "tool_choice: got 'required', expected auto or none"),
    ],
)
def test_functions_that_do_not_fit_together_are_refused(fields: Any, expected: str) -> None:
    with pytest.raises(ApiError) as error:
        chat_options(body(**fields))
    assert error.value.message.startswith(expected)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"store": True}, "store"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [{"type": "custom", "name": "apply_patch"}]}, "tools.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        (
            {"input": [message("user", [{"type": "input_image", "image_url": "http://x"}])]},
            "input.0.<type=message>.content.0",
        ),
        ({"include": ["web_search_call.action.sources"]}, "include.0"),
        ({"reasoning": {"summary": "concise"}}, "reasoning.summary"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
    ],
)
def test_what_is_not_honoured_is_refused_where_it_stands(fields: Any, place: str) -> None:
    with pytest.raises(ValidationError) as error:
        body(**{"items": fields.pop("input", "a"), **fields})
    [found] = error.value.errors()
    assert ".".join(map(str, found["loc"])) == place
