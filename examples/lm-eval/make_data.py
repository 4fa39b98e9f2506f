"""Writes the data of the tasks beside it: ``suite.jsonl`` and ``choices.jsonl``.

Run: ``python examples/lm-eval/make_data.py``. Needed only where the demo model or its questions change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from duckllm.demo import CHECKPOINT
from duckllm.demo.suite import load_choices, load_suite
from duckllm.text import Tokenizer

FOLDER = Path(__file__).parent


def rows() -> dict[str, list[dict[str, object]]]:
    """The rows of each file. Prompts are as the demo model reads a conversation, control tokens spelled."""
    tokenizer = Tokenizer(CHECKPOINT)

    def prompt(messages: list[dict[str, str]]) -> str:
        return tokenizer.decode(tokenizer.apply_chat_template(messages), skip_special_tokens=False)

    suite = [
        {
            "task": item.task,
            "question": item.messages[-1][1],
            "prompt": prompt(item.chat),
            "answer": item.answer,
        }
        for item in load_suite()
    ]
    choices = [
        {
            "question": each.question,
            "prompt": prompt([{"role": "user", "content": each.question}]),
            "choices": list(each.choices),
            "right": each.right,
        }
        for each in load_choices()
    ]
    return {"suite.jsonl": suite, "choices.jsonl": choices}


def as_text(found: Iterable[dict[str, object]]) -> str:
    """A line of JSON for each row."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found)


if __name__ == "__main__":
    for name, found in rows().items():
        (FOLDER / name).write_text(as_text(found), encoding="utf-8")
