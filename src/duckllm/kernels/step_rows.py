"""Where the rows of a step belong: the context and position of each, and where contexts lie in the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Tokens of a page of the KV cache on a GPU.
PAGE_TOKENS = 16


@dataclass(frozen=True)
class StepRows:
    """Rows of a step on the device. A row sees the positions from its context's first one to its own.

    The token at position p of context c lies in row ``pages[c, p // 16] * 16 + p % 16`` of each tensor of the
    cache. A row of slot -1 is nobody's: it is computed, and stored nowhere.

    Args:
        positions: Of each row.
        contexts: Of each row.
        firsts: The first position that each row sees.
        slots: The row of the cache that each row's own token is stored in, or -1.
        pages: Pages of each context, in order; what lies behind a context's last one may be anything.
        cos: Cosines of all positions.
        sin: Sines of all positions.
        spans: First row and number of rows of each context, whose rows are consecutive tokens; empty where a
            step is captured, in which rows of contexts may lie as they like.

    Shapes:
        positions, contexts, firsts, slots: [R] int32; pages: [C, P] int32;
        cos, sin: [max_positions, rope / 2] f32; all on the device
    """

    positions: torch.Tensor
    contexts: torch.Tensor
    firsts: torch.Tensor
    slots: torch.Tensor
    pages: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.positions)
