"""Which host a worker serves: one at a time, from its HELLO on where it names its session.

Called by :mod:`duckllm.worker.session`, by the thread of each connection.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from duckllm.errors import WorkerUnavailableError

# A host that reconnects at once may arrive before its last connection's end was noticed.
BUSY_GRACE_S = 1.0


class Occupancy:
    """The one place for a host at a worker.

    Hosts that start together would choose the same worker if it were free until the first plan arrives, when
    the other one has planned with it too. So a HELLO with a session holds the place already.

    Threading: any thread.
    """

    def __init__(self) -> None:
        self._left = threading.Condition()
        self._holder: tuple[str, socket.socket] | None = None

    def hold(self, session: str, connection: socket.socket) -> bool:
        """Takes the place for a host that says hello, if it is free and the host names its session.

        Returns:
            Whether another session's host has it.
        """
        with self._left:
            if self._holder is None and session:
                self._holder = session, connection
            return self._holder is not None and not (session and self._holder[0] == session)

    def take(self, session: str, connection: socket.socket) -> None:
        """Takes the place for a host that has sent its plan, if it does not hold it.

        An older visit of the same session is ended: that host took it for lost, and after a broken link its
        end is never heard.

        Raises:
            WorkerUnavailableError: Another host has it, and keeps it for a second.
        """
        with self._left:
            if self._holder is not None:
                if self._holder[1] is connection:
                    return
                if session and self._holder[0] == session:
                    with contextlib.suppress(OSError):  # it has ended by itself
                        self._holder[1].shutdown(socket.SHUT_RDWR)
            if not self._left.wait_for(lambda: self._holder is None, BUSY_GRACE_S):
                raise WorkerUnavailableError("busy: this worker serves another host")
            self._holder = session, connection

    def leave(self, connection: socket.socket) -> None:
        """Gives the place back, if this connection's host has it."""
        with self._left:
            if self._holder is not None and self._holder[1] is connection:
                self._holder = None
                self._left.notify_all()
