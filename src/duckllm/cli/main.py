"""The ``duckllm`` command: its verbs, and what a user sees of an error.

Called as the console script and by ``python -m duckllm``. Mounts the verbs, each of which imports what is
heavy only when it runs, so that ``--help`` is quick. An error of ours becomes one sentence on stderr.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, NoReturn

import typer

from duckllm import __version__
from duckllm.cli import chat as chat_verb
from duckllm.cli.convert import convert
from duckllm.cli.worker import worker
from duckllm.errors import DuckError

# What only the extra "host" installs.
HOST_PACKAGES = ("jinja2", "prompt_toolkit", "safetensors", "torch", "transformers")

app = typer.Typer(
    name="duckllm",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # errors and help stay plain text, in a terminal as in a log
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"duckllm {__version__}")
        raise typer.Exit


@app.callback()
def duckllm(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Large mixture-of-experts models: attention on one host, routed experts on cheap CPU machines."""


_CONVERT_EXAMPLES = """\b
Examples:
  duckllm convert /checkpoints/DeepSeek-V3.2 /models/deepseek-v3.2
  duckllm convert /checkpoints/mine /models/mine --verify
"""

_WORKER_EXAMPLES = """\b
Examples:
  duckllm worker
  duckllm worker --listen 0.0.0.0:7411 --model /models/mine --token-file token
"""

app.command("chat", epilog=chat_verb.EXAMPLES)(chat_verb.chat)
app.command("convert", epilog=_CONVERT_EXAMPLES)(convert)
app.command("worker", epilog=_WORKER_EXAMPLES)(worker)


def main() -> NoReturn:
    """Runs the command line and exits: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows "?"
    code: int | str | None = 0
    try:
        app(prog_name="duckllm")
    except DuckError as error:
        print(f"duckllm: {error}", file=sys.stderr)
        code = error.exit_code
    except ModuleNotFoundError as error:
        if error.name not in HOST_PACKAGES:
            raise
        print(
            f"duckllm: {error.name} is not installed: a node does without it, a host needs it; "
            "install this package with its extra [host]",
            file=sys.stderr,
        )
        code = 1
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # what comes next begins on a line of its own
        code = 130
    except BrokenPipeError:
        code = 1
    except SystemExit as request:
        code = request.code
    _flush_stdout()
    sys.exit(code)


def _flush_stdout() -> None:
    """Flushes what was printed; where nobody reads it any more, quietly drops it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
