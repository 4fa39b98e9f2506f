"""Where pages of the KV cache go when their room in its pool is needed, and come back from.

Called by :class:`duckllm.engine.kv_cache.KvCache`. Below the pool lies a budget of memory, below that a
folder on a disk. A page whose room is taken moves down one tier, the one left longest first; what a request
has computed is saved to disk at its end as well. Holds pages as bytes and knows no tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from duckllm.config import show_size
from duckllm.engine.disk_tier import DiskTier, Pending
from duckllm.engine.page_files import PageBytes, PageFolder, PageFormat, PageKey
from duckllm.errors import ConfigError

DEFAULT_DISK_BYTES = 16 << 30


@dataclass(frozen=True)
class TierSettings:
    """What there is below the pool.

    Args:
        model_hash: The model's, without which pages on a disk say nothing.
        arithmetic: What else decides the bits of a page.
        memory_bytes: Budget of the memory tier; 0 for none.
        disk_dir: Folder of the disk tier; None for none.
        disk_bytes: Budget of the disk tier.
    """

    model_hash: str = ""
    arithmetic: str = ""
    memory_bytes: int = 0
    disk_dir: Path | None = None
    disk_bytes: int = DEFAULT_DISK_BYTES


class Tiers:
    """Memory and disk below the pool; either may be missing.

    Args:
        settings: Which there are.
        page_format: Of the pages.
        copy_page: The content of a page of the pool, by its number.

    Raises:
        ConfigError: A budget that holds no page, or a folder that cannot be used.
        CacheFormatError: The folder is another model's, or of another format.
    """

    def __init__(
        self, settings: TierSettings, page_format: PageFormat, copy_page: Callable[[int], PageBytes]
    ) -> None:
        self._copy_page = copy_page
        self._most_in_memory = settings.memory_bytes // page_format.page_bytes
        if settings.memory_bytes and not self._most_in_memory:
            least = show_size(page_format.page_bytes, up=True)
            raise ConfigError(
                "kv_memory_bytes", show_size(settings.memory_bytes), f"0, or at least {least}, one page"
            )
        self._memory: OrderedDict[bytes, tuple[PageKey, PageBytes]] = OrderedDict()  # longest left first
        self._disk: DiskTier | None = None
        if settings.disk_dir is not None:
            folder = PageFolder(settings.disk_dir, page_format, settings.disk_bytes)
            self._disk = DiskTier(folder, copy_page)

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._memory or (self._disk is not None and page_hash in self._disk)

    def occupancy(self) -> tuple[int, int, int, int]:
        """Pages in memory, most there, pages on disk, most there. Any thread may ask."""
        disk = (0, 0) if self._disk is None else self._disk.occupancy()
        return len(self._memory), self._most_in_memory, *disk

    def close(self) -> None:
        """Saves what waits to be saved; harmless when repeated."""
        if self._disk is not None:
            self._disk.close()

    def save(self, chain: Sequence[tuple[PageKey, int]]) -> None:
        """A context was computed: its pages, in their order, are to outlive the process."""
        if self._disk is not None:
            self._disk.save(chain)

    def leaves_pool(self, key: PageKey, page: int) -> None:
        """Must be told before a known page of the pool gets another content."""
        if self._disk is not None:
            self._disk.leaves_pool(key, page)
        if self._most_in_memory:
            self._memory.pop(key.hash, None)
            while len(self._memory) >= self._most_in_memory:
                _, (oldest, content) = self._memory.popitem(last=False)
                if self._disk is not None:
                    self._disk.save_copy(oldest, content)
            self._memory[key.hash] = (key, self._copy_page(page))

    def forget_pool(self) -> None:
        """The pool's pages are void; what was moved down stays."""
        if self._disk is not None:
            self._disk.forget_pool()

    def read_ahead(self, keys: Sequence[PageKey]) -> None:
        """The pages that are taken next, in their order."""
        if self._disk is not None:
            self._disk.read_ahead([key for key in keys if key.hash not in self._memory])

    def cancel_reads(self) -> None:
        """Nobody takes what was read ahead."""
        if self._disk is not None:
            self._disk.cancel_reads()

    def pass_over(self, page_hash: bytes) -> None:
        """A page that was to be read came from elsewhere."""
        if self._disk is not None:
            self._disk.pass_over(page_hash)

    def take(self, key: PageKey) -> tuple[PageBytes | Pending | None, str]:
        """A page's content and the tier it was in.

        None where it cannot be had, PENDING where it is being read. A page of the memory tier leaves it, as
        it is about to be in the pool.
        """
        if (found := self._memory.pop(key.hash, None)) is not None:
            self.pass_over(key.hash)
            return found[1], "memory"
        return (None if self._disk is None else self._disk.take(key)), "disk"

    def wait_for(self, page_hash: bytes, timeout_s: float) -> None:
        """Returns when the page can be taken, or is not to be had, or the time is over."""
        if self._disk is not None and page_hash not in self._memory:
            self._disk.wait_for(page_hash, timeout_s)
