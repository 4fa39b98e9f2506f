"""``duckllm worker``: serve a slice of a model's experts to a host, until stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from duckllm.worker.config import ANNOUNCED_LISTEN, DEFAULT_LISTEN


def worker(
    listen: Annotated[
        str | None,
        typer.Option(
            help=f"Address to listen on, name:port; port 0 takes a free one. By default {DEFAULT_LISTEN}, or "
            f"with --announce {ANNOUNCED_LISTEN}.",
            show_default=False,
        ),
    ] = None,
    announce: Annotated[
        bool,
        typer.Option(
            "--announce",
            help="Tell hosts of this worker by multicast DNS, so that --cluster discover finds it; needs a "
            "cluster token.",
        ),
    ] = False,
    node_name: Annotated[
        str | None,
        typer.Option(
            help="Name that this node goes by; by default the system's, up to its first dot.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="This worker's own converted model folder; else it opens the host's by path."),
    ] = None,
    threads: Annotated[int, typer.Option(help="Compute threads; 0 takes every core.")] = 0,
    spin_us: Annotated[
        int, typer.Option(help="How long idle threads spin before they sleep; -1 decides by the cores.")
    ] = -1,
    pin: Annotated[
        bool | None,
        typer.Option(
            "--pin/--no-pin",
            help="Keep each compute thread on a core of its own; by default where they take every core.",
            show_default=False,
        ),
    ] = None,
    weight_format: Annotated[
        str,
        typer.Option(
            "--format",
            help="Format to compute in: fp9 or fp8, of which a copy is made in memory if the model is "
            "stored in the other; auto takes the faster one where the slice is large. Other formats are "
            "computed as they are stored, whatever is said.",
        ),
    ] = "auto",
    prefill: Annotated[
        str,
        typer.Option(
            help="What experts of many rows are computed with: f32, or bf16, which rounds activations and "
            "needs a CPU with AVX512-BF16 or AMX-BF16."
        ),
    ] = "f32",
    speed: Annotated[
        float | None,
        typer.Option(
            help="GB/s that this node reads from memory, by which hosts share out the experts; by default "
            "measured at the first start, in a second, and kept; 0 says nothing of it.",
            show_default=False,
        ),
    ] = None,
    copy: Annotated[
        bool,
        typer.Option(
            help="Copy the slice into memory of its own, in huge pages: steps are some per cent faster than "
            "from mapped files, whose memory other programs may share or take."
        ),
    ] = False,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the node cache, for weights that the host sends; else one in this user's cache.",
            show_default=False,
        ),
    ] = None,
    cache_bytes: Annotated[
        str | None,
        typer.Option(
            help="Most bytes in it, like 40GiB, the longest unused are removed first; by default what the "
            "disk has room for.",
            show_default=False,
        ),
    ] = None,
    cache: Annotated[
        bool,
        typer.Option(
            "--cache/--no-cache",
            help="Keep weights that the host sends on the disk; else in memory, sent again for each plan.",
        ),
    ] = True,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File that holds the cluster token (else $DUCKLLM_CLUSTER_TOKEN)."),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="An address that may connect, beside this machine's own; may be given several times. "
            "Without it any that has the token.",
            show_default=False,
        ),
    ] = None,
    handshake_timeout_s: Annotated[
        float, typer.Option(help="From accepting a connection to its complete plan.")
    ] = 10.0,
    frame_timeout_s: Annotated[
        float, typer.Option(help="From a step request's first byte to its last.")
    ] = 30.0,
    send_timeout_s: Annotated[float, typer.Option(help="For the host to take one reply.")] = 60.0,
    exit_with_stdin: Annotated[
        bool, typer.Option("--exit-with-stdin", help="Leave when standard input ends.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Say where it listens as a JSON line.")] = False,
) -> None:
    """Serve a slice of a model's experts to a host, until stopped.

    Beyond loopback there must be a cluster token, the same on the host and on every worker.
    """
    from duckllm.cli.common import tell
    from duckllm.cluster.token import read_token
    from duckllm.config import parse_size, words_on_turns
    from duckllm.worker.config import WorkerConfig
    from duckllm.worker.server import run_worker

    config = WorkerConfig(
        listen=listen,
        announce=announce,
        node_name=node_name,
        model=model,
        threads=threads,
        spin_us=spin_us,
        pin=pin,
        weight_format=weight_format,
        prefill=prefill,
        cache=cache,
        cache_dir=cache_dir,
        cache_bytes=None if cache_bytes is None else parse_size("cache_bytes", cache_bytes),
        speed=speed,
        copy=copy,
        allow=tuple(allow or ()),
        token=read_token(token_file),
        exit_with_stdin=exit_with_stdin,
        handshake_timeout_s=handshake_timeout_s,
        frame_timeout_s=frame_timeout_s,
        send_timeout_s=send_timeout_s,
    )
    turns = words_on_turns("threads", config.resolved_threads)
    if turns:
        tell(turns)
    run_worker(config, json_output=json)
