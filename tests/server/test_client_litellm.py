"""LiteLLM as a client of OpenAI's and Anthropic's APIs, against a running server."""

from __future__ import annotations

import asyncio
import json
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from server_harness import ServerProcess

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks a server for prices when it is imported
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import litellm
    from litellm.llms.custom_httpx.http_handler import HTTPHandler

DUCK = [{"role": "user", "content": "What is a duck?"}]
BEGINNING = "verb: to move (the head or body) quickly downwards"
BIRD = {
    "type": "object",
    "properties": {"bird": {"enum": ["duck", "swan"]}},
    "required": ["bird"],
    "additionalProperties": False,
}
PROVIDERS = ["openai", "anthropic"]

# Modules of the package that are imported when they are needed warn about themselves.
pytestmark = pytest.mark.filterwarnings("ignore")


class Ask:
    """Asks by one provider's API, with connections that are closed at the end."""

    def __init__(self, server: ServerProcess) -> None:
        self._url = server.url
        self.clients = {"openai": server.openai(), "anthropic": HTTPHandler()}

    def __call__(self, provider: str, **options: Any) -> Any:
        base = self._url if provider == "anthropic" else f"{self._url}/v1"
        return litellm.completion(
            model=f"{provider}/demo", api_base=base, api_key="none", max_retries=0,
            client=self.clients[provider], **{"messages": DUCK, "max_tokens": 60, **options},
        )  # fmt: skip


@pytest.fixture(scope="module")
def ask(server: ServerProcess) -> Iterator[Ask]:
    # The package takes the thread's event loop, or else makes one and leaves it behind.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    ask = Ask(server)
    yield ask
    for client in ask.clients.values():
        client.close()
    asyncio.set_event_loop(None)
    loop.close()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_conversation(ask: Ask, provider: str) -> None:
    first = ask(provider)
    message = first.choices[0].message
    assert message.content.startswith(BEGINNING)
    assert first.choices[0].finish_reason == "stop"
    assert first.usage.prompt_tokens == 8
    turns = [
        *DUCK,
        message.model_dump(exclude_none=True),
        {"role": "user", "content": "What was my first question?"},
    ]
    assert ask(provider, messages=turns).choices[0].message.content == DUCK[0]["content"]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_stream(ask: Ask, provider: str) -> None:
    chunks = list(ask(provider, stream=True, max_tokens=12))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.startswith("verb: to move")
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_tool_is_called(ask: Ask, provider: str) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": BIRD}}
    reply = ask(provider, tools=[tool], tool_choice="required", max_tokens=200).choices[0]
    assert reply.finish_reason == "tool_calls"
    [call] = reply.message.tool_calls
    assert call.function.name == "look_up"
    assert json.loads(call.function.arguments)["bird"] in ("duck", "swan")
    result = {"role": "tool", "tool_call_id": call.id, "content": "A bird."}
    turns = [*DUCK, reply.message.model_dump(exclude_none=True), result]
    assert ask(provider, messages=turns, tools=[tool], max_tokens=1).usage.prompt_tokens > 64


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_reply_of_a_schema(ask: Ask, provider: str) -> None:
    schema = {"name": "bird", "schema": BIRD, "strict": True}
    reply = ask(provider, response_format={"type": "json_schema", "json_schema": schema})
    assert json.loads(reply.choices[0].message.content)["bird"] in ("duck", "swan")


def test_log_probabilities(ask: Ask) -> None:
    choice = ask("openai", logprobs=True, top_logprobs=1, max_tokens=5).choices[0]
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_error(ask: Ask, provider: str) -> None:
    with pytest.raises(litellm.BadRequestError, match=r"temperature: got -1\.0"):
        ask(provider, temperature=-1.0)
