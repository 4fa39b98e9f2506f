"""``python -m duckllm.worker``: a worker process, as local clusters start it. Imports no torch."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from duckllm.cluster.frames import safe_text
from duckllm.cluster.token import read_token
from duckllm.config import parse_size
from duckllm.errors import describe_error
from duckllm.paths import as_path
from duckllm.worker.config import WorkerConfig
from duckllm.worker.server import run_worker, write_line

_DEFAULTS = WorkerConfig()


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence; ``--help`` shows the usage."""

    def error(self, message: str) -> NoReturn:
        write_line(sys.stderr, f"error: {safe_text(message)}")
        sys.exit(2)


def make_parser() -> argparse.ArgumentParser:
    """The command line; nearly every flag is a field of :class:`WorkerConfig`."""
    parser = _Parser("python -m duckllm.worker", description="Serve a slice of a model's experts.")
    parser.add_argument("--listen", help="address to listen on, name:port")
    parser.add_argument("--model", help="this worker's own converted model folder")
    parser.add_argument(
        "--threads", type=int, default=_DEFAULTS.threads, help="compute threads, 0 for all cores"
    )
    parser.add_argument("--spin-us", type=int, default=_DEFAULTS.spin_us)
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, help="keep each thread on one core")
    parser.add_argument(
        "--format",
        dest="weight_format",
        default=_DEFAULTS.weight_format,
        help="auto, fp9 or fp8; other formats are computed as they are stored",
    )
    parser.add_argument("--prefill", default=_DEFAULTS.prefill, help="f32 or bf16, for experts of many rows")
    parser.add_argument("--cache-dir", help="folder of the node cache")
    parser.add_argument("--cache-bytes", help="most bytes in it, like 40GiB")
    parser.add_argument("--no-cache", dest="cache", action="store_false", help="keep no shards on the disk")
    parser.add_argument("--speed", type=float, help="GB/s that this node reads; 0 says nothing of it")
    parser.add_argument("--copy", action="store_true", help="copy the slice into memory, in huge pages")
    parser.add_argument("--announce", action="store_true", help="tell hosts of this worker by multicast DNS")
    parser.add_argument("--node-name", help="name that this node goes by, else the system's")
    parser.add_argument("--allow", action="append", help="an address that may connect; else any")
    parser.add_argument("--token-file", help="file that holds the cluster token")
    for name in ("handshake", "frame", "send"):
        parser.add_argument(
            f"--{name}-timeout-s", type=float, default=getattr(_DEFAULTS, f"{name}_timeout_s")
        )
    parser.add_argument(
        "--shared-memory", type=int, nargs=3, default=(), help="inherited descriptors of a host's memory"
    )
    parser.add_argument("--exit-with-stdin", action="store_true", help="leave when standard input ends")
    parser.add_argument("--die-with-parent", action="store_true", help="be killed when what started it ends")
    parser.add_argument("--json", action="store_true", help="say where it listens as a JSON line")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a worker; the exit status: 0 stopped, 1 failed, 2 wrong usage, 70 our fault, 130 interrupted.

    What went wrong is one sentence on stderr, after the traceback where $DUCKLLM_DEBUG is 1.
    """
    flags = vars(make_parser().parse_args(argv))
    json_output, token_file = flags.pop("json"), flags.pop("token_file")
    if flags.pop("die_with_parent"):
        _die_with_parent()
    try:
        if flags["cache_bytes"] is not None:
            flags["cache_bytes"] = parse_size("cache_bytes", flags["cache_bytes"])
        for field in ("model", "cache_dir"):
            if flags[field] is not None:
                flags[field] = as_path(field, flags[field], "a folder")
        flags["allow"] = tuple(flags["allow"] or ())
        flags["shared_memory"] = tuple(flags["shared_memory"])
        run_worker(WorkerConfig(token=read_token(token_file), **flags), json_output=json_output)
    except KeyboardInterrupt:  # before there are handlers for signals
        return 130
    except Exception as error:
        if os.environ.get("DUCKLLM_DEBUG") == "1":
            write_line(sys.stderr, traceback.format_exc())
        sentence, code = describe_error(error)
        write_line(sys.stderr, f"error: {safe_text(sentence)}")  # it may quote a model's file
        return code
    return 0


def _die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends, even where it is stopped."""
    pr_set_pdeathsig = 1  # of linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
