"""Paths that users give, in Python and on the command line, and what lies where a file is to be written."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from duckllm import LLM, Conversation
from duckllm.cli.main import app
from duckllm.cli.path_options import check_paths
from duckllm.cluster.token import read_token
from duckllm.errors import ConfigError, DuckError, ModelNotFoundError, describe_error
from duckllm.paths import as_path, check_replaceable
from duckllm.weights.convert import convert
from duckllm.weights.resolve import find_model
from duckllm.worker.config import WorkerConfig

NUL, HALF = "a\x00b", "a\ud800b"
NONE = [(NUL, "no file's name has a NUL"), (HALF, "no file's name has half a character")]


@pytest.mark.parametrize(("text", "problem"), [("", "it is empty"), *NONE])
def test_a_text_that_is_no_path_is_refused_by_name(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"^dst: got .*, expected a folder \({problem}\)$"):
        as_path("dst", text, "a folder")


def test_a_path_is_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert as_path("dst", "~/x", "a folder", home=True) == tmp_path / "x"
    assert as_path("dst", "~/x", "a folder") == Path("~/x")
    assert as_path("dst", os.fsdecode(b"\xff"), "a folder") == Path(os.fsdecode(b"\xff"))
    assert as_path("dst", Path(), "a folder") == Path()  # this is asked for: the current folder
    for wrong in (None, 7, b"x", "~nobody-of-that-name/x"):
        with pytest.raises(ConfigError, match=r"dst: got .*, expected a folder"):
            as_path("dst", wrong, "a folder", home=True)


@pytest.mark.parametrize(("text", "problem"), NONE)
@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("kv_disk_dir", lambda text: LLM(kv_disk_dir=text)),
        ("trace", lambda text: LLM(trace=text)),
        ("path", lambda text: Conversation.load(text, None)),  # type: ignore[arg-type]
        ("path", lambda text: Conversation.save(None, text)),  # type: ignore[arg-type]
        ("src", lambda text: convert(text, "x")),
        ("dst", lambda text: convert("x", text)),
        ("token_file", read_token),
        ("model", lambda text: WorkerConfig(model=Path(text))),
        ("cache_dir", lambda text: WorkerConfig(cache_dir=Path(text))),
    ],
)
def test_no_call_takes_what_no_path_is(
    field: str, call: Callable[[str], Any], text: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: got "):
        call(text)


@pytest.mark.parametrize("text", [NUL, HALF])
def test_what_no_model_is_called_is_said_in_text_that_can_be_printed(text: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        find_model(text)
    assert str(caught.value).isprintable()
    assert str(caught.value).encode()


def test_every_error_can_be_printed() -> None:
    assert str(DuckError("no \ud800 here")) == "no \\ud800 here"
    for error in (OSError(2, "No such file or directory", HALF), ValueError(HALF)):
        assert describe_error(error)[0].encode()


def test_every_path_option_refuses_an_empty_text() -> None:
    """Of every verb: each is read by one function, whatever verb has it."""
    commands = [each for verbs in groups(app) for each in verbs.registered_commands]
    assert len(commands) > 15
    seen = 0
    for command in commands:
        assert command.callback is not None
        for name, hint in command.callback.__annotations__.items():
            if re.search(r"\bPath\b", str(getattr(hint, "__origin__", ""))):
                seen += 1
                with pytest.raises(ConfigError, match=f"^{name}: got ''"):
                    hint.__metadata__[0].parser("")
    assert seen > 30


def groups(verbs: typer.Typer) -> list[typer.Typer]:
    """An app, and those mounted in it."""
    below = [each.typer_instance for each in verbs.registered_groups]
    return [verbs, *(found for each in below if each is not None for found in groups(each))]


def test_an_empty_path_is_refused_before_a_verb_runs() -> None:
    verbs = typer.Typer()
    ran: list[Path | None] = []

    @verbs.command()
    def verb(out: Path | None = None) -> None:
        ran.append(out)

    for arguments in (["worker", "--cache-dir", ""], ["convert", "demo", ""], ["trace", "a.json", ""]):
        outcome = CliRunner().invoke(app, arguments)
        assert isinstance(outcome.exception, ConfigError)
        assert "(it is empty)" in str(outcome.exception)
    check_paths(verb)
    assert CliRunner().invoke(verbs, []).exit_code == 0
    assert ran == [None]


def test_a_worker_process_refuses_an_empty_path(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "duckllm.worker", "--cache-dir", ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "error: cache_dir: got '', expected a folder (it is empty)\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_only_a_regular_file_or_nothing_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("new")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo("pipe")
    (tmp_path / "to-pipe").symlink_to("pipe")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    for name, target in (("file", "file"), ("link", "file"), ("dangling", "new"), ("free", "free")):
        assert check_replaceable("save", tmp_path / name) == (tmp_path / target).resolve()
    for name, what in (
        ("pipe", "a named pipe lies there"),
        ("to-pipe", "a named pipe lies there"),
        ("folder", "a folder lies there"),
        ("socket", "a socket lies there"),
        ("loop", "Too many levels of symbolic links"),
        ("x" * 256, "File name too long"),
    ):
        expected = rf"^save: got .*, expected a regular file to replace, or a name that is free \({what}\)$"
        with pytest.raises(ConfigError, match=expected):
            check_replaceable("save", tmp_path / name)


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    node = tmp_path / "null"
    try:
        os.mknod(node, 0o666 | 0o020000, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("this user makes no devices")
    with pytest.raises(ConfigError, match="a device lies there"):
        check_replaceable("save", node)
