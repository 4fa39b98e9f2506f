"""The demo model through worker processes: every question exactly, whatever the number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from duckllm import LLM, SamplingParams
from duckllm.demo import load_questions

WORKERS = (1, 2, 3, 5, 8)
GREEDY = SamplingParams(temperature=0, max_tokens=400)


@pytest.fixture(scope="module", params=WORKERS)
def llm(request: pytest.FixtureRequest, demo_folder: Path) -> Iterator[LLM]:
    """The demo model's experts have 8 stripes: 3 and 5 workers get uneven slices, 8 one stripe each."""
    with LLM(demo_folder, workers=request.param, max_model_len=1024) as llm:
        pids = llm.cluster_info().pids
        assert len(pids) == request.param
        yield llm
    assert not any(psutil.pid_exists(pid) for pid in pids)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_question_is_answered_exactly(llm: LLM) -> None:
    questions = load_questions()
    assert len(questions) == 180
    outputs = llm.chat([[user(question.question)] for question in questions], GREEDY)
    wrong = [
        (question.question, output.outputs[0].text, question.answer)
        for question, output in zip(questions, outputs, strict=True)
        if output.outputs[0].text != question.answer
    ]
    assert wrong == []
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}


def test_a_long_conversation_reaches_back_past_the_sparse_border(llm: LLM) -> None:
    """From the 129th token on attention is to 128 selected tokens: the first question must be among them."""
    questions = load_questions()
    messages: list[dict[str, str]] = []
    num_tokens = 0
    for question in questions[1:30]:
        messages.append(user(question.question))
        messages.append({"role": "assistant", "content": question.answer})
        num_tokens = len(llm.tokenizer.apply_chat_template(messages))
        if num_tokens > 400:
            break
    assert num_tokens > 400
    first, previous = llm.chat(
        [
            [*messages, user("What was my first question?")],
            [*messages, user("What was my previous question?")],
        ],
        GREEDY,
    )
    assert first.outputs[0].text == questions[1].question
    assert previous.outputs[0].text == messages[-2]["content"]
