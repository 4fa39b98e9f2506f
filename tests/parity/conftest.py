from __future__ import annotations

from collections.abc import Callable

import pytest

from support import families
from support.families import Case, Spec


@pytest.fixture(scope="session")
def make_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Spec], Case]:
    """Makes a random model once, however many tests ask for it."""
    cases: dict[tuple[str, str], Case] = {}

    def make(spec: Spec) -> Case:
        key = (spec.architecture, spec.name)
        if key not in cases:
            cases[key] = families.make_case(tmp_path_factory.mktemp(spec.name), spec)
        return cases[key]

    return make
