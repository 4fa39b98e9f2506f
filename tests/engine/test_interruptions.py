"""What comes in the midst of a step: Ctrl-C at any line, streams that the garbage collector ends, threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from duckllm.engine import logprobs, penalties, sampler
from duckllm.engine import request as request_module
from duckllm.engine.engine import Drafting, Engine
from duckllm.engine.kv_cache import KvCache
from duckllm.engine.request import Request
from duckllm.errors import RequestError
from duckllm.models.causal_lm import CausalLM
from duckllm.models.mtp import MTPLayer
from duckllm.sampling_params import SamplingParams, StructuredOutputsParams
from duckllm.text import Tokenizer, grammar
from support.drafting import GROUPED, Remembering, make_engine, make_model
from support.grammars import tiny_table

PROMPT = [5, 9, 20, 31, 7, 12, 8, 40, 41, 3] * 2
FILES = {module.__file__ for module in (request_module, sampler, penalties, logprobs, grammar)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalLM, MTPLayer]:
    return make_model(tmp_path_factory.mktemp("model"), GROUPED, max_tokens=64)


def interrupted_at(line: int, work: Callable[[], object]) -> bool:
    """Whether the work was interrupted at so many lines of the code that takes a reply on."""
    left = line

    def trace(frame: FrameType, event: str, _argument: object) -> object:
        nonlocal left
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_reply_that_was_interrupted_at_any_line_is_the_same(pair: tuple[CausalLM, MTPLayer]) -> None:
    """One of two streams is stopped while it computes for both; grammar, counts and text stay together."""
    model, _ = pair
    params = SamplingParams(
        temperature=1.2, seed=3, max_tokens=6, logprobs=1, presence_penalty=0.9, repetition_penalty=1.3,
        structured_outputs=StructuredOutputsParams(regex="[a-z ]{1,3}([0-9]+[a-m ]{1,4})*"),
    )  # fmt: skip
    table, plain = tiny_table(), make_engine(model)
    plain.grammar_table = table
    alone = plain.new_request(PROMPT, params)
    list(plain.run(alone))
    layer = Remembering(model)
    layer.learn(alone.token_ids)
    engine = make_engine(model, Drafting(layer, 3, "on"))
    engine.grammar_table = table
    accepted = 0
    for line in range(1, 10**6, 31):
        first, second = (engine.new_request(PROMPT, params) for _ in range(2))
        engine.add(second)
        reply = engine.run(first)
        was_interrupted = interrupted_at(line, lambda reply=reply: list(reply))  # type: ignore[misc]
        assert list(engine.run(second)) == list(alone.output_token_ids)
        list(engine.run(first))
        assert first.completion() == second.completion() == alone.completion()
        assert engine.kv_cache.num_available_pages == engine.kv_cache.num_pages
        accepted += second.num_accepted_tokens
        if not was_interrupted:
            break
    assert line > 200
    assert accepted > 0


@pytest.mark.parametrize("num_tokens", range(6))
def test_a_reply_made_again_has_the_same_text_and_goes_on(demo_checkpoint: Path, num_tokens: int) -> None:
    tokenizer = Tokenizer(demo_checkpoint)
    tokens = tokenizer.encode("a swan, a duck and no END of it")[1:]
    params = SamplingParams(temperature=0, stop="END", logprobs=0, repetition_penalty=1.5)
    requests = [
        Request(
            "1", [0, 2, 3], params, vocab_size=8192, max_model_len=60, eos_token_ids=frozenset({1}),
            tokenizer=tokenizer,
        )
        for _ in range(2)
    ]  # fmt: skip
    for number, token_id in enumerate(tokens):
        logits = torch.nn.functional.one_hot(torch.tensor(token_id), 8192) * 50.0
        for request in requests:
            if request.finish_reason is None:
                request.advance(logits)
        if number == num_tokens + 1:
            requests[0].rewind(3 + num_tokens)
            for again in tokens[num_tokens : number + 1]:
                requests[0].advance(torch.nn.functional.one_hot(torch.tensor(again), 8192) * 50.0)
    assert requests[0].finish_reason == "stop"
    assert requests[0].completion() == requests[1].completion()
    assert requests[0].completion().text == "a swan, a duck and no "


@pytest.mark.parametrize(
    ("where", "name"),
    [(CausalLM, "forward_lanes"), (KvCache, "open"), (KvCache, "reserve"), (KvCache, "seal"),
     (Request, "verify"), (MTPLayer, "forward")],
)  # fmt: skip
def test_a_stream_that_ends_in_the_midst_of_a_step_disturbs_nobody(
    pair: tuple[CausalLM, MTPLayer], monkeypatch: pytest.MonkeyPatch, where: Any, name: str
) -> None:
    """The garbage collector ends streams that nobody holds any more wherever it happens to run."""
    model, mtp = pair
    params = SamplingParams(temperature=0, max_tokens=20)
    prompts = [PROMPT, [3] * 18, [7, 8] * 9]
    plain = make_engine(model)
    expected = [list(plain.run(plain.new_request(prompt, params))) for prompt in prompts]
    for moment in (1, 4, 9):
        engine = make_engine(model, Drafting(mtp, 2, "on"), pages=8)
        requests = [engine.new_request(prompt, params) for prompt in prompts]
        streams = [engine.run(request) for request in requests]
        for request in requests:
            engine.add(request)
        begun = [next(stream) for stream in streams]
        assert begun == [reply[0] for reply in expected]
        left, method = moment, getattr(where, name)

        def ending(*arguments: Any, _method: Any = method, _stream: Any = streams[1], **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                _stream.close()
            return _method(*arguments, **named)

        with monkeypatch.context() as patch:
            patch.setattr(where, name, ending)
            assert begun[:1] + list(streams[0]) == expected[0]
            assert begun[2:] + list(streams[2]) == expected[2]
        streams[1].close()
        assert requests[1].num_output_tokens > 0
        list(engine.run(requests[1]))
        assert list(requests[1].output_token_ids) == expected[1]
        assert engine.kv_cache.num_available_pages == engine.kv_cache.num_pages
        assert engine.drafter is not None
        assert engine.drafter._kept == {}


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_a_step_in_another_threads_step_is_refused(
    pair: tuple[CausalLM, MTPLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = pair
    params = SamplingParams(temperature=0, max_tokens=5)
    engine = make_engine(model)
    expected = list(engine.run(engine.new_request(PROMPT, params)))
    refused: list[str] = []

    def compute() -> None:
        with pytest.raises(RequestError, match="computing another step, expected one thread") as error:
            list(engine.run(engine.new_request([1, 2, 3], params)))
        refused.append(str(error.value))

    forward = model.forward_lanes
    monkeypatch.setattr(model, "forward_lanes", lambda *given: in_thread(compute) or forward(*given))
    assert list(engine.run(engine.new_request(PROMPT, params))) == expected
    assert len(refused) == 5
    assert engine.kv_cache.num_available_pages == engine.kv_cache.num_pages
    # One after the other is as good as one thread.
    monkeypatch.undo()
    in_thread(lambda: refused.append(str(list(engine.run(engine.new_request(PROMPT, params))))))
    assert refused[-1] == str(expected)


def test_a_stream_that_ends_in_a_thread_of_no_steps_waits_for_the_next_step(
    pair: tuple[CausalLM, MTPLayer],
) -> None:
    """Such as the disk's thread, where it would wait for a lock that this thread itself may hold."""
    model, _ = pair
    engine: Engine = make_engine(model)
    params = SamplingParams(temperature=0, max_tokens=5)
    left = engine.run(engine.new_request(PROMPT, params))
    next(left)
    in_thread(left.close)
    assert len(engine.scheduler._running) == 1
    list(engine.run(engine.new_request([1, 2, 3], params)))
    assert len(engine.scheduler._running) == 0
    assert engine.kv_cache.num_available_pages == engine.kv_cache.num_pages
