"""Fixtures that several parts of the suite share."""

from __future__ import annotations

from pathlib import Path

import pytest

import duckllm.demo


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def demo_checkpoint() -> Path:
    """The demo model as it ships in the package: a Hugging Face checkpoint folder."""
    return Path(duckllm.demo.__file__).parent / "checkpoint"
