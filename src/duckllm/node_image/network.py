"""The node's network: cables, an address, the time, a file from the boot server.

Called by :mod:`duckllm.node_image.init`, in the image alone. Addresses come from DHCP by busybox's udhcpc,
which keeps the lease and holds no port open meanwhile.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from duckllm.node_image.dhcp_event import LEASES
from duckllm.node_image.settings import NodeSettings

BUSYBOX = "/bin/busybox"
DHCP_EVENT = "/usr/lib/node/dhcp-event"
FETCHED = LEASES / "fetched"
_FETCH_TIMEOUT_S = 20
_MAX_CONFIG_BYTES = 64 << 10
_UNIX_EPOCH_IN_NTP_S = 2_208_988_800  # 1970 counted from 1900, RFC 5905


def wired_interfaces(root: Path = Path("/")) -> list[str]:
    """Network cards with a driver, Ethernet and without radio."""
    found = []
    for path in sorted((root / "sys/class/net").iterdir()):
        is_card = (path / "device").exists() and not (path / "wireless").exists()
        if is_card and (path / "type").read_text().strip() == "1":
            found.append(path.name)
    return found


def host_name(root: Path = Path("/")) -> str:
    """A name that no other machine has: ``duck-525400770001``, of the first card's hardware address."""
    for card in wired_interfaces(root):
        return "duck-" + (root / "sys/class/net" / card / "address").read_text().strip().replace(":", "")
    return "duck"


def bring_up(
    settings: NodeSettings, say: Callable[[str], None]
) -> list[Callable[[], subprocess.Popen[bytes]]]:
    """Gives the node its address, or says what asks for one on every card.

    Returns:
        What starts the DHCP clients, which stay.
    """
    LEASES.mkdir(mode=0o700, exist_ok=True)
    _ip("link", "set", "lo", "up")
    cards = wired_interfaces()
    if not cards:
        say("node: no wired network card has a driver here")
    for card in cards:
        _ip("link", "set", card, "up")
    if not settings.address:
        return [functools.partial(_start_dhcp, card) for card in cards]
    card = _first_with_cable(cards)
    _ip("addr", "replace", settings.address, "broadcast", "+", "dev", card)
    if settings.gateway:
        _ip("route", "replace", "default", "via", settings.gateway, "dev", card)
    facts = {"interface": card, "address": settings.address, "time_servers": []}
    (LEASES / f"lease-{card}.json").write_text(json.dumps(facts))
    return []


def _start_dhcp(card: str) -> subprocess.Popen[bytes]:
    command = [BUSYBOX, "udhcpc", "-f", "-i", card, "-s", DHCP_EVENT, "-T", "2", "-A", "3"]
    return subprocess.Popen(
        [*command, "-x", f"hostname:{socket.gethostname()}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def leases() -> list[dict[str, Any]]:
    """The addresses that this node has by now."""
    return [json.loads(path.read_text()) for path in sorted(LEASES.glob("lease-*.json"))]


def fetch_config(address: str) -> str:
    """A file of settings from the boot server.

    By busybox, as Python's HTTP client would stay in the memory of the node's first program.

    Raises:
        OSError: It cannot be fetched, is too large or not UTF-8.
        subprocess.TimeoutExpired: It takes too long.
    """
    command = [BUSYBOX, "wget", "-q", "-O", str(FETCHED), address]
    if address.startswith("tftp://"):
        parts = urlsplit(address)
        command = [BUSYBOX, "tftp", "-g", "-l", str(FETCHED), "-r", parts.path.lstrip("/")]
        command += [parts.hostname or "", str(parts.port or 69)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_FETCH_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise OSError(f"{address}: {done.stderr.strip() or 'it cannot be fetched'}")
        with FETCHED.open("rb") as file:
            content = file.read(_MAX_CONFIG_BYTES + 1)
    finally:
        FETCHED.unlink(missing_ok=True)
    if len(content) > _MAX_CONFIG_BYTES:
        raise OSError(f"{address}: more than {_MAX_CONFIG_BYTES} bytes")
    try:
        return str(content, "utf-8")
    except UnicodeDecodeError:
        raise OSError(f"{address}: not UTF-8") from None


def set_clock(server: str, timeout_s: float = 3.0) -> float:
    """Sets the clock by a time server (SNTP, RFC 5905); by how much it moved, seconds.

    Raises:
        OSError: No answer, or one that says that the server does not know the time.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.settimeout(timeout_s)
        asked.connect((server, 123))
        sent = time.time()
        asked.send(b"\x23" + bytes(47))  # version 4, client
        answer = asked.recv(128)
        received = time.time()
    offset = clock_offset(answer, sent, received)
    time.clock_settime(time.CLOCK_REALTIME, time.time() + offset)
    return offset


def clock_offset(answer: bytes, sent: float, received: float) -> float:
    """How far our clock is behind a time server's, seconds.

    Args:
        answer: The server's packet.
        sent: When it was asked, seconds of our clock.
        received: When the answer came.

    Raises:
        OSError: It is no answer of a server that knows the time.
    """
    if len(answer) < 48 or answer[0] & 7 != 4 or answer[0] >> 6 == 3 or not 1 <= answer[1] <= 15:
        raise OSError("the time server does not know the time")
    moments = struct.unpack("!4I", answer[32:48])
    theirs: list[float] = [
        seconds - _UNIX_EPOCH_IN_NTP_S + fraction / 2**32
        for seconds, fraction in zip(moments[::2], moments[1::2], strict=True)
    ]
    return ((theirs[0] - sent) + (theirs[1] - received)) / 2


def _first_with_cable(cards: list[str]) -> str:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for card in cards:
            try:
                if Path(f"/sys/class/net/{card}/carrier").read_text().strip() == "1":
                    return card
            except OSError:
                pass  # it is not up yet
        time.sleep(0.1)
    return cards[0] if cards else "lo"


def _ip(*arguments: str) -> None:
    subprocess.run([BUSYBOX, "ip", *arguments], check=False, env={"PATH": os.defpath})
