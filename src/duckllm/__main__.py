"""The command ``duckllm``, also ``python -m duckllm``: quiet from the first moment when it is interrupted."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Imports the command line and runs it; Ctrl-C while it imports leaves with 130, as later on."""
    try:
        from duckllm.cli.main import main as run
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
