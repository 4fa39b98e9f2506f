"""A limit to the work of a chat template, which is a program that somebody else wrote.

Called by :mod:`duckllm.text.chat_template`. Counts the lines that a template's own code runs and the calls
below it, so that the limit is the same on every machine, and looks at the clock at each of them, as one may
take long. A single operation that never comes back, such as with enormous numbers, is not caught.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")

# What Jinja calls the file of code that it made of a text.
_FILE = "<template>"


class TooManyStepsError(Exception):
    """A template did not come to its end."""


def run_limited(run: Callable[[], Result], max_steps: int, max_s: float) -> Result:
    """The result of ``run``, which renders a template.

    Args:
        run: What to do; what of it is before the template's own code is not counted.
        max_steps: Lines and calls.
        max_s: Seconds.

    Raises:
        TooManyStepsError: It took more.

    Threading: concerns this thread alone, whose trace function (of a debugger) is put back afterwards.
    """
    steps, end_s = 0, time.monotonic() + max_s

    def count() -> None:
        nonlocal steps
        steps += 1
        if steps > max_steps or time.monotonic() > end_s:
            raise TooManyStepsError

    def trace_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            count()
        return trace_line

    def trace_call(frame: FrameType, event: str, argument: Any) -> Any:
        is_template = frame.f_code.co_filename == _FILE
        if is_template or steps:
            count()
        return trace_line if is_template else None

    before = sys.gettrace()
    sys.settrace(trace_call)
    try:
        return run()
    finally:
        sys.settrace(before)
