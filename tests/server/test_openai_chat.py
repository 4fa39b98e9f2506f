"""The chat API through the official client, against a running server."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from server_harness import ServerProcess

JSON = {"content-type": "application/json"}
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


def test_logprobs_have_openais_form(server: ServerProcess) -> None:
    reply = ask(server, temperature=0, logprobs=True, top_logprobs=3, max_tokens=6)
    [choice] = reply.choices
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == choice.message.content
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        likeliest = entry.top_logprobs[0]
        assert (likeliest.token, likeliest.logprob) == (entry.token, entry.logprob)
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
    none = ask(server, temperature=0, logprobs=True, max_tokens=2).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in none] == [[], []]


def test_a_seed_makes_n_replies_repeatable(server: ServerProcess) -> None:
    def texts(seed: int, n: int) -> list[str]:
        choices = ask(server, temperature=4, seed=seed, n=n).choices
        assert [choice.index for choice in choices] == list(range(n))
        return [choice.message.content for choice in choices]

    found = texts(1, 3)
    assert len(set(found)) == 3
    assert texts(1, 3) == found
    assert texts(2, 1) == found[1:2]
    assert texts(-(2**63) + 1, 1) == found[:1]  # OpenAI's may be negative


def test_stop_strings_end_a_reply_and_are_not_shown(server: ServerProcess) -> None:
    text = ask(server, temperature=0, max_tokens=50).choices[0].message.content
    stop = text[10:14]
    [choice] = ask(server, temperature=0, max_tokens=50, stop=stop).choices
    assert (choice.message.content, choice.finish_reason) == (text.split(stop)[0], "stop")
    [choice] = ask(server, temperature=0, max_tokens=50, stop=["nowhere", stop]).choices
    assert choice.message.content == text.split(stop)[0]
    chunks = list(ask(server, temperature=0, max_tokens=50, stop=stop, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text.split(stop)[0]


def test_a_conversation_goes_on_from_the_cache(server: ServerProcess) -> None:
    """Parts of text are one text, a developer speaks as the system, and null is as absent."""
    question = "Is 1009 prime? " * 5
    first = [{"role": "user", "content": question}]
    reply = ask(server, messages=first, temperature=0, max_tokens=40)
    answer = reply.choices[0].message
    parts = [{"type": "text", "text": question[:20]}, {"type": "text", "text": question[20:]}]
    sent_back = {**answer.model_dump(), "audio": None, "function_call": None}
    messages = [{"role": "user", "content": parts}, sent_back, {"role": "user", "content": "Why?"}]
    more = ask(server, messages=messages, temperature=0, extra_body={"tools": None, "stop": None})
    assert more.usage.prompt_tokens_details.cached_tokens > 16
    assert more.timings["cache_n"] == more.usage.prompt_tokens_details.cached_tokens


def test_what_makes_no_difference_is_accepted(server: ServerProcess) -> None:
    plain = ask(server, temperature=0).choices[0].message.content
    more = {"user": "a", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "seed": 1}
    more |= {"parallel_tool_calls": True, "response_format": {"type": "text"}, "tool_choice": "none"}
    more |= {"max_completion_tokens": 12, "logit_bias": {}, "stop": [], "stream": None, "top_k": -1}
    assert ask(server, temperature=0, extra_body=more).choices[0].message.content == plain


@pytest.mark.parametrize("model", ["", None])
def test_a_model_need_not_be_named(server: ServerProcess, model: str | None) -> None:
    body = {"model": model, "messages": DUCK, "max_tokens": 1}
    assert server.http.post("/v1/chat/completions", json=body).json()["model"] == "demo"


SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 5}, "count": {"enum": [1, 2]}},
    "required": ["word", "count"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"temperature": -1.0}, "temperature", "temperature: got -1.0, expected a number from 0"),
        ({"temperature": "hot"}, "temperature", "temperature: got 'hot', expected a valid number"),
        ({"extra_body": {"frob": 1}}, "frob", "frob: unknown field"),
        ({"n": 2, "temperature": 0}, "n", "n: got 2, expected 1 with temperature"),
        ({"n": 0}, "n", "n: got 0, expected greater than or equal to 1"),
        (
            {"max_tokens": 5, "max_completion_tokens": 6},
            "max_tokens",
            "max_tokens: got 5, expected none",
        ),
        (
            {"max_tokens": 0, "max_completion_tokens": 0},
            "max_completion_tokens",
            "max_completion_tokens: got 0, expected an integer",
        ),
        (
            {"messages": [{"role": "user", "content": "duck " * 5000}]},
            "messages",
            "the request has 5005 tokens, expected at most 4095",
        ),
        ({"top_logprobs": 1}, "top_logprobs", "top_logprobs: got 1, expected none without logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs: got 21, expected an integer"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream_options: got some"),
        ({"messages": []}, "messages", "messages: got [], expected at least one"),
        ({"messages": "hello"}, "messages", "messages: got 'hello', expected a valid list"),
        ({"messages": [{"role": "owl", "content": "x"}]}, "messages[0].role", "messages[0].role: got 'owl'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "messages[0].content: got None"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]},
            "messages[0].content[1].type",
            "messages[0].content[1].type: got 'image_url', expected 'text'",
        ),
        (
            {"messages": [{"role": "user", "content": [SOUND]}]},
            "messages[0].content[0].type",
            "messages[0].content[0].type: got 'input_audio', expected 'text'",
        ),
        ({"messages": [{**DUCK[0], "name": "Ada"}]}, "messages[0].name", "messages[0].name: got 'Ada'"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages[0].tool_call_id",
            "messages[0].tool_",
        ),
        (
            {"tools": [TOOL, TOOL]},
            "tools[1].function.name",
            "tools[1].function.name: got 'look_up'",
        ),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice: got 'required', expected auto or none"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "response_format.type: got 'xml'"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "response_format.json_s",
        ),
        ({"extra_body": {"store": True}}, "store", "store: got True, expected False"),
        ({"modalities": ["text", "audio"]}, "modalities[1]", "modalities[1]: got 'audio', expected 'text'"),
        ({"functions": [{"name": "f"}]}, "functions", "functions: unknown field"),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, None, "body: got no valid JSON"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    server: ServerProcess, options: dict[str, Any], param: str | None, message: str
) -> None:
    if param is None:  # what the official client cannot send
        body = {"messages": [{"role": "user", "content": "SURROGATE"}]}
        sent = json.dumps(body).replace("SURROGATE", "\\ud800").encode()
        error = server.http.post("/v1/chat/completions", content=sent, headers=JSON).json()["error"]
        assert error["message"].startswith(message)
        return
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, **options)
    assert caught.value.param == param
    assert caught.value.body["message"].startswith(message)  # type: ignore[index]


def test_another_model_is_not_found(server: ServerProcess) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(server, model="gpt-4o")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        (
            "GET",
            "/v1/nowhere",
            404,
            "path: got '/v1/nowhere', expected one of '/cluster', '/detokenize', '/health', '/metrics', "
            "'/tokenize', '/tokenizer_info', '/v1/chat/completions', '/v1/completions', '/v1/embeddings', "
            "'/v1/messages', '/v1/messages/count_tokens', '/v1/models', '/v1/models/{name}', '/v1/responses'",
        ),
        (
            "POST",
            "/chat/completions",
            404,
            "path: got '/chat/completions', expected '/v1/chat/completions' "
            "(the address of the API ends with /v1)",
        ),
        ("GET", "/v1/chat/completions", 405, "method: got GET, expected POST for '/v1/chat/completions'"),
        ("POST", "/v1/embeddings", 501, "this server's model writes text and has no embeddings"),
    ],
)
def test_other_errors_have_the_envelope_too(
    server: ServerProcess, method: str, path: str, status: int, message: str
) -> None:
    reply = server.http.request(method, path, json={"input": "x"} if method == "POST" else None)
    assert reply.status_code == status
    assert reply.json()["error"]["message"] == message
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def check_schema(text: str) -> None:
    found = json.loads(text)
    assert set(found) == {"word", "count"}
    assert len(found["word"]) <= 5
    assert found["count"] in (1, 2)


@pytest.mark.parametrize("strict", [True, None])
def test_a_reply_keeps_to_a_schema(server: ServerProcess, strict: bool | None) -> None:
    schema = {"name": "word", "schema": SCHEMA, "strict": strict}
    form = {"type": "json_schema", "json_schema": schema}
    [choice] = ask(server, response_format=form, max_tokens=90, seed=4).choices
    assert choice.finish_reason == "stop"
    check_schema(choice.message.content)
    chunks = ask(server, response_format=form, max_tokens=90, seed=4, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
def test_a_tool_is_called(server: ServerProcess, choice: Any) -> None:
    options = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 120, "seed": 1}
    [whole] = ask(server, **options).choices
    [call] = whole.message.tool_calls
    assert (whole.finish_reason, whole.message.content, call.function.name) == ("tool_calls", None, "look_up")
    check_schema(call.function.arguments)
    chunks = list(ask(server, stream=True, **options))
    deltas = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert (deltas[0].index, deltas[0].type, deltas[0].function.name) == (0, "function", "look_up")
    assert deltas[0].id.startswith("call_")
    assert {delta.id for delta in deltas[1:]} == {None}
    assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "a bird"}
    asked = [*DUCK, whole.message.model_dump(exclude_none=True), result]
    assert ask(server, messages=asked, tools=[TOOL]).choices[0].finish_reason in ("stop", "length")


SAMPLED = [
    {"seed": seed, "temperature": 1.2, "n": n, "max_tokens": most, "logprobs": True, "top_logprobs": 2}
    | ({"stop": stop} if stop else {})
    for seed, n, most, stop in ((1, 1, 30, None), (2, 3, 20, ["e"]), (3, 2, 40, [" ", "."]), (4, 1, 60, None))
]


@pytest.mark.parametrize("options", SAMPLED)
def test_a_stream_is_its_whole_reply(server: ServerProcess, options: dict[str, Any]) -> None:
    whole = ask(server, **options)
    contents = [""] * len(whole.choices)
    entries: list[list[Any]] = [[] for _ in contents]
    reasons: list[str | None] = [None] * len(contents)
    usage = None
    for chunk in ask(server, stream=True, stream_options={"include_usage": True}, **options):
        usage = chunk.usage
        for choice in chunk.choices:
            contents[choice.index] += choice.delta.content or ""
            entries[choice.index] += choice.logprobs.content if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason
    assert contents == [choice.message.content for choice in whole.choices]
    assert entries == [choice.logprobs.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_the_readmes_code_runs(server: ServerProcess, repository: Path) -> None:
    text = (repository / "README.md").read_text(encoding="utf-8")
    [code] = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "openai" in block]
    told = subprocess.run(
        [sys.executable, "-c", code.replace("http://127.0.0.1:8000", server.url)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.startswith("verb: to move")
    [command] = [line.strip() for line in text.splitlines() if line.startswith("    curl ")]
    body = json.loads(shlex.split(command)[-1])
    assert server.http.post("/v1/chat/completions", json=body).json()["object"] == "chat.completion"


def test_a_client_that_leaves_is_noticed(server: ServerProcess) -> None:
    """Others get its place, in the queue as well: more than twelve never wait here."""
    endless = {"max_tokens": 4000, "stream": True, "extra_body": {"ignore_eos": True}}
    for _ in range(3):
        for stream in [ask(server, **endless) for _ in range(7)]:
            stream.close()
    assert ask(server, temperature=0).choices[0].message.content


def test_models_are_listed(server: ServerProcess) -> None:
    [model] = server.openai().models.list().data
    assert (model.id, model.object, model.owned_by) == ("demo", "model", "duckllm")
    assert server.http.head("/health").status_code == 200
    assert server.http.get("/v1//models/").json()["data"][0]["context_length"] == 4096
    assert server.openai().models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        server.openai().models.retrieve("other")
