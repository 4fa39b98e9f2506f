"""Dense linear layers in float64, with the error bound of csrc/kernels/linear.h.

Built from the definitions of e4m3 and bfloat16 alone, not from the packer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from duckllm import _native

UNIT_ROUNDOFF = 2.0**-24


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """Float64 values of e4m3 bytes, by the definition of the format."""
    codes = codes.astype(np.int64)
    sign, exponent, mantissa = np.where(codes >> 7, -1.0, 1.0), (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * np.exp2(exponent.astype(float) - 7)
    return sign * np.where(exponent == 0, mantissa * 2.0**-9, normal)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """The upper halves of f32 values, as uint16: bfloat16 by truncation."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bf16(words: np.ndarray) -> np.ndarray:
    """The f32 values of bfloat16 words."""
    return (words.astype(np.uint32) << 16).view(np.float32)


@dataclass
class Weight:
    """A dense weight as a checkpoint has it: ``stored`` is [N, K], e4m3 bytes, bfloat16 words or f32."""

    stored: np.ndarray
    scales: np.ndarray | None

    @classmethod
    def random(cls, out_features: int, in_features: int, weight_format: str, seed: int = 0) -> Weight:
        """Every exponent of e4m3, subnormals and both zeros included; normal numbers in bfloat16 and f32."""
        rng = np.random.default_rng(seed)
        shape = (out_features, in_features)
        if weight_format == "bf16":
            return cls(to_bf16(rng.standard_normal(shape) / 16), None)
        if weight_format == "f32":
            return cls((rng.standard_normal(shape) / 16).astype(np.float32), None)
        codes = rng.integers(0, 254, shape, dtype=np.uint8)
        codes = np.where(codes >= 0x7F, codes + 1, codes).astype(np.uint8)  # 0x7f and 0xff are NaN
        blocks = (-(-out_features // 128), -(-in_features // 128))
        return cls(codes, (rng.uniform(0.5, 2.0, blocks) * 2.0**-9).astype(np.float32))

    def dense(self) -> np.ndarray:
        """Float64 [N, K]."""
        if self.scales is None:
            values = self.stored if self.stored.dtype == np.float32 else from_bf16(self.stored)
            return values.astype(np.float64)
        wide = np.repeat(np.repeat(self.scales.astype(np.float64), 128, 0), 128, 1)
        return decode_e4m3(self.stored) * wide[: self.stored.shape[0], : self.stored.shape[1]]

    def run(
        self, runtime: _native.LinearRuntime, weight_format: str, x: np.ndarray, out: np.ndarray | None = None
    ) -> np.ndarray:
        """The native product."""
        out_features, in_features = self.stored.shape
        packed = _native.pack_linear(self.stored, weight_format)
        return runtime.run(packed, self.scales, out_features, in_features, weight_format, x, out)


def product(weight: Weight, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The exact y [T, N] and the bound on the error of the native kernels."""
    dense, x = weight.dense(), x.astype(np.float64)
    in_features = x.shape[1]
    blocks = -(-in_features // 128)
    steps = min(in_features, 128) / 2 + min(blocks, 8) + -(-blocks // 8) + 4
    return x @ dense.T, steps * UNIT_ROUNDOFF * (abs(x) @ abs(dense).T)


def rows(num_rows: int, in_features: int, seed: int = 1) -> np.ndarray:
    """Random x [T, K] f32."""
    return np.random.default_rng(seed).standard_normal((num_rows, in_features)).astype(np.float32)


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    """Equal to the last bit, signs of zeros and NaN payloads included."""
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
