"""Every kernel test that names `isa` runs on each instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from expert_reference import Layer, whole_expert

from duckllm import _native


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", _native.available_isas())


@pytest.fixture
def new_experts(isa: str) -> Callable[..., _native.Experts]:
    """Makes native Experts for a layer on the test's ISA; by default the whole expert on one thread."""

    def new(layer: Layer, **changes: object) -> _native.Experts:
        return _native.Experts(**(whole_expert(layer) | {"isa": isa} | changes))

    return new
