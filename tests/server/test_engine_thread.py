"""The thread that computes: what a failed step means to whom, idleness, and its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from app_harness import Call, InProcess, ask, in_process

from duckllm.engine.request import Request
from duckllm.errors import EngineError, ModelError, UnavailableError, WorkerLostError
from duckllm.sampling_params import SamplingParams
from duckllm.server.engine_thread import EngineThread, LoadingProgress, ReplyStream
from duckllm.server.errors import log_fault

CHAT = "/v1/chat/completions"
LOST = WorkerLostError("10.0.0.7:7411", "it went away", 3)


def body(text: str = "List all prime numbers below 400.", **options: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {"messages": [message], "temperature": 0, "max_tokens": 20, "ignore_eos": True, **options}


@pytest.fixture
def failing(here: InProcess) -> Iterator[Any]:
    """The gate, whose next steps raise what ``errors`` holds."""
    errors: list[Exception] = []

    def before() -> None:
        if errors:
            raise errors.pop(0)

    here.gate.before_step = before
    here.gate.errors = errors  # type: ignore[attr-defined]
    yield here.gate
    here.gate.before_step = lambda: None
    here.gate.open()
    here.settle()


@pytest.mark.parametrize(
    ("error", "status", "code", "message"),
    [
        (LOST, 503, "worker_lost", "worker 10.0.0.7:7411 is lost at layer 3: it went away"),
        (
            ZeroDivisionError("a user's words"),
            500,
            "internal_error",
            "internal error: ZeroDivisionError while the reply was computed (please report it)",
        ),
    ],
)
def test_a_failed_step_fails_its_replies_and_the_next_go_on(
    here: InProcess,
    failing: Any,
    capfd: pytest.CaptureFixture[str],
    error: Exception,
    status: int,
    code: str,
    message: str,
) -> None:
    failing.errors.append(error)
    done = ask(here, CHAT, body())
    assert (done.status, done.headers.get("retry-after")) == (status, "2" if status == 503 else None)
    assert done.json()["error"] == {"message": message, "type": "server_error", "param": None, "code": code}
    assert ask(here, CHAT, body()).status == 200
    failing.errors.append(error)
    stream = ask(here, CHAT, body(stream=True))
    *_, told, end = stream.content.decode().strip().split("\n\n")
    assert (stream.status, end) == (200, "data: [DONE]")
    assert message in told


def test_in_the_midst_of_a_step_only_those_in_it_fail(here: InProcess, failing: Any) -> None:
    """Two run and fail; the third, which waits for a place, is answered."""
    alone = ask(here, CHAT, body()).json()["choices"]
    failing.close()
    model = here.llm._engine.model

    async def run() -> list[Call]:
        calls = [await Call(here.app, CHAT, body()).begin() for _ in range(3)]
        while here.service.engine.num_open < 3:
            await asyncio.sleep(0.001)
        return calls

    calls = here.run(run())
    for _ in range(4):
        failing.allow()
    with pytest.MonkeyPatch.context() as patch:

        def lose(*_: object) -> None:
            raise LOST

        patch.setattr(model, "forward_lanes", lose)
        failing.allow()
    failing.open()
    for call in calls:
        here.run(call.end())
    assert [call.status for call in calls] == [503, 503, 200]
    assert calls[2].json()["choices"] == alone


def test_broken_logits_fail_the_one_reply_that_they_are_of(
    here: InProcess, failing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = ask(here, CHAT, body()).json()["choices"]
    failing.close()

    async def run() -> list[Call]:
        calls = [await Call(here.app, CHAT, body(seed=seed)).begin() for seed in (1, 2)]
        while here.service.engine.num_open < 2:
            await asyncio.sleep(0.001)
        return calls

    calls = here.run(run())
    advance = Request.advance

    def break_one(request: Request, logits: Any) -> int:
        if request.params.seed == 2 and request.num_output_tokens == 3:
            raise ModelError("logits: got NaN, expected numbers")
        return advance(request, logits)

    monkeypatch.setattr(Request, "advance", break_one)
    failing.open()
    for call in calls:
        here.run(call.end())
    assert (calls[1].status, calls[1].json()["error"]["message"]) == (
        500,
        "logits: got NaN, expected numbers",
    )
    assert calls[0].json()["choices"] == alone


def test_idle_it_computes_no_steps_and_takes_no_time(here: InProcess) -> None:
    assert ask(here, CHAT, body()).status == 200
    here.settle()
    steps = here.gate.num_steps
    before = time.process_time()
    time.sleep(0.3)
    assert here.gate.num_steps == steps
    assert time.process_time() - before < 0.15


def test_outputs_of_a_step_are_handed_over_together(here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    deliver = here.service.engine._deliver
    monkeypatch.setattr(
        here.service.engine, "_deliver", lambda batch: (batches.append(len(batch)), deliver(batch))[1]
    )
    here.gate.close()

    async def run() -> list[Call]:
        calls = [await Call(here.app, CHAT, body()).begin() for _ in range(2)]
        while here.service.engine.num_open < 2:
            await asyncio.sleep(0.001)
        return calls

    calls = here.run(run())
    here.gate.open()
    for call in calls:
        assert here.run(call.end()).status == 200
    assert 2 in batches
    assert len(batches) < 2 * 20


def test_a_stop_ends_what_runs_and_takes_nothing_more() -> None:
    with in_process() as here:
        here.gate.close()

        async def run() -> Call:
            call = await Call(here.app, CHAT, body()).begin()
            while not here.service.engine.num_open:
                await asyncio.sleep(0.001)
            stopping = asyncio.ensure_future(here.service.engine.stop())
            await asyncio.sleep(0)
            with pytest.raises(UnavailableError, match="the server is stopping"):
                here.service.engine.submit(here.llm.new_requests([5], SamplingParams()))
            here.gate.open()
            await stopping
            return await call.end()

        done = here.run(run())
        assert (done.status, done.json()["error"]["message"]) == (503, "the server is stopping")


def test_all_can_be_ended_in_the_midst_of_a_step(here: InProcess, failing: Any) -> None:
    """Readers are told at once; the thread, when it has time."""
    failing.close()

    async def run() -> Call:
        call = await Call(here.app, CHAT, body()).begin()
        while not here.service.engine.num_open:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(failing.allow)  # from here on it is in a step
        here.service.engine.fail_all(UnavailableError("the server is stopping"))
        done = await call.end()
        assert here.service.engine.num_open == 1
        return done

    done = here.run(run())
    assert (done.status, done.json()["error"]["message"]) == (503, "the server is stopping")
    failing.open()
    here.settle()
    assert ask(here, CHAT, body()).status == 200


def test_a_fault_is_logged_without_what_a_user_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ValueError("a user's words")

    for debug in ("", "1"):
        monkeypatch.setenv("DUCKLLM_DEBUG", debug)
        caplog.clear()
        try:
            fail()
        except ValueError as error:
            log_fault("POST /v1/models", error)
        assert "POST /v1/models: internal error: ValueError at" in caplog.text
        assert ("a user's words" in caplog.text) == bool(debug)


def test_a_thread_that_fails_tells_everybody() -> None:
    async def run() -> None:
        class Broken:
            max_num_seqs = 1

            def __enter__(self) -> Broken:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def new_pool(self) -> Any:
                return self

            def __len__(self) -> int:
                return 0

            def attend_workers(self) -> None:
                pass

            def add(self, _: object) -> None:
                raise KeyError("broken")

        class Reply:
            prompt_token_ids = (1,)

        engine = EngineThread(lambda _: Broken())  # type: ignore[arg-type, return-value]
        engine.start()
        await engine.loaded
        stream: ReplyStream = engine.submit([Reply()])  # type: ignore[list-item]
        with pytest.raises(EngineError, match="internal error: KeyError"):
            await stream.arrived()
        with pytest.raises(KeyError):
            await engine.ended
        with pytest.raises(UnavailableError):
            engine.submit([Reply()])  # type: ignore[list-item]

    asyncio.run(run())


def test_progress_names_no_folder() -> None:
    progress = LoadingProgress()
    progress.report("Converting /home/ada/secret into /cache", 0.25)
    assert (progress.stage, progress.share) == ("converting", 0.25)
