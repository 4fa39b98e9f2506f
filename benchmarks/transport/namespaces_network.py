"""A host and workers on one switch, each in a network namespace of its own: the network of namespaces.py.

Every machine has a veth pair to a bridge; both ends send through a token bucket, so that a link carries no
more than its speed in either direction. Packets are lost by chance when they arrive at a machine, by a BPF
program that the kernel runs (this needs no netem). Needs root, ``ip`` and ``tc`` (iproute2). Everything is
named flock-, the process id and so on, and removed in the end; what a killed run left is removed by the next.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

PREFIX = f"flock-{os.getpid()}-"
HOST, SWITCH = f"{PREFIX}host", f"{PREFIX}switch"
_CLONE_NEWNET, _SO_RCVBUFFORCE = 0x40000000, 33  # linux/sched.h, asm-generic/socket.h
_NAMESPACES = "/run/netns"
_BUFFER_BYTES = 1 << 20  # of a switch's port, and of an interface's queue
_LOSS_PACKETS, _LOSS_BYTES = 40_000, 100  # of the test of the loss
_libc = ctypes.CDLL(None, use_errno=True)


def run(*words: str) -> str:
    """What a command writes; ends the program, with its words, where it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def check_rights() -> None:
    """Ends the program where namespaces cannot be made."""
    if os.geteuid() != 0:
        raise SystemExit("namespaces: got a user other than root, expected root: sudo python ...")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool}: not found, expected iproute2: apt install iproute2")


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread, the sockets that it makes and the processes that it starts are in that namespace."""
    with open("/proc/self/ns/net") as before, open(f"{_NAMESPACES}/{namespace}") as wanted:
        _enter(wanted.fileno())
        try:
            yield
        finally:
            _enter(before.fileno())


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


class Network:
    """The machines, their links and the switch; a context manager.

    Args:
        num_workers: Workers.
        mbit_per_s: Speed of each link, in each direction.
        uplink_only: Whether only what the host sends is slowed down to that.
    """

    def __init__(self, num_workers: int, mbit_per_s: int, *, uplink_only: bool = False) -> None:
        self.mbit_per_s, self._uplink_only = mbit_per_s, uplink_only
        self.workers = tuple(f"{PREFIX}worker{number}" for number in range(1, num_workers + 1))
        self.machines = (HOST, *self.workers)
        self._loss = 0.0

    def address(self, machine: str) -> str:
        """Its IPv4 address."""
        return f"10.77.0.{10 + self.machines.index(machine)}"

    def __enter__(self) -> Network:
        remove_namespaces()
        try:
            self._build()
        except BaseException:
            remove_namespaces()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        remove_namespaces()

    def _build(self) -> None:
        run("ip", "netns", "add", SWITCH)
        run("ip", "-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", SWITCH, "link", "set", "bridge", "up")
        for number, machine in enumerate(self.machines):
            port = f"port{number}"
            run("ip", "netns", "add", machine)
            run("ip", "-n", machine, "link", "set", "lo", "up")
            pair = ("type", "veth", "peer", "name", port, "netns", SWITCH)
            run("ip", "-n", machine, "link", "add", "eth0", *pair)
            run("ip", "-n", SWITCH, "link", "set", port, "master", "bridge")
            run("ip", "-n", machine, "address", "add", f"{self.address(machine)}/24", "dev", "eth0")
            run("tc", "-n", machine, "qdisc", "add", "dev", "eth0", "clsact")
            # Packets as a wire has them, and not the kernel's of 64 KB; a slow link cuts those up by itself.
            segments = () if self._uplink_only else ("gso_max_segs", "1")
            for namespace, device in ((machine, "eth0"), (SWITCH, port)):
                run("ip", "-n", namespace, "link", "set", device, *segments, "up")
        self.set_mtu(1500)

    def set_mtu(self, mtu: int) -> None:
        """Sets the largest packet, bytes, of every link."""
        speed = ("rate", f"{self.mbit_per_s}mbit", "limit", str(_BUFFER_BYTES))
        shape = ("root", "tbf", *speed, "burst", str(burst_bytes(mtu)))
        for number, machine in enumerate(self.machines):
            for namespace, device in ((SWITCH, f"port{number}"), (machine, "eth0")):
                run("ip", "-n", namespace, "link", "set", device, "mtu", str(mtu))
                if namespace == HOST or not self._uplink_only:
                    run("tc", "-n", namespace, "qdisc", "replace", "dev", device, *shape)

    def set_loss(self, share: float) -> None:
        """Loses such a share of the packets that arrive at any machine."""
        for machine in self.machines:
            if self._loss:
                run("tc", "-n", machine, "filter", "del", "dev", "eth0", "ingress")
            if share:
                at = ("dev", "eth0", "ingress")
                run("tc", "-n", machine, "filter", "add", *at, "bpf", "da", "bytecode", _lose(share))
        self._loss = share

    def num_lost(self) -> int:
        """Packets lost by chance so far."""
        lost = 0
        for machine in self.machines:
            listed = json.loads(run("tc", "-n", machine, "-s", "-j", "qdisc", "show", "dev", "eth0"))
            lost += sum(each["drops"] for each in listed if each["kind"] == "clsact")
        return lost

    def measure_loss(self) -> float:
        """The share of small datagrams to the first worker that do not arrive."""
        machine = self.workers[0]
        with inside(machine):
            taker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            taker.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 1 << 26)
            taker.bind((self.address(machine), 0))
        with inside(HOST):
            giver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        got = 0

        def take() -> None:
            nonlocal got
            with contextlib.suppress(TimeoutError):
                while got < _LOSS_PACKETS:
                    taker.recv(_LOSS_BYTES)
                    got += 1

        with taker, giver:
            taker.settimeout(1)
            giver.connect(taker.getsockname())
            taking = threading.Thread(target=take)
            taking.start()
            for _ in range(_LOSS_PACKETS):
                giver.send(bytes(_LOSS_BYTES))
            taking.join()
        return 1 - got / _LOSS_PACKETS


def burst_bytes(mtu: int) -> int:
    """What a link lets pass at once: as little as it can, so that a step does not pass in a burst."""
    return max(mtu + 18, 2 * (1500 + 18))


def _lose(share: float) -> str:
    """Classic BPF for tc: drop (2) where a random number of 32 bits is below a limit, else pass (0)."""
    load_random, jump_if_at_least, answer = 0x20, 0x35, 0x06
    random = (1 << 32) - 0x1000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM of linux/filter.h
    limit = round(share * (1 << 32))
    program = ((load_random, 0, 0, random), (jump_if_at_least, 1, 0, limit))
    program += ((answer, 0, 0, 2), (answer, 0, 0, 0))
    return ",".join([str(len(program)), *(" ".join(map(str, line)) for line in program)])


def remove_namespaces() -> None:
    """Removes the namespaces of this process, and of ended ones of its kind; links go with them."""
    for name in sorted(os.listdir(_NAMESPACES)) if os.path.isdir(_NAMESPACES) else []:
        found = re.fullmatch(r"flock-(\d+)-\w+", name)
        if found and (int(found[1]) == os.getpid() or not os.path.exists(f"/proc/{found[1]}")):
            run("ip", "netns", "delete", name)
