"""What a worker says of itself and its node in HELLO.

Called by :mod:`duckllm.worker.session`; docs/wire-format.md lists the fields.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import duckllm
from duckllm import _native
from duckllm.cluster.discovery_announcement import node_name
from duckllm.config import total_memory_bytes
from duckllm.weights.recode import available_memory_bytes
from duckllm.worker.config import WorkerConfig


def hello_facts(
    config: WorkerConfig, instructions: str, read_gb_per_s: float | None, *, is_busy: bool = False
) -> dict[str, Any]:
    """The object of a worker's HELLO.

    Args:
        config: The worker's configuration.
        instructions: What its kernels use.
        read_gb_per_s: What its node reads from memory, or None where nobody measured.
        is_busy: Whether it serves another host now.
    """
    return {
        "protocol_version": _native.PROTOCOL_VERSION,
        "build": duckllm.__version__,
        "node_name": node_name(config.node_name),
        "isa": instructions,
        "threads": config.resolved_threads,
        "pid": os.getpid(),
        "memory_bytes": total_memory_bytes(),
        "available_bytes": memory_for_experts(),
        "read_gb_per_s": read_gb_per_s,
        "unix_time_s": time.time(),
        "keeps_weights": config.cache,
        "is_busy": is_busy,
    }


def memory_for_experts(root: Path = Path("/")) -> int:
    """Memory that a plan may take: what is available, and what this process itself holds and would let go."""
    own = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                own = int(line.split()[1]) * 1024
    return min(total_memory_bytes(), available_memory_bytes(root) + own)
