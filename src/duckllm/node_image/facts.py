"""What runs and listens on a node, and what memory is used, from /proc.

Called by :mod:`duckllm.node_image.init`, which writes it to the console: nobody can look by a shell.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path

from duckllm.node_image.console import one_line

_LISTENING, _UNCONNECTED = "0A", "07"  # states of TCP and UDP sockets in /proc/net
_MOST_COMMAND_BYTES = 4096  # of a process's words, which are read
_MOST_WORD_CHARACTERS = 32  # of each that is shown


def used_memory_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """Memory that nobody could have, bytes: of what the kernel manages, and what it kept before it counted.

    The first is MemTotal less MemAvailable. The second is the memory that the firmware gave the kernel, less
    MemTotal: the kernel's code and data, and a table with 64 bytes for every page of 4 KiB.
    """
    values = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        values[name] = int(value.split()[0]) * 1024
    given = 0
    for line in (root / "proc/iomem").read_text().splitlines():
        place, _, name = line.partition(" : ")
        if name == "System RAM":
            first, _, last = place.partition("-")
            given += int(last, 16) + 1 - int(first, 16)
    return values["MemTotal"] - values["MemAvailable"], max(0, given - values["MemTotal"])


def describe_memory(root: Path = Path("/")) -> str:
    """Memory used by all but weights, and what of it the kernel kept for itself at the start."""
    managed, kept = used_memory_bytes(root)
    return f"{(managed + kept) / 1e6:.0f} MB, {kept / 1e6:.0f} of them the kernel's own code and tables"


def describe_processes(root: Path = Path("/")) -> str:
    """Every process but the kernel's own: number, first words, memory of its own; one line, as it is shown.

    Whoever starts a process gives it words, so that these may be anything: each is shown up to 32 characters.
    """
    found = []
    for path in sorted((root / "proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError, KeyError):  # ended meanwhile, or a thread of the kernel
            with (path / "cmdline").open("rb") as file:
                words = file.read(_MOST_COMMAND_BYTES).rstrip(b"\0").decode("utf-8", "replace").split("\0")
            status = (path / "status").read_text(errors="replace")
            fields = dict(line.partition(":")[::2] for line in status.splitlines())
            resident_kb = int(fields["RssAnon"].split()[0])
            if words == [""]:  # which a program can do to its own
                words = [f"[{fields['Name'].strip()}]"]
            words[0] = words[0].rpartition("/")[2]
            name = " ".join(one_line(" ".join(word.split()), _MOST_WORD_CHARACTERS) for word in words[:4])
            found.append(f"{path.name} {name} ({resident_kb / 1000:.0f} MB)")
    return "; ".join(found)


def describe_ports(root: Path = Path("/")) -> str:
    """Every socket to which others could send without having been asked: protocol, address and port."""
    found = set()
    for name, state in (
        ("tcp", _LISTENING),
        ("tcp6", _LISTENING),
        ("udp", _UNCONNECTED),
        ("udp6", _UNCONNECTED),
    ):
        path = root / "proc/net" / name
        if not path.exists():
            continue
        for line in path.read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == state:
                found.add(f"{name} {_address(columns[1])}")
    return "; ".join(sorted(found)) or "none"


def _address(text: str) -> str:
    number, _, port = text.partition(":")
    if len(number) == 8:
        shown = socket.inet_ntoa(struct.pack("<I", int(number, 16)))
    else:
        words = struct.pack("<4I", *(int(number[at : at + 8], 16) for at in range(0, 32, 8)))
        shown = f"[{socket.inet_ntop(socket.AF_INET6, words)}]"
    return f"{shown}:{int(port, 16)}"
