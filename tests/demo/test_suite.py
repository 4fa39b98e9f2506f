"""The demo model's suite, its tasks for lm-evaluation-harness, and that clients of its kind are served."""

from __future__ import annotations

import json
import runpy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from duckllm import LLM, SamplingParams
from duckllm.demo import load_questions
from duckllm.demo.suite import MAX_TOKENS, load_choices, load_suite


@pytest.fixture(scope="module")
def tasks(repository: Path) -> Path:
    return repository / "examples" / "lm-eval"


@pytest.fixture(scope="module")
def llm(demo_folder: Path) -> Iterator[LLM]:
    with LLM(demo_folder, workers=0, max_model_len=1024, draft="off") as llm:
        yield llm


def test_the_suite_asks_each_question_and_for_each_one_again() -> None:
    suite, questions = load_suite(), load_questions()
    assert Counter(item.task for item in suite) == {
        "dictionary": 98, "primes": 45, "sums": 37, "recall": 180,
    }  # fmt: skip
    assert [(item.messages[-1][1], item.answer) for item in suite[:180]] == [
        (each.question, each.answer) for each in questions
    ]
    answer_to = {each.question: each.answer for each in questions}
    asked: Counter[tuple[str, int]] = Counter()
    for item in suite[180:]:
        *turns, (role, question) = item.messages
        said = [text for who, text in turns if who == "user"]
        assert role == "user"
        assert turns == [turn for text in said for turn in (("user", text), ("assistant", answer_to[text]))]
        which = question.removeprefix("What was my ").removesuffix(" question?")
        assert item.answer == said[{"first": 0, "previous": -1}[which]]
        asked[which, len(said)] += 1
    assert len(asked) == 8
    assert min(asked.values()) > 20


def test_choices_have_one_right_answer_at_every_place() -> None:
    choices = load_choices()
    by_question = {each.question: each for each in load_questions()}
    kind_of = {each.answer: each.kind for each in load_questions()}
    for choice in choices:
        assert len(set(choice.choices)) == 4
        assert choice.choices[choice.right] == by_question[choice.question].answer
        assert {kind_of[answer] for answer in choice.choices} == {by_question[choice.question].kind}
    assert min(Counter(choice.right for choice in choices).values()) > 20


def test_the_tasks_data_is_the_suite(tasks: Path) -> None:
    script = runpy.run_path(str(tasks / "make_data.py"))
    for name, rows in script["rows"]().items():
        assert (tasks / name).read_text(encoding="utf-8") == script["as_text"](rows)
        assert len(rows) in (98, 360)


def read_task(path: Path) -> dict[str, Any]:
    """A task with what it includes; functions as their names."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))  # type: ignore[arg-type]
    found = yaml.load(path.read_text(encoding="utf-8"), Loader)
    base = read_task(path.parent / found["include"]) if "include" in found else {}
    return {**base, **found}


def test_tasks_name_fields_that_their_data_has(tasks: Path) -> None:
    found = {path.stem: read_task(path) for path in tasks.glob("*.yaml")}
    names = {each["task"] for each in found.values() if isinstance(each.get("task"), str)}
    groups = [each for each in found.values() if "group" in each]
    assert {name for group in groups for name in group["task"]} == names
    assert len(names) == 8
    code = (tasks / "suite_data.py").read_text(encoding="utf-8")
    for task in found.values():
        if "group" in task or "task" not in task:
            continue
        function = task["custom_dataset"].removeprefix("suite_data.")
        assert f"def {function}(" in code
        file = "suite.jsonl" if function == "suite" else "choices.jsonl"
        rows = [json.loads(line) for line in (tasks / file).read_text(encoding="utf-8").splitlines()]
        fields = {task.get(name) for name in ("doc_to_text", "doc_to_target", "doc_to_choice")} - {None}
        assert fields <= set(rows[0])
        if function == "suite":
            assert task["dataset_kwargs"]["task"] in {row["task"] for row in rows}


def test_a_part_of_the_suite_is_answered_exactly(llm: LLM) -> None:
    """All of it is asked by ``benchmarks/quality/demo_suite.py``."""
    items = load_suite()[::40]
    assert len({item.task for item in items}) >= 3
    outputs = llm.chat([item.chat for item in items], SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    assert [output.outputs[0].text for output in outputs] == [item.answer for item in items]


def test_prompts_of_the_tasks_are_conversations(llm: LLM, tasks: Path) -> None:
    """As text they are the tokens that a chat is made of."""
    rows = [json.loads(line) for line in (tasks / "suite.jsonl").read_text().splitlines()]
    for item, row in list(zip(load_suite(), rows, strict=True))[::24]:
        assert llm.tokenizer.encode(row["prompt"]) == llm.tokenizer.apply_chat_template(item.chat)
