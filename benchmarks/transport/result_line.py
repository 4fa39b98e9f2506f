"""The line that a benchmark of this folder ends with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from duckllm.bench.machine import commit, cpu_name


def print_result(name: str, results: dict[str, Any], file: Path | None) -> None:
    """Prints the results, the commit and the processor as one line of JSON, which ``file`` gets too."""
    line = json.dumps({"benchmark": name, "commit": commit(), "cpu": cpu_name(), **results})
    print(line)
    if file is not None:
        with file.open("a") as lines:
            lines.write(line + "\n")
