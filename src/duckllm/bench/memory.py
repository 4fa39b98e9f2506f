"""Memory for measurements: page-aligned, in huge pages or in small ones, walked window by window.

Called by ceilings.py and points.py; knows nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]

HUGE_PAGE_BYTES = 2 << 20


def new_memory(num_bytes: int, huge_pages: bool) -> U8:
    """Zeroed private memory that begins on a huge page's boundary; freed with the last view of it.

    Whether the kernel gives huge pages is its decision: :func:`huge_page_share` tells.

    Shapes: result: [num_bytes] u8.
    """
    # Whole huge pages, and one more to align in.
    length = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES + HUGE_PAGE_BYTES
    mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages has small ones only
        mapping.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]


def huge_page_share(memory: U8, smaps: Path = Path("/proc/self/smaps")) -> float:
    """How much of the memory really is in huge pages, 0 to 1, by AnonHugePages of its mappings."""
    start, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    inside, huge_bytes = False, 0
    for line in smaps.read_text().splitlines():
        name, _, rest = line.partition(" ")
        if name.endswith(":"):
            if inside and name == "AnonHugePages:":
                huge_bytes += int(rest.split()[0]) * 1024
        else:
            first, _, last = name.partition("-")
            inside = int(first, 16) < end and int(last, 16) > start
    return min(1.0, huge_bytes / memory.nbytes)


class Windows:
    """Equal windows of a memory, handed out in turn: one comes again only after all the others.

    With a memory several times the last-level cache, a window that is handed out is therefore in no cache,
    whatever was done to it the last time.

    Args:
        memory: What to cut; ``num_windows * granule_bytes`` at least.
        granule_bytes: A window's length is a multiple of it.
        num_windows: How many.
    """

    def __init__(self, memory: U8, granule_bytes: int, num_windows: int) -> None:
        self.window_bytes = memory.nbytes // num_windows // granule_bytes * granule_bytes
        assert self.window_bytes > 0
        self._windows = [
            memory[i * self.window_bytes : (i + 1) * self.window_bytes] for i in range(num_windows)
        ]
        self._next = 0

    def __len__(self) -> int:
        return len(self._windows)

    def __iter__(self) -> Iterator[U8]:
        return iter(self._windows)

    def take(self) -> tuple[int, U8]:
        """The next window's number and the window."""
        number = self._next
        self._next = (number + 1) % len(self._windows)
        return number, self._windows[number]
