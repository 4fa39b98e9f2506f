"""Every test here that names `isa` runs on each instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from duckllm import _native


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", _native.available_isas())


@pytest.fixture
def new_attention(isa: str) -> Callable[..., _native.Attention]:
    """Makes attention on the test's ISA; on one thread unless said."""

    def new(num_threads: int = 1) -> _native.Attention:
        return _native.Attention(_native.LinearRuntime(1, 1, num_threads, 0, isa))

    return new
