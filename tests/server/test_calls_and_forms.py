"""What a request asks of its reply's form, through OpenAI's client: enforced, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from server_harness import ServerProcess

ASK: list[Any] = [{"role": "user", "content": "Is 1001 prime?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "number": {"type": "integer", "minimum": 0, "maximum": 9999},
        "why": {"enum": ["odd", "é🦆"]},
    },
    "required": ["number", "why"],
    "additionalProperties": False,
}


def function(name: str, schema: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **options}}


TOOLS: list[Any] = [function("check", SCHEMA, strict=True), function("wait", {"additionalProperties": False})]
NAMED = {"type": "function", "function": {"name": "check"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_must_be_comes_whole_and_in_pieces(server: ServerProcess, choice: Any) -> None:
    options: dict[str, Any] = {
        "model": "demo",
        "messages": ASK,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 120,
        "logit_bias": {token: 4 for token in range(3, 60)},
    }
    for seed in range(2):
        sampled = {**options, "temperature": 1.0, "seed": seed}
        with server.openai() as client:
            reply = client.chat.completions.create(**sampled).choices[0]
            chunks = list(client.chat.completions.create(stream=True, **sampled))
        assert chunks[-1].choices[0].finish_reason == reply.finish_reason
        deltas = [chunk.choices[0].delta for chunk in chunks]
        pieces = [call.function for delta in deltas for call in delta.tool_calls or [] if call.function]
        if reply.finish_reason == "tool_calls":
            assert not reply.message.content
            [call] = reply.message.tool_calls or []
            assert call.type == "function"
            called = call.function
            assert called.name in ("check", "wait")
            assert choice == "required" or called.name == "check"
            arguments = json.loads(called.arguments)
            assert called.name == "wait" or (
                0 <= arguments["number"] < 10000 and arguments["why"] in ("odd", "é🦆")
            )
            assert [piece.name for piece in pieces if piece.name] == [called.name]
            assert "".join(piece.arguments or "" for piece in pieces) == called.arguments
        else:
            assert reply.finish_reason == "length"


def test_content_is_of_the_form_beside_tools_too(server: ServerProcess) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    for tools in ({}, {"tools": TOOLS}):
        with server.openai() as client:
            reply = client.chat.completions.create(
                model="demo", messages=ASK, response_format=form, temperature=0, **tools
            )
        message = reply.choices[0].message
        if tools and message.tool_calls:
            assert reply.choices[0].finish_reason == "tool_calls"
            assert not message.content
        else:
            assert reply.choices[0].finish_reason == "stop"
            assert sorted(json.loads(message.content or "")) == ["number", "why"]


UNIQUE = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [TOOLS[1], function("f", UNIQUE, strict=True)]}, "tools[1].function.parameters"),
        (
            {"tools": [function("f", {"type": "array"})], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": UNIQUE}}},
            "response_format.json_schema.schema",
        ),
        ({"extra_body": {"structured_outputs": {"regex": "a{1000}{1000}"}}}, "structured_outputs.regex"),
        ({"extra_body": {"structured_outputs": {"grammar": "start: <[2]>"}}}, "structured_outputs.grammar"),
        (
            {"extra_body": {"structured_outputs": {"grammar": "start: <[2]>", "control_token_ids": [2]}}},
            "structured_outputs.control_token_ids",
        ),
    ],
)
def test_what_cannot_be_kept_to_is_refused_by_name(
    server: ServerProcess, options: dict[str, Any], param: str
) -> None:
    with server.openai() as client, pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="demo", messages=ASK, **options)
    assert raised.value.param == param
