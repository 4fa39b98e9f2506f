"""``duckllm doctor``: checks this machine, and workers and the ways to them, and says what to change.

Mounted by cli/main.py. Changes nothing and needs no privileges.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from duckllm.cli.common import Waiting, parse_workers, refuse_unused
from duckllm.cli.discover import DiscoverOption, check_undiscovered, discover
from duckllm.cli.model_options import DiscoverWait, MinWorkers
from duckllm.cli.terminal import printable
from duckllm.config import count_of
from duckllm.errors import ConfigError

if TYPE_CHECKING:
    from duckllm.cluster.discovery import FoundNode
    from duckllm.doctor.finding import Finding

EXAMPLES = """\b
Examples:
  duckllm doctor
  duckllm doctor --workers 10.0.0.11:7411,10.0.0.12:7411 --token-file token
  duckllm doctor --cluster discover --token-file token
  duckllm doctor --jitter
  duckllm doctor --json
"""
DEFAULT_SAMPLES = 20_000
_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red", "unknown": "dim"}


def doctor(
    workers: Annotated[
        str | None,
        typer.Option(
            help="Addresses of workers to check too, and the ways to them: a:port,b:port.", show_default=False
        ),
    ] = None,
    cluster: DiscoverOption = None,
    min_workers: MinWorkers = 1,
    discover_wait_s: DiscoverWait = 30.0,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the secret that the workers share.", readable=False),
    ] = None,
    measure_jitter: Annotated[
        bool,
        typer.Option(
            "--jitter",
            help="Measure instead how evenly each core computes, and what interrupts it; seconds a core.",
        ),
    ] = False,
    samples: Annotated[
        int, typer.Option(help="Pieces of work on each core with --jitter, of 50 us each.")
    ] = DEFAULT_SAMPLES,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")] = False,
) -> None:
    """Check this machine, and workers and the ways to them, and say what to change.

    Changes nothing and needs no privileges; what cannot be known is said to be so. A busy worker is checked
    too, whose steps then take turns with the messages that are timed. Exit code 1 where there is a problem.
    """
    if measure_jitter:
        from duckllm.cli.jitter import jitter

        of_workers: dict[str, object] = {"workers": workers, "cluster": cluster, "token_file": token_file}
        of_workers |= {"min_workers": min_workers, "discover_wait_s": discover_wait_s}
        refuse_unused(doctor, of_workers, "nothing with --jitter, which measures this machine")
        jitter(samples, as_json=as_json)
        return
    refuse_unused(doctor, {"samples": samples}, "nothing without --jitter")
    from duckllm.cluster.address import parse_address
    from duckllm.doctor.examine import examine
    from duckllm.doctor.finding import WARNING, Finding

    check_undiscovered(cluster, min_workers, discover_wait_s)
    found: list[FoundNode] = []
    others: list[FoundNode] = []
    if cluster is not None:
        found, others = discover(cluster, workers, token_file, min_workers, discover_wait_s)
        asked: int | tuple[str, ...] = tuple(str(node.address) for node in found)
    else:
        asked = () if workers is None else parse_workers(workers)
    if not isinstance(asked, tuple):
        raise ConfigError("workers", workers, "addresses: name:port,name:port")
    findings = examine([parse_address(address, "workers") for address in asked], token_file, Waiting)
    names = {str(node.address): node.title for node in found}
    findings = [dataclasses.replace(each, where=names.get(each.where, each.where)) for each in findings]
    findings += [
        Finding(node.title, "announcement", WARNING, node.problem, "docs/operations.md, Nodes that announce")
        for node in others
    ]
    counts = Counter(finding.status for finding in findings)
    if as_json:
        shown = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"problems": counts["problem"], "warnings": counts["warning"], "findings": shown}))
    else:
        show(findings)
        print(
            f"{count_of(counts['problem'], 'problem')}, {count_of(counts['warning'], 'warning')}, "
            f"{counts['unknown']} unknown"
        )
    if counts["problem"]:
        raise typer.Exit(1)


def show(findings: list[Finding]) -> None:
    """The findings for people: a table, and below it what to do, in lines that can be copied."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    for name in ("where", "check", "", "found"):
        table.add_column(name, overflow="fold")
    where = ""
    for finding in findings:
        if where and finding.where != where:
            table.add_section()
        # As Text: a worker's words may hold what rich takes for its markup.
        table.add_row(
            Text("" if finding.where == where else printable(finding.where)),
            Text(finding.check),
            Text(finding.status, style=_COLOURS[finding.status]),
            Text(printable(finding.found)),
        )
        where = finding.where
    console = Console(file=sys.stdout)
    console.print(table)
    for finding in findings:
        if finding.advice:
            line = f"{finding.where}, {finding.check}: {finding.advice}"
            console.print(Text(printable(line)), soft_wrap=True)
