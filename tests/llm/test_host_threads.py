"""How many threads the host's layers take, and what is said of more threads than cores."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from duckllm import LLM, assembly
from duckllm.cli.main import app
from duckllm.config import available_cores

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


def test_threads_that_take_turns_on_the_cores_are_said(
    demo_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = available_cores()
    with LLM(demo_folder, workers=0, max_model_len=64, threads_per_worker=cores, host_threads=cores):
        assert "take turns" not in caplog.text
    for workers in (0, 1):
        caplog.clear()
        with LLM(demo_folder, workers=workers, max_model_len=64, threads_per_worker=cores + 1):
            assert f"threads_per_worker: {cores + 1} threads take turns on {cores} core" in caplog.text
    caplog.clear()
    before = torch.get_num_threads()
    with LLM(demo_folder, workers=0, max_model_len=64, host_threads=cores + 1):
        assert f"host_threads: {cores + 1} threads take turns on {cores} core" in caplog.text
    torch.set_num_threads(before)
    monkeypatch.setattr("duckllm.worker.server.run_worker", lambda config, **options: None)
    done = CliRunner().invoke(app, ["worker", "--threads", str(cores + 1)])
    assert done.exit_code == 0
    assert f"threads: {cores + 1} threads take turns" in " ".join(done.stderr.split())
    assert CliRunner().invoke(app, ["worker", "--threads", str(cores)]).stderr == ""
