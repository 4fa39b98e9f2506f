"""What a node says of itself to everybody on its network, and the proof that it holds the cluster token.

An announcement is the text record of a service (RFC 6763): ``key=value`` entries, of which the last is an
HMAC over all others. Made and read here, sent and heard by :mod:`duckllm.cluster.discovery_mdns`; opens no
socket and believes nothing that is not proven.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from duckllm.cluster.address import Address, parse_address
from duckllm.errors import ConfigError, ProtocolError, show_value

FORM = "1"  # of announcements; others are another release's
ROLES = ("node", "host")
MAX_BYTES = 1024  # of a text record; ours have 300
MAX_NAME_CHARACTERS = 40
MAX_ADDRESSES = 8  # of one node
_KEYS = ("form", "role", "name", "at", "isa", "memory_bytes", "read_gb_per_s", "time_us", "proof")
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{MAX_NAME_CHARACTERS - 1}}}", re.ASCII)
_MAX_ISA_CHARACTERS = 40


class UnprovenError(ProtocolError):
    """An announcement whose proof is not that of this side's token; whatever else it says is not believed."""


@dataclass(frozen=True)
class Announcement:
    """What a node, or a host that looks for nodes, announces.

    Args:
        role: ``"node"`` or ``"host"``.
        name: The machine's name; several workers may have the same.
        addresses: Where the worker listens, by preference; none of a host.
        isa: Instruction set of its kernels; empty of a host.
        memory_bytes: Memory of its node; 0 of a host.
        read_gb_per_s: What it reads from memory, GB/s; None where it does not say.
        time_us: When it was signed, Unix time: the value that is fresh in each.
    """

    role: str
    name: str
    addresses: tuple[Address, ...] = ()
    isa: str = ""
    memory_bytes: int = 0
    read_gb_per_s: float | None = None
    time_us: int = 0

    @property
    def label(self) -> str:
        """Its name among the services of a network: that of the machine, made unique by the addresses."""
        places = ",".join(map(str, self.addresses)) or str(self.time_us)
        return f"{self.name}-{hashlib.sha256(places.encode()).hexdigest()[:8]}"


def node_name(asked: str | None = None) -> str:
    """The name that a node goes by: ``asked``, else the system's up to its first dot.

    Raises:
        ConfigError: ``asked`` is no such name.
    """
    if asked is not None:
        if not _NAME.fullmatch(asked):
            expected = f"letters, digits, - and _, at most {MAX_NAME_CHARACTERS}"
            raise ConfigError("node_name", asked, expected)
        return asked
    found = re.sub(r"[^A-Za-z0-9_-]", "-", os.uname().nodename.partition(".")[0], flags=re.ASCII)
    return found.lstrip("-_")[:MAX_NAME_CHARACTERS] or "node"


