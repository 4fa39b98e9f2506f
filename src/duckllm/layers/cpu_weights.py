"""Weights of linear layers in the native layout, and the choice of a format for FP8 ones.

Made by :mod:`duckllm.layers.cpu_runtime`; knows arrays and no model.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from duckllm import _native
from duckllm.weights.e4m3 import scale_shape

F32 = npt.NDArray[np.float32]

# The weight that the formats are compared on; it stays in a cache, where decoding alone counts.
TRIAL_SHAPE = (32, 4096)
_TRIAL_RUNS = 8
# fp8 takes an eighth less memory; it is left only where decoding it is clearly slower, as on CPUs that take
# long for the f32 denormals that e4m3 subnormals become.
_MOST_SLOWER = 1.3


@dataclass(frozen=True)
class PackedWeight:
    """A linear layer's weight in the native layout.

    Args:
        records: Of ``_native.pack_linear``.
        scales: Block scales, None for bf16 and f32.
        row_scales: What the outputs are multiplied with, where the checkpoint has a scale for each row.
        out_features: N.
        in_features: K.
        format: ``"bf16"``, ``"f32"``, ``"fp8"`` or ``"fp9"``.
    """

    records: npt.NDArray[np.uint8]
    scales: F32 | None
    out_features: int
    in_features: int
    format: str
    row_scales: F32 | None = None

    @classmethod
    def pack(cls, weight: torch.Tensor, scales: torch.Tensor | None, fp8_format: str) -> PackedWeight:
        """Packs a stored weight.

        Shapes: weight: [N, K] float8_e4m3fn with scales f32, [ceil(N/128), ceil(K/128)] for blocks or [N, 1]
            for rows, or bfloat16 or float32 without.

        Raises:
            ValueError: The weight holds NaN bytes of e4m3.
        """
        out_features, in_features = weight.shape
        if weight.dtype == torch.float32:
            values = weight.contiguous().numpy()
            return cls(_native.pack_linear(values, "f32"), None, out_features, in_features, "f32")
        if scales is None:
            words = weight.contiguous().view(torch.int16).numpy().view(np.uint16)
            return cls(_native.pack_linear(words, "bf16"), None, out_features, in_features, "bf16")
        codes = weight.contiguous().view(torch.uint8).numpy()
        records, factors = _native.pack_linear(codes, fp8_format), scales.contiguous().numpy()
        blocks = scale_shape(out_features, in_features)
        if factors.shape == blocks:
            return cls(records, factors, out_features, in_features, fp8_format)
        ones = np.ones(blocks, np.float32)
        return cls(records, ones, out_features, in_features, fp8_format, factors[:, 0])

    def multiply(self, native: _native.LinearRuntime, x: F32) -> F32:
        """``x W^T``: [T, K] to [T, N]."""
        y = native.run(self.records, self.scales, self.out_features, self.in_features, self.format, x)
        return y if self.row_scales is None else np.multiply(y, self.row_scales, out=y)


def faster_format(native: _native.LinearRuntime) -> str:
    """fp8, unless this machine decodes it much slower than fp9."""
    out_features, in_features = TRIAL_SHAPE
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 0x7F, TRIAL_SHAPE, np.uint8) | rng.integers(0, 2, TRIAL_SHAPE, np.uint8) << 7
    scales = np.ones((1, in_features // 128), np.float32)
    x = rng.standard_normal((1, in_features)).astype(np.float32)
    fastest = {}
    for name in ("fp8", "fp9"):
        packed = _native.pack_linear(codes.astype(np.uint8), name)
        seconds = []
        for _ in range(_TRIAL_RUNS):
            start = time.perf_counter()
            native.run(packed, scales, out_features, in_features, name, x)
            seconds.append(time.perf_counter() - start)
        fastest[name] = min(seconds)
    return "fp8" if fastest["fp8"] <= _MOST_SLOWER * fastest["fp9"] else "fp9"
