"""The command as a process of its own: what it imports, and how it ends when nobody reads."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import typer

import duckllm.__main__ as duckllm_main
from duckllm.cli import main as command
from duckllm.errors import CheckpointError


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['duckllm', '--help']\n"
        "from duckllm.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'prompt_toolkit'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "duckllm", "--version"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.startswith("duckllm 0.")


def test_a_package_that_only_hosts_have_is_named() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "sys.argv = ['duckllm', 'chat', '--prompt', 'x']\n"
        "from duckllm.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("duckllm: torch is not installed")
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "duckllm", "chat", "--help"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode == 1


def test_ctrl_c_while_the_command_is_imported_is_quiet() -> None:
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from duckllm.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_console_script_begins_where_the_module_does() -> None:
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"duckllm": f"{duckllm_main.__name__}:{duckllm_main.main.__name__}"}


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (OSError(28, "No space left on device", "/models/x"), 1, "/models/x: No space left on device"),
        (PermissionError(13, "Permission denied", b"/models/y"), 1, "/models/y: Permission denied"),
        (OSError(36, "File name too long", "n" * 4000), 1, "n" * 197 + "...: File name too long"),
        (OSError(5, "Input/output error"), 1, "Input/output error"),
        (CheckpointError("a\x1b[2J\nb\x9b"), 1, "a[2J b"),
        (MemoryError(), 1, "out of memory"),
        (RecursionError("too deep\nby far"), 70, "internal error: RecursionError: too deep"),
        (KeyError("x"), 70, "internal error: KeyError: 'x'"),
        (ModuleNotFoundError("No module named 'y'", name="y"), 70, "internal error: ModuleNotFoundError: No"),
    ],
)
@pytest.mark.parametrize("debug", [False, True])
def test_whatever_goes_wrong_is_one_sentence(
    error: Exception,
    code: int,
    sentence: str,
    debug: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail(prog_name: str) -> None:
        raise error

    monkeypatch.setattr(command, "app", fail)
    monkeypatch.setenv("DUCKLLM_DEBUG", "1" if debug else "0")
    with pytest.raises(SystemExit) as end:
        command.main()
    lines = capfd.readouterr().err.splitlines()
    assert end.value.code == code
    assert lines[-1].startswith(f"duckllm: {sentence}")
    assert lines[-1].isprintable()
    assert ("please report it" in lines[-1]) == (code == 70)
    assert (lines[0] == "Traceback (most recent call last):") == debug
    assert debug or len(lines) == 1


@pytest.mark.parametrize(
    ("redirection", "code", "err"),
    [
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        (">/dev/full", 1, "duckllm: No space left on device\n"),
        (">/dev/full 2>/dev/full", 1, ""),
    ],
)
def test_streams_that_are_closed_or_full(redirection: str, code: int, err: str) -> None:
    line = f"exec {shlex.quote(sys.executable)} -m duckllm --version {redirection}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, err)


def test_no_help_shows_marks_of_its_layout() -> None:
    root = typer.main.get_command(command.app)
    waiting, seen = [("duckllm", root)], 0
    while waiting:
        name, verb = waiting.pop()
        text = verb.get_help(click.Context(verb, info_name=name))
        assert "\\b" not in text, name
        assert "\b" not in text, name
        seen += 1
        waiting += [(f"{name} {sub}", each) for sub, each in getattr(verb, "commands", {}).items()]
    assert seen > 15
