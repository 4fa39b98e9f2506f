"""The demo model's files and its questions."""

from __future__ import annotations

from pathlib import Path

from duckllm.demo import CHECKPOINT, load_questions
from duckllm.weights.checkpoint import Checkpoint


def test_questions() -> None:
    questions = load_questions()
    assert len(questions) == 180
    assert {question.kind for question in questions} >= {"define", "prime", "primes", "plus", "times"}
    by_text = {question.question: question.answer for question in questions}
    assert by_text["What is a repression?"] == "noun: a state of forcible subjugation"


def test_the_checkpoint_is_whole_and_carries_its_notice(demo_checkpoint: Path) -> None:
    assert demo_checkpoint == CHECKPOINT
    checkpoint = Checkpoint.open(CHECKPOINT)
    assert len(checkpoint.tensors) == 1361
    notice = (CHECKPOINT / "LICENSE.wordnet").read_text()
    assert "WordNet 3.0 Copyright 2006 by Princeton University.  All rights reserved." in notice
    assert 'THIS SOFTWARE AND DATABASE IS PROVIDED "AS IS"' in notice


def test_the_notice_is_among_the_third_party_notices(repository: Path) -> None:
    notice = (CHECKPOINT / "LICENSE.wordnet").read_text()
    start = notice.index("WordNet Release 3.0")
    assert notice[start:] in (repository / "THIRD_PARTY_NOTICES.md").read_text()
