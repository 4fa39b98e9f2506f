"""Progress on stderr: a bar with the time left on a terminal, plain lines elsewhere.

Called by ``duckllm convert``, by :func:`duckllm.weights.resolve.resolve_model` and where workers are sent
their weights; knows bytes and a label.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

_LINE_EVERY_S = 10.0

# Spinners on the terminal, which a bar would be drawn over: each is asked to go before one begins.
on_bar: list[Callable[[], object]] = []
# Who else wants to know, of any work: its title, and how much of it is done, 0 to 1.
on_progress: list[Callable[[str, float], object]] = []


class ConsoleProgress:
    """A callable for ``convert(progress=...)``; a context manager that leaves the terminal tidy.

    Args:
        title: Written before the bar, or once as a line.
        console: Where to; stderr by default.
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._title = title
        self._console = console or Console(file=sys.stderr)
        self._bar: Progress | None = None
        self._last_line_s = 0.0
        self._stage = ""

    def __enter__(self) -> ConsoleProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Shows that ``done`` of ``total`` bytes of the work called ``stage`` are done."""
        for watch in on_progress:
            watch(self._title, done / total if total else 1.0)
        if self._console.is_terminal:
            self._draw(stage, done, total)
        else:
            self._print(stage, done, total)

    def _draw(self, stage: str, done: int, total: int) -> None:
        stage = stage.removesuffix(".safetensors")
        if self._bar is None:
            # One line however long the title is: a bar of two lines would be left behind in part.
            title = Column(ratio=1, no_wrap=True, overflow="ellipsis")
            columns = (
                TextColumn("{task.description}", markup=False, table_column=title),
                BarColumn(bar_width=10),
                DownloadColumn(table_column=Column(no_wrap=True)),
                TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
                TextColumn(
                    "{task.fields[stage]}", markup=False, table_column=Column(no_wrap=True, max_width=23)
                ),
            )
            self._bar = Progress(*columns, console=self._console, transient=True, expand=True)
            for hide in on_bar:
                hide()
            self._task = self._bar.add_task(self._title, total=total, completed=done, stage=stage)
            self._bar.start()
        self._bar.update(self._task, total=total, completed=done, stage=stage)

    def _print(self, stage: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if not self._stage:
            self._print_line(self._title)
            self._first_s, self._first_done = now_s, done
            self._last_line_s = now_s
        self._stage = stage
        if now_s - self._last_line_s < _LINE_EVERY_S:
            return
        self._last_line_s = now_s
        gained = done - self._first_done
        left = f", {(total - done) * (now_s - self._first_s) / gained:.0f} s left" if gained > 0 else ""
        line = f"{self._title}: {done / 1e9:.2f} of {total / 1e9:.2f} GB{left} ({stage})"
        self._print_line(line)

    def _print_line(self, line: str) -> None:
        """Prints a line as it is: a folder's name may hold what rich takes for its markup, as ``[/b]``."""
        self._console.print(line, soft_wrap=True, highlight=False, markup=False, emoji=False)
