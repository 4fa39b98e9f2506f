"""What is too much: bodies, nesting, schemas, waiting requests, readers that do not read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from app_harness import Call, InProcess, ask

from duckllm.server import engine_thread, limits

CHAT = "/v1/chat/completions"


def body(**options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "What is a duck?"}], "max_tokens": 4, **options}


def refusal(call: Call) -> tuple[int, str | None, str]:
    error = call.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    return call.status, error["param"], error["message"]


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"[" * 100_000, "body: got no valid JSON (recursion limit exceeded"),
        (b'{"a":' * 100_000, "body: got no valid JSON (recursion limit exceeded"),
        (
            b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
            "body: got no valid JSON (unexpected end",
        ),
        (b'{"temperature": NaN}', "body: got no valid JSON (expected value"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "body: got no valid JSON (number out of range"),
        (b'{"temperature": 1e999}', "temperature: got inf, expected a finite number"),
        (b"\xff", "body: got no valid JSON"),
        (b"", "body: got nothing, expected a value"),
        (b"[]", "body: got no JSON object, expected one"),
        (b"null", "body: got no"),
    ],
)
def test_what_is_no_json_object_is_a_400(here: InProcess, sent: bytes, message: str) -> None:
    status, _, told = refusal(ask(here, CHAT, sent, method="POST"))
    assert status == 400
    assert told.startswith(message)


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"n": 129}, "n", "n: got 129, expected less than or equal to 128"),
        ({"stop": ["a"] * 65}, "stop", "stop: got"),
        ({"stop": "a" * 4097}, "stop", "stop: got"),
        (
            {"structured_outputs": {"regex": "a" * 70_000}},
            "structured_outputs.regex",
            "structured_outputs.re",
        ),
        (
            {"structured_outputs": {"choice": ["a" * 40_000, "b" * 40_000]}},
            "structured_outputs.choice",
            "structured_outputs.choice: got '80000 characters'",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": "DEEP"}}},
            "response_format.json_schema.schema",
            "response_format.json_schema.schema: got 'more than 64 levels'",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": "LARGE"}}},
            "response_format.json_schema.schema",
            "response_format.json_schema.schema: got 'more than 262144 bytes'",
        ),
    ],
)
def test_what_is_too_much_is_refused_by_name(
    here: InProcess, options: dict[str, Any], param: str, message: str
) -> None:
    asked = body(**options)
    schema = asked.get("response_format", {}).get("json_schema", {}).get("schema")
    if schema == "DEEP":
        deep: dict[str, Any] = {}
        for _ in range(70):
            deep = {"items": deep}
        asked["response_format"]["json_schema"]["schema"] = deep
    elif schema == "LARGE":
        asked["response_format"]["json_schema"]["schema"] = {"enum": ["a" * 1000] * 300}
    status, told_param, told = refusal(ask(here, CHAT, asked))
    assert status == 400
    assert told.startswith(message)
    assert told_param == param


def test_a_body_has_a_limit(here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", 200)
    assert ask(here, CHAT, body()).status == 200
    large = body(user="a" * 200)
    assert refusal(ask(here, CHAT, large)) == (
        413,
        None,
        "body: got more than 200 bytes, expected at most that",
    )
    assert ask(here, "/v1/messages", large).json()["error"]["type"] == "request_too_large"


def test_bodies_have_a_limit_together(here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BODIES_BYTES", 50)
    status, _, message = refusal(ask(here, CHAT, body()))
    assert (status, message) == (503, "too many large requests at a time")


def test_a_body_has_a_time(here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_TIMEOUT_S", 0.01)

    async def run() -> Call:
        call = Call(here.app, CHAT, body())
        call._was_read = True  # nothing comes
        return await (await call.begin()).end()

    assert refusal(here.run(run()))[0] == 408


def test_a_prompt_that_is_too_long_says_by_how_much(here: InProcess) -> None:
    call = ask(here, CHAT, {"messages": [{"role": "user", "content": "duck " * 5000}]})
    error = call.json()["error"]
    assert (call.status, error["type"], error["code"]) == (400, *["exceed_context_size_error"] * 2)
    assert error["n_ctx"] == 4096
    assert error["n_prompt_tokens"] > 5000


@pytest.fixture
def closed(here: InProcess) -> Iterator[InProcess]:
    """No step is computed until the test is over."""
    here.gate.close()
    yield here
    here.gate.open()
    here.settle()


def test_more_than_may_wait_are_told_to_come_again(
    closed: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed.service, "max_waiting", 3)

    async def run() -> None:
        calls = [await Call(closed.app, CHAT, body()).begin() for _ in range(5)]
        while closed.service.engine.num_open < 5:
            await asyncio.sleep(0.001)
        refused = await (await Call(closed.app, CHAT, body()).begin()).end()
        assert (refused.status, refused.headers["retry-after"]) == (429, "2")
        assert refused.json()["error"]["code"] == "overloaded"
        await calls[0].leave()
        while closed.service.engine.num_open == 5:
            closed.gate.open()
            await asyncio.sleep(0.001)
        assert (await (await Call(closed.app, CHAT, body()).begin()).end()).status == 200
        for call in calls[1:]:
            assert (await call.end()).status == 200

    closed.run(run())


def test_more_replies_than_could_ever_wait_are_refused_for_good(here: InProcess) -> None:
    status, param, _ = refusal(ask(here, "/v1/completions", {"prompt": ["a"] * 131}))
    assert (status, param) == (400, "n")


def test_a_reader_who_does_not_read_is_given_up(here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reply is ended, and what was kept of it is gone."""
    monkeypatch.setattr(engine_thread, "MAX_UNREAD_OUTPUTS", 5)

    async def run() -> None:
        call = Call(here.app, CHAT, body(max_tokens=1000, ignore_eos=True, stream=True))
        full = asyncio.Event()
        send = call._send

        async def stuck(message: Any) -> None:
            if message["type"] == "http.response.body":
                await full.wait()
            await send(message)

        monkeypatch.setattr(call, "_send", stuck)
        await call.begin()
        while not here.service.engine.num_open:
            await asyncio.sleep(0.001)
        while here.service.engine.num_open:
            await asyncio.sleep(0.001)
        full.set()
        await call.end()
        assert b"nobody read what had been sent" in call.content
        assert call.content.count(b"data: ") < 10

    before = here.gate.num_steps
    here.run(run())
    assert here.gate.num_steps - before < 200
