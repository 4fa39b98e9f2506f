"""The node's console: lines to every terminal that the kernel writes to, a screen and a serial line alike."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MOST_CHARACTERS = 4000  # of a line


def one_line(text: str, most: int = MOST_CHARACTERS) -> str:
    """Text of whatever origin as one printable line of at most ``most`` characters.

    Line ends and tabs become spaces, what a terminal would obey a question mark; the end of longer ones is
    three dots.
    """
    cut = text if len(text) <= most else text[: most - 3] + "..."
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in cut)


class Console:
    """Writes lines; never waits for a terminal and never fails.

    Args:
        root: Folder in whose ``sys`` and ``dev`` the terminals are.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        active = root / "sys/class/tty/console/active"
        names = active.read_text().split() if active.exists() else ["console"]
        self._terminals: list[int] = []
        for name in names:
            with contextlib.suppress(OSError):  # named on the command line, and not there
                flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK
                self._terminals.append(os.open(root / "dev" / name, flags))

    def say(self, line: str) -> None:
        """One line, whatever there is in it."""
        shown = one_line(line)
        for terminal in self._terminals:
            with contextlib.suppress(OSError):
                os.write(terminal, f"{shown}\r\n".encode("utf-8", "replace"))
