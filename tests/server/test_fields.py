"""Fields of bodies in every API: what is left out, what does not belong to a type, and how that is said."""

from __future__ import annotations

from typing import Any

import pytest
from app_harness import InProcess, ask

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
SAID = [{"role": "user", "content": "hi"}]
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID, "max_tokens": 1},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 1},
    RESPONSES: {"input": "hi", "max_output_tokens": 1},
    MESSAGES: {"messages": SAID, "max_tokens": 1},
    COUNT: {"messages": SAID},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [9]},
}
FORM = {"name": "a", "schema": {"type": "object"}}


def test_model_may_be_left_out_everywhere(here: InProcess) -> None:
    for path, body in LEAST.items():
        for model in ({}, {"model": ""}, {"model": None}):
            assert ask(here, path, {**body, **model}).status == 200, (path, model)


def test_null_is_as_if_a_field_were_absent(here: InProcess) -> None:
    """Whether it is one of another kind, one that is refused, or one inside."""
    refused = ["functions", "function_call", "audio", "prediction", "web_search_options"]
    all_fields = here.app.openapi()["components"]["schemas"]
    known = {
        CHAT: "ChatCompletionBody",
        COMPLETIONS: "CompletionBody",
        RESPONSES: "ResponsesBody",
        MESSAGES: "MessagesBody",
        COUNT: "CountTokensBody",
        "/tokenize": "TokenizeBody",
        "/detokenize": "DetokenizeBody",
    }
    for path, body in LEAST.items():
        nulls = dict.fromkeys([*refused, *all_fields[known[path]]["properties"]])
        done = ask(here, path, {**nulls, **body})
        assert done.status == 200, (path, done.content)
    inside = {"type": "text", "text": "hi", "cache_control": None, "frob": None}
    assert ask(here, COUNT, {"messages": [{"role": "user", "content": [inside]}]}).status == 200


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        *[
            (
                CHAT,
                {"response_format": {"type": kind, "json_schema": FORM}},
                f"response_format.json_schema: unknown field with type '{kind}', which cannot be honoured",
            )
            for kind in ("text", "json_object")
        ],
        *[
            (
                RESPONSES,
                {"text": {"format": {"type": kind, "schema": {}}}},
                f"text.format.schema: unknown field with type '{kind}', which cannot be honoured",
            )
            for kind in ("text", "json_object")
        ],
        (
            CHAT,
            {"response_format": {"json_schema": FORM}},
            "response_format.type: got nothing, expected one of 'text', 'json_object', 'json_schema'",
        ),
        (CHAT, {"response_format": "text"}, "response_format: got 'text', expected an object"),
        (CHAT, {"tool_choice": 5}, "tool_choice: got 5, expected 'auto', 'none' or 'required'"),
        (RESPONSES, {"tool_choice": "x"}, "tool_choice: got 'x', expected 'auto', 'none' or 'required'"),
        (RESPONSES, {"tool_choice": {"type": "x"}}, "tool_choice.type: got 'x', expected 'function'"),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "refusal": "b"}]}]},
            "input[0].content[0].refusal: unknown field with type 'input_text', which cannot be honoured",
        ),
        (RESPONSES, {"input": []}, "input: got [], expected at least one item"),
        (
            MESSAGES,
            {"thinking": {"type": "disabled", "budget_tokens": 5}},
            "thinking.budget_tokens: unknown field with type 'disabled', which cannot be honoured",
        ),
        (
            MESSAGES,
            {"tool_choice": {"type": "none", "name": "a"}},
            "tool_choice.name: unknown field with type 'none', which cannot be honoured",
        ),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages[0].content[0].text: got 1, expected a valid string",
        ),
        (
            MESSAGES,
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "x"}]}},
            "context_management.edits[0].keep.type: got 'x', expected one of 'thinking_turns', 'all'",
        ),
        (MESSAGES, {"thinking": 5}, "thinking: got 5, expected an object"),
        (MESSAGES, {"messages": []}, "messages: got [], expected at least one item"),
        (COMPLETIONS, {"prompt": []}, "prompt: got [], expected at least one item"),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name: got 'a b', expected text that matches ^[a-zA-Z0-9_.-]{1,64}$",
        ),
        (
            CHAT,
            {"structured_outputs": {"regex": "[^\\s\\S]"}},
            "structured_outputs.regex: got '[^\\\\s\\\\S]', expected one that can be kept to "
            "(no text keeps to it)",
        ),
        (
            CHAT,
            {"structured_outputs": {"json": {"$ref": "#"}}},
            "structured_outputs.json: got {'$ref': '#'}, expected one that can be kept to "
            "(no text keeps to it)",
        ),
        (
            CHAT,
            {"structured_outputs": {"grammar": "start: <|eos|>"}},
            "structured_outputs.grammar: got 'start: <|eos|>', expected one that can be kept to "
            "(it names a token as <|name|>; tokens have numbers alone here, as in <[7]>)",
        ),
    ],
)
def test_what_is_wrong_is_said_in_our_words(
    here: InProcess, path: str, fields: dict[str, Any], message: str
) -> None:
    done = ask(here, path, {**LEAST[path], **fields})
    error = done.json()["error"]
    assert (done.status, error["message"]) == (400, message)
    if path != MESSAGES:
        assert error["param"] == message.partition(": ")[0]
