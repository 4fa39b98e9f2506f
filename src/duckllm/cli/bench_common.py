"""What the verbs of ``duckllm bench`` share: lists in options, lines of JSON, files, progress.

Called by cli/bench.py, cli/bench_model.py and cli/bench_serve.py.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from duckllm.config import parse_whole
from duckllm.errors import ConfigError
from duckllm.paths import check_replaceable
from duckllm.weights.files import AtomicFile


def print_line(values: dict[str, object], save: Path | None) -> None:
    """Prints a result as one line of JSON, then appends it to a file: what was measured is not lost."""
    line = json.dumps(values)
    print(line)
    append_line(line, save)


def append_line(line: str, save: Path | None) -> None:
    """Appends a line to the file that was asked for, if one was; all of it, or none.

    Raises:
        ConfigError: It could not be written.
    """
    if save is None:
        return
    with writing("save", save), save.open("ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        rest = memoryview((line + "\n").encode())
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # a pipe has no end to go back to
                os.ftruncate(file.fileno(), size)
            raise


@contextlib.contextmanager
def writing(field: str, path: Path) -> Iterator[None]:
    """Names the file that could not be written, and leaves no empty one behind; a link to it stays.

    Raises:
        ConfigError: It could not be written.
    """
    target, existed = Path(os.path.realpath(path)), path.exists()
    try:
        yield
    except OSError as error:
        if not existed:
            with contextlib.suppress(OSError):
                target.unlink(missing_ok=True)
        reason = error.strerror or str(error)
        raise ConfigError(field, str(path), f"a file that can be written ({reason})") from error


@contextlib.contextmanager
def writing_whole(field: str, path: Path) -> Iterator[Path]:
    """A file beside ``path`` to write, which takes its place when it is whole; until then an older one stays.

    Its own name ends otherwise.

    Raises:
        ConfigError: It could not be written, or something else than a regular file lies there.
    """
    target = check_replaceable(field, path)
    with writing(field, path):
        if target.exists() and not os.access(target.parent, os.W_OK):
            yield target  # a file in a folder that takes no other
            return
        with AtomicFile(target) as file:
            yield file.partial
            file.commit()


class CellProgress:
    """A bar on stderr with the time left; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("Measuring")

    def __enter__(self) -> CellProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, name: str, done: float, total: float) -> None:
        """Shows what is measured now, and how much of the work is done."""
        self._bar.update(self._task, description=name, completed=done, total=total)


def check_environment() -> None:
    """Finds out whether DUCK_FORCE_ISA names an instruction set of this machine.

    Raises:
        ConfigError: It does not.
    """
    from duckllm.prefill import select_isa

    select_isa()


def check_save(path: Path, field: str = "save") -> None:
    """Finds out before anything is measured whether a file can be written there; leaves it as it is.

    Args:
        path: The file.
        field: The option that names it.

    Raises:
        ConfigError: Its folder does not exist, something else than a regular file lies there, or it may not
            be written.
    """
    with writing(field, path):
        is_file = not path.is_dir() and path.parent.is_dir()
    if not is_file:
        raise ConfigError(field, str(path), "a file in a folder that exists")
    target = check_replaceable(field, path)
    existed = target.exists()
    with writing(field, path), target.open("a", encoding="utf-8"):
        pass
    if not existed:
        target.unlink(missing_ok=True)


def parse_words(text: str) -> tuple[str, ...]:
    """The words of ``"fp9,fp8"``, each once; none from an empty text."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(","))) if text.strip() else ()


def parse_numbers(field: str, text: str) -> tuple[int, ...]:
    """Numbers from ``"1,2,4"``; none from an empty text.

    Raises:
        ConfigError: It is something else.
    """
    numbers: dict[int, None] = {}  # each once
    for word in parse_words(text):
        number = parse_whole(word)
        if number is None:
            raise ConfigError(field, text, "numbers with commas between, like 1,2,4")
        numbers[number] = None
    return tuple(numbers)
