"""A worker process from start to end: listen, hand connections to sessions, stop when told to.

Called by ``python -m duckllm.worker`` and by the command line. The main thread only accepts; every connection
has a thread, of which there are few.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from duckllm import _native
from duckllm._native import ErrorCode
from duckllm.cluster.address import Address, is_loopback, parse_address
from duckllm.cluster.discovery_mdns import NodeAnnouncement, check_zeroconf
from duckllm.cluster.token import TOKEN_VARIABLE
from duckllm.config import threads_in_words, total_memory_bytes
from duckllm.errors import ConfigError
from duckllm.worker.config import WorkerConfig
from duckllm.worker.read_speed import read_speed
from duckllm.worker.session import Sessions

MAX_CONNECTIONS = 8
STOP_TIMEOUT_S = 3.0
_BACKLOG = 128  # connections wait here only until the main thread accepts or refuses them


class WorkerServer:
    """Listens at once; :meth:`serve` accepts until :meth:`stop`.

    Args:
        config: The worker's configuration.
        log: Takes one line per event.
        sessions: Serves connections; None for the worker's own.

    Raises:
        ConfigError: The address is malformed or taken, or beyond loopback without a token; or
            DUCK_FORCE_ISA is wrong, or bf16 is asked for where the CPU lacks it.
        ModelError: ``config.model`` is no converted model.
    """

    def __init__(
        self, config: WorkerConfig, log: Callable[[str], None], sessions: Sessions | None = None
    ) -> None:
        self._config, self._log = config, log
        self._sessions = Sessions(config, log) if sessions is None else sessions
        self.instructions = self._sessions.instructions
        self._listener = _listen(config)
        name, port = self._listener.getsockname()[:2]
        self.address = Address(name, port)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._guard = threading.Lock()  # of _connections

    def measure(self) -> None:
        """Finds out how fast this node reads, unless the configuration says so or forbids it.

        Raises:
            ConfigError: There is no memory to measure with.
        """
        if self._config.speed is None:
            self._sessions.read_gb_per_s = read_speed(self._config.resolved_threads)

    def announce(self) -> NodeAnnouncement | None:
        """Tells hosts of this worker until what this gives is closed; None where that was not asked for.

        Raises:
            ConfigError: It listens where no host would find it.
        """
        config = self._config
        if not config.announce:
            return None
        assert config.token is not None
        return NodeAnnouncement(
            self.address,
            config.token,
            config.node_name,
            self.instructions,
            total_memory_bytes(),
            self._sessions.read_gb_per_s,
            self._log,
        )

    def serve(self) -> bool:
        """Accepts connections until stopped; True when every connection's thread has ended by then."""
        stdin = 0
        if self._config.exit_with_stdin and sys.stdin is None:
            return self._close()  # closed from the start: it has ended, and its descriptor is another's now
        with selectors.PollSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            if self._config.exit_with_stdin:
                selector.register(stdin, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if self._wake_receiver.fileno() in ready or (stdin in ready and _stdin_ended()):
                    break
                if self._listener.fileno() in ready:
                    self._accept()
        return self._close()

    def stop(self) -> None:
        """Makes :meth:`serve` return. Safe in a signal handler and from any thread."""
        with contextlib.suppress(OSError):  # already told so
            self._wake_sender.send(b"s")

    def _accept(self) -> None:
        try:
            connection, peer_address = self._listener.accept()
        except OSError as error:
            self._log(f"accept failed: {error.strerror}")
            time.sleep(0.1)  # out of descriptors: others must end first
            return
        peer = str(Address(*peer_address[:2]))
        if not self._config.lets_in(peer_address[0]):
            text = "this worker takes no connections from that address"
            self._refuse(connection, peer, text, ErrorCode.AUTHENTICATION)
            return
        with contextlib.suppress(OSError):  # gone already
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._guard:
            room = len(self._connections) < MAX_CONNECTIONS
            if room:
                thread = threading.Thread(target=self._serve_connection, args=(connection, peer), daemon=True)
                self._connections[connection] = thread
        if not room:
            self._refuse(connection, peer, f"busy: {MAX_CONNECTIONS} connections are open, expected fewer")
            return
        try:
            thread.start()
        except (RuntimeError, MemoryError):  # at a limit of threads or memory, which others may free
            with self._guard:
                del self._connections[connection]
            self._refuse(connection, peer, "busy: this worker can start no further thread")

    def _refuse(
        self, connection: socket.socket, peer: str, text: str, code: ErrorCode = ErrorCode.BUSY
    ) -> None:
        with contextlib.suppress(OSError):
            connection.send(_native.encode_error_frame(code, text), socket.MSG_DONTWAIT)
        connection.close()
        self._log(f"{peer}: refused: {text}")

    def _serve_connection(self, connection: socket.socket, peer: str) -> None:
        try:
            self._sessions.serve(connection, peer)
        finally:
            with self._guard:
                del self._connections[connection]
            connection.close()

    def _close(self) -> bool:
        self._sessions.stop()
        self._listener.close()
        with self._guard:
            connections = dict(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):  # gone by itself
                connection.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for thread in connections.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        self._wake_sender.close()
        self._wake_receiver.close()
        return not any(thread.is_alive() for thread in connections.values())


def run_worker(config: WorkerConfig, *, json_output: bool = False) -> None:
    """Runs a worker in this process until SIGTERM, SIGINT or, if so configured, the end of standard input.

    Args:
        config: The worker's configuration.
        json_output: Say where it listens as one JSON line, for programs, instead of a sentence.

    Raises:
        ConfigError: As :class:`WorkerServer`; or it is to be announced and listens on IPv6.
        MissingPackageError: It is to be announced, and zeroconf is not installed.
        ModelError: As :class:`WorkerServer`.
    """
    if config.announce:
        check_zeroconf("announce")
    _give_large_memory_back()
    server = WorkerServer(config, _log)
    server.measure()
    announcement = server.announce()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    isa = server.instructions
    if json_output:
        facts = {"event": "listening", "address": str(server.address), "pid": os.getpid(), "isa": isa}
        line = json.dumps(facts)
    else:
        line = (
            f"worker listening on {server.address} "
            f"({isa}, {threads_in_words(config.resolved_threads)}, "
            f"{'with' if config.token else 'without'} a cluster token); Ctrl-C stops it"
        )
    write_line(sys.stdout, line)
    has_ended = server.serve()
    if announcement is not None:
        announcement.close()
    if not has_ended:
        # A thread is still inside a step: leave without the interpreter's tear-down under its feet.
        os._exit(0)


def _give_large_memory_back() -> None:
    """Has malloc map every large block and unmap it when it is freed, as it does at first.

    glibc else learns from a message of megabytes to keep such blocks, in an arena of each thread.
    """
    mmap_threshold, at_least_bytes = -3, 1 << 20  # M_MMAP_THRESHOLD of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it, musl has no need
    if mallopt is not None:
        mallopt(mmap_threshold, at_least_bytes)


def _log(line: str) -> None:
    write_line(sys.stderr, f"worker: {line}")


def write_line(stream: TextIO | None, line: str) -> None:
    """Writes at once and past every buffer, which would keep a failed line for the exit; may lose it."""
    if stream is None:
        return
    with contextlib.suppress(OSError, ValueError):  # closed, full, or nobody reads it
        os.write(stream.fileno(), f"{line}\n".encode("utf-8", "replace"))


def _stdin_ended() -> bool:
    try:
        return os.read(0, 4096) == b""
    except OSError:
        return True


def _listen(config: WorkerConfig) -> socket.socket:
    address = parse_address(config.resolved_listen, "listen", allow_port_0=True)
    try:
        found = socket.getaddrinfo(
            address.name, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            "listen", config.resolved_listen, f"an address of this machine ({reason})"
        ) from error
    family, kind, protocol, _, end = found[0]
    if config.token is None and not is_loopback(str(end[0])):
        raise ConfigError(
            "cluster_token",
            None,
            f"a token, as {config.resolved_listen} is beyond loopback",
            f"--token-file FILE or ${TOKEN_VARIABLE}",
        )
    if config.allow and is_loopback(str(end[0])):
        expected = f"nothing on loopback, as {config.resolved_listen} is, where this machine alone connects"
        raise ConfigError("allow", ", ".join(config.allow), expected)
    listener: socket.socket | None = None
    try:
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(end)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            "listen", config.resolved_listen, f"an address that can be bound ({error.strerror})"
        ) from error
    return listener
