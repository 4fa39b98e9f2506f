"""The ``duckllm`` command: its verbs, and what a user sees of an error.

Called as the console script and by ``python -m duckllm``. Mounts the verbs, each of which imports what is
heavy only when it runs, so that ``--help`` is quick. An error of ours becomes one sentence on stderr.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from duckllm import __version__
from duckllm.cli import calibrate as calibrate_verb
from duckllm.cli import chat as chat_verb
from duckllm.cli import doctor as doctor_verb
from duckllm.cli import quality as quality_verb
from duckllm.cli import serve as serve_verb
from duckllm.cli import simulate as simulate_verb
from duckllm.cli import trace as trace_verb
from duckllm.cli.bench import bench
from duckllm.cli.convert import convert
from duckllm.cli.inspect import inspect
from duckllm.cli.node_image import node_image
from duckllm.cli.path_options import check_paths
from duckllm.cli.plan import plan
from duckllm.cli.terminal import printable, wrapped
from duckllm.cli.worker import worker
from duckllm.errors import HIDDEN, PlacementError, describe_error, without_credentials

# What only the extra "host" installs.
HOST_PACKAGES = frozenset(
    ("fastapi", "jinja2", "prompt_toolkit", "pydantic", "safetensors", "torch", "transformers", "uvicorn")
)


class _Discreet(TyperGroup):
    """The verbs; what is wrong with a command line is said without the passwords in it."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        """As of any group."""
        with _no_passwords():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        """As of any group; verbs read their arguments in here."""
        with _no_passwords():
            return super().invoke(ctx)


@contextlib.contextmanager
def _no_passwords() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Click's errors: typer has its own click or the package, by its release.
        if hasattr(error, "format_message") and isinstance(getattr(error, "message", None), str):
            error.message = without_credentials(error.message, HIDDEN)  # type: ignore[attr-defined]
        raise


app = typer.Typer(
    name="duckllm",
    cls=_Discreet,
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
  duckllm convert deepseek-ai/DeepSeek-V3.2 /models/ds-int4 --format int4 --keep fp8:first,last
"""

_INSPECT_EXAMPLES = """\b
Examples:
  duckllm inspect /checkpoints/DeepSeek-V3.2
  duckllm inspect /models/mine --json
"""

_PLAN_EXAMPLES = """\b
Examples:
  duckllm plan /checkpoints/Qwen3-30B-A3B
  duckllm plan /models/mine --workers 8 --memory 16
  duckllm plan examples/configs/GLM-4.5-Air --workers 4 --memory 16 --format int4
  duckllm plan /models/mine --memory 16,16,32 --max-model-len 32768
  duckllm plan Qwen/Qwen3-30B-A3B --nodes examples/flocks/three-pcs.toml
  duckllm plan --measure --workers 2
"""

_WORKER_EXAMPLES = """\b
Examples:
  duckllm worker
  duckllm worker --listen 0.0.0.0:7411 --model /models/mine --token-file token
"""

# A summary where the first sentence of the docstring is longer than a line of the list.
app.command("chat", epilog=chat_verb.EXAMPLES)(chat_verb.chat)
_SERVE = "Serve a model behind OpenAI's API and others, with a web page."
app.command("serve", short_help=_SERVE, epilog=serve_verb.EXAMPLES)(serve_verb.serve)
app.command("convert", epilog=_CONVERT_EXAMPLES)(convert)
app.command("inspect", short_help="Say what a model is and weighs.", epilog=_INSPECT_EXAMPLES)(inspect)
_PLAN = "Say which node would hold what, how fast, and whether it fits."
app.command("plan", short_help=_PLAN, epilog=_PLAN_EXAMPLES)(plan)
_QUALITY = "Compare formats: what each costs in answers, and gives in speed."
app.command("quality", short_help=_QUALITY, epilog=quality_verb.EXAMPLES)(quality_verb.quality)
_CALIBRATE = "Record which weights matter for your prompts, for duckllm convert."
app.command("calibrate", short_help=_CALIBRATE, epilog=calibrate_verb.EXAMPLES)(calibrate_verb.calibrate)
_SIMULATE = "Try a flock larger than one has, and its host."
app.command("simulate", short_help=_SIMULATE, epilog=simulate_verb.EXAMPLES)(simulate_verb.simulate)
_DOCTOR = "Check this machine and workers, and say what to change."
app.command("doctor", short_help=_DOCTOR, epilog=doctor_verb.EXAMPLES)(doctor_verb.doctor)
_TRACE = "Say where the time of a traced run went, with heat maps."
app.command("trace", short_help=_TRACE, epilog=trace_verb.EXAMPLES)(trace_verb.trace)
app.command("worker", epilog=_WORKER_EXAMPLES)(worker)
_NODE_IMAGE = "Build and hand out the bootable image of a node."
app.add_typer(node_image, name="node-image", short_help=_NODE_IMAGE)
app.add_typer(bench, short_help="Measure a machine, kernels, a model, a server.")

for _verbs in (app, node_image, bench):
    for _command in _verbs.registered_commands:
        if _command.callback is not None:
            check_paths(_command.callback)


def main() -> NoReturn:
    """Runs the command line and exits: 0 done, 1 failed, 2 wrong usage, 70 our fault, 130 interrupted."""
    code: int | str | None
    try:
        code = _run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except OSError as error:
        code = _report(error)
    _drop_unwritten()
    sys.exit(code)


def _run() -> int | str | None:
    """Runs the verb; the exit code. What went wrong is said on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows "?"
    try:
        app(prog_name="duckllm")
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # what comes next begins on a line of its own
        return 130
    except SystemExit as request:
        return request.code
    except Exception as error:
        return _report(error)
    return 0


def _report(error: Exception) -> int:
    """Says in one sentence what went wrong, with the traceback where $DUCKLLM_DEBUG is 1; the exit code."""
    if isinstance(error, BrokenPipeError):
        return 1  # nobody reads it any more
    sentence, code = _describe(error)
    try:
        if os.environ.get("DUCKLLM_DEBUG") == "1":
            traceback.print_exception(error)
        if isinstance(error, PlacementError):
            print(printable(error.table), file=sys.stderr)
        # A file of a model may have put anything into it: nothing that a terminal obeys, and no second line.
        line = f"duckllm: {printable(sentence).replace(chr(10), ' ')}"
        print(wrapped(line, sys.stderr), file=sys.stderr, flush=True)
    except OSError:
        pass  # nowhere left to say it: the exit code does
    return code


def _describe(error: Exception) -> tuple[str, int]:
    """The sentence and the exit code of an error."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in HOST_PACKAGES:
        return (
            f"{package} is not installed: a node does without it, a host needs it; "
            "install this package with its extra [host]",
            1,
        )
    return describe_error(error)


def _drop_unwritten() -> None:
    """Drops what stdout and stderr still hold and cannot write, so that the interpreter's exit is quiet."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
