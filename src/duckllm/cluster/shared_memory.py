"""Memory that the host shares with a worker it started, for steps; their connection stays beside it.

Called by :mod:`duckllm.cluster.local`, which makes it, and by a worker, which gets its descriptors. The
memory has no name: it is gone with the last process that holds it, however that ends, and nobody else can
open it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Sequence

from duckllm import _native

F_ADD_SEALS, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 1, 2, 4  # of linux/fcntl.h


class SharedChannel:
    """A memory and the two bells, eventfds, that the ends wake each other with.

    Raises:
        OSError: The system gives none.
    """

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        try:
            self._descriptors.append(os.memfd_create("duckllm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            for _ in range(2):
                self._descriptors.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            os.ftruncate(self._descriptors[0], _native.SHARED_MEMORY_BYTES)
            fcntl.fcntl(self._descriptors[0], F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
        except OSError:
            self.close()
            raise

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Memory, host's bell, worker's bell: for the worker's process to inherit."""
        return tuple(self._descriptors)

    def host_end(self) -> _native.SharedMemory:
        """The host's end; it keeps what it needs of the descriptors."""
        memory, host_bell, worker_bell = self._descriptors
        return _native.SharedMemory(
            is_host=True, memory_fd=memory, my_bell_fd=host_bell, their_bell_fd=worker_bell
        )

    def close(self) -> None:
        """Lets go of the descriptors. Idempotent."""
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def worker_end(descriptors: Sequence[int]) -> _native.SharedMemory:
    """The worker's end, of inherited descriptors in the order of :attr:`SharedChannel.descriptors`.

    They are closed.

    Raises:
        OSError: They are not open.
        ValueError: They are no such memory.
        RuntimeError: It cannot be mapped.
    """
    memory, host_bell, worker_bell = descriptors
    end = _native.SharedMemory(
        is_host=False, memory_fd=memory, my_bell_fd=worker_bell, their_bell_fd=host_bell
    )
    for descriptor in descriptors:
        os.close(descriptor)
    return end
