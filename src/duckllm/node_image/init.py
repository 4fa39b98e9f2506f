"""The node's first and last program (PID 1): network, settings, the worker, and a watch over it.

Started by the kernel's initramfs (files/initramfs-init) in an image that ``duckllm node-image build`` made;
never called elsewhere. Says on the console what it does and why it does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from duckllm.errors import ConfigError
from duckllm.node_image import network
from duckllm.node_image.console import Console
from duckllm.node_image.disks import CACHE, MS_NODEV, MS_NOSUID, look_at_medium, mount_cache
from duckllm.node_image.facts import describe_memory, describe_ports, describe_processes
from duckllm.node_image.settings import NodeSettings, merge, read_command_line, read_fetched
from duckllm.node_image.tuning import make_room, tune
from duckllm.node_image.watchdog import Restarts, Watchdog, answers

IMAGE_FACTS = Path("/usr/lib/node/image.json")
WORKER_USER = 1000
_TOKEN_FILE = Path("/run/worker/token")
_RB_AUTOBOOT, _RB_DISABLE_CAD = 0x01234567, 0  # of sys/reboot.h
_LISTEN_TIMEOUT_S = 180.0
_PROBE_EVERY_S = 10.0
_LOOK_AFTER_S = 15.0  # so that what the worker does first is over
_MOST_UNANSWERED = 3
_MOST_LINE_BYTES = 65536
_SETTINGS_AGAIN_S = 30.0
_TOKEN_SOURCES = (
    "the cluster token: duck.token= on the kernel's command line, token = in node.toml of the medium, "
    "or a boot server that has one"
)


class _StopError(Exception):
    """Somebody pressed Ctrl-Alt-Del."""


class Node:
    """All that runs on this machine.

    Args:
        console: Where it says what it does.
    """

    def __init__(self, console: Console) -> None:
        self._say = console.say
        self._image: dict[str, Any] = json.loads(IMAGE_FACTS.read_text())
        self._watchdog = Watchdog()
        self._restarts = Restarts()
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._kept: dict[int, Callable[[], subprocess.Popen[bytes]]] = {}
        self._stopping = False
        signal.signal(signal.SIGINT, self._stop)  # Ctrl-Alt-Del
        signal.signal(signal.SIGTERM, self._stop)

    def run(self) -> None:
        """Starts everything and stays; returns when the node shall be started again."""
        try:
            self._run()
        except _StopError:
            self._say("node: asked to start again")
        for child in self._children.values():
            child.terminate()
        time.sleep(1.0)

    def _run(self) -> None:
        self._say(f"node: duckllm {self._image['version']}, kernel {os.uname().release}")
        medium = self._read_medium()
        settings = self._settings(medium, with_token=False)
        socket.sethostname(settings.name or network.host_name())
        for start in network.bring_up(settings, self._say):
            self._keep(start)
        if self._image["shell"]:
            self._keep(_start_shell)
        leases = self._wait_for_lease()
        settings = self._settings(medium, with_token=True)
        if settings.name:  # which the boot server may have said
            socket.sethostname(settings.name)
        self._set_clock(settings, leases)
        for line in tune():
            self._say(f"node: {line}")
        self._say(f"node: watchdog: {self._watchdog.name}")
        self._serve(settings, mount_cache(settings.cache_label, WORKER_USER, self._say))

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _settings(self, medium: dict[str, Any], *, with_token: bool) -> NodeSettings:
        """What holds: the command line before the boot server before the medium; waits until it is right.

        Args:
            medium: Settings of the medium.
            with_token: Whether to ask the boot server, if one is named, and to insist on a token.
        """
        while True:
            try:
                ours = read_command_line(Path("/proc/cmdline").read_text(errors="surrogateescape"))
                settings = merge(ours, medium)
                if with_token and settings.config:
                    theirs = read_fetched(network.fetch_config(settings.config), settings.config)
                    settings = merge(ours, theirs, medium)
                    self._say(f"node: settings from {settings.config}")
                if with_token and not settings.token:
                    raise ConfigError("token", None, _TOKEN_SOURCES)
                return settings
            except (ConfigError, OSError, subprocess.TimeoutExpired) as error:
                self._say(f"node: does not join: {error}; tries again in {_SETTINGS_AGAIN_S:g} s")
                self._wait(_SETTINGS_AGAIN_S)

    def _read_medium(self) -> dict[str, Any]:
        """The settings of the medium; waits until they are right, as one of them may say who may connect."""
        while True:
            try:
                return look_at_medium(self._say)
            except (OSError, ConfigError) as error:
                self._say(f"node: does not join: {error}; tries again in {_SETTINGS_AGAIN_S:g} s")
                self._wait(_SETTINGS_AGAIN_S)

    def _wait_for_lease(self) -> list[dict[str, Any]]:
        said = False
        while not (found := network.leases()):
            if not said and time.clock_gettime(time.CLOCK_BOOTTIME) > 30:
                self._say("node: no address yet; is there a cable, and a DHCP server?")
                said = True
            self._wait(0.1)
        for lease in found:
            self._say(f"node: {lease['interface']} has {lease['address']}")
        return found

    def _set_clock(self, settings: NodeSettings, leases: list[dict[str, Any]]) -> None:
        named = [server for lease in leases for server in lease["time_servers"]]
        servers = [settings.time_server] if settings.time_server else named
        for server in servers:
            try:
                moved_s = network.set_clock(server)
                self._say(f"node: the clock is {server}'s, moved by {moved_s:+.3f} s")
                return
            except OSError as error:
                self._say(f"node: no time from {server} ({error})")
        if not servers:
            self._say("node: nobody names a time server; the clock stays the machine's own")

    def _serve(self, settings: NodeSettings, has_cache: bool) -> None:
        """Runs the worker, again where it ends, until the node shall be started again."""
        home = _TOKEN_FILE.parent
        home.mkdir(mode=0o700)
        _TOKEN_FILE.write_text(settings.token)
        _TOKEN_FILE.chmod(0o600)
        for path in (home, _TOKEN_FILE):
            os.chown(path, WORKER_USER, WORKER_USER)
        while True:
            make_room()
            worker = self._start_worker(settings, has_cache)
            reason = self._watch(worker, settings.port)
            self._say(f"node: the worker {reason}")
            if not self._restarts.ended(time.monotonic()):
                self._say("node: it ended too often; the node starts again in 10 s")
                self._wait(10.0)
                return
            self._wait(0.5)

    def _start_worker(self, settings: NodeSettings, has_cache: bool) -> subprocess.Popen[bytes]:
        home = CACHE if has_cache else _TOKEN_FILE.parent
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # isolated cores too
        worker = subprocess.Popen(
            worker_command(settings, has_cache, self._image["announce"]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            user=WORKER_USER,
            group=WORKER_USER,
            extra_groups=[],
            cwd="/",
            env={
                "HOME": str(_TOKEN_FILE.parent),
                "DUCKLLM_CACHE_DIR": str(home),
                "OPENBLAS_NUM_THREADS": "1",  # NumPy's products are no part of a step; saves its buffers
            },
        )
        os.sched_setaffinity(0, [0])
        self._children[worker.pid] = worker
        return worker

    def _watch(self, worker: subprocess.Popen[bytes], port: int) -> str:
        """Stays until the worker has ended; why it did."""
        assert worker.stdout is not None
        os.set_blocking(worker.stdout.fileno(), False)
        started, listening, unanswered, text = time.monotonic(), False, 0, b""
        look_at: float | None = None
        next_probe, killed = started, ""
        while worker.returncode is None:
            self._wait(1.0, worker.stdout.fileno())
            with contextlib.suppress(BlockingIOError):
                text += os.read(worker.stdout.fileno(), 65536)
            *lines, text = text.split(b"\n")
            if len(text) > _MOST_LINE_BYTES:  # which has no end so far, and would be kept until it has
                lines, text = [*lines, text], b""
            for line in lines:
                shown = line.decode("utf-8", "replace")
                if not listening and shown.startswith('{"event"'):
                    listening, look_at = True, time.monotonic() + _LOOK_AFTER_S
                    uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
                    isa = json.loads(shown)["isa"]
                    self._say(f"node: joined: the worker listens on port {port} ({isa})")
                    self._say(f"node: ready {uptime_s:.1f} s after the kernel began")
                else:
                    self._say(shown)
            now = time.monotonic()
            if look_at is not None and now >= look_at:
                look_at = None
                self._look()
            if not listening:
                if now - started > _LISTEN_TIMEOUT_S:
                    killed = f"did not listen within {_LISTEN_TIMEOUT_S:g} s, and was killed"
            elif now >= next_probe:
                unanswered = 0 if answers(port, has_token=True) else unanswered + 1
                next_probe = time.monotonic() + _PROBE_EVERY_S
                if unanswered >= _MOST_UNANSWERED:
                    killed = f"gave no sign of life {unanswered} times, and was killed"
            if killed:
                worker.kill()
        worker.stdout.close()
        for rest in text.decode("utf-8", "replace").splitlines():
            self._say(rest)
        return killed or f"ended (exit status {worker.returncode})"

    def _look(self) -> None:
        """What a look into this machine would show, as there is no other way to look."""
        self._say(f"node: memory used: {describe_memory()}")
        self._say(f"node: processes: {describe_processes()}")
        self._say(f"node: open ports: {describe_ports()}")

    def _wait(self, seconds: float, until_readable: int | None = None) -> None:
        """Waits, keeps the watchdog quiet, and takes note of every process that ends.

        Raises:
            _StopError: The node shall start again.
        """
        deadline = time.monotonic() + seconds
        while True:
            self._watchdog.pet()
            self._reap()
            if self._stopping:
                raise _StopError
            left = deadline - time.monotonic()
            if left <= 0:
                return
            if until_readable is None:
                time.sleep(min(left, 1.0))
                continue
            self._selector.register(until_readable, selectors.EVENT_READ)
            ready = self._selector.select(min(left, 1.0))
            self._selector.unregister(until_readable)
            if ready:
                time.sleep(0.01)  # the line that has begun
                self._reap()
                return

    def _keep(self, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        """Starts a program that is started again where it ends."""
        child = start()
        self._children[child.pid], self._kept[child.pid] = child, start

    def _reap(self) -> None:
        again = []
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                child = self._children.pop(ended[0], None)
                if child is not None:
                    child.returncode = os.waitstatus_to_exitcode(ended[1])
                if ended[0] in self._kept:
                    again.append(self._kept.pop(ended[0]))
        for start in again:
            self._keep(start)


def _start_shell() -> subprocess.Popen[bytes]:
    terminal = os.open("/dev/console", os.O_RDWR | os.O_NOCTTY)
    try:
        return subprocess.Popen(
            [network.BUSYBOX, "setsid", "-c", network.BUSYBOX, "sh", "-l"],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={"PATH": "/bin:/usr/bin", "HOME": "/run", "TERM": "linux"},
        )
    finally:
        os.close(terminal)


def worker_command(settings: NodeSettings, has_cache: bool, can_announce: bool) -> list[str]:
    """How the worker is started.

    Args:
        settings: The node's settings.
        has_cache: Whether a disk keeps weights.
        can_announce: Whether the image has what announcing takes.
    """
    command = [sys.executable, "-IOO", "-m", "duckllm.worker", "--json"]  # as compile_library made it
    command += ["--listen", f"0.0.0.0:{settings.port}", "--token-file", str(_TOKEN_FILE)]
    command += ["--threads", str(settings.threads)]
    if can_announce and settings.announce == "on":
        command.append("--announce")
    for host in settings.hosts:
        command += ["--allow", host]
    if not has_cache:
        return [*command, "--no-cache"]
    command += ["--copy", "--cache-dir", str(CACHE / "shards")]
    return [*command, "--cache-bytes", settings.cache_bytes] if settings.cache_bytes else command


def _restart(say: Any) -> NoReturn:
    say("node: starts again")
    os.sync()
    subprocess.run([network.BUSYBOX, "umount", str(CACHE)], check=False, capture_output=True)
    ctypes.CDLL(None).reboot(_RB_AUTOBOOT)
    while True:
        time.sleep(60)  # the machine's watchdog ends this


def main() -> NoReturn:
    """Runs the node; whatever happens ends in a new start of it."""
    for target, options in (("/run", "mode=0755,size=64m"), ("/tmp", "mode=1777,size=16m")):
        ctypes.CDLL(None).mount(b"tmpfs", target.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options.encode())
    console = Console()
    ctypes.CDLL(None).reboot(_RB_DISABLE_CAD)  # Ctrl-Alt-Del is told to this program
    try:
        Node(console).run()
    except BaseException:
        for line in traceback.format_exc().splitlines():
            console.say(line)
        console.say("node: failed for a reason of its own (please report it); starts again in 30 s")
        time.sleep(30)
    _restart(console.say)
