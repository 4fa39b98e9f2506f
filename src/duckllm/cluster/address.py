"""Addresses of workers: ``name:port``, ``1.2.3.4:port``, ``[::1]:port``.

Called by the worker (what to listen on) and by the cluster (where to connect); opens no socket.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from duckllm.errors import ConfigError


@dataclass(frozen=True)
class Address:
    """A network end.

    Args:
        name: Host name or IP address, without brackets.
        port: TCP port.
    """

    name: str
    port: int

    def __str__(self) -> str:
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"

    @property
    def end(self) -> tuple[str, int]:
        """Name and port in the one form that all spellings of them have: ``PC1`` is ``pc1``."""
        if _is_ip_address(self.name):
            return ipaddress.ip_address(self.name).compressed, self.port
        return self.name.lower().removesuffix("."), self.port


def parse_address(text: str, field: str = "addresses", *, allow_port_0: bool = False) -> Address:
    """The address that ``text`` spells.

    Args:
        text: What the user wrote.
        field: Where it was written, for the error.
        allow_port_0: Port 0 (any free one) makes sense for listening only.

    Raises:
        ConfigError: Not of the form ``name:port``, or a port out of range.
    """
    lowest = 0 if allow_port_0 else 1
    expected = f"name:port with a port from {lowest} to 65535"
    name, colon, port = text.strip().rpartition(":")
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
        well_formed = _is_ip_address(name) and ":" in name
    elif ":" in name:
        raise ConfigError(field, text, expected, "an IPv6 address goes in brackets: [::1]:port")
    else:
        well_formed = bool(name) and not any(c.isspace() or not c.isprintable() or c in "/[]@" for c in name)
    digits = port.isascii() and port.isdigit() and len(port) <= 5
    if not (colon and well_formed and digits and lowest <= int(port) <= 65535):
        raise ConfigError(field, text, expected)
    return Address(name, int(port))


def parse_addresses(entries: Iterable[str], field: str = "addresses") -> tuple[Address, ...]:
    """The addresses of workers, in their order.

    Args:
        entries: What the user wrote of each.
        field: Where it was written, for the error.

    Raises:
        ConfigError: One is not of the form ``name:port``, or is there twice, however it is spelled.
    """
    found: dict[tuple[str, int], Address] = {}
    for entry in entries:
        address = parse_address(entry, field)
        if address.end in found:
            raise ConfigError(field, entry, "each worker once")
        found[address.end] = address
    return tuple(found.values())


def is_loopback(ip_address: str) -> bool:
    """Whether a numeric address never leaves this machine."""
    address = ipaddress.ip_address(ip_address.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _is_ip_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
