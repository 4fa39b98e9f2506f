"""The node's console: lines to every terminal that the kernel writes to, a screen and a serial line alike."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


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
        """One line; what a terminal would obey is shown as a question mark."""
        shown = "".join(char if char.isprintable() else "?" for char in line)
        for terminal in self._terminals:
            with contextlib.suppress(OSError):
                os.write(terminal, f"{shown}\r\n".encode("utf-8", "replace"))
