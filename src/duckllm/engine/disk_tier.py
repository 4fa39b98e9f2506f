"""Saves pages to disk and reads them back in a thread of its own, so that no step waits for a disk.

Called by :mod:`duckllm.engine.tiers`; calls :mod:`duckllm.engine.page_files`. A page that is to be saved
stays in the cache's pool until it is its turn; where its room is needed before that, it is copied. The pages
of a context are read ahead in their order, one context at a time.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from duckllm.engine.page_files import PageBytes, PageFolder, PageKey

# Most bytes of pages that wait for the disk outside the pool, in each direction. A page more is not saved.
BACKLOG_BYTES = 256 << 20
READ_AHEAD_BYTES = 64 << 20

_log = logging.getLogger("duckllm")


class Pending:
    """Says that a page is being read."""


PENDING = Pending()


class DiskTier:
    """A folder of pages behind a queue.

    Args:
        folder: The files.
        copy_page: The content of a page of the pool, by its number.

    Threading:
        Every method may be called by one thread at a time; the files are its own thread's.
    """

    def __init__(self, folder: PageFolder, copy_page: Callable[[int], PageBytes]) -> None:
        self._folder, self._copy_page = folder, copy_page
        self._most_copies = max(1, BACKLOG_BYTES // folder.format.page_bytes)
        self._most_read = max(1, READ_AHEAD_BYTES // folder.format.page_bytes)
        # Entered directly: its exit is one native call, which Ctrl-C cannot fall into. Its holder may take it
        # again: the garbage collector, wherever it runs, may end the one whose tier this is.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._from_pool: OrderedDict[bytes, tuple[PageKey, int]] = OrderedDict()
        self._copies: OrderedDict[bytes, tuple[PageKey, PageBytes]] = OrderedDict()
        self._writing: tuple[bytes, PageBytes] | None = None
        self._begun: deque[list[bytes]] = deque()  # hashes of chains, before what is new of them is written
        self._used: deque[list[bytes]] = deque()  # and after it
        self._reads: OrderedDict[bytes, PageKey] = OrderedDict()
        self._reading: bytes | None = None
        self._asked: bytes | None = None  # what is taken next
        self._arrived: dict[bytes, PageBytes | None] = {}
        self._is_closing = self._has_warned = False
        self._thread = threading.Thread(target=self._run, name="duckllm-kv-disk", daemon=True)
        self._thread.start()

    def __contains__(self, page_hash: bytes) -> bool:
        with self._lock:
            return page_hash in self._folder or self._waiting_content(page_hash) is not None

    def occupancy(self) -> tuple[int, int]:
        """Pages in the folder, as far as this process knows, and most there. Any thread may ask."""
        return len(self._folder), self._folder.max_pages

    def save(self, chain: Sequence[tuple[PageKey, int]]) -> None:
        """Saves the pages of one context, in their order, as far as they are not there; all count as used."""
        with self._lock:
            # The beginning is of most use to others: it is to be the youngest.
            hashes = [key.hash for key, _ in reversed(chain)]
            self._begun.append(hashes)
            self._used.append(hashes)
            for key, page in self._folder.missing(chain):
                if self._waiting_content(key.hash) is None:
                    self._from_pool[key.hash] = (key, page)
            self._changed.notify_all()

    def save_copy(self, key: PageKey, content: PageBytes) -> None:
        """Saves a page that is nowhere else any more."""
        with self._lock:
            if key.hash not in self._folder:
                self._keep(key, content)

    def leaves_pool(self, key: PageKey, page: int) -> None:
        """Must be told before a page of the pool gets another content."""
        with self._lock:
            if self._from_pool.pop(key.hash, None) is not None:
                self._keep(key, self._copy_page(page))

    def forget_pool(self) -> None:
        """The pool's pages are void: what was to be saved of them is not."""
        with self._lock:
            self._from_pool.clear()
        self.cancel_reads()

    def read_ahead(self, keys: Sequence[PageKey]) -> None:
        """Begins to read the pages of one context, in their order."""
        with self._lock:
            for key in keys:
                if key.hash not in self._arrived and key.hash != self._reading and key.hash in self._folder:
                    self._reads[key.hash] = key
            self._changed.notify_all()

    def pass_over(self, page_hash: bytes) -> None:
        """A page that was to be read came from elsewhere."""
        with self._lock:
            self._reads.pop(page_hash, None)
            self._arrived.pop(page_hash, None)
            if self._reading == page_hash:
                self._reading = None
            self._changed.notify_all()

    def cancel_reads(self) -> None:
        """Drops what was read ahead and not taken."""
        with self._lock:
            self._reads.clear()
            self._arrived.clear()
            self._reading = None

    def take(self, key: PageKey) -> PageBytes | Pending | None:
        """A page's content; None where it cannot be had, PENDING where it is being read."""
        with self._lock:
            if key.hash in self._arrived:
                self._changed.notify_all()
                return self._arrived.pop(key.hash)
            if (content := self._waiting_content(key.hash)) is not None:
                self._reads.pop(key.hash, None)
                return content
            if key.hash != self._reading:
                if self._is_closing or (key.hash not in self._reads and key.hash not in self._folder):
                    return None
                # Read even where as much as may be is read ahead already.
                self._asked = key.hash
                self._reads[key.hash] = key
                self._reads.move_to_end(key.hash, last=False)
                self._changed.notify_all()
            return PENDING

    def wait_for(self, page_hash: bytes, timeout_s: float) -> None:
        """Returns when the page can be taken, or is not to be had, or the time is over."""
        with self._lock:
            self._changed.wait_for(lambda: not self._is_pending(page_hash), timeout_s)

    def close(self) -> None:
        """Saves what waits to be saved and ends; harmless when repeated."""
        with self._lock:
            self._is_closing = True
            self._reads.clear()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _is_pending(self, page_hash: bytes) -> bool:
        return page_hash in self._reads or page_hash == self._reading

    def _waiting_content(self, page_hash: bytes) -> PageBytes | None:
        if self._writing is not None and self._writing[0] == page_hash:
            return self._writing[1]
        waiting = self._copies.get(page_hash)
        return None if waiting is None else waiting[1]

    def _keep(self, key: PageKey, content: PageBytes) -> None:
        if len(self._copies) < self._most_copies:
            self._copies[key.hash] = (key, content)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(self._has_work)
                if not self._has_work(closing=False):
                    return
                work = self._next_work()
            try:
                work()
            except Exception as error:  # a cache must not end what it serves
                self._warn(str(error) or type(error).__name__)

    def _has_work(self, closing: bool = True) -> bool:
        waiting = self._begun or self._copies or self._from_pool or self._used
        return bool(waiting or self._may_read() or (closing and self._is_closing))

    def _may_read(self) -> bool:
        if len(self._arrived) < self._most_read:
            return bool(self._reads)
        return self._asked in self._reads

    def _next_work(self) -> Callable[[], None]:
        """What the thread does next, outside the lock: somebody may wait for a read."""
        if self._may_read():
            self._reading, wanted = self._reads.popitem(last=False)
            return lambda: self._read(wanted)
        if self._begun:
            begun = self._begun.popleft()
            # What a chain has already must not be what makes room for the rest of it.
            return lambda: self._folder.use(begun, lasting=False)
        if self._copies:
            page_hash, (key, content) = self._copies.popitem(last=False)
        elif self._from_pool:
            page_hash, (key, page) = self._from_pool.popitem(last=False)
            content = self._copy_page(page)
        else:
            used = self._used.popleft()
            return lambda: self._folder.use(used)
        self._writing = (page_hash, content)
        return lambda: self._write(key, content)

    def _read(self, key: PageKey) -> None:
        content = None
        try:
            content = self._folder.read(key)
        finally:
            with self._lock:
                if self._reading == key.hash:  # else nobody wants it any more
                    self._arrived[key.hash] = content
                    self._reading = None
                self._changed.notify_all()

    def _write(self, key: PageKey, content: PageBytes) -> None:
        try:
            self._folder.write(key, content)
        except OSError as error:
            self._warn(error.strerror or str(error))
        finally:
            with self._lock:
                self._writing = None

    def _warn(self, why: str) -> None:
        """Says once that the disk is of no use; answers go on without it."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s: pages of the KV cache cannot be kept: %s", self._folder.path, why)
