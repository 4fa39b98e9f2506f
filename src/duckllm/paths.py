"""Paths that users give: whether they can be any, and what lies where a file is to be written.

Called by everything that takes a path or writes a file; knows no file's content.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from duckllm.errors import ConfigError

WRITTEN = "a regular file to replace, or a name that is free"
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def as_path(field: str, value: object, expected: str, *, home: bool = False) -> Path:
    """A path that was given as text or as a Path, after it is known to be one for the system, too.

    An empty text would be the current folder, which nobody means by it.

    Args:
        field: What named it.
        value: What was given.
        expected: What may be given, for the message.
        home: Whether ``~`` stands for a user's home.

    Raises:
        ConfigError: It is something else or empty, holds a NUL or half a character, or ``~`` stands for no
            home.
    """
    if not isinstance(value, str | Path):
        raise ConfigError(field, value, expected)
    if problem := path_problem(str(value)):
        raise ConfigError(field, value, expected, problem)
    try:
        return Path(value).expanduser() if home else Path(value)
    except RuntimeError as error:
        raise ConfigError(field, value, expected, str(error)) from error


def path_problem(text: str) -> str:
    """Why a text is no path; empty where it is one."""
    if not text:
        return "it is empty"
    if "\0" in text:
        return "no file's name has a NUL"
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return "no file's name has half a character"
    return ""


def replaced_file(path: Path) -> tuple[Path, os.stat_result | None]:
    """The file that is replaced where ``path`` is to be written, to which links lead, and what it is now.

    Raises:
        OSError: Something else than a regular file lies there: writing would destroy it, or never end. Or it
            cannot be looked at.
    """
    target = Path(os.path.realpath(path))  # a link may lead to a new file
    try:
        status = target.stat()
    except FileNotFoundError:
        return target, None
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        what = _KINDS.get(kind, "something else")
        raise FileExistsError(errno.EEXIST, f"{what} lies there", str(path))
    return target, status


def check_replaceable(field: str, path: Path) -> Path:
    """The file that is replaced where ``path`` is to be written, found out before there is anything to write.

    Args:
        field: What named it.
        path: The file.

    Raises:
        ConfigError: Something else than a regular file lies there, or it cannot be looked at.
    """
    try:
        return replaced_file(path)[0]
    except OSError as error:
        raise ConfigError(field, str(path), WRITTEN, error.strerror or str(error)) from error
