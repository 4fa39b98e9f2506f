"""A matrix for each head, which the head's part of every row is multiplied with, natively.

Called by :mod:`duckllm.layers.cpu_runtime`, for the products with the up-projections of keys and values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from duckllm import _native

_COLUMNS = 32  # outputs side by side in the native layout


class HeadMatrices:
    """``out[t, h] = x[t, h] W[h]``, a row's bits the same in any company.

    Shapes:
        matrices: [heads, K, N] f32
    """

    def __init__(self, matrices: torch.Tensor, attention: _native.Attention) -> None:
        self._native = attention
        self.num_heads, self.num_inputs, self.num_outputs = matrices.shape
        padded = F.pad(matrices, (0, -self.num_outputs % _COLUMNS))
        padded = padded.view(self.num_heads, self.num_inputs, -1, _COLUMNS)
        self._packed = padded.transpose(1, 2).contiguous().numpy()

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``out``.

        Shapes:
            x: [T, heads, K]; out: [T, heads, N]; of both the last dimension lies side by side
        """
        self._native.multiply_heads(x.numpy(), self._packed, self.num_outputs, out.numpy())
