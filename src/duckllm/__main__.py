"""The command ``duckllm``, also ``python -m duckllm``: quiet from the first moment when it is interrupted."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Imports the command line and runs it; Ctrl-C while it imports leaves with 130, as later on."""
    try:
        _open_missing_streams()
        from duckllm.cli.main import main as run

        run()
    except KeyboardInterrupt:
        if sys.stderr is not None and sys.stderr.isatty():
            print(file=sys.stderr)
        sys.exit(130)


def _open_missing_streams() -> None:
    """Opens the null device in place of a standard stream that the caller closed (``>&-``)."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


if __name__ == "__main__":
    main()