def sign(announcement: Announcement, token: str) -> dict[str, str]:
    """The entries of its text record, signed now."""
    entries = {
        "form": FORM,
        "role": announcement.role,
        "name": announcement.name,
        "at": ",".join(map(str, announcement.addresses)),
        "isa": announcement.isa,
        "memory_bytes": str(announcement.memory_bytes),
        "read_gb_per_s": "" if announcement.read_gb_per_s is None else f"{announcement.read_gb_per_s:.1f}",
        "time_us": str(announcement.time_us or time.time_ns() // 1000),
    }
    return {**entries, "proof": _proof(entries, token)}


def parse(entries: Mapping[str, str | None], num_bytes: int, token: str) -> Announcement:
    """What a text record announces, once its proof is known to be right.

    Args:
        entries: As they came.
        num_bytes: Size of the record.
        token: This side's cluster token.

    Raises:
        UnprovenError: The proof is another token's, or none.
        ProtocolError: It is no announcement of this form. Its text is safe to be shown.
    """
    if num_bytes > MAX_BYTES:
        raise ProtocolError(f"its record: got {num_bytes} bytes, expected at most {MAX_BYTES}")
    form = entries.get("form")
    if form != FORM:
        raise ProtocolError(f"its form: got {show_value(form)}, expected {FORM!r}: is it another release's?")
    if sorted(entries) != sorted(_KEYS):
        raise ProtocolError(f"its entries: got {len(entries)}, expected {', '.join(_KEYS)}")
    given = {name: value or "" for name, value in entries.items()}
    proof = given.pop("proof")
    if not hmac.compare_digest(proof.encode(), _proof(given, token).encode()):
        raise UnprovenError("cluster_token: it has another one than this side")
    # From here on its words are those of a holder of the token, who may be of another release still.
    role, name = given["role"], given["name"]
    if role not in ROLES:
        raise ProtocolError(f"its role: got {show_value(role)}, expected one of {', '.join(ROLES)}")
    if not _NAME.fullmatch(name):
        raise ProtocolError(f"its name: got {show_value(name)}, expected letters, digits, - and _")
    isa = given["isa"]
    if len(isa) > _MAX_ISA_CHARACTERS or not isa.isprintable():
        raise ProtocolError(f"its isa: got {show_value(isa)}, expected an instruction set")
    return Announcement(
        role,
        name,
        _addresses(given["at"], role),
        isa,
        _count("memory_bytes", given["memory_bytes"]),
        _speed(given["read_gb_per_s"]),
        _count("time_us", given["time_us"]),
    )


def reachable(announcement: Announcement, networks: Iterable[ipaddress.IPv4Interface]) -> Address | None:
    """The first of its addresses that lies in one of this machine's networks; None where none does.

    What is announced is heard on these networks alone, so that an address elsewhere is not a node's.
    """
    known = [interface.network for interface in networks]
    for address in announcement.addresses:
        if any(ipaddress.IPv4Address(address.name) in network for network in known):
            return address
    return None


def listening_at(
    listen: Address, networks: Sequence[ipaddress.IPv4Interface]
) -> tuple[list[str], tuple[Address, ...]]:
    """Through which interfaces a worker announces itself, by their addresses, and where it says that it is.

    Args:
        listen: Where it listens, a numeric address.
        networks: Those of this machine.

    Raises:
        ConfigError: It listens on IPv6 alone, of which hosts do not hear.
    """
    try:
        own = ipaddress.IPv4Address(listen.name)
    except ValueError:
        raise ConfigError("listen", str(listen), "an IPv4 address with --announce") from None
    if own.is_unspecified:
        found = [each.ip for each in networks if not each.ip.is_loopback] or [each.ip for each in networks]
    else:
        found = [own]
    names = [str(each) for each in found[:MAX_ADDRESSES]]
    return names, tuple(Address(name, listen.port) for name in names)


def _proof(entries: Mapping[str, str], token: str) -> str:
    message = "duck-llm announce " + json.dumps(sorted(entries.items()))
    return hmac.new(token.encode(), message.encode(), hashlib.sha256).hexdigest()


def _addresses(text: str, role: str) -> tuple[Address, ...]:
    parts = [part for part in text.split(",") if part]
    expected = f"1 to {MAX_ADDRESSES} of the form 10.0.0.5:7411" if role == "node" else "none of a host"
    if not (len(parts) == 0 if role == "host" else 1 <= len(parts) <= MAX_ADDRESSES):
        raise ProtocolError(f"its addresses: got {len(parts)}, expected {expected}")
    try:
        found = tuple(parse_address(part) for part in parts)
        for address in found:
            ipaddress.IPv4Address(address.name)
    except (ConfigError, ValueError):
        raise ProtocolError(f"its addresses: got {show_value(text)}, expected {expected}") from None
    return found


def _count(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ProtocolError(f"its {name}: got {show_value(text)}, expected a whole number")
    return int(text)


def _speed(text: str) -> float | None:
    if not text:
        return None
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not 0 <= speed <= 1e6:
        raise ProtocolError(f"its read_gb_per_s: got {show_value(text)}, expected GB/s")
    return speed or None
