"""What the layers of one forward pass share. Made by the models; passed from one attention to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

# What one attention layer keeps of the tokens it has seen: tensors [max_tokens, width], as many as it needs.
LayerCache = tuple[torch.Tensor, ...]


def new_layer_cache(widths: Sequence[int], max_tokens: int, dtype: torch.dtype) -> LayerCache:
    """An empty cache of one layer; memory is taken by the system only as it is written.

    Shapes:
        result: one tensor [max_tokens, width] for each width
    """
    return tuple(torch.empty(max_tokens, width, dtype=dtype) for width in widths)


@dataclass
class SequenceStep:
    """Consecutive tokens of one context in a step, and where the context lies in the cache.

    Args:
        rows: Their rows in the step.
        start: Position of the first one; the cache holds the tokens before it.
        num_tokens: How many.
        first_slot: Row of the cache that holds the context's first token.
        slots: Row of each token up to the last of the step, where they are not consecutive.
        selection: The tokens that each of them attends to, by the last layer that has chosen some; None
            where that layer attends to all.

    Shapes:
        slots: [start + num_tokens] int64; selection: [num_tokens, start + num_tokens] bool
    """

    rows: slice
    start: int
    num_tokens: int
    first_slot: int = 0
    slots: torch.Tensor | None = None
    selection: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        first_row: int,
        start: int,
        num_tokens: int,
        first_slot: int = 0,
        slots: npt.NDArray[np.int64] | None = None,
    ) -> SequenceStep:
        """Tokens [start, start + num_tokens) in the rows from ``first_row`` on."""
        rows = slice(first_row, first_row + num_tokens)
        indices = None if slots is None else torch.from_numpy(slots)
        return cls(rows, start, num_tokens, first_slot, indices)

    @property
    def stop(self) -> int:
        """Position behind the last token."""
        return self.start + self.num_tokens

    def write(self, cache: torch.Tensor, values: torch.Tensor) -> None:
        """Puts the step's tokens into the cache: [num_tokens, width] of [max_tokens, width]."""
        if self.slots is None:
            cache[self.first_slot + self.start : self.first_slot + self.stop] = values
        else:
            cache[self.slots[self.start :]] = values

    def read(self, cache: torch.Tensor, first: int = 0) -> torch.Tensor:
        """The context's tokens from ``first`` to the last of the step, in order: a view where they lie so."""
        if self.slots is None:
            return cache[self.first_slot + first : self.first_slot + self.stop]
        return cache.index_select(0, self.slots[first:])

    def read_at(self, cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The tokens at these positions alone: [n, width] for [n] int64."""
        slots = self.first_slot + positions if self.slots is None else self.slots[positions]
        return cache.index_select(0, slots)


@dataclass(frozen=True)
class StepContext:
    """The tokens of a step, on their way through the layers.

    Args:
        sequences: The contexts that they belong to, in the order of their rows.
        cos: Cosines of their positions.
        sin: Sines of their positions.

    Shapes:
        cos, sin: [T, rope / 2] f32
    """

    sequences: Sequence[SequenceStep]
    cos: torch.Tensor
    sin: torch.Tensor
