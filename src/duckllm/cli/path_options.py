"""How the paths of every verb's options are read. Called by cli/main.py, for all verbs at once."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from typer.models import OptionInfo

from duckllm.paths import as_path


def check_paths(verb: Callable[..., Any]) -> None:
    """Has a verb's paths read by :func:`duckllm.paths.as_path`, which refuses an empty text by name.

    As the command line parser reads them, an empty text is the current folder, and no verb can tell.
    """
    own = inspect.signature(verb, eval_str=True)
    parameters = [_checked(parameter) for parameter in own.parameters.values()]
    verb.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    verb.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def _checked(parameter: inspect.Parameter) -> inspect.Parameter:
    if get_origin(parameter.annotation) is not Annotated:
        return parameter
    kind, *said = get_args(parameter.annotation)
    if Path not in (kind, *get_args(kind)):
        return parameter
    [option] = map(copy.copy, said)  # several verbs may share one

    def read(value: str | Path) -> Path:
        return as_path(parameter.name, value, "a file's or a folder's name")

    option.parser = read
    if isinstance(option, OptionInfo) and option.metavar is None:
        option.metavar = "<path>"  # else help shows it as no other kind of value
    return parameter.replace(annotation=Annotated[kind, option])
