"""The chat API through the official client, against a running server."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from server_harness import ServerProcess

DUCK = [{"role": "user", "content": "What is a duck?"}]


def ask(server: ServerProcess, **options: Any) -> Any:
    options = {"model": "demo", "messages": DUCK, "max_tokens": 12, **options}
    return server.openai().chat.completions.create(**options)


def test_a_reply_has_openais_form(server: ServerProcess) -> None:
    reply = ask(server, temperature=0, max_tokens=50)
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert reply.model == "demo"
    [choice] = reply.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "stop", "assistant")
    assert choice.message.content.startswith("verb: to move")
    assert reply.usage.prompt_tokens == 8
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    assert reply.timings["prompt_n"] == 8
    assert reply.timings["predicted_n"] == reply.usage.completion_tokens


def test_a_stream_has_openais_chunks(server: ServerProcess) -> None:
    chunks = list(ask(server, temperature=0, stream=True, stream_options={"include_usage": True}))
    first, *middle, end, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk.id for chunk in chunks} == {first.id}
    assert "".join(chunk.choices[0].delta.content for chunk in middle).startswith("verb: to move")
    assert [chunk.choices[0].finish_reason for chunk in middle] == [None] * len(middle)
    assert end.choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_usage_is_sent_only_where_it_is_asked_for(server: ServerProcess) -> None:
    chunks = list(ask(server, temperature=0, stream=True))
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"temperature": -1.0}, "temperature", "temperature: got -1.0, expected a number from 0"),
        ({"extra_body": {"frob": 1}}, "frob", "frob: unknown field"),
        ({"n": 2, "temperature": 0}, "n", "n: got 2, expected 1 with temperature"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    server: ServerProcess, options: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, **options)
    assert caught.value.param == param
    assert caught.value.body["message"].startswith(message)  # type: ignore[index]


def test_models_are_listed(server: ServerProcess) -> None:
    [model] = server.openai().models.list().data
    assert (model.id, model.object, model.owned_by) == ("demo", "model", "duckllm")
    assert server.http.get("/v1//models/").json()["data"][0]["context_length"] == 4096
    assert server.openai().models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        server.openai().models.retrieve("other")
