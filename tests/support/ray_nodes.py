"""A Ray cluster of several nodes on this machine, in a process of its own: run as a script by tests.

Says its address in one line, takes ``end NODE`` to kill a node, and ends with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

# Nothing is reported to anybody, and a node that is gone is noticed soon.
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "2",
}
NODES = ({"duckllm_worker": 1}, {"duckllm_worker": 2})


@dataclass
class RayNodes:
    """The running cluster."""

    process: subprocess.Popen[str]
    address: str

    def end_node(self, index: int) -> None:
        """Kills a node's processes."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print("end", index, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "ended\n"

    def actors(self) -> list[psutil.Process]:
        """Every actor of ours that lives."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if "ray::WorkerActor" in " ".join(process.cmdline()):
                    found.append(process)
        return found


@contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    """A head without workers, and :data:`NODES`."""
    with subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **VARIABLES},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield RayNodes(process, json.loads(process.stdout.readline()))
        finally:
            process.stdin.close()
            process.wait(60)


def _main() -> None:
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from ray.cluster_utils import Cluster

    few = {"object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **few})
    nodes = [cluster.add_node(num_cpus=1, resources=resources, **few) for resources in NODES]
    print(json.dumps(cluster.address), file=said, flush=True)
    for line in sys.stdin:
        cluster.remove_node(nodes[int(line.split()[1])], allow_graceful=False)
        print("ended", file=said, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    _main()
