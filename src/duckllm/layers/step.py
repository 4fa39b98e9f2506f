"""What the layers of one forward pass share. Made by the runtime; passed from one attention to the next."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from duckllm import _native

# What one attention layer keeps of the tokens it has seen: tensors [max_tokens, width], as many as it needs.
LayerCache = tuple[torch.Tensor, ...]

_HUGE_PAGE = 2 << 20


def new_layer_cache(widths: Sequence[int], max_tokens: int) -> LayerCache:
    """An empty cache of one layer; memory is taken by the system only as it is written.

    Shapes:
        result: one tensor [max_tokens, width] for each width
    """
    return tuple(_new_tensor(max_tokens, width) for width in widths)


def _new_tensor(max_tokens: int, width: int) -> torch.Tensor:
    """On huge pages where it is large and the system gives them: keys are read from all over it."""
    size = max_tokens * width * torch.float32.itemsize
    if size < _HUGE_PAGE:
        return torch.empty(max_tokens, width)
    memory = mmap.mmap(-1, size)
    with suppress(OSError):  # advice: small pages do too
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).view(max_tokens, width)


@dataclass(frozen=True)
class SequenceStep:
    """Consecutive tokens of one context in a step, and where the context lies in the cache.

    The token at position p lies in row ``pages[p // page_tokens] * page_tokens + p % page_tokens`` of each
    tensor of the cache.

    Args:
        rows: Their rows in the step.
        start: Position of the first one; the cache holds the tokens before it.
        num_tokens: How many.
        pages: The context's pages up to the step's last token, in order.
        page_tokens: Tokens of a page.
        first: The first position that the context has; none before it is attended to.

    Shapes:
        pages: [ceil((start + num_tokens) / page_tokens)] int32
    """

    rows: slice
    start: int
    num_tokens: int
    pages: npt.NDArray[np.int32]
    page_tokens: int
    first: int = 0

    @classmethod
    def of(
        cls,
        first_row: int,
        start: int,
        num_tokens: int,
        pages: npt.NDArray[np.int32] | None = None,
        page_tokens: int = 1,
        *,
        first: int = 0,
    ) -> SequenceStep:
        """Tokens [start, start + num_tokens) in the rows from ``first_row`` on.

        Without ``pages`` the context lies in order, from the cache's first row on.
        """
        rows = slice(first_row, first_row + num_tokens)
        if pages is None:
            pages, page_tokens = np.zeros(1, np.int32), start + num_tokens
        return cls(rows, start, num_tokens, pages, page_tokens, first)

    @property
    def stop(self) -> int:
        """Position behind the last token."""
        return self.start + self.num_tokens


@dataclass
class StepContext:
    """The tokens of a step, on their way through the layers.

    Args:
        sequences: The contexts that they belong to, in the order of their rows.
        cos: Cosines of their positions.
        sin: Sines of their positions.
        selection: The positions that each of them attends to, by the last layer that has chosen some, as
            ``_native.Attention.select`` gives them; None where that layer attends to all.

    Shapes:
        cos, sin: [T, rope / 2] f32; selection: [T, topk] int32
    """

    sequences: Sequence[SequenceStep]
    cos: torch.Tensor
    sin: torch.Tensor
    selection: npt.NDArray[np.int32] | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        return self.native.longest

    @cached_property
    def native(self) -> _native.StepContexts:
        """The contexts, as the native attention takes them."""
        rows = [(each.start, each.num_tokens, each.first, each.page_tokens) for each in self.sequences]
        pages = [each.pages for each in self.sequences]
        return _native.StepContexts(
            np.array(rows, np.int64), pages[0] if len(pages) == 1 else np.concatenate(pages)
        )
