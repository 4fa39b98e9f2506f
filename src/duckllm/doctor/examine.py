"""All checks, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from duckllm.cluster.address import Address
from duckllm.cluster.connect import THIS_MACHINE, WorkerInfo
from duckllm.doctor.finding import Finding
from duckllm.doctor.link_checks import check_flock, check_worker
from duckllm.doctor.link_facts import gather_worker
from duckllm.doctor.machine_checks import check_machine
from duckllm.doctor.machine_facts import gather_machine
from duckllm.doctor.token_check import check_token


def examine(
    addresses: Sequence[Address],
    token_file: Path | None,
    waiting: Callable[[str], AbstractContextManager[object]] = lambda text: nullcontext(),
) -> list[Finding]:
    """What is found on this machine, and at each worker.

    Args:
        addresses: The workers; none for this machine alone.
        token_file: The file of the cluster token; None for the environment's.
        waiting: Shows what is going on, where it takes longer.
    """
    with waiting("Measuring this machine"):
        machine = gather_machine()
    finding, token = check_token(token_file, addresses)
    workers = []
    for number, address in enumerate(addresses):
        with waiting(f"Asking worker {address}, {number + 1} of {len(addresses)}"):
            workers.append(gather_worker(address, token))
    said = said_here([worker.info for worker in workers if worker.info is not None])
    findings = [*check_machine(replace(machine, said_gb_per_s=said)), finding]
    for worker in workers:
        findings += check_worker(worker)
    return findings + check_flock(workers)


def said_here(workers: Sequence[WorkerInfo]) -> tuple[tuple[float, int], ...]:
    """What those of this machine say that they read, GB/s, and by how many threads."""
    return tuple(
        (info.read_gb_per_s, info.threads)
        for info in workers
        if info.machine == THIS_MACHINE and info.read_gb_per_s is not None
    )
