"""The Anthropic API through the official client, against a running server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message
from server_harness import ServerProcess

DUCK = [{"role": "user", "content": "What is a duck?"}]
NUMBERS = [{"role": "user", "content": "What are the first 40 primes?"}]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, **options: Any) -> Message:
    return client.messages.create(**{"model": "demo", "max_tokens": 60, "messages": DUCK, **options})


def only_text(message: Message) -> str:
    [block] = message.content
    assert block.type == "text"
    return block.text


def test_a_message(client: anthropic.Anthropic) -> None:
    message = ask(client)
    assert only_text(message).startswith("verb: to move (the head or body) quickly downwards")
    assert (message.type, message.role, message.model) == ("message", "assistant", "demo")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == 8
    assert usage.output_tokens == 50


def test_a_stream_of_a_sampled_reply(client: anthropic.Anthropic) -> None:
    # The package's current version no longer names these, which the API still takes.
    sampling = {"temperature": 0.8, "top_p": 0.9, "top_k": 20}
    asked = {"model": "demo", "messages": NUMBERS, "max_tokens": 30, "stop_sequences": ["zzz"]}
    with client.messages.stream(**asked, extra_body=sampling) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert streamed.stop_reason == "max_tokens"
    assert streamed.usage.output_tokens == 30
    assert only_text(streamed)


def test_greedy_replies_are_the_same_streamed_and_whole(client: anthropic.Anthropic) -> None:
    whole = ask(client, messages=NUMBERS, max_tokens=40)
    with client.messages.stream(model="demo", messages=NUMBERS, max_tokens=40) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        # The second one finds the prompt in the cache.
        message.usage.input_tokens += message.usage.cache_read_input_tokens or 0
        message.usage.cache_read_input_tokens = message.id = None  # type: ignore[assignment]
    assert streamed.model_dump(exclude_none=True) == whole.model_dump(exclude_none=True)


def test_a_stop_sequence_ends_the_text_before_it(client: anthropic.Anthropic) -> None:
    message = ask(client, stop_sequences=["head or", "unseen"])
    assert only_text(message) == "verb: to move (the "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "head or")


def test_tokens_are_counted_as_they_are_used(client: anthropic.Anthropic) -> None:
    turns = [
        *DUCK,
        {"role": "assistant", "content": "A bird."},
        {"role": "user", "content": "What is a swan?"},
    ]
    counted = client.messages.count_tokens(model="demo", messages=turns)
    used = ask(client, messages=turns, max_tokens=1).usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)
    assert counted.input_tokens > 16


def test_a_reply_is_json_of_a_schema(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"bird": {"enum": ["duck", "swan"]}}, "required": ["bird"]}
    form = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    message = ask(client, output_config={"format": form})
    assert only_text(message).replace(" ", "").replace("\n", "") in ('{"bird":"duck"}', '{"bird":"swan"}')


BIRDS = {
    "name": "look_up",
    "description": "Looks a bird up.",
    "input_schema": {
        "type": "object",
        "properties": {
            "bird": {"enum": ["duck", "swan"]},
            "number": {"type": "integer", "maximum": 9, "minimum": 1},
        },
        "required": ["bird", "number"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look_up"}])
def test_a_tool_is_called_and_its_result_read(client: anthropic.Anthropic, choice: dict[str, str]) -> None:
    one = {"tools": [BIRDS], "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    whole = ask(client, max_tokens=200, **one)
    with client.messages.stream(model="demo", max_tokens=200, messages=DUCK, **one) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        [call] = message.content
        assert call.type == "tool_use"
        assert call.name == "look_up"
        assert call.input["bird"] in ("duck", "swan")
        assert call.input["number"] in (1, 2)
    assert streamed.content[0].input == whole.content[0].input  # type: ignore[union-attr]
    result = {"type": "tool_result", "tool_use_id": streamed.content[0].id, "content": "A bird."}  # type: ignore[union-attr]
    turns = [*DUCK, streamed.to_param(), {"role": "user", "content": [result]}]
    after = ask(client, messages=turns, tools=[BIRDS], max_tokens=1).usage
    assert after.cache_read_input_tokens is not None
    assert after.cache_read_input_tokens > 64


def test_a_stream_that_is_left_disturbs_nobody(client: anthropic.Anthropic) -> None:
    with client.messages.create(model="demo", messages=NUMBERS, max_tokens=900, stream=True) as stream:
        for event in stream:
            if event.type == "content_block_delta":
                break
    assert ask(client, max_tokens=3).usage.output_tokens == 3


UNIQUE = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"extra_body": {"temperature": -1.0}},
            anthropic.BadRequestError,
            "temperature: got -1.0, expected a number from 0",
        ),
        ({"model": "other"}, anthropic.NotFoundError, "model: got 'other', expected demo"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            anthropic.BadRequestError,
            "messages[0].content[0].type: got 'image', expected one of 'text'",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            anthropic.BadRequestError,
            "tools[0].type: got 'web_search_20250305', expected 'custom'",
        ),
        ({"extra_body": {"frob": 1}}, anthropic.BadRequestError, "frob: unknown field"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": UNIQUE}}},
            anthropic.BadRequestError,
            "output_config.format.schema: got ",
        ),
        (
            {"tools": [{"name": "f", "input_schema": UNIQUE, "strict": True}]},
            anthropic.BadRequestError,
            "tools[0].input_schema: got ",
        ),
        (
            {"messages": [{"role": "user", "content": "duck " * 5000}]},
            anthropic.BadRequestError,
            "prompt is too long: 5",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_anthropics_form(
    client: anthropic.Anthropic, options: dict[str, Any], error: type[anthropic.APIStatusError], message: str
) -> None:
    with pytest.raises(error) as caught:
        ask(client, **options)
    body = caught.value.body
    assert isinstance(body, dict)
    assert body["type"] == "error"
    assert body["error"]["message"].startswith(message)
    kinds = {anthropic.BadRequestError: "invalid_request_error", anthropic.NotFoundError: "not_found_error"}
    assert body["error"]["type"] == kinds[error]


def test_a_prompt_that_is_too_long_says_by_how_much(server: ServerProcess) -> None:
    body = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "duck " * 5000}]}
    error = server.http.post("/v1/messages", json=body).json()["error"]
    assert error["n_ctx"] == 4096
    assert error["n_prompt_tokens"] > 5000
