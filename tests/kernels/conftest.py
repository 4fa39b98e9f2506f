"""Every kernel test that names `isa` runs on each instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from expert_reference import Layer

from duckllm import _native


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", _native.available_isas())


@pytest.fixture
def new_experts(isa: str) -> Callable[..., _native.Experts]:
    """Makes native Experts for a layer on the test's ISA; by default the whole expert on one thread."""

    def new(layer: Layer, **changes: object) -> _native.Experts:
        arguments: dict[str, object] = {
            "hidden_size": layer.hidden,
            "intermediate_size": layer.intermediate,
            "num_experts": layer.num_experts,
            "top_k": 8,
            "first_stripe": 0,
            "num_stripes": layer.num_stripes,
            "max_tokens": 150,
            "num_threads": 1,
            "spin_us": 0,
            "isa": isa,
        }
        return _native.Experts(**(arguments | changes))

    return new
