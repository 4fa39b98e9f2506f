"""A slice of experts in another format: a copy in memory of its own, instead of the mapped file.

Called by workers and by the in-process experts; imports no torch. The hashes of a file are those of the
stored form, and are checked before.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np

from duckllm import _native
from duckllm.errors import WeightFormatError
from duckllm.weights.e4m3 import U8
from duckllm.weights.formats import unit_bytes

_HUGE_PAGE_BYTES = 2 << 20
_MAP_HUGETLB = 0x40000 | 21 << 26  # of linux/mman.h: pages of 2**21 bytes
# What a copy leaves free of the memory that is available.
_FREE_SHARE = 0.1


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that can be had without pushing out what others use, by the kernel and the control group."""
    available = 1 << 62
    with contextlib.suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    group = root / "sys/fs/cgroup"
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return available
    # Pages of files that nobody has used lately go as soon as the memory is wanted.
    used -= int(statistics.get("inactive_file", 0))
    return max(0, min(available, limit - used))


def copy_fits(num_bytes: int) -> bool:
    """Whether the memory that is available has room for a copy, and a tenth of it to spare."""
    return num_bytes <= (1 - _FREE_SHARE) * available_memory_bytes()


def recode_units(
    units: U8, hidden_size: int, stored: str, wanted: str, num_threads: int, scale_layout: str = "block"
) -> U8:
    """The units in another format, in private memory, in huge pages where the kernel has them.

    Args:
        units: A slice, as stored.
        hidden_size: H.
        stored: Format of ``units``.
        wanted: Format of the result.
        num_threads: Threads that share out the experts.
        scale_layout: Layout of the scales, which stay as they are.

    Shapes: units: [E, S, unit_bytes(H, stored, scale_layout)] u8; result: [E, S, unit_bytes(H, wanted,
        scale_layout)] u8, contiguous.

    Raises:
        WeightFormatError: The units hold what no finite e4m3 value is stored as, or there is no memory.
    Reference: unpacking and packing by :mod:`duckllm.weights.units`, byte for byte.
    """
    shape = (*units.shape[:2], unit_bytes(hidden_size, wanted, scale_layout))
    out = private_memory(shape, reserve=True)
    experts = units.shape[0]
    bounds = [experts * index // num_threads for index in range(num_threads + 1)]
    with ThreadPoolExecutor(num_threads, thread_name_prefix="recode") as pool:
        parts = deque(
            pool.submit(
                _native.recode_units,
                units[first:end],
                out[first:end],
                hidden_size,
                stored,
                wanted,
                scale_layout,
            )
            for first, end in pairwise(bounds)
        )
        try:
            # A future is let go before what it raises comes here: it keeps its error, whose traceback keeps
            # this frame, and they would keep each other and the copy until the garbage collector runs.
            while parts:
                parts.popleft().result()
        except ValueError as error:
            del out  # the error may be kept, too
            raise WeightFormatError(str(error)) from error
    return out


def may_reserve(root: Path = Path("/")) -> bool:
    """Whether the system lets programs reserve huge pages as they need them (vm.nr_overcommit_hugepages)."""
    try:
        return int((root / "proc/sys/vm/nr_overcommit_hugepages").read_text()) > 0
    except (OSError, ValueError):
        return False


def private_memory(shape: tuple[int, ...], *, reserve: bool = False) -> U8:
    """Zeroed memory that begins on a huge page's boundary; freed with the last view of it.

    Args:
        shape: In bytes.
        reserve: Have huge pages for all of it now, if the system lets programs have them and has as many
            together; else, as without it, the kernel finds some as the memory is written. No file can be
            mapped over pages that were reserved.

    Raises:
        WeightFormatError: There is no such memory.
    """
    num_bytes = math.prod(shape)
    if reserve and num_bytes and may_reserve():
        length = -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_HUGETLB
        with contextlib.suppress(OSError):
            return np.frombuffer(mmap.mmap(-1, length, flags=flags), np.uint8)[:num_bytes].reshape(shape)
    length = num_bytes + _HUGE_PAGE_BYTES
    try:
        mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise WeightFormatError(
            f"weights: got no {num_bytes} bytes of memory of its own ({error.strerror})"
        ) from error
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages has small ones only
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE_BYTES
    return whole[start : start + num_bytes].reshape(shape)


def huge_page_bytes(
    arrays: Iterable[U8], maps: Path = Path("/proc/self/smaps"), *, reserved_only: bool = False
) -> int:
    """Bytes of arrays in private memory that the kernel has put into huge pages, as it says itself.

    Where it says nothing that is 0. What other memory beside them has counts as theirs.

    Args:
        arrays: Written before.
        maps: Where the kernel says it.
        reserved_only: Count those pages alone that were reserved.
    """
    kinds = ("Private_Hugetlb:",) if reserved_only else ("Private_Hugetlb:", "AnonHugePages:")
    ranges = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays]
    found, is_ours = 0, False
    with contextlib.suppress(OSError, ValueError), maps.open() as lines:
        for line in lines:
            first, _, rest = line.partition(" ")
            if first in kinds:
                found += int(rest.split()[0]) * 1024 if is_ours else 0
            elif not first.endswith(":"):
                start, end = (int(number, 16) for number in first.split("-"))
                is_ours = any(start < last and begin < end for begin, last in ranges)
    return min(found, sum(last - begin for begin, last in ranges))
