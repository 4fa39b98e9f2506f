"""The command as a process of its own: what it imports, and how it ends when nobody reads."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import duckllm.__main__ as duckllm_main


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
