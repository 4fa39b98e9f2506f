"""What lm-evaluation-harness asks for the data of the tasks beside it, wherever it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets

FOLDER = Path(__file__).parent


def suite(task: str, **_metadata: Any) -> datasets.DatasetDict:
    """The rows of one task of ``suite.jsonl``."""
    rows = _rows("suite.jsonl")
    return datasets.DatasetDict(test=rows.filter(lambda row: row["task"] == task))


def choices(**_metadata: Any) -> datasets.DatasetDict:
    """All rows of ``choices.jsonl``."""
    return datasets.DatasetDict(test=_rows("choices.jsonl"))


def _rows(name: str) -> datasets.Dataset:
    return datasets.Dataset.from_json(str(FOLDER / name))
