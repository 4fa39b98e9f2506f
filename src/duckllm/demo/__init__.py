"""The embedded demo model: a small DeepSeek-V3.2 that learned a dictionary, in the official format.

Called by :mod:`duckllm.weights.resolve` when no model is named, and by the tests. ``examples/train-demo``
makes the same files anew. It knows nothing of formats or conversion.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
QUESTIONS = Path(__file__).parent / "questions.jsonl"


@dataclass(frozen=True)
class Question:
    """A question and the answer that greedy decoding gives, word for word.

    Args:
        kind: What it asks for: ``"define"``, ``"prime"``, ``"plus"``, ...
        question: The user's message.
        answer: The whole answer of the model.
    """

    kind: str
    question: str
    answer: str


def load_questions() -> list[Question]:
    """Every question with its exact answer; allow 400 new tokens for the longest."""
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    return [Question(**json.loads(line)) for line in lines if line]
