"""Every test here that names `isa` runs on each instruction set that this machine has."""

from __future__ import annotations

import pytest

from duckllm import _native


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", _native.available_isas())
