"""Memory for one layer of a slice, shard by shard: mapped from files of the node cache, or a worker's own.

Called by :mod:`duckllm.worker.weights`. A shard is one stripe of every expert, its units one behind the
other, so that it serves workers of any split; knows neither hashes nor where shards come from.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from duckllm.errors import WeightFormatError
from duckllm.weights.e4m3 import U8
from duckllm.weights.recode import private_memory

_MAP_FIXED, _MAP_FAILED = 0x10, ctypes.c_void_p(-1).value


class ShardMemory:
    """Room for the shards of a layer's slice, each on a page boundary.

    Until a shard is mapped or written its memory is zero, and none is taken but for pages that are reserved.

    Args:
        num_experts: E.
        num_stripes: S, shards.
        unit_bytes: Bytes of a unit.
        in_memory: Every shard is written and none mapped, so that huge pages may be reserved for all.

    Attributes:
        units: All of it as experts take it, read-only.

    Shapes: units: [E, S, unit_bytes] u8, each unit contiguous.

    Raises:
        WeightFormatError: There is no memory.
    """

    def __init__(
        self, num_experts: int, num_stripes: int, unit_bytes: int, *, in_memory: bool = False
    ) -> None:
        self._shard_bytes = num_experts * unit_bytes
        slot_bytes = -(-self._shard_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = private_memory((num_stripes, slot_bytes), reserve=in_memory)
        self._shards = whole[:, : self._shard_bytes]
        units = self._shards.reshape(num_stripes, num_experts, unit_bytes).transpose(1, 0, 2)
        units.flags.writeable = False
        self.units: U8 = units

    def shard(self, index: int) -> memoryview:
        """A shard's own bytes, to be written; not where it is mapped."""
        return memoryview(self._shards[index])

    def map_file(self, index: int, descriptor: int) -> None:
        """Has a shard be the bytes of an open file, read-only, whatever becomes of the file's name.

        Raises:
            WeightFormatError: It cannot be mapped.
        """
        size = os.fstat(descriptor).st_size
        assert size == self._shard_bytes, size
        map_at = ctypes.CDLL(None, use_errno=True).mmap
        map_at.restype = ctypes.c_void_p
        map_at.argtypes = (
            *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
            ctypes.c_int64,
        )
        address = self._shards[index].ctypes.data
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if map_at(address, size, mmap.PROT_READ, flags, descriptor, 0) == _MAP_FAILED:
            reason = os.strerror(ctypes.get_errno())
            raise WeightFormatError(f"weights: a file of {size} bytes cannot be mapped ({reason})")
