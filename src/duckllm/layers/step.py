"""What the layers of one forward pass share. Made by the models; passed from one attention to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# What one attention layer keeps of the tokens it has seen: tensors [max_tokens, width], as many as it needs.
LayerCache = tuple[torch.Tensor, ...]


@dataclass
class StepContext:
    """Consecutive tokens of one sequence, on their way through the layers.

    Args:
        start: Position of the first one; the cache holds the tokens before it.
        cos: Cosines of their positions.
        sin: Sines of their positions.
        selection: The tokens that each of them attends to, by the last layer that has chosen some; None
            where that layer attends to all.

    Shapes:
        cos, sin: [T, rope / 2] f32; selection: [T, start + T] bool
    """

    start: int
    cos: torch.Tensor
    sin: torch.Tensor
    selection: torch.Tensor | None = None
