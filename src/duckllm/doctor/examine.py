"""All checks, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from duckllm.cluster.address import Address
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
        findings = check_machine(gather_machine())
    finding, token = check_token(token_file, addresses)
    findings.append(finding)
    workers = []
    for number, address in enumerate(addresses):
        with waiting(f"Asking worker {address}, {number + 1} of {len(addresses)}"):
            workers.append(gather_worker(address, token))
        findings += check_worker(workers[-1])
    return findings + check_flock(workers)
