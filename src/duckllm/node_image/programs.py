"""Programs that build an image: whether they are there, and running them so that nothing of them stays.

Called by :mod:`duckllm.node_image.build` and :mod:`duckllm.node_image.serve`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

from duckllm.errors import ConfigError, DuckError, InWords

# Programs that are called, and Debian's package of each.
PROGRAMS = {
    "mmdebstrap": "mmdebstrap",
    "depmod": "kmod",
    "readelf": "binutils",
    "mksquashfs": "squashfs-tools",
    "cpio": "cpio",
    "zstd": "zstd",
    "mformat": "mtools",
    "mcopy": "mtools",
    "sfdisk": "fdisk",
}


class BuildError(DuckError):
    """A program that builds the image failed."""


def check_programs() -> None:
    """Raises ConfigError with the packages to install where programs are missing."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        packages = " ".join(sorted({PROGRAMS[name] for name in missing}))
        raise ConfigError(
            "programs", InWords(f"no {', '.join(missing)}"), "them installed", f"apt-get install {packages}"
        )


def run(command: list[str], **given: Any) -> str:
    """Runs a program and gives what it wrote.

    Args:
        command: The program and its arguments.
        given: ``env``, beside what is set here; ``input``, what it reads.

    Raises:
        BuildError: It failed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    environment |= {"PATH": _path(), "LC_ALL": "C", "TZ": "UTC"} | given.pop("env", {})
    program = subprocess.Popen(
        command,
        stdin=subprocess.PIPE if "input" in given else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output, errors = program.communicate(given.get("input"))
    except BaseException:  # with all that it has started, which would go on writing
        _end_group(program)
        raise
    if program.returncode:
        said = (errors.strip() or output.strip()).splitlines() or ["nothing"]
        # apt's and mmdebstrap's first error is the cause, and their last that there was one.
        line = next((line for line in said if line.startswith("E: ")), said[-1])
        raise BuildError(f"{command[0]} failed with exit status {program.returncode}: {line}")
    return output


def _path() -> str:
    """Where programs are looked for: some of them are where only root's PATH leads."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _end_group(program: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(5.0)


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Has SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises KeyboardInterrupt: temporary folders go.

    Threading: of the main thread alone.
    """

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
