"""A matrix for each head, which the head's part of every row is multiplied with.

Called by :mod:`duckllm.layers.mla`, for the products with the up-projections of keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from duckllm.layers.runtime import LinearRuntime

_COLUMNS = 32  # outputs side by side in the native layout


class HeadMatrices:
    """``out[t, h] = x[t, h] W[h]``, a row's bits the same in any company.

    Shapes:
        matrices: [heads, K, N] f32
    """

    def __init__(self, matrices: torch.Tensor, runtime: LinearRuntime) -> None:
        self._native = runtime.attention
        self._outputs = matrices.shape[2]
        num_heads, inputs = matrices.shape[:2]
        padded = F.pad(matrices, (0, -self._outputs % _COLUMNS)).view(num_heads, inputs, -1, _COLUMNS)
        self._packed = padded.transpose(1, 2).contiguous().numpy()

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``out``.

        Shapes:
            x: [T, heads, K]; out: [T, heads, N]; of both the last dimension lies side by side
        """
        self._native.multiply_heads(x.numpy(), self._packed, self._outputs, out.numpy())
