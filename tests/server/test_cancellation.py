"""A client that goes away stops its own work within two steps, wherever it is, and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from app_harness import Call, InProcess, ask

CHAT = "/v1/chat/completions"
MOST_STEPS = 2


@pytest.fixture
def gate(here: InProcess) -> Iterator[Any]:
    """Steps that the test allows, none of them left to anybody else afterwards."""
    here.gate.close()
    yield here.gate
    here.gate.open()
    here.settle()


def body(text: str = "List all prime numbers below 400.", **options: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {"messages": [message], "temperature": 0, "max_tokens": 40, "ignore_eos": True, **options}


def begin(here: InProcess, **options: Any) -> Call:
    """A request that the engine's thread has taken."""
    before = here.service.engine.num_open

    async def run() -> Call:
        call = await Call(here.app, CHAT, body(**options)).begin()
        while here.service.engine.num_open == before:
            await asyncio.sleep(0.001)
        return call

    return here.run(run())


def steps_to_idle(here: InProcess, gate: Any) -> int:
    """Steps until nothing is left to compute."""
    before = gate.num_steps
    while len(gate):
        gate.allow()
    return int(gate.num_steps - before)


@pytest.mark.parametrize("stream", [True, False])
def test_in_decode(here: InProcess, gate: Any, stream: bool) -> None:
    call = begin(here, stream=stream)
    for _ in range(5):
        gate.allow()
    here.run(call.leave())
    assert steps_to_idle(here, gate) <= MOST_STEPS


@pytest.mark.parametrize("stream", [True, False])
def test_in_prefill(here: InProcess, gate: Any, stream: bool) -> None:
    """A prompt of more than ten steps' tokens."""
    call = begin(here, stream=stream, text="duck " * 200)
    gate.allow()
    here.run(call.leave())
    assert steps_to_idle(here, gate) <= MOST_STEPS
    assert b"content" not in call.content


@pytest.mark.parametrize("stream", [True, False])
def test_in_the_queue_while_others_go_on(here: InProcess, gate: Any, stream: bool) -> None:
    alone = ask_alone(here, gate)
    running = [begin(here), begin(here)]
    waiting = begin(here, stream=stream)
    last = begin(here)
    gate.allow()
    here.run(waiting.leave())
    gate.open()
    for call in (*running, last):
        here.run(call.end())
        assert call.json()["choices"] == alone["choices"]


def test_each_of_n_replies(here: InProcess, gate: Any) -> None:
    call = begin(here, n=3, temperature=1, seed=1, stream=True)
    for _ in range(4):
        gate.allow()
    here.run(call.leave())
    assert steps_to_idle(here, gate) <= MOST_STEPS


def test_of_two_that_run_the_other_is_not_touched(here: InProcess, gate: Any) -> None:
    alone = ask_alone(here, gate)
    leaves, stays = begin(here, stream=True), begin(here)
    for _ in range(3):
        gate.allow()
    here.run(leaves.leave())
    gate.open()
    assert here.run(stays.end()).json()["choices"] == alone["choices"]


def test_before_the_prompt_is_made(here: InProcess, gate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never computed at all, and its place is free again."""

    async def run() -> None:
        made = asyncio.Event()

        async def never(_: object) -> None:
            made.set()
            await asyncio.sleep(3600)

        monkeypatch.setattr(here.service, "prepare", never)
        call = await Call(here.app, CHAT, body()).begin()
        await made.wait()
        await call.leave()
        assert call.status == 499
        monkeypatch.undo()

    before = gate.num_steps
    here.run(run())
    assert gate.num_steps == before
    assert here.service._num_beginning == 0


def test_completions_of_several_prompts(here: InProcess, gate: Any) -> None:
    async def run() -> Call:
        call = Call(here.app, "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 40, "stream": True})
        await call.begin()
        while here.service.engine.num_open < 2:
            await asyncio.sleep(0.001)
        return call

    call = here.run(run())
    for _ in range(3):
        gate.allow()
    here.run(call.leave())
    assert steps_to_idle(here, gate) <= MOST_STEPS


def ask_alone(here: InProcess, gate: Any) -> Any:
    gate.open()
    answer = ask(here, CHAT, body()).json()
    gate.close()
    return answer


TEXT = "List all prime numbers below 400."
OTHER_APIS = {
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 40, "temperature": 0, "ignore_eos": True},
    "/v1/messages": lambda text: {
        **{"model": "demo", "max_tokens": 40, "temperature": 0},
        "messages": [{"role": "user", "content": text}],
    },
    "/v1/responses": lambda text: {
        **{"model": "demo", "max_output_tokens": 40, "temperature": 0},
        "input": text,
    },
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("text", [TEXT, "duck " * 200], ids=["in decode", "in prefill"])
@pytest.mark.parametrize("path", OTHER_APIS)
def test_of_every_api(here: InProcess, gate: Any, path: str, text: str, stream: bool) -> None:
    """Beside one that goes on, and has the same reply as alone."""
    alone = ask_alone(here, gate)
    stays, before = begin(here), here.service.engine.num_open

    async def run() -> Call:
        call = await Call(here.app, path, {**OTHER_APIS[path](text), "stream": stream}).begin()
        while here.service.engine.num_open == before:
            await asyncio.sleep(0.001)
        return call

    call = here.run(run())
    for _ in range(4):
        gate.allow()
    assert len(gate) == 2
    here.run(call.leave())
    for _ in range(MOST_STEPS):
        gate.allow()
    assert len(gate) == 1
    gate.open()
    assert here.run(stays.end()).json()["choices"] == alone["choices"]
