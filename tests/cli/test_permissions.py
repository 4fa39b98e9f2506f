"""Files that may not be read end as one sentence that names them, whoever runs the tests.

Root may read everything, so the command runs without the two capabilities that let it; others run it as is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH leave the bounding set, so that duckllm begins without them.
WITHOUT_PRIVILEGES = """
import ctypes, os, sys
if os.geteuid() == 0:
    libc = ctypes.CDLL(None, use_errno=True)
    PR_CAPBSET_DROP = 24
    for capability in (1, 2):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            sys.exit(99)
os.execv(sys.executable, [sys.executable, "-m", "duckllm", *sys.argv[1:]])
"""


def duckllm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_PRIVILEGES, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 99:
        pytest.skip("root may not give up CAP_DAC_OVERRIDE here, and so may read every file")
    return done


@pytest.fixture
def forbid() -> Iterator[Callable[[Path, int], None]]:
    """Changes a path's permissions for the test; they are as before afterwards."""
    before: list[tuple[Path, int]] = []

    def change(path: Path, mode: int) -> None:
        before.append((path, path.stat().st_mode & 0o777))
        path.chmod(mode)

    yield change
    for path, mode in before:
        path.chmod(mode)


@pytest.mark.parametrize("file", ["", "config.json", "model-00001-of-00003.safetensors"])
@pytest.mark.parametrize("verb", ["chat", "convert"])
def test_a_checkpoint_that_may_not_be_read(
    demo_checkpoint: Path, tmp_path: Path, forbid: Callable[[Path, int], None], verb: str, file: str
) -> None:
    model = shutil.copytree(demo_checkpoint, tmp_path / "model")
    forbid(model / file, 0)
    rest = ["--prompt", "hi"] if verb == "chat" else [str(tmp_path / "to")]
    done = duckllm(verb, model, *rest)
    assert done.returncode == 1
    assert done.stderr == f"duckllm: {model / file}: cannot be read (Permission denied)\n"
    assert done.stdout == ""


@pytest.mark.parametrize("file", ["", "duck.json", "config.json"])
def test_a_converted_model_that_may_not_be_read(
    demo_folder: Path, tmp_path: Path, forbid: Callable[[Path, int], None], file: str
) -> None:
    model = shutil.copytree(demo_folder, tmp_path / "model")
    forbid(model / file, 0)
    done = duckllm("chat", model, "--prompt", "hi")
    assert done.returncode == 1
    assert done.stderr == f"duckllm: {model / file}: cannot be read (Permission denied)\n"


def test_a_token_file_that_may_not_be_read(tmp_path: Path, forbid: Callable[[Path, int], None]) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    forbid(token, 0)
    done = duckllm("chat", "--prompt", "hi", "--workers", "127.0.0.1:1", "--token-file", token)
    assert done.returncode == 2
    assert done.stderr == (
        f"duckllm: token_file: got '{token}', expected a readable file (Permission denied)\n"
    )


def test_a_model_cache_that_may_not_be_written(
    demo_checkpoint: Path,
    tmp_path: Path,
    forbid: Callable[[Path, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forbid(tmp_path, 0o555)
    monkeypatch.setenv("DUCKLLM_CACHE_DIR", str(tmp_path / "cache"))
    done = duckllm("chat", demo_checkpoint, "--prompt", "hi")
    assert done.returncode == 2
    assert f"{tmp_path}/cache/" in done.stderr
    assert "expected a folder that can be written (Permission denied)" in done.stderr
    assert os.listdir(tmp_path) == []
