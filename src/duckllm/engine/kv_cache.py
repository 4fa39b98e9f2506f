"""The KV cache: pages of tokens, allocated once, shared by requests that begin alike.

Called by the scheduler. A page holds what every layer keeps of PAGE_TOKENS consecutive tokens; the layout
inside belongs to the attention layers. A page that is full is known by a hash of its tokens and of all before
them, so that another request with the same beginning takes it as it is. A page that nobody uses keeps its
content until the room is needed; the one that was left longest goes first, and moves to the tiers below
(:mod:`duckllm.engine.tiers`), from where it comes back.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from duckllm.engine.cache_size import PAGE_TOKENS as PAGE_TOKENS
from duckllm.engine.cache_size import num_pages as num_pages
from duckllm.engine.disk_tier import PENDING
from duckllm.engine.page_files import PageFormat, PageKey
from duckllm.engine.page_mover import PageMover
from duckllm.engine.tiers import Tiers, TierSettings
from duckllm.layers.step import LayerCache, SequenceStep
from duckllm.outputs import CachePages

# Most bytes that come up from the tiers in one step: those who answer wait for them.
FETCH_BYTES = 64 << 20
_WAIT_S = 1.0


@dataclass
class PageTable:
    """The pages of one request, in the order of its tokens.

    Args:
        pages: Their numbers.
        hashes: Of the first ones, which are full.
        coming: The pages that follow these, which the tiers below have; :meth:`KvCache.fetch` brings them up.
        found: How many of the pages were found, by tier.
        is_used: Whether something was computed with them.
    """

    pages: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    coming: deque[PageKey] = field(default_factory=deque)
    found: Counter[str] = field(default_factory=Counter)
    is_used: bool = False


class KvCache:
    """Memory for the tokens of many contexts.

    Args:
        new_tensors: Makes the tensors that hold a number of tokens: for each layer some [tokens, width].
        max_tokens: Most tokens, over all contexts; rounded down to whole pages.
        tiers: What there is below.

    Raises:
        ConfigError: A tier's budget holds no page, or its folder cannot be used.
        CacheFormatError: The folder is another model's, or of another format.
    """

    def __init__(
        self,
        new_tensors: Callable[[int], list[LayerCache]],
        max_tokens: int,
        tiers: TierSettings | None = None,
    ) -> None:
        self.num_pages = max_tokens // PAGE_TOKENS
        self.tensors = new_tensors(self.num_pages * PAGE_TOKENS)
        settings = tiers or TierSettings()
        self.format = page_format(self.tensors, settings)
        self._mover = PageMover([tensor for layer in self.tensors for tensor in layer], PAGE_TOKENS)
        self._pages_a_fetch = max(1, FETCH_BYTES // self.format.page_bytes)
        self._tiers = Tiers(settings, self.format, self._mover.read)
        self.clear()

    def clear(self) -> None:
        """Forgets everything in the pool; tables that were open are void."""
        self._tiers.forget_pool()
        self._users = np.zeros(self.num_pages, np.int32)
        self._is_free = np.ones(self.num_pages, bool)
        self._num_free = self.num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, PageKey] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # with content, longest left first

    def shut(self) -> None:
        """Waits until what is to be saved is saved; harmless when repeated."""
        self._tiers.close()

    @property
    def num_available_pages(self) -> int:
        """Pages that nobody uses."""
        return self._num_free + len(self._unused)

    def occupancy(self) -> CachePages:
        """How full it is, and the tiers below. Any thread may ask, for counts of about the same moment."""
        num_unused, num_free = len(self._unused), self._num_free
        used = max(0, self.num_pages - num_unused - num_free)
        return CachePages(used, num_unused, num_free, *self._tiers.occupancy(), self.format.page_bytes)

    def open(self, token_ids: Sequence[int]) -> tuple[PageTable, int]:
        """A table that begins with the pages that are in the pool, and how many tokens they hold.

        What the tiers have of the pages behind them is ``coming``. At least one token is left to compute, as
        its logits are wanted.
        """
        table = PageTable()
        for key in self._keys(token_ids[: (len(token_ids) - 1) // PAGE_TOKENS * PAGE_TOKENS]):
            page = self._page_of.get(key.hash)
            if page is not None and not table.coming:
                self._share(table, key.hash, page)
            elif page is not None or key.hash in self._tiers:
                table.coming.append(key)
            else:
                break
        return table, len(table.pages) * PAGE_TOKENS

    def fetch(self, table: PageTable) -> bool:
        """Brings up pages that are coming, as many as a step may; whether all that can be had are there.

        Only one table at a time may be fetched for. Where the pool has no room, the rest is left.
        """
        # As many as may come up at once: there may be thousands behind them.
        ahead = islice(table.coming, self._pages_a_fetch)
        self._tiers.read_ahead([key for key in ahead if key.hash not in self._page_of])
        for _ in range(self._pages_a_fetch):
            if not table.coming:
                break
            key = table.coming[0]
            page = self._page_of.get(key.hash)
            if page is not None:
                self._tiers.pass_over(key.hash)
                self._share(table, key.hash, page)
            elif not self.num_available_pages:
                self._leave_rest(table)
                break
            else:
                content, tier = self._tiers.take(key)
                if content is PENDING:
                    return False
                if not isinstance(content, np.ndarray):
                    self._leave_rest(table)
                    break
                page = self._take(table)
                table.pages.append(page)
                self._mover.write(page, content)
                self._know(page, key)
                table.hashes.append(key.hash)
                table.found[tier] += 1
            table.coming.popleft()
        return not table.coming

    def wait_for(self, table: PageTable) -> None:
        """Returns when :meth:`fetch` has something to do, or after a moment."""
        if table.coming:
            self._tiers.wait_for(table.coming[0].hash, _WAIT_S)

    def _leave_rest(self, table: PageTable) -> None:
        table.coming.clear()
        self._tiers.cancel_reads()

    def _share(self, table: PageTable, page_hash: bytes, page: int) -> None:
        self._unused.pop(page, None)
        self._users[page] += 1
        table.pages.append(page)
        table.hashes.append(page_hash)
        table.found["device"] += 1

    def _know(self, page: int, key: PageKey) -> None:
        if self._page_of.setdefault(key.hash, page) == page:
            self._key_of[page] = key

    def _keys(self, token_ids: Sequence[int], previous: bytes | None = None) -> Iterator[PageKey]:
        """The keys of pages with these tokens, behind ``previous`` or from the beginning."""
        parent = self.format.seed if previous is None else previous
        for first in range(0, len(token_ids), PAGE_TOKENS):
            key = PageKey.of(parent, array("q", token_ids[first : first + PAGE_TOKENS]).tobytes())
            yield key
            parent = key.hash

    def reserve(self, table: PageTable, num_tokens: int) -> bool:
        """Pages for the first ``num_tokens`` tokens; False, and nothing changed, where there are too few."""
        wanted = num_pages(num_tokens) - len(table.pages)
        if wanted > self.num_available_pages:
            return False
        for _ in range(wanted):
            table.pages.append(self._take(table))
        return True

    def seal(self, table: PageTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Makes the pages that are full by now known to others."""
        table.is_used = True
        num_known = len(table.hashes)
        new = token_ids[num_known * PAGE_TOKENS : num_computed // PAGE_TOKENS * PAGE_TOKENS]
        keys = self._keys(new, table.hashes[-1] if table.hashes else None)
        for number, key in enumerate(keys, start=num_known):
            table.hashes.append(key.hash)
            self._know(table.pages[number], key)

    def close(self, table: PageTable) -> None:
        """Lets go of a table's pages; those that are known keep their content for the next one."""
        if table.coming:
            self._leave_rest(table)
        if table.is_used:
            # Of pages that two have computed one is known, and it may be gone by now.
            pages = [self._page_of[each] for each in table.hashes if each in self._page_of]
            self._tiers.save([(self._key_of[page], page) for page in pages])
        # The last pages of a context are of least use to others: they go first.
        for page in reversed(table.pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._key_of:
                self._unused[page] = None
            else:
                self._is_free[page] = True
                self._num_free += 1
        table.pages.clear()
        table.hashes.clear()

    def sequence(
        self, table: PageTable, first_row: int, start: int, num_tokens: int, *, first: int = 0
    ) -> SequenceStep:
        """Where the tokens of a context lie, for a step that adds tokens [start, start + num_tokens)."""
        pages = np.array(table.pages[: num_pages(start + num_tokens)], np.int32)
        return SequenceStep.of(first_row, start, num_tokens, pages, PAGE_TOKENS, first=first)

    def _take(self, table: PageTable) -> int:
        """A page, behind the table's last one where that is free: consecutive pages need no copies."""
        if self._num_free:
            after = table.pages[-1] + 1 if table.pages else self.num_pages
            page = after if after < self.num_pages and self._is_free[after] else self._start_of_run()
            self._is_free[page] = False
            self._num_free -= 1
        else:
            page, _ = self._unused.popitem(last=False)
            key = self._key_of.pop(page)
            del self._page_of[key.hash]
            self._tiers.leaves_pool(key, page)
        self._users[page] = 1
        return page

    def _start_of_run(self) -> int:
        """The middle of the longest run of free pages; its first half is left to who lies before it."""
        edges = np.flatnonzero(np.diff(self._is_free, prepend=False, append=False))
        starts, stops = edges[::2], edges[1::2]
        longest = int((stops - starts).argmax())
        start, stop = int(starts[longest]), int(stops[longest])
        return start if start == 0 else start + (stop - start) // 2


def page_format(tensors: list[LayerCache], settings: TierSettings) -> PageFormat:
    """The format of pages of these tensors."""
    widths = tuple(tuple(tensor.shape[1] for tensor in layer) for layer in tensors)
    dtype = tensors[0][0].dtype
    token_bytes = sum(map(sum, widths)) * dtype.itemsize
    return PageFormat(
        settings.model_hash,
        str(dtype).removeprefix("torch."),
        widths,
        PAGE_TOKENS,
        PAGE_TOKENS * token_bytes,
        settings.arithmetic,
    )
