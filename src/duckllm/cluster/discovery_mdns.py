"""Announcements on the network, by multicast DNS: a node's and a host's are sent here, and heard.

Called by the worker and by :mod:`duckllm.cluster.discovery`. The records that the zeroconf package carries
are read by :mod:`duckllm.cluster.discovery_announcement`; of them only the signed text is believed: other
records (addresses, ports, goodbyes) can be sent by anybody.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from duckllm.cluster.address import Address
from duckllm.cluster.discovery_announcement import (
    Announcement,
    UnprovenError,
    listening_at,
    node_name,
    parse,
    sign,
)
from duckllm.cluster.frames import safe_text
from duckllm.errors import ConfigError, MissingPackageError, ProtocolError

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

TYPES = {"node": "_duckllm._tcp.local.", "host": "_duckllm-host._tcp.local."}
_LOOK_AGAIN_S = 5.0  # at this machine's networks, which may come, go and change
_REQUEST_MS = 2000
_TYPE_TEXT, _CLASS_INTERNET = 16, 1  # of records: RFC 1035, 3.2
_MOST_REQUESTS = 64  # for records that did not come together; of more, the next news are waited for
_MOST_REFUSALS = 64  # that are told apart, so that a flood of them is no flood of lines
_log = logging.getLogger("duckllm")


class Closable(Protocol):
    """What is closed at the end."""

    def close(self) -> None:
        """Ends it."""


def check_zeroconf(field: str) -> None:
    """Refuses where the package is missing.

    Raises:
        MissingPackageError: It is.
    """
    if importlib.util.find_spec("zeroconf") is None:
        raise MissingPackageError("zeroconf", field, "discover")


def own_networks() -> list[ipaddress.IPv4Interface]:
    """This machine's IPv4 addresses with their networks."""
    import ifaddr

    return [
        ipaddress.IPv4Interface(f"{ip.ip}/{ip.network_prefix}")
        for adapter in ifaddr.get_adapters()
        for ip in adapter.ips
        if ip.is_IPv4
    ]


