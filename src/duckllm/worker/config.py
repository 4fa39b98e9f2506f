"""A worker's configuration, as its command line gives it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from duckllm.cluster.discovery_announcement import node_name
from duckllm.cluster.token import TOKEN_VARIABLE
from duckllm.config import LOSSLESS_FORMATS, MAX_THREADS, MAX_TIMEOUT_S, PREFILLS, available_cores, is_utf8
from duckllm.errors import ConfigError, InWords
from duckllm.paths import path_problem

DEFAULT_LISTEN = "127.0.0.1:7411"
ANNOUNCED_LISTEN = "0.0.0.0:7411"  # of a worker that is to be found
_SPIN_US_WITH_SPARE_CORES = 200
FORMATS = ("auto", *LOSSLESS_FORMATS)  # to compute in, which is a choice between copies that lose nothing
MAX_SPEED = 1_000_000  # GB/s; no node reads a petabyte a second


@dataclass(frozen=True)
class WorkerConfig:
    """How a worker listens, computes and waits.

    Args:
        listen: Address to listen on; port 0 takes a free one. None: on loopback, or on every network where it
            is announced.
        model: Its own converted model, looked into before the host's folder; None for none.
        threads: Compute threads; 0 takes every core.
        spin_us: How long idle threads spin before they sleep, microseconds; -1 decides by the cores.
        pin: Whether each compute thread stays on a core of its own; None: where they take every core, as on a
            machine that does nothing else.
        weight_format: Format to compute in, whatever the host asks for: ``"fp9"`` or ``"fp8"``; ``"auto"``
            takes the host's, or what is stored, unless the other is measured to be faster.
        prefill: What experts of many rows are computed with, ``"f32"`` or ``"bf16"``
            (csrc/kernels/experts.h).
        cache: Whether what is in no folder, and comes from the host, is kept in the node cache; else it is in
            memory alone, and comes again with the next plan.
        cache_dir: Folder of the node cache; None for ``shards`` in this user's cache.
        cache_bytes: Most bytes in it; None for what the disk has room for.
        speed: Bytes that this node reads from memory, GB/s; None measures it when a worker first starts on a
            machine, 0 says nothing of it to hosts.
        copy: Whether to copy the slice into memory of its own, in huge pages, instead of mapping the files.
        announce: Whether hosts are told of this worker by multicast DNS (``cluster="discover"``); needs a
            token.
        node_name: The name that this node goes by; None for the system's, up to its first dot.
        token: The cluster token, text that UTF-8 can hold; needed beyond loopback.
        allow: Addresses that may connect, beside this machine's own; empty for any.
        shared_memory: Inherited descriptors of memory that a host shares with this worker: the memory, the
            host's bell, this worker's; empty for none.
        exit_with_stdin: Whether to leave when standard input ends.
        handshake_timeout_s: From accepting a connection to its complete plan, seconds.
        frame_timeout_s: From the first byte of a step request to its last, seconds.
        send_timeout_s: For the host to take one reply, seconds.

    Raises:
        ConfigError: A field is of the wrong kind or out of range.
    """

    listen: str | None = None
    model: Path | None = None
    threads: int = 0
    spin_us: int = -1
    pin: bool | None = None
    weight_format: str = "auto"
    prefill: str = "f32"
    cache: bool = True
    cache_dir: Path | None = None
    cache_bytes: int | None = None
    speed: float | None = None
    copy: bool = False
    announce: bool = False
    node_name: str | None = None
    token: str | None = None
    allow: tuple[str, ...] = ()
    shared_memory: tuple[int, ...] = ()
    exit_with_stdin: bool = False
    handshake_timeout_s: float = 10.0
    frame_timeout_s: float = 30.0
    send_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not isinstance(self.listen, str | None):
            raise ConfigError("listen", self.listen, "an address, name:port")
        for field in ("model", "cache_dir"):
            value = getattr(self, field)
            if not isinstance(value, Path | None) or (value is not None and path_problem(str(value))):
                raise ConfigError(field, value, "a path, or None")
        for field, least, most, meaning in (
            ("threads", 0, MAX_THREADS, "0 (every core)"),
            ("spin_us", -1, 1_000_000, "-1 (decide by the cores)"),
        ):
            value = getattr(self, field)
            if type(value) is not int or not least <= value <= most:
                raise ConfigError(field, value, f"{meaning} to {most}")
        if not isinstance(self.pin, bool | None):
            raise ConfigError("pin", self.pin, "True, False or None")
        cores = available_cores()
        if self.pin and self.threads > cores:
            raise ConfigError("threads", self.threads, f"at most {cores}, the cores to pin them to")
        for field in ("handshake_timeout_s", "frame_timeout_s", "send_timeout_s"):
            value = getattr(self, field)
            if type(value) not in (int, float) or not 0.001 <= value <= MAX_TIMEOUT_S:
                raise ConfigError(field, value, f"0.001 to {MAX_TIMEOUT_S}")
        if self.speed is not None and not (type(self.speed) in (int, float) and 0 <= self.speed <= MAX_SPEED):
            raise ConfigError("speed", self.speed, f"GB/s, 0 to {MAX_SPEED}, or None")
        if not isinstance(self.weight_format, str) or self.weight_format not in FORMATS:
            expected = f"one of {', '.join(FORMATS)}"
            hint = "other formats are computed as they are stored"
            raise ConfigError("format", self.weight_format, expected, hint)
        if not isinstance(self.prefill, str) or self.prefill not in PREFILLS:
            raise ConfigError("prefill", self.prefill, "one of " + ", ".join(PREFILLS))
        for field in ("cache", "copy", "announce"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(field, getattr(self, field), "True or False")
        self._check_cache()
        for address in self.allow:
            try:
                ipaddress.ip_address(address)
            except ValueError:
                raise ConfigError("allow", address, "an address like 10.0.0.10") from None
        if not isinstance(self.token, str | None):
            raise ConfigError("token", InWords(type(self.token).__name__), "text, or None")
        if self.token is not None and not is_utf8(self.token):
            raise ConfigError("token", InWords("text that UTF-8 cannot hold"), "valid text")
        node_name(self.node_name)
        if self.announce and self.token is None:
            expected = "a token, by which an announced worker and its hosts know each other"
            raise ConfigError("cluster_token", None, expected, f"--token-file FILE or ${TOKEN_VARIABLE}")

    def _check_cache(self) -> None:
        if self.cache_bytes is not None and (type(self.cache_bytes) is not int or self.cache_bytes < 1):
            raise ConfigError("cache_bytes", self.cache_bytes, "a whole number from 1, or None")
        for field in ("cache_dir", "cache_bytes"):
            if not self.cache and getattr(self, field) is not None:
                raise ConfigError(field, getattr(self, field), "nothing without a cache", "--no-cache")

    def lets_in(self, peer: str) -> bool:
        """Whether who connects from this address may."""
        if not self.allow:
            return True
        address = ipaddress.ip_address(peer.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return address.is_loopback or address in map(ipaddress.ip_address, self.allow)

    @property
    def resolved_listen(self) -> str:
        """Where it listens, None resolved."""
        return self.listen or (ANNOUNCED_LISTEN if self.announce else DEFAULT_LISTEN)

    @property
    def resolved_threads(self) -> int:
        """Compute threads, 0 resolved."""
        return self.threads or available_cores()

    @property
    def resolved_spin_us(self) -> int:
        """Spin time, -1 resolved."""
        if self.spin_us >= 0:
            return self.spin_us
        return _SPIN_US_WITH_SPARE_CORES if self.resolved_threads < available_cores() else 0

    @property
    def resolved_pin(self) -> bool:
        """Whether threads are pinned, None resolved."""
        return self.resolved_threads == available_cores() if self.pin is None else self.pin
