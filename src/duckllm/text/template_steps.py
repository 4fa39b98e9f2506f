"""A limit to the work of a chat template, which is a program that somebody else wrote.

Called by :mod:`duckllm.text.chat_template`. Counts the lines that a template's own code runs and the calls
it makes, so that the limit is the same on every machine. One operation that never ends, such as multiplying
enormous texts, is one step and is not caught.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")

# What Jinja calls the file of code that it made of a text.
_FILE = "<template>"


class TooManyStepsError(Exception):
    """A template did not come to its end."""


def run_limited(run: Callable[[], Result], max_steps: int) -> Result:
    """The result of ``run``, which renders a template.

    Args:
        run: What to do; what of it is no template's code is not counted.
        max_steps: Lines and calls of templates.

    Raises:
        TooManyStepsError: There were more.

    Threading: concerns this thread alone, whose trace function (of a debugger) is put back afterwards.
    """
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1
        if steps > max_steps:
            raise TooManyStepsError

    def trace_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            count()
        return trace_line

    def trace_call(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename == _FILE:
            count()
            return trace_line
        if frame.f_back is not None and frame.f_back.f_code.co_filename == _FILE:
            count()
        return None

    before = sys.gettrace()
    sys.settrace(trace_call)
    try:
        return run()
    finally:
        sys.settrace(before)
