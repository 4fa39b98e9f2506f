"""The Responses API through the official client, against a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from server_harness import ServerProcess

DUCK = "What is a duck?"
BEGINNING = "verb: to move (the head or body) quickly downwards"


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client


def ask(client: openai.OpenAI, **options: Any) -> Response:
    return client.responses.create(**{"model": "demo", "input": DUCK, **options})


def test_a_response(client: openai.OpenAI) -> None:
    response = ask(client, metadata={"a": "b"}, temperature=0)
    assert response.output_text.startswith(BEGINNING)
    assert (response.object, response.model, response.status) == ("response", "demo", "completed")
    assert (response.metadata, response.temperature, response.error) == ({"a": "b"}, 0, None)
    [item] = response.output
    assert (item.type, item.status) == ("message", "completed")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (8, 50)


def test_a_stream_ends_with_the_same_response(client: openai.OpenAI) -> None:
    asked = {"max_output_tokens": 20, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = ask(client, **asked)
    events = list(client.responses.create(model="demo", input=DUCK, stream=True, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert "".join(event.delta for event in deltas) == last.response.output_text == whole.output_text
    [[streamed], [part]] = [each.output[0].content for each in (last.response, whole)]
    assert streamed == part
    assert part.logprobs is not None
    assert len(part.logprobs) == 20
    assert "".join(token.token for token in part.logprobs) == part.text
    assert [len(token.top_logprobs) for token in part.logprobs] == [2] * 20
    assert all(token.top_logprobs[0].logprob == token.logprob <= 0 for token in part.logprobs)


def test_a_conversation_goes_on_from_the_items_of_a_reply(client: openai.OpenAI) -> None:
    first = ask(client)
    said = [item.model_dump(exclude_none=True) for item in first.output]
    question = {"role": "user", "content": "What was my first question?"}
    second = ask(client, input=[{"role": "user", "content": DUCK}, *said, question], store=False)
    assert second.output_text == DUCK
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 16


def test_a_reply_is_json_of_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [3, 4]}}, "required": ["n"]}
    form = {"type": "json_schema", "name": "n", "schema": {**schema, "additionalProperties": False}}
    response = ask(client, text={"format": form})
    assert response.output_text.replace(" ", "").replace("\n", "") in ('{"n":3}', '{"n":4}')
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"


LOOK_UP = {
    "type": "function",
    "name": "look_up",
    "description": "Looks a bird up.",
    "parameters": {
        "type": "object",
        "properties": {"bird": {"enum": ["duck", "swan"]}},
        "required": ["bird"],
        "additionalProperties": False,
    },
    "strict": True,
}


def test_a_function_is_called_and_its_output_read(client: openai.OpenAI) -> None:
    asked = {"tools": [LOOK_UP], "tool_choice": {"type": "function", "name": "look_up"}, "store": False}
    whole = ask(client, **asked)
    events = list(client.responses.create(model="demo", input=DUCK, stream=True, **asked))
    last = events[-1]
    assert last.type == "response.completed"
    [call], [same] = whole.output, last.response.output
    assert (call.type, call.name, call.status) == ("function_call", "look_up", "completed")
    assert json.loads(call.arguments)["bird"] in ("duck", "swan")
    added = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(added) == same.arguments == call.arguments
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "A bird."}
    items = [{"role": "user", "content": DUCK}, call.model_dump(exclude_none=True), output]
    after = ask(client, input=items, tools=[LOOK_UP], max_output_tokens=1).usage
    assert after is not None
    assert after.input_tokens_details.cached_tokens > 64


def test_a_session_as_codex_holds_it(client: openai.OpenAI, server: ServerProcess) -> None:
    shell = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    files = {**LOOK_UP, "name": "open", "strict": False}
    asked: dict[str, Any] = {
        "model": "demo",
        "instructions": "You are a coding agent.",
        "tools": [
            {
                "type": "function",
                "name": "exec",
                "description": "Runs it.",
                "strict": False,
                "parameters": shell,
            },
            {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [files]},
        ],
        "tool_choice": {"type": "function", "name": "mcp__files__open"},  # Codex leaves it to the model
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "session",
        "client_metadata": {"originator": "codex_cli"},
    }
    developer = {
        "type": "message",
        "role": "developer",
        "content": [{"type": "input_text", "text": "Be kind."}],
    }
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": DUCK}]}
    items: list[Any] = [developer, user]
    for turn in range(2):
        response = server.http.post("/v1/responses", json={**asked, "input": items})
        blocks = [block.split("\n") for block in response.text.strip().split("\n\n")]
        events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
        assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in events]
        assert events[-1]["type"] == "response.completed"
        [done] = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert (done["namespace"], done["name"]) == ("mcp__files", "open")
        assert json.loads(done["arguments"])["bird"] in ("duck", "swan")
        cached = events[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"]
        assert (cached > 100) == (turn > 0)
        items += [done, {"type": "function_call_output", "call_id": done["call_id"], "output": "A bird."}]


def test_a_stream_that_is_left_disturbs_nobody(client: openai.OpenAI) -> None:
    with client.responses.create(model="demo", input="List the primes below 207.", stream=True) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                break
    assert ask(client, max_output_tokens=3).usage.output_tokens == 3  # type: ignore[union-attr]


UNIQUE = {
    "type": "json_schema",
    "name": "x",
    "schema": {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}},
}


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"temperature": -1.0}, "temperature", "temperature: got -1.0, expected a number from 0"),
        (
            {"max_output_tokens": 2**40},
            "max_output_tokens",
            "max_output_tokens: got 1099511627776, expected an",
        ),
        ({"store": True}, "store", "store: got True, expected False"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_id: got 'resp_1'"),
        ({"background": True}, "background", "background: got True, expected False"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "tools[0].type: got 'web_search'"),
        (
            {"input": [{"type": "item_reference", "id": "a"}]},
            "input[0].type",
            "input[0].type: got 'item_reference'",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "input[0].content[0].type: got 'input_image', expected one of 'input_text'",
        ),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "stream_options: got"),
        ({"extra_body": {"frob": 1}}, "frob", "frob: unknown field"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "reasoning.effort: got 'high'"),
        ({"text": {"format": UNIQUE}}, "text.format.schema", "text.format.schema: got "),
        ({"tools": [{**LOOK_UP, "parameters": UNIQUE["schema"]}]}, "tools[0].parameters", "tools[0].par"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    client: openai.OpenAI, options: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **options)
    assert caught.value.param == param
    assert caught.value.body["message"].startswith(message)  # type: ignore[index]


def test_a_prompt_that_is_too_long_says_by_how_much(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, input="duck " * 5000)
    assert (caught.value.code, caught.value.param) == ("exceed_context_size_error", "input")
    assert caught.value.body["n_ctx"] == 4096  # type: ignore[index]
