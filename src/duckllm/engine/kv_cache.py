"""The KV cache: pages of tokens, allocated once, shared by requests that begin alike.

Called by the scheduler. A page holds what every layer keeps of PAGE_TOKENS consecutive tokens; the layout
inside belongs to the attention layers. A page that is full is known by a hash of its tokens and of all before
them, so that another request with the same beginning takes it as it is. A page that nobody uses keeps its
content until the room is needed; the one that was left longest goes first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from duckllm.config import total_memory_bytes
from duckllm.errors import ConfigError
from duckllm.layers.step import LayerCache, SequenceStep
from duckllm.models.config import ModelConfig

PAGE_TOKENS = 16
DEFAULT_BUDGET_BYTES = 2 << 30


def resolve_max_model_len(asked: int | None, config: ModelConfig, element_bytes: int = 4) -> int:
    """``asked`` once it is known to be possible; for None the longest, or what 2 GiB of KV cache hold.

    Raises:
        ConfigError: More than the model's longest context, or than this machine's memory holds.
    """
    token_bytes = config.cache_elements_per_token * element_bytes
    longest = config.max_position_embeddings
    if asked is None:
        return max(2, min(longest, DEFAULT_BUDGET_BYTES // token_bytes))
    if asked > longest:
        raise ConfigError("max_model_len", asked, f"at most {longest}, the model's longest context")
    memory_bytes = total_memory_bytes()
    if asked * token_bytes > memory_bytes:
        raise ConfigError(
            "max_model_len",
            asked,
            f"at most {memory_bytes // token_bytes}, what the {memory_bytes} bytes of this machine's memory "
            f"hold at {token_bytes} bytes a token",
        )
    return asked


def resolve_cache_tokens(
    asked_bytes: int | None, max_model_len: int, config: ModelConfig, element_bytes: int = 4
) -> int:
    """Tokens that the KV cache holds: of 2 GiB, or of what was asked for, and at least one whole context.

    Raises:
        ConfigError: Not enough for one context of ``max_model_len``.
    """
    token_bytes = config.cache_elements_per_token * element_bytes
    least_bytes = num_pages(max_model_len) * PAGE_TOKENS * token_bytes
    if asked_bytes is None:
        return max(DEFAULT_BUDGET_BYTES, least_bytes) // token_bytes
    if asked_bytes < least_bytes:
        raise ConfigError(
            "kv_cache_bytes",
            asked_bytes,
            f"at least {least_bytes}, for one context of {max_model_len} tokens",
        )
    if asked_bytes > total_memory_bytes():
        raise ConfigError(
            "kv_cache_bytes", asked_bytes, f"at most {total_memory_bytes()}, this machine's memory"
        )
    return asked_bytes // token_bytes


def num_pages(num_tokens: int) -> int:
    """Pages that so many tokens take."""
    return -(-num_tokens // PAGE_TOKENS)


@dataclass
class PageTable:
    """The pages of one request, in the order of its tokens.

    Args:
        pages: Their numbers.
        hashes: Of the first ones, which are full.
    """

    pages: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)


class KvCache:
    """Memory for the tokens of many contexts.

    Args:
        new_tensors: Makes each layer's tensors for so many tokens, [max_tokens, width] each.
        max_tokens: Most tokens, over all contexts; rounded down to whole pages.
    """

    def __init__(self, new_tensors: Callable[[int], list[LayerCache]], max_tokens: int) -> None:
        self.num_pages = max_tokens // PAGE_TOKENS
        self.tensors = new_tensors(self.num_pages * PAGE_TOKENS)
        self.clear()

    def clear(self) -> None:
        """Forgets everything; tables that were open are void."""
        self._users = np.zeros(self.num_pages, np.int32)
        self._is_free = np.ones(self.num_pages, bool)
        self._num_free = self.num_pages
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # with content, longest left first

    @property
    def num_available_pages(self) -> int:
        """Pages that nobody uses."""
        return self._num_free + len(self._unused)

    def open(self, token_ids: Sequence[int]) -> tuple[PageTable, int]:
        """A table that begins with the pages that are known already, and how many tokens they hold.

        At least one token is left to compute, as its logits are wanted.
        """
        table = PageTable()
        previous = b""
        for first in range(0, (len(token_ids) - 1) // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS):
            previous = _hash(previous, token_ids[first : first + PAGE_TOKENS])
            page = self._page_of.get(previous)
            if page is None:
                break
            self._unused.pop(page, None)
            self._users[page] += 1
            table.pages.append(page)
            table.hashes.append(previous)
        return table, len(table.pages) * PAGE_TOKENS

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
        for number in range(len(table.hashes), num_computed // PAGE_TOKENS):
            previous = table.hashes[-1] if table.hashes else b""
            first = number * PAGE_TOKENS
            table.hashes.append(_hash(previous, token_ids[first : first + PAGE_TOKENS]))
            if self._page_of.setdefault(table.hashes[-1], table.pages[number]) == table.pages[number]:
                self._hash_of[table.pages[number]] = table.hashes[-1]

    def close(self, table: PageTable) -> None:
        """Lets go of a table's pages; those that are known keep their content for the next one."""
        # The last pages of a context are of least use to others: they go first.
        for page in reversed(table.pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._hash_of:
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
        pages = np.array(table.pages[: num_pages(start + num_tokens)])
        run = bool((np.diff(pages) == 1).all())
        slots = None
        if not run:
            slots = (pages[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).reshape(-1)[: start + num_tokens]
        if slots is not None:
            slots = slots[first:]
        return SequenceStep.of(
            first_row, start - first, num_tokens, int(pages[0]) * PAGE_TOKENS + first, slots
        )

    def _take(self, table: PageTable) -> int:
        """A page, behind the table's last one where that is free: consecutive pages need no copies."""
        if self._num_free:
            after = table.pages[-1] + 1 if table.pages else self.num_pages
            page = after if after < self.num_pages and self._is_free[after] else self._start_of_run()
            self._is_free[page] = False
            self._num_free -= 1
        else:
            page, _ = self._unused.popitem(last=False)
            del self._page_of[self._hash_of.pop(page)]
        self._users[page] = 1
        return page

    def _start_of_run(self) -> int:
        """The middle of the longest run of free pages; its first half is left to who lies before it."""
        edges = np.flatnonzero(np.diff(self._is_free, prepend=False, append=False))
        starts, stops = edges[::2], edges[1::2]
        longest = int((stops - starts).argmax())
        start, stop = int(starts[longest]), int(stops[longest])
        return start if start == 0 else start + (stop - start) // 2


def _hash(previous: bytes, token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(previous + array("q", token_ids).tobytes(), digest_size=16).digest()
