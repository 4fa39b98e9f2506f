"""Every test here that names `isa` runs on each instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from duckllm import _native

FORMATS = ("fp8", "fp9", "bf16", "f32")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", _native.available_isas())
    if "weight_format" in metafunc.fixturenames:
        metafunc.parametrize("weight_format", FORMATS)


@pytest.fixture
def new_runtime(isa: str) -> Callable[..., _native.LinearRuntime]:
    """Makes a runtime on the test's ISA; by default for up to 256 rows on one thread."""

    def new(max_in_features: int, **changes: object) -> _native.LinearRuntime:
        arguments: dict[str, object] = {
            "max_rows": 256,
            "max_in_features": max_in_features,
            "num_threads": 1,
            "spin_us": 0,
            "isa": isa,
        }
        return _native.LinearRuntime(**(arguments | changes))

    return new
