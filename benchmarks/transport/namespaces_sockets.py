"""TCP connections of this process and of others, as the kernel has them; called by namespaces.py.

Another process's sockets are duplicated by pidfd_getfd, which needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import statistics
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

# linux/tcp.h and asm/unistd.h of x86-64, which Python does not name.
_TCP_INFO, _TCP_CONGESTION, _TCP_RTO_MIN_US, _PIDFD_GETFD = 11, 13, 45, 438
_RTO_OFFSET, _RTT_OFFSET, _TOTAL_RETRANS_OFFSET, _INFO_BYTES = 8, 68, 100, 104
_libc = ctypes.CDLL(None, use_errno=True)


def connections(pids: Sequence[int]) -> Iterator[socket.socket]:
    """Every TCP connection of these processes, one after the other, as a copy of its descriptor."""
    for pid in pids:
        handle = os.pidfd_open(pid)
        try:
            for entry in sorted(Path(f"/proc/{pid}/fd").iterdir()):
                with contextlib.suppress(OSError):
                    if not os.readlink(entry).startswith("socket:"):
                        continue
                    descriptor = _libc.syscall(_PIDFD_GETFD, handle, int(entry.name), 0)
                    if descriptor < 0:
                        continue
                    with socket.socket(fileno=descriptor) as connection:
                        is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                        if is_tcp and connection.type == socket.SOCK_STREAM:
                            connection.getpeername()  # a listening one has no peer
                            yield connection
        finally:
            os.close(handle)


def describe(pids: Sequence[int]) -> tuple[str, int]:
    """Congestion control, RTO and round trip of the connections, in words, and packets sent again on them."""
    congestion: set[str] = set()
    least_us: set[int] = set()
    rto_us: list[int] = []
    rtt_us: list[int] = []
    retransmitted = 0
    for connection in connections(pids):
        info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
        rto_us.append(struct.unpack_from("=I", info, _RTO_OFFSET)[0])
        rtt_us.append(struct.unpack_from("=I", info, _RTT_OFFSET)[0])
        retransmitted += struct.unpack_from("=I", info, _TOTAL_RETRANS_OFFSET)[0]
        name = connection.getsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, 16)
        congestion.add(name.rstrip(b"\0").decode())
        with contextlib.suppress(OSError):
            least_us.add(connection.getsockopt(socket.IPPROTO_TCP, _TCP_RTO_MIN_US))
    least = "/".join(f"{each / 1000:g} ms" for each in sorted(least_us)) or "as the kernel has it"
    rto_ms, rtt_ms = statistics.median(rto_us) / 1000, statistics.median(rtt_us) / 1000
    kind = "/".join(sorted(congestion))
    return f"{kind}, minimum RTO {least}, RTO {rto_ms:.0f} ms, round trip {rtt_ms:.1f} ms", retransmitted
