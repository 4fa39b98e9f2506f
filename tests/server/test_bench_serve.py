"""``duckllm bench serve`` against the server, and ``duckllm bench decode`` as commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server_harness import ServerProcess


def bench(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "duckllm", "bench", *words, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_the_server_counts_what_the_client_asked_for(
    server: ServerProcess, backend: str, tmp_path: Path
) -> None:
    page, lines = tmp_path / "load.html", tmp_path / "lines"
    lengths = ("--random-input-len", "60", "--random-output-len", "8", "--num-prompts", "5")
    options = ("--base-url", server.url, "--backend", backend, "--max-concurrency", "2", *lengths)
    found = bench("serve", *options, "--html", str(page), "--save", str(lines))
    [run] = found["runs"]
    assert (run["completed"], run["errors"], run["reply_tokens"], run["short_replies"]) == (5, {}, 8.0, 0)
    assert run["prompt_tokens"] == pytest.approx(60, rel=0.25)
    assert run["cached_prompt_tokens"] <= 16  # what a template writes before a question
    assert run["loop"] == "closed"
    assert json.loads(lines.read_text()) == found
    assert "<svg" in page.read_text()
