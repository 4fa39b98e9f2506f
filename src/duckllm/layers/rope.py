"""Rotary position embedding in its two layouts.

Called by the attention layers. MLA pairs neighbours, (x0, x1), (x2, x3), ...; grouped-query attention and the
sparse-attention indexer pair the halves, (x0, x[D/2]), (x1, x[D/2 + 1]), ... The same angles serve both. The
rotation itself is native.
"""

from __future__ import annotations

import torch

from duckllm import _native


class RotaryTable:
    """Cosines and sines of every position, computed once.

    Args:
        inv_freq: Angle per position of each pair, radians.
        attention_scaling: Factor on cosine and sine (YaRN's attention factor; 1 without scaling).
        max_positions: Number of positions.

    Shapes:
        inv_freq: [D / 2] f32; cos, sin: [max_positions, D / 2] f32
    """

    def __init__(self, inv_freq: torch.Tensor, attention_scaling: float, max_positions: int) -> None:
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq.float()
        self.cos = angles.cos() * attention_scaling
        self.sin = angles.sin() * attention_scaling

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of cosines and sines at ``positions``: two [T, D / 2]."""
        return self.cos[positions], self.sin[positions]


def rotate_interleaved(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``x`` with neighbouring pairs rotated; the results of first elements come first, then of second ones.

    That order is a permutation which queries and keys share, so their products do not see it.

    Shapes:
        x, out, result: [T, D] or [T, heads, D] f32, the last dimension side by side; cos, sin: [T, D / 2]
    """
    return _rotate(x, cos, sin, out, interleaved=True)


def rotate_half_split(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``x`` with element i of the first half rotated against element i of the second half.

    Shapes:
        x, out, result: [T, D] or [T, heads, D] f32, the last dimension side by side; cos, sin: [T, D / 2]
    """
    return _rotate(x, cos, sin, out, interleaved=False)


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor | None, *, interleaved: bool
) -> torch.Tensor:
    """Writes ``out``, which may be ``x``; a new tensor where there is none."""
    if out is None:
        out = torch.empty(x.shape)
    _native.rotate(x.numpy(), cos.numpy(), sin.numpy(), interleaved, out.numpy())
    return out
