"""One server for the session, the demo model and two workers; and one application in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from app_harness import InProcess, in_process
from server_harness import ServerProcess, running_server


@pytest.fixture(scope="session")
def server(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server for tests that leave it as it was. At its end nothing may have gone wrong unsaid."""
    log = tmp_path_factory.mktemp("server") / "stderr"
    with running_server(log, "--workers", "2", "--max-num-seqs", "6", "--max-waiting", "6") as running:
        yield running
        assert running.stop() == 0
    assert "error" not in log.read_text().lower()


@pytest.fixture(scope="session")
def here(demo_folder: Path) -> Iterator[InProcess]:
    """An application without a network; two replies are computed at a time, 16 tokens a step."""
    with in_process(max_step_tokens=16) as running:
        yield running
