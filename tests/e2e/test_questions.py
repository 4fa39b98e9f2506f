"""The demo model through worker processes: every question exactly, whatever the number of workers.

Each answer is checked through each number of workers in one forward pass over question and answer: the
likeliest next token must be the answer's, at every position, and its end behind it. Token by token, as a user
gets them, answers are made for all questions through two workers, and for a fifth of them, each time
another, through each other number (all of them with ``--all-questions``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from duckllm import LLM, SamplingParams
from duckllm.demo import Question, load_questions
from support.models import all_logits

WORKERS = (1, 2, 3, 5, 7, 8)
GREEDY = SamplingParams(temperature=0, max_tokens=400)


@pytest.fixture(scope="module", params=WORKERS)
def llm(request: pytest.FixtureRequest, demo_folder: Path) -> Iterator[LLM]:
    """The demo model's experts have 8 stripes: 3, 5 and 7 workers get uneven slices, 8 one stripe each."""
    with LLM(demo_folder, workers=request.param, max_model_len=1024) as llm:
        pids = llm.cluster_info().pids
        assert len(pids) == request.param
        yield llm
    assert not any(psutil.pid_exists(pid) for pid in pids)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_token_of_every_answer_is_the_likeliest(llm: LLM) -> None:
    questions = load_questions()
    assert len(questions) == 180
    (end,) = llm._engine.eos_token_ids
    wrong = []
    for question in questions:
        prompt = llm.tokenizer.apply_chat_template([user(question.question)])
        reply = {"role": "assistant", "content": question.answer}
        token_ids = llm.tokenizer.apply_chat_template([user(question.question), reply])
        assert token_ids[: len(prompt)] == prompt
        token_ids = token_ids[: token_ids.index(end, len(prompt)) + 1]
        step_tokens = llm._engine.scheduler.max_step_tokens
        logits = all_logits(llm._engine.model, token_ids[:-1], step_tokens, first=len(prompt) - 1)
        likeliest = logits.argmax(dim=-1).tolist()
        if likeliest != token_ids[len(prompt) :]:
            wrong.append((question.question, llm.tokenizer.decode(likeliest), question.answer))
    assert wrong == []


def asked_of(workers: int, all_questions: bool = False) -> list[Question]:
    """The questions whose answers are made token by token; all of them with ``--all-questions``."""
    questions = load_questions()
    if workers == 2 or all_questions:
        return questions
    others = [number for number in WORKERS if number != 2]
    return questions[others.index(workers) :: len(others)]


def test_fifths_make_a_whole() -> None:
    asked = [question for workers in WORKERS if workers != 2 for question in asked_of(workers)]
    assert sorted(map(str, asked)) == sorted(map(str, load_questions()))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_questions_are_answered_exactly(llm: LLM, request: pytest.FixtureRequest) -> None:
    questions = asked_of(llm.cluster_info().num_workers, request.config.getoption("--all-questions"))
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
