"""One model and one long-lived worker for the tests that leave both as they were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from duckllm.weights.manifest import Manifest
from worker_harness import WorkerProcess, make_model, running_worker


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder: Path = tmp_path_factory.mktemp("worker")
    with running_worker(folder) as process:
        yield process
