"""How many threads the host's layers take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from duckllm import assembly

LARGE = assembly._ONE_THREAD_ELEMENTS


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"model.layers.0.o_proj.weight": (LARGE // 8, 8)}, 6),
        ({"model.layers.0.o_proj.weight": (LARGE // 8 - 1, 8)}, 1),
        ({"model.embed_tokens.weight": (LARGE, 8), "lm_head.weight": (8, 8)}, 1),
        ({"model.layers.0.o_proj.weight": (LARGE // 16, 8), "lm_head.weight": (LARGE // 16, 8)}, 6),
    ],
)
def test_small_models_take_one_and_others_all(
    monkeypatch: pytest.MonkeyPatch, shapes: dict[str, tuple[int, ...]], expected: int
) -> None:
    monkeypatch.setattr(assembly, "available_cores", lambda: 6)
    tensors: Any = SimpleNamespace(names=lambda: list(shapes), shape=shapes.__getitem__)
    assert assembly._host_threads(tensors) == expected
