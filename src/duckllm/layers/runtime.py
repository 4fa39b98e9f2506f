"""What the native layers of one model share: threads, scratch memory, and the format of FP8 weights.

Called by the models, which make one and hand it to their layers; knows arrays and no model.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from duckllm import _native
from duckllm.errors import ConfigError
from duckllm.weights.e4m3 import scale_shape

F32 = npt.NDArray[np.float32]

# Rows that the scratch memory holds; a longer step is taken by turns.
PANEL_ROWS = 256
# How long idle threads wait for the next layer before they sleep. Between two layers of a decode step lie
# some tens of microseconds; PyTorch's threads, which may want the same cores, have to wait no longer.
SPIN_US = 50
# The weight that the formats are compared on; it stays in a cache, where decoding alone counts.
_TRIAL_SHAPE = (32, 4096)
_TRIAL_RUNS = 8
# fp8 takes an eighth less memory; it is left only where decoding it is clearly slower, as on CPUs that take
# long for the f32 denormals that e4m3 subnormals become.
_MOST_SLOWER = 1.3


@dataclass(frozen=True)
class LinearRuntime:
    """Threads and scratch memory of a model's native layers. One layer computes at a time.

    Args:
        native: Computes.
        fp8_format: Format that FP8 weights are packed in, ``"fp8"`` or ``"fp9"``; both give the same bits.
    """

    native: _native.LinearRuntime
    fp8_format: str

    @classmethod
    def new(cls, max_in_features: int, num_threads: int) -> LinearRuntime:
        """A runtime for weights [any, up to ``max_in_features``].

        Raises:
            ConfigError: DUCK_FORCE_ISA names no instruction set, or one that this machine lacks.
        """
        try:
            isa = _native.select_isa()
        except ValueError as error:
            known = "one of " + ", ".join(_native.available_isas())
            raise ConfigError("DUCK_FORCE_ISA", os.environ.get("DUCK_FORCE_ISA"), known) from error
        native = _native.LinearRuntime(
            PANEL_ROWS,
            max(max_in_features, _TRIAL_SHAPE[1]),
            num_threads,
            SPIN_US if num_threads > 1 else 0,
            isa,
        )
        return cls(native, _faster_format(native))

    @cached_property
    def attention(self) -> _native.Attention:
        """Attention on the same threads."""
        return _native.Attention(self.native)


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

    def multiply(self, runtime: LinearRuntime, x: F32) -> F32:
        """``x W^T``: [T, K] to [T, N]."""
        y = runtime.native.run(self.records, self.scales, self.out_features, self.in_features, self.format, x)
        return y if self.row_scales is None else np.multiply(y, self.row_scales, out=y)


def _faster_format(native: _native.LinearRuntime) -> str:
    """fp8, unless this machine decodes it much slower than fp9."""
    out_features, in_features = _TRIAL_SHAPE
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 0x7F, _TRIAL_SHAPE, np.uint8) | rng.integers(0, 2, _TRIAL_SHAPE, np.uint8) << 7
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
