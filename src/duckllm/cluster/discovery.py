"""The flock that announces itself: who is there, who may take a lost one's place, and who is not taken in.

Called by :mod:`duckllm.cluster.discovery_cluster`, ``duckllm plan`` and ``duckllm doctor``. An announcement
only makes a candidate: each is asked on a connection of its own, where both sides prove with new nonces that
they hold the token (:mod:`duckllm.cluster.auth`), before it counts. Replayed ones come no further than that;
nor does a goodbye, which anybody can send, take a node out: it is asked again.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Self

from duckllm.cluster.address import Address
from duckllm.cluster.connect import Connection, WorkerInfo
from duckllm.cluster.discovery_announcement import Announcement, reachable
from duckllm.cluster.discovery_mdns import Closable, Mdns, own_networks
from duckllm.config import MAX_WORKERS, count_of
from duckllm.errors import ClusterError, ConfigError, WorkerUnavailableError

NEW, WAITING, BUSY, GONE, REFUSED = "new", "waiting", "busy", "gone", "refused"
SETTLE_S = 2.0  # no news for so long: whoever runs has answered, as questions go out at once, after 1 and 3 s
_ASK_TIMEOUT_S = 3.0
_ASK_AGAIN_S = 30.0  # a node that waits, is busy or is gone
_SOON_S = 1.0  # one that has just announced itself and does not answer yet
_WANTED_S = 2.0  # one that is busy or gone, while a host lacks nodes
_NUM_ASKED_SOON = 5
_ASKED_TOGETHER = 16
_MOST_REFUSALS = 64  # that are kept to be shown
BUSY_PROBLEM = "it serves another host"
_log = logging.getLogger("duckllm")


@dataclass(frozen=True)
class FoundNode:
    """A node that announced itself with the right proof, or one that was refused.

    Args:
        name: Of the machine; of one that is not believed, what it calls itself.
        address: Where it is; None of one that is not believed.
        state: NEW (not asked yet), WAITING (ready to be taken in), BUSY (serves another host), GONE (does not
            answer), REFUSED.
        info: What it said when it was asked; None before.
        memory_bytes: Memory of its node, as it says; 0 where it says nothing.
        read_gb_per_s: What it reads from memory; None where it does not say.
        problem: Why it is busy, gone or refused.
    """

    name: str
    address: Address | None
    state: str = NEW
    info: WorkerInfo | None = None
    memory_bytes: int = 0
    read_gb_per_s: float | None = None
    problem: str = ""

    @property
    def title(self) -> str:
        """Its name and place."""
        return self.name if self.address is None else f"{self.name} ({self.address})"


@dataclass
class _Entry:
    """What is remembered of one address."""

    node: FoundNode
    label: str
    time_us: int
    num_asked: int = 0
    asked_s: float = 0.0  # time.monotonic(), as those below
    ask_at_s: float = 0.0
    changed_s: float = 0.0


class Discovery:
    """Finds nodes until it is closed; a context manager.

    Args:
        token: The cluster token.
        interface: Address of this machine whose interface alone is searched; None for every one.
        start: Begins to listen: is given what takes an announcement, what is told of a refused one, and what
            forgets one; None for multicast DNS.
        ask: What a node says of itself at an address; None for a connection to it.
        networks: This machine's; None asks the system at each announcement.

    Raises:
        WorkerUnavailableError: The system does not let it listen.

    Threading: any thread may ask it; it has threads of its own.
    """

    def __init__(
        self,
        token: str,
        interface: str | None = None,
        *,
        start: Callable[..., Closable] | None = None,
        ask: Callable[[Address], WorkerInfo] | None = None,
        networks: Sequence[ipaddress.IPv4Interface] | None = None,
    ) -> None:
        self._token, self._networks = token, networks
        self._ask = ask or self._connect
        self._entries: dict[Address, _Entry] = {}
        self._refusals: dict[tuple[str, str], FoundNode] = {}
        self._changed = threading.Condition()
        self._news_s = time.monotonic()
        self._ended = False
        # Those that compute are not asked: their connections say more.
        self.in_use: Callable[[], Iterable[Address]] = tuple
        try:
            self._source = (start or Mdns(token, interface))(self.take, self.refuse, self.forget)
        except OSError as error:
            reason = error.strerror or str(error)
            raise WorkerUnavailableError(f"cluster discover: cannot listen for nodes: {reason}") from error
        self._thread = threading.Thread(target=self._run, name="duckllm-discovery", daemon=True)
        self._thread.start()

    # From the network.

    def take(self, label: str, announcement: Announcement) -> None:
        """Remembers a proven announcement; its node is asked soon."""
        networks = own_networks() if self._networks is None else self._networks
        address = reachable(announcement, networks)
        if address is None:
            shown = ", ".join(map(str, announcement.addresses))
            self.refuse(announcement.name, f"its address: got {shown}, expected one in this host's networks")
            return
        with self._changed:
            known = self._entries.get(address)
            if known is not None and announcement.time_us <= known.time_us:
                # Heard again, replayed, or a node whose clock went back: no more than worth a question.
                if known.node.state == GONE:
                    known.ask_at_s = min(known.ask_at_s, time.monotonic() + _SOON_S)
                    self._changed.notify_all()
                return
            if known is None and not self._has_room():
                return
            self._news_s = time.monotonic()
            node = FoundNode(
                announcement.name,
                address,
                NEW if known is None else known.node.state,
                None if known is None else known.node.info,
                announcement.memory_bytes,
                announcement.read_gb_per_s,
            )
            self._entries[address] = _Entry(node, label, announcement.time_us, changed_s=self._news_s)
            self._changed.notify_all()

    def refuse(self, name: str, why: str) -> None:
        """Remembers, and says, why an announcement was not taken."""
        with self._changed:
            if (name, why) in self._refusals or len(self._refusals) >= _MOST_REFUSALS:
                return
            self._refusals[name, why] = FoundNode(name, None, REFUSED, problem=why)
        _log.warning("node %s is not taken in: %s", name, why)

    def forget(self, label: str) -> None:
        """Asks those again that are said to be gone."""
        with self._changed:
            for entry in self._entries.values():
                if entry.label == label:
                    entry.ask_at_s = 0.0
                    entry.num_asked = 0
            self._changed.notify_all()

    # For those who look for nodes.

    def nodes(self) -> list[FoundNode]:
        """Every node that is known, in the order in which they are taken in: by name, then address."""
        with self._changed:
            found = [entry.node for entry in self._entries.values()]
        return sorted(found, key=_order)

    def refused(self) -> list[FoundNode]:
        """Announcements that were not taken, and nodes that were refused when they were asked."""
        with self._changed:
            refusals = list(self._refusals.values())
        return refusals + [node for node in self.nodes() if node.state == REFUSED]

    def waiting(self) -> list[FoundNode]:
        """Those that can be taken in."""
        used = set(self.in_use())
        return [node for node in self.nodes() if node.state == WAITING and node.address not in used]

    def lost(self, address: Address) -> None:
        """Has a node that was lost asked before it is taken in again."""
        with self._changed:
            entry = self._entries.get(address)
            if entry is not None:
                entry.node = replace(entry.node, state=GONE, problem="it was lost")
                entry.num_asked = 0
                entry.ask_at_s = time.monotonic() + _SOON_S
                self._changed.notify_all()

    def busy(self, address: Address) -> None:
        """Has a node that was found to serve another host asked before it is taken in again."""
        with self._changed:
            entry = self._entries.get(address)
            if entry is not None and entry.node.state == WAITING:
                entry.node = replace(entry.node, state=BUSY, problem=BUSY_PROBLEM)
                entry.num_asked = 0
                entry.ask_at_s = time.monotonic() + _SOON_S
                _say(entry.node, WAITING)
                self._changed.notify_all()

    def hurry(self) -> None:
        """Has those that are busy or gone asked again soon, as a host lacks nodes; to be called meanwhile."""
        with self._changed:
            for entry in self._entries.values():
                soon_s = entry.asked_s + _WANTED_S
                if entry.node.state in (BUSY, GONE) and soon_s < entry.ask_at_s:
                    entry.ask_at_s = soon_s
                    self._changed.notify_all()

    def wait(
        self, count: int, limit_s: float, settle_s: float = SETTLE_S, *, with_busy: bool = False
    ) -> list[FoundNode]:
        """The nodes that can be taken in, once there are ``count`` and no more have come for a while.

        Args:
            count: At least so many.
            limit_s: Longest wait, seconds; with enough nodes by then it is no error.
            settle_s: How long there is to be no news, seconds.
            with_busy: Have those that serve another host count too, behind all others.

        Raises:
            WorkerUnavailableError: Fewer have come in time; the message names them, and who was refused.
        """
        started = time.monotonic()
        deadline = started + limit_s
        with self._changed:
            while True:
                now = time.monotonic()
                states = [entry.node.state for entry in self._entries.values()]
                quiet_at_s = max(self._news_s, started) + settle_s
                is_settled = now >= quiet_at_s and NEW not in states
                num_there = states.count(WAITING) + (states.count(BUSY) if with_busy else 0)
                if (is_settled and num_there >= count) or now >= deadline:
                    break
                if num_there < count:
                    self.hurry()
                wake_s = min(deadline, now + _WANTED_S if now >= quiet_at_s else quiet_at_s)
                self._changed.wait(wake_s - now)
        found = self.waiting()
        if with_busy:
            found += [node for node in self.nodes() if node.state == BUSY]
        if len(found) >= count:
            return found
        raise WorkerUnavailableError(self._too_few(count, limit_s, found))

    def close(self) -> None:
        """Hears nothing more. Idempotent."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
            self._changed.notify_all()
        self._source.close()
        self._thread.join(_ASK_TIMEOUT_S + 1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _too_few(self, count: int, limit_s: float, found: Sequence[FoundNode]) -> str:
        said = ", ".join(node.title for node in found) or "none"
        lines = [f"cluster discover: found {said} within {limit_s:g} s, expected {count_of(count, 'node')}"]
        problems = [node for node in self.nodes() if node.state in (BUSY, GONE)] + self.refused()
        lines += [f"{node.title}: {node.problem}" for node in problems[:8]]
        if not found and not problems:
            lines.append("on each node: duckllm worker --announce --token-file FILE")
        return "; ".join(lines)

    def _has_room(self) -> bool:
        """Whether one more may be remembered; makes room by those that are of no use."""
        if len(self._entries) < MAX_WORKERS:
            return True
        used = set(self.in_use())
        idle = [
            address
            for address, entry in self._entries.items()
            if entry.node.state in (GONE, REFUSED) and address not in used
        ]
        if not idle:
            return False
        del self._entries[min(idle, key=lambda address: self._entries[address].changed_s)]
        return True

    def _run(self) -> None:
        with ThreadPoolExecutor(_ASKED_TOGETHER, thread_name_prefix="duckllm-ask") as pool:
            while True:
                with self._changed:
                    if self._ended:
                        return
                    used, now = set(self.in_use()), time.monotonic()
                    idle = [entry for address, entry in self._entries.items() if address not in used]
                    due = [entry.node.address for entry in idle if entry.ask_at_s <= now]
                    if not due:
                        pause_s = min((entry.ask_at_s - now for entry in idle), default=_ASK_AGAIN_S)
                        self._changed.wait(min(max(pause_s, 0.01), _ASK_AGAIN_S))
                        continue
                    batch = [address for address in due if address is not None][:_ASKED_TOGETHER]
                list(pool.map(self._ask_one, batch))

    def _ask_one(self, address: Address) -> None:
        info: WorkerInfo | None = None
        state, problem = WAITING, ""
        try:
            info = self._ask(address)
            if info.is_busy:
                state, problem = BUSY, BUSY_PROBLEM
        except WorkerUnavailableError as error:
            state, problem = GONE, str(error)
        except ClusterError as error:
            state, problem = REFUSED, str(error)
        except ConfigError as error:
            state, problem = REFUSED, str(error)
        with self._changed:
            entry = self._entries.get(address)
            if entry is None or self._ended:
                return
            now, before = time.monotonic(), entry.node
            entry.num_asked += 1
            entry.asked_s = now
            is_soon = state in (BUSY, GONE) and entry.num_asked < _NUM_ASKED_SOON
            entry.ask_at_s = now + (_SOON_S * entry.num_asked if is_soon else _ASK_AGAIN_S)
            if is_soon and state == GONE and before.state == NEW:
                state = NEW  # it may still be starting
            if state != before.state:
                entry.changed_s = now
                if state == WAITING:
                    self._news_s = now
            if info is not None:
                entry.num_asked = entry.num_asked if state == BUSY else 0
                memory_bytes, speed = info.memory_bytes, info.read_gb_per_s
            else:
                info, memory_bytes, speed = before.info, before.memory_bytes, before.read_gb_per_s
            entry.node = replace(
                before,
                state=state,
                info=info,
                memory_bytes=memory_bytes,
                read_gb_per_s=speed,
                problem=problem,
            )
            self._changed.notify_all()
        if state != before.state:
            _say(entry.node, before.state)

    def _connect(self, address: Address) -> WorkerInfo:
        with contextlib.closing(Connection(address, self._token, _ASK_TIMEOUT_S)) as connection:
            return connection.info


def _say(node: FoundNode, before: str) -> None:
    """Tells the log of a node whose state has changed."""
    if node.state == WAITING:
        words = "is there" if before == NEW else "is back"
        speed = "" if node.read_gb_per_s is None else f", {node.read_gb_per_s:.1f} GB/s"
        _log.info("node %s %s: %.1f GiB%s", node.title, words, node.memory_bytes / (1 << 30), speed)
    elif node.state == BUSY:
        _log.warning("node %s is passed over: %s", node.title, node.problem)
    elif node.state == REFUSED:
        _log.warning("node %s is not taken in: %s", node.title, node.problem)
    elif before == WAITING:
        _log.warning("node %s has gone: %s", node.title, node.problem)


def _order(node: FoundNode) -> tuple[object, ...]:
    address = node.address
    assert address is not None
    # duck-10 comes after duck-9.
    stem = node.name.rstrip("0123456789")
    return (
        stem,
        int(node.name[len(stem) :] or 0),
        node.name,
        ipaddress.IPv4Address(address.name),
        address.port,
    )
