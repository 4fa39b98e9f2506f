"""LangChain's client of OpenAI's APIs, against a running server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from server_harness import ServerProcess

DUCK = "What is a duck?"
BEGINNING = "verb: to move (the head or body) quickly downwards"


class Bird(BaseModel):
    """A bird."""

    name: Literal["duck", "swan"]


class Client:
    """Makes models that share a connection."""

    def __init__(self, url: str, http: httpx.Client) -> None:
        self._options: dict[str, Any] = {
            "base_url": f"{url}/v1", "api_key": "none", "http_client": http,
            "model": "demo", "max_retries": 0,
        }  # fmt: skip

    def __call__(self, **options: Any) -> ChatOpenAI:
        return ChatOpenAI(**self._options, **options)


@pytest.fixture(scope="module")
def model(server: ServerProcess) -> Iterator[Client]:
    with httpx.Client() as http:
        yield Client(server.url, http)


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_a_conversation(model: Client, use_responses_api: bool) -> None:
    chat = model(use_responses_api=use_responses_api)
    first = chat.invoke(DUCK)
    assert str(first.text).startswith(BEGINNING)
    assert first.usage_metadata is not None
    assert first.usage_metadata["input_tokens"] == 8
    second = chat.invoke([HumanMessage(DUCK), first, HumanMessage("What was my first question?")])
    assert str(second.text) == DUCK


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_a_stream(model: Client, use_responses_api: bool) -> None:
    chat = model(use_responses_api=use_responses_api, stream_usage=True, max_tokens=12)
    whole: Any = None
    for chunk in chat.stream(DUCK):
        whole = chunk if whole is None else whole + chunk
    assert str(whole.text).startswith("verb: to move")
    assert whole.usage_metadata["output_tokens"] == 12


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_a_reply_of_a_schema(model: Client, use_responses_api: bool) -> None:
    chat = model(use_responses_api=use_responses_api)
    bird = chat.with_structured_output(Bird, method="json_schema").invoke(DUCK)
    assert isinstance(bird, Bird)


def look_up(bird: Literal["duck", "swan"]) -> str:
    """Looks a bird up."""
    return f"A {bird} is a bird."


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_a_tool_is_called_and_its_result_read(model: Client, use_responses_api: bool) -> None:
    chat = model(use_responses_api=use_responses_api, max_tokens=200)
    called = chat.bind_tools([look_up], tool_choice="look_up", strict=True).invoke(DUCK)
    assert isinstance(called, AIMessage)
    [call] = called.tool_calls
    assert call["name"] == "look_up"
    result = ToolMessage(look_up(**call["args"]), tool_call_id=call["id"])
    after = chat.bind_tools([look_up], tool_choice="none").invoke([HumanMessage(DUCK), called, result])
    assert isinstance(after, AIMessage)
    assert after.tool_calls == []


def test_log_probabilities(model: Client) -> None:
    reply = model(logprobs=True, top_logprobs=1, max_tokens=5).invoke(DUCK)
    assert isinstance(reply, AIMessage)
    tokens = reply.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == reply.text
    assert all(token["logprob"] <= 0 for token in tokens)


def test_an_error(model: Client) -> None:
    with pytest.raises(openai.BadRequestError, match=r"temperature: got -1\.0") as caught:
        model(temperature=-1.0).invoke(DUCK)
    assert caught.value.param == "temperature"
