"""What a node is told: by its kernel's command line, a file on the medium it booted from, the boot server.

Read by :mod:`duckllm.node_image.init` in the image, and by the commands that build images and hand them out,
so that a mistake is found there. Knows no files and no network: texts become values.
"""

from __future__ import annotations

import ipaddress
import re
import tomllib
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from duckllm.cluster.token import MAX_TOKEN_BYTES
from duckllm.config import MAX_THREADS, is_utf8, parse_size, parse_whole
from duckllm.errors import ConfigError, InWords

PREFIX = "duck."
DEFAULT_PORT = 7411
CACHE_LABEL = "DUCKCACHE"
MEDIUM_LABEL = "DUCKLLM"
_MAX_LABEL_BYTES = 16  # of ext4
_NAME = re.compile(r"(?=.{1,63}$)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?")
SCHEMES = ("http://", "tftp://")
_WORD = re.compile(r'(?:[^\s"]|"[^"]*(?:"|$))+')  # as the kernel divides its command line


@dataclass(frozen=True)
class NodeSettings:
    """A node's settings; every field is a key of ``node.toml`` and, as ``duck.KEY=``, of the command line.

    Args:
        token: The cluster token; without one the node does not join.
        name: What the node is called; empty for ``duck-`` and its first card's hardware address.
        host: Addresses that may connect, with commas between them; empty for any that has the token.
        port: Where the worker listens.
        announce: Whether the worker tells hosts of itself by multicast DNS, ``on`` or ``off``.
        address: This node's own address with its prefix length, ``10.0.0.11/24``; empty for DHCP.
        gateway: Router, beside ``address``.
        time_server: An NTP server's address; empty for the one that DHCP names.
        config: Where to fetch further settings, ``http://`` or ``tftp://``; of the command line alone.
        cache_label: Label of the partition that keeps weights.
        cache_bytes: Most bytes there, like ``40GiB``; empty for what it has room for.
        threads: Compute threads; 0 takes every core.

    Raises:
        ConfigError: A field is of the wrong kind or out of range.
    """

    token: str = ""
    name: str = ""
    host: str = ""
    port: int = DEFAULT_PORT
    announce: str = "on"
    address: str = ""
    gateway: str = ""
    time_server: str = ""
    config: str = ""
    cache_label: str = CACHE_LABEL
    cache_bytes: str = ""
    threads: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if type(value) is not kind:
                got = InWords(type(value).__name__) if field.name == "token" else value
                raise ConfigError(field.name, got, "text" if kind is str else "a whole number")
        if not is_utf8(self.token) or (self.token and not self.token.strip()):
            raise ConfigError("token", InWords("no UTF-8, or white space alone"), "a token of valid text")
        if len(self.token.encode()) > MAX_TOKEN_BYTES:
            raise ConfigError("token", InWords("a longer one"), f"at most {MAX_TOKEN_BYTES} bytes")
        if not 1 <= self.port <= 65535:
            raise ConfigError("port", self.port, "1 to 65535")
        if not 0 <= self.threads <= MAX_THREADS:
            raise ConfigError("threads", self.threads, f"0 (every core) to {MAX_THREADS}")
        if self.announce not in ("on", "off"):
            raise ConfigError("announce", self.announce, "on or off")
        if self.name and not _NAME.fullmatch(self.name):
            raise ConfigError("name", self.name, "at most 63 letters, digits and hyphens")
        for host in self.hosts:
            _check_address("host", host)
        for name in ("gateway", "time_server"):
            if getattr(self, name):
                _check_address(name, getattr(self, name))
        self._check_own_address()
        if self.config and not _is_address_of_file(self.config):
            raise ConfigError("config", self.config, "an address that begins with " + " or ".join(SCHEMES))
        label = self.cache_label
        if not label.isprintable() or not 1 <= len(label.encode()) <= _MAX_LABEL_BYTES:
            raise ConfigError("cache_label", label, f"a label of 1 to {_MAX_LABEL_BYTES} bytes")
        if self.cache_bytes and parse_size("cache_bytes", self.cache_bytes) < 1:
            raise ConfigError("cache_bytes", self.cache_bytes, "at least a byte; empty for all there is")

    def _check_own_address(self) -> None:
        if not self.address:
            if self.gateway:
                raise ConfigError("gateway", self.gateway, "none without an address; DHCP names one")
            return
        try:
            own = ipaddress.IPv4Interface(self.address)
        except ValueError:
            own = None
        # Without a length it would be a network of this node alone.
        if own is None or "/" not in self.address:
            raise ConfigError("address", self.address, "an address like 10.0.0.11/24")
        if self.gateway and ipaddress.IPv4Address(self.gateway) not in own.network:
            raise ConfigError("gateway", self.gateway, f"an address of {own.network}")

    @property
    def hosts(self) -> tuple[str, ...]:
        """The addresses that may connect."""
        return tuple(host.strip() for host in self.host.split(",")) if self.host else ()


