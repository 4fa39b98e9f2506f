"""The demo model's questions as a suite: 180 asked alone, and 180 about what a conversation began with.

Called by ``benchmarks/quality/demo_suite.py``, ``examples/lm-eval`` and the tests. Knows messages; no model,
and no way of asking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from duckllm.demo import Question, load_questions

# Kinds of questions by the task that they belong to.
TASKS = {
    "dictionary": ("define", "synonym", "example", "kind", "kinds"),
    "primes": ("prime", "primes"),
    "sums": ("plus", "times"),
}
RECALL = "recall"
MOST_TURNS = 4  # before a question of recall
NUM_CHOICES = 4
MAX_TOKENS = 400  # of the longest answer, with room


@dataclass(frozen=True)
class SuiteItem:
    """A conversation and the one reply that is right, word for word.

    Args:
        task: ``"dictionary"``, ``"primes"``, ``"sums"`` or ``"recall"``.
        messages: Roles and texts, the question last.
        answer: The whole reply.
    """

    task: str
    messages: tuple[tuple[str, str], ...]
    answer: str

    @property
    def chat(self) -> list[dict[str, str]]:
        """The messages as APIs take them."""
        return [{"role": role, "content": content} for role, content in self.messages]


@dataclass(frozen=True)
class Choice:
    """A question of the dictionary with its answer among others of the same kind.

    Args:
        question: The user's message.
        choices: Answers, of which one is right.
        right: Its number.
    """

    question: str
    choices: tuple[str, ...]
    right: int


def load_suite() -> list[SuiteItem]:
    """All items, 360 of them: each question alone, and a question of recall behind each."""
    questions = load_questions()
    task_of = {kind: task for task, kinds in TASKS.items() for kind in kinds}
    alone = [SuiteItem(task_of[each.kind], (("user", each.question),), each.answer) for each in questions]
    return [*alone, *(_recall(questions, first) for first in range(len(questions)))]


def load_choices() -> list[Choice]:
    """Each question of the dictionary with the answers of the three that follow it in its kind."""
    questions = [each for each in load_questions() if each.kind in TASKS["dictionary"]]
    found = []
    for number, question in enumerate(questions):
        others = [each.answer for each in _behind(questions, number) if each.kind == question.kind]
        wrong = [answer for answer in dict.fromkeys(others) if answer != question.answer]
        right = number % NUM_CHOICES
        choices = [*wrong[:right], question.answer, *wrong[right : NUM_CHOICES - 1]]
        found.append(Choice(question.question, tuple(choices), right))
    return found


def _behind(questions: Sequence[Question], number: int) -> list[Question]:
    """The questions that follow one, and then those before it."""
    return [*questions[number + 1 :], *questions[:number]]


def _recall(questions: Sequence[Question], first: int) -> SuiteItem:
    """One to four turns from a question on, and what the first or the previous one was."""
    turns = [questions[first], *_behind(questions, first)[: first % MOST_TURNS]]
    which = "first" if first // MOST_TURNS % 2 == 0 else "previous"
    messages = [
        message for turn in turns for message in (("user", turn.question), ("assistant", turn.answer))
    ]
    messages.append(("user", f"What was my {which} question?"))
    return SuiteItem(RECALL, tuple(messages), turns[0 if which == "first" else -1].question)