class Announcer:
    """Announces a role on the network until it is closed, again whenever this machine's addresses change.

    Args:
        announcement: What is said; addresses and time are filled in.
        token: The cluster token.
        find: The addresses of the interfaces to announce through, and those to announce; asked every few
            seconds.
        log: Takes a line for what keeps it from announcing, and for where it announces.

    Threading: has a thread of its own, beside zeroconf's.
    """

    def __init__(
        self,
        announcement: Announcement,
        token: str,
        find: Callable[[], tuple[list[str], tuple[Address, ...]]],
        log: Callable[[str], None],
    ) -> None:
        self._announcement, self._token, self._find, self._log = announcement, token, find, log
        self._end = threading.Event()
        self._zeroconf: Zeroconf | None = None
        self._said = ""
        self._thread = threading.Thread(target=self._run, name="duckllm-announce", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Says goodbye, if that takes no longer than a second or two. Idempotent."""
        self._end.set()
        self._thread.join(3.0)

    def _run(self) -> None:
        known: tuple[list[str], tuple[Address, ...]] | None = None
        while not self._end.is_set():
            try:
                now = self._find()
                if now != known:
                    self._stop()
                    known = now
                    if now[0]:
                        self._start(*now)
                    else:
                        self._say("no network to announce on yet")
            except Exception as error:  # zeroconf's own, or the system's: tried again
                known = None
                self._stop()
                self._say(f"cannot announce: {getattr(error, 'strerror', None) or error}")
            self._end.wait(_LOOK_AGAIN_S)
        self._stop()

    def _start(self, interfaces: Sequence[str], addresses: tuple[Address, ...]) -> None:
        self._zeroconf = open_zeroconf(interfaces)
        announcement = dataclasses.replace(self._announcement, addresses=addresses)
        info = service_info(announcement, interfaces, self._token)
        # Its label is made unique by its addresses; asking whether another has it would cost a second.
        self._zeroconf.register_service(info, cooperating_responders=True)
        places = ", ".join(map(str, addresses)) or ", ".join(interfaces)
        self._say(f"announces itself as {announcement.name} at {places}")

    def _stop(self) -> None:
        zeroconf, self._zeroconf = self._zeroconf, None
        if zeroconf is not None:
            with contextlib.suppress(Exception):
                zeroconf.close()

    def _say(self, line: str) -> None:
        if line != self._said:
            self._said = line
            self._log(line)


class Listener:
    """Hears announcements of one role, until it is closed.

    Args:
        role: Whose.
        token: The cluster token.
        interfaces: Addresses of the interfaces to listen on; None for every one.
        take: Is given each that is proven, with the label of its service.
        refuse: Is told a label and why its announcement was not taken, once for each of these.
        forget: Is told the label of a service that says, or is said, to be gone: anybody can.

    Raises:
        OSError: The system does not let it listen.

    Threading: the callbacks are called from zeroconf's threads, and are not to wait.
    """

    def __init__(
        self,
        role: str,
        token: str,
        interfaces: Sequence[str] | None,
        take: Callable[[str, Announcement], None],
        refuse: Callable[[str, str], None],
        forget: Callable[[str], None] = lambda label: None,
    ) -> None:
        from zeroconf import ServiceBrowser

        self._role, self._token = role, token
        self._take, self._refuse, self._forget = take, refuse, forget
        self._refused: set[tuple[str, str]] = set()
        self._num_requests = 0
        self._guard = threading.Lock()
        self._zeroconf = open_zeroconf(interfaces)
        try:
            self._browser = ServiceBrowser(self._zeroconf, TYPES[role], handlers=[self._heard])
        except BaseException:
            self._zeroconf.close()
            raise

    def close(self) -> None:
        """Hears nothing more."""
        with contextlib.suppress(Exception):
            self._zeroconf.close()

    def _heard(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: Any) -> None:
        import asyncio

        from zeroconf import ServiceInfo, ServiceStateChange

        label = name.removesuffix(f".{TYPES[self._role]}")
        if state_change is ServiceStateChange.Removed:
            self._forget(label)
            return
        try:
            info = ServiceInfo(service_type, name)
            if self._read_all(label, info):
                return
        except Exception as error:  # of a malformed name
            self._note(label, f"its records: {error}")
            return
        with self._guard:
            if self._num_requests >= _MOST_REQUESTS:
                return
            self._num_requests += 1
        loop = zeroconf.loop
        assert loop is not None
        asyncio.run_coroutine_threadsafe(self._request(label, info), loop)

    async def _request(self, label: str, info: ServiceInfo) -> None:
        try:
            with contextlib.suppress(Exception):
                await info.async_request(self._zeroconf, _REQUEST_MS)
            self._read_all(label, info)
        finally:
            with self._guard:
                self._num_requests -= 1

    def _read_all(self, label: str, info: ServiceInfo) -> bool:
        """Reads what is known of a service; False where that is nothing."""
        from zeroconf import ServiceInfo

        texts = texts_of(info.name, self._zeroconf)
        for text in texts:
            self._read(label, ServiceInfo(info.type, info.name, properties=text))
        return bool(texts)

    def _read(self, label: str, info: ServiceInfo) -> None:
        try:
            announcement = parse(info.decoded_properties, len(info.text or b""), self._token)
            if announcement.role != self._role:
                raise ProtocolError(f"its role: got {announcement.role!r}, expected {self._role!r}")
        except UnicodeDecodeError:
            self._note(label, "its record: got bytes that are not UTF-8, expected text")
        except ProtocolError as error:
            self._note(label, str(error), is_unproven=isinstance(error, UnprovenError))
        else:
            self._take(label, announcement)

    def _note(self, label: str, why: str, *, is_unproven: bool = False) -> None:
        shown = safe_text(label)[:80]
        # Whoever has another token may have it in good faith: one line for each. Others are noise.
        key = (shown if is_unproven else "", why)
        with self._guard:
            if key in self._refused or len(self._refused) >= _MOST_REFUSALS:
                return
            self._refused.add(key)
        self._refuse(shown, why)


def texts_of(name: str, zeroconf: Zeroconf) -> list[bytes]:
    """Every text record that was heard under a service's name: others may use a node's, and not hide it."""
    records = zeroconf.cache.get_all_by_details(name, _TYPE_TEXT, _CLASS_INTERNET)
    texts: list[bytes] = [getattr(record, "text", b"") for record in records]
    return [text for text in texts if text]


def open_zeroconf(interfaces: Sequence[str] | None) -> Zeroconf:
    """Sockets of multicast DNS on these interfaces, or on every one."""
    from zeroconf import InterfaceChoice, IPVersion, Zeroconf

    log = logging.getLogger("zeroconf")
    if log.level == logging.NOTSET:  # it warns, with tracebacks, of every packet that others malform
        log.setLevel(logging.CRITICAL)
    chosen = InterfaceChoice.All if interfaces is None else list(interfaces)
    # Not in a loop of the program's own, which may stand still while a reply is computed.
    return Zeroconf(interfaces=chosen, ip_version=IPVersion.V4Only, use_asyncio=False)


def service_info(announcement: Announcement, interfaces: Sequence[str], token: str) -> ServiceInfo:
    """The records of an announcement, signed now."""
    from zeroconf import ServiceInfo

    entries = sign(announcement, token)
    signed = dataclasses.replace(announcement, time_us=int(entries["time_us"]))
    kind = TYPES[announcement.role]
    return ServiceInfo(
        kind,
        f"{signed.label}.{kind}",
        port=announcement.addresses[0].port if announcement.addresses else 0,
        properties=entries,
        server=f"{signed.label}.local.",
        parsed_addresses=list(interfaces),
    )


class Mdns:
    """Multicast DNS as a search starts it: nodes are heard, and this host is announced to them.

    They cannot know otherwise why nobody takes them in: a node that hears a host with another token says so.
    """

    def __init__(self, token: str, interface: str | None) -> None:
        self._token, self._interface = token, interface
        self._open: list[Closable] = []

    def __call__(self, take: Any, refuse: Any, forget: Any) -> Self:
        """Begins, with a listener's three callbacks."""
        interfaces = None if self._interface is None else [self._interface]
        self._open.append(Listener("node", self._token, interfaces, take, refuse, forget))

        def find() -> tuple[list[str], tuple[Address, ...]]:
            return interfaces or [str(each.ip) for each in own_networks()], ()

        host = Announcement("host", node_name(), time_us=time.time_ns() // 1000)
        self._open.append(Announcer(host, self._token, find, lambda line: _log.info("this host %s", line)))
        return self

    def close(self) -> None:
        """Hears and says nothing more."""
        while self._open:
            self._open.pop().close()


class NodeAnnouncement:
    """A worker's: announces it, and says on its console which hosts look for nodes with another token.

    Args:
        listen: Where it listens, a numeric address.
        token: The cluster token.
        asked_name: The name to go by; None for the system's.
        isa: Its instruction set.
        memory_bytes: Memory of its node.
        read_gb_per_s: What it reads from memory; None where nobody measured.
        log: Takes one line for each event.

    Raises:
        ConfigError: It listens on IPv6 alone, or the name is none.
    """

    def __init__(
        self,
        listen: Address,
        token: str,
        asked_name: str | None,
        isa: str,
        memory_bytes: int,
        read_gb_per_s: float | None,
        log: Callable[[str], None],
    ) -> None:
        name = node_name(asked_name)
        listening_at(listen, [])
        self._token, self._log = token, log
        self._listener: Listener | None = None
        self._heard_on: list[str] = []

        def find() -> tuple[list[str], tuple[Address, ...]]:
            interfaces, addresses = listening_at(listen, own_networks())
            self._listen_for_hosts(interfaces)
            return interfaces, addresses

        said = Announcement("node", name, (), isa, memory_bytes, read_gb_per_s)
        self._announcer = Announcer(said, token, find, log)

    def _listen_for_hosts(self, interfaces: list[str]) -> None:
        if interfaces == self._heard_on:
            return
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if interfaces:
            self._listener = Listener("host", self._token, interfaces, self._take, self._refuse)
        self._heard_on = interfaces

    def _take(self, label: str, host: Announcement) -> None:
        self._log(f"host {host.name} looks for nodes, with this node's cluster token")

    def _refuse(self, label: str, why: str) -> None:
        self._log(f"host {label} looks for nodes and does not take this one in: {why}")

    def close(self) -> None:
        """Says goodbye to hosts."""
        self._announcer.close()
        if self._listener is not None:
            self._listener.close()


def check_interface(name: str) -> str:
    """An address of this machine, through whose interface alone nodes are looked for.

    Raises:
        ConfigError: It is none of this machine's.
    """
    own = [str(interface.ip) for interface in own_networks()]
    if name not in own:
        raise ConfigError("cluster", f"discover:{name}", f"one of this host's: {', '.join(own)}")
    return name