def _is_address_of_file(text: str) -> bool:
    try:
        parts = urlsplit(text)
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:  # no such port, or half an IPv6 address
        return False
    return text.startswith(SCHEMES) and is_whole and text.isascii() and text.isprintable() and " " not in text


def _check_address(field: str, value: str) -> None:
    try:
        ipaddress.IPv4Address(value)
    except ValueError:
        raise ConfigError(field, value, "an IPv4 address") from None


_KINDS = {field.name: type(field.default) for field in fields(NodeSettings)}


def read_command_line(text: str) -> dict[str, Any]:
    """The settings in a kernel's command line; what does not begin with ``duck.`` is the kernel's.

    Raises:
        ConfigError: An unknown name, or a word where there must be a number.
    """
    found: dict[str, Any] = {}
    for word in _WORD.findall(text):
        name, is_setting, value = _unquoted(word).partition("=")
        if name.startswith(PREFIX) and is_setting:
            found[_known(name.removeprefix(PREFIX), name)] = _unquoted(value)
    for name, value in found.items():
        if _KINDS[name] is int:
            number = parse_whole(value)
            if number is None:
                raise ConfigError(PREFIX + name, value, "a whole number")
            found[name] = number
    return found


def _unquoted(text: str) -> str:
    """Without a double quote at both ends, as the kernel does it; no other character is special."""
    return text[1:].removesuffix('"') if text.startswith('"') else text


def read_file(text: str, source: str) -> dict[str, Any]:
    """The settings in a ``node.toml``.

    Args:
        text: Its content.
        source: What to call it in errors.

    Raises:
        ConfigError: It is no TOML, or has an unknown name.
    """
    try:
        found = tomllib.loads(text.removeprefix("\ufeff"))  # which Windows' Notepad writes
    except RecursionError:
        raise ConfigError(source, InWords("values that are nested too deeply"), "text and numbers") from None
    except ValueError as error:  # tomllib's own, or a number of too many digits
        raise ConfigError(source, InWords(f"no TOML ({error})"), 'lines like token = "..."') from None
    for name in found:
        _known(name, f"{source}: {name}")
        if name == "config":
            raise ConfigError(f"{source}: config", found[name], "it on the kernel's command line alone")
    return found


def read_fetched(text: str, source: str) -> dict[str, Any]:
    """The settings in a ``node.toml`` of the boot server, which every node there gets.

    Raises:
        ConfigError: As :func:`read_file`, or it names what a node needs before it can ask.
    """
    found = read_file(text, source)
    for name in ("address", "gateway"):
        if name in found:
            expected = "it on the medium or the kernel's command line: the network is up by then"
            raise ConfigError(f"{source}: {name}", found[name], expected)
    return found


def _known(name: str, shown: str) -> str:
    if name not in _KINDS:
        shown = "".join(char if char.isprintable() else "?" for char in shown[:120])
        raise ConfigError(shown, InWords("an unknown name"), "one of " + ", ".join(_KINDS))
    return name


def merge(*sources: dict[str, Any]) -> NodeSettings:
    """The settings of several sources, of which the first one that names a field decides.

    Raises:
        ConfigError: As of :class:`NodeSettings`.
    """
    merged: dict[str, Any] = {}
    for source in reversed(sources):
        merged |= source
    return NodeSettings(**merged)
