"""FP8 e4m3 codes, their block scales, and the rounding of floats onto that grid, in numpy.

Every weight format stores such weights without loss. Called by the converter, its checks and the formats; it
knows arrays only, no records, files or models, and imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from duckllm.errors import WeightFormatError

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

SCALE_BLOCK = 128
E4M3_MAX = 448.0

_SMALLEST_NORMAL_F32 = np.float32(2.0**-126)


def ceil_div(a: int, b: int) -> int:
    """The smallest integer that is at least ``a / b``."""
    return -(-a // b)


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the block scales of a ``[rows, columns]`` matrix; edge blocks count."""
    return ceil_div(rows, SCALE_BLOCK), ceil_div(columns, SCALE_BLOCK)


def count_e4m3_nans(codes: U8) -> int:
    """How many bytes are one of the two e4m3 NaNs, 0x7f and 0xff."""
    return int(np.count_nonzero((codes & 0x7F) == 0x7F))


def refuse_nans(codes: U8, name: str) -> None:
    """Checks that e4m3 codes are finite.

    Raises:
        WeightFormatError: The codes hold NaN (0x7f or 0xff); names the tensor.
    """
    nans = count_e4m3_nans(codes)
    if nans:
        raise WeightFormatError(
            f"{name}: got {nans} NaN value(s) among its e4m3 bytes (0x7f or 0xff), expected finite weights"
        )


def e4m3_values() -> F32:
    """The f32 value of each of the 256 e4m3 codes; 0x7f and 0xff are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = np.ldexp(1.0 + mantissa / 8.0, exponent - 7)
    value = np.where(exponent == 0, mantissa * 2.0**-9, normal) * np.where(code >= 0x80, -1.0, 1.0)
    value[[0x7F, 0xFF]] = np.nan
    return value.astype(np.float32)


def expand_scales(scales: F32, rows: int, columns: int) -> F32:
    """Scales of blocks or of rows repeated to one per weight.

    Shapes: scales: [ceil(rows/128), ceil(columns/128)] or [rows, 1] f32; result: [rows, columns] f32.
    """
    if scales.shape == (rows, 1):
        return np.broadcast_to(scales, (rows, columns))
    wide: F32 = np.repeat(np.repeat(scales, SCALE_BLOCK, axis=0), SCALE_BLOCK, axis=1)
    return wide[:rows, :columns]


def dequantise(codes: U8, scales: F32) -> F32:
    """The weights that e4m3 codes and scales of blocks or rows stand for.

    Shapes: codes: [rows, columns] u8; scales: as for :func:`expand_scales`; result: as codes, f32.
    """
    return e4m3_values()[codes] * expand_scales(scales, *codes.shape)


def round_to_e4m3(values: F32) -> U8:
    """The e4m3 codes nearest to the values, ties to even, subnormals included, clamped to +-448.

    Shapes: values: any, f32, finite; result: the same, u8.
    """
    bits = values.view(np.uint32)
    size = np.minimum(np.abs(values), np.float32(E4M3_MAX))
    size_bits = size.view(np.uint32)
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = np.rint(size * np.float32(512.0))
    codes = np.where(size < np.float32(2.0**-6), subnormal.astype(np.uint32), normal)
    result: U8 = (codes | ((bits >> 31) << 7)).astype(np.uint8)
    return result


@dataclass
class QuantisationError:
    """Sums that describe how far quantised weights lie from their source; add up over tensors with ``+=``.

    Args:
        squared_error: Sum of (quantised - source)^2.
        squared_source: Sum of source^2.
        max_relative: Largest |quantised - source| / |source| over weights of at least 2^-6 of the block's
            scale, at most 1/17; smaller weights change by at most 2^-10 of the scale.
        flushed: Non-zero source weights that became zero (below 2^-10 of the block's scale).
        weights: Number of weights.
    """

    squared_error: float = 0.0
    squared_source: float = 0.0
    max_relative: float = 0.0
    flushed: int = 0
    weights: int = 0

    def __iadd__(self, other: QuantisationError) -> QuantisationError:
        self.squared_error += other.squared_error
        self.squared_source += other.squared_source
        self.max_relative = max(self.max_relative, other.max_relative)
        self.flushed += other.flushed
        self.weights += other.weights
        return self

    @classmethod
    def from_json(cls, value: object) -> QuantisationError:
        """What ``dataclasses.asdict`` made of one.

        Raises:
            ValueError: A sum is missing, unknown or no number.
        """
        if not isinstance(value, dict) or value.keys() != cls.__dataclass_fields__.keys():
            raise ValueError(f"expected an object with {sorted(cls.__dataclass_fields__)}")
        for name, got in value.items():
            whole = name in ("flushed", "weights")
            if type(got) is not int and (whole or type(got) is not float):
                raise ValueError(f"{name}: expected a {'whole ' if whole else ''}number")
        return cls(**value)

    @property
    def rms_relative(self) -> float:
        """Root mean square error over the root mean square of the source."""
        return (self.squared_error / self.squared_source) ** 0.5 if self.squared_source else 0.0


def block_scales(weights: F32) -> F32:
    """The scales that map each 128x128 block's largest magnitude to 448; 1 for a block of zeros.

    A scale below the smallest normal f32 is raised to it, so that no kernel multiplies by a denormal.

    Shapes: weights: [rows, columns] f32; result: [ceil(rows/128), ceil(columns/128)] f32.
    """
    rows, columns = weights.shape
    block_rows, block_columns = scale_shape(rows, columns)
    padded = np.zeros((block_rows * SCALE_BLOCK, block_columns * SCALE_BLOCK), np.float32)
    np.abs(weights, out=padded[:rows, :columns])
    blocks = padded.reshape(block_rows, SCALE_BLOCK, block_columns, SCALE_BLOCK)
    largest = blocks.max(axis=(1, 3))
    scales = np.maximum(largest / np.float32(E4M3_MAX), _SMALLEST_NORMAL_F32)
    return np.where(largest == 0, np.float32(1.0), scales)


def quantise_blocks(weights: F32, name: str = "tensor") -> tuple[U8, F32, QuantisationError]:
    """Codes on the e4m3 grid, their block scales, and how far they lie from the weights.

    Shapes: weights: [rows, columns] f32; codes: same, u8; scales: [ceil(rows/128), ceil(columns/128)] f32.

    Raises:
        WeightFormatError: The weights hold NaN or infinity.
    Reference: the native twin is ``duckllm._native.quantize_e4m3_blocks``, byte for byte.
    """
    bad = weights.size - int(np.count_nonzero(np.isfinite(weights)))
    if bad:
        raise WeightFormatError(f"{name}: got {bad} non-finite weight(s), expected finite weights")
    scales = block_scales(weights)
    codes = round_to_e4m3(weights / expand_scales(scales, *weights.shape))
    return codes, scales, quantisation_error(weights, codes, scales)


def quantise_rows(weights: F32) -> tuple[U8, F32, QuantisationError]:
    """Codes on the e4m3 grid, a scale for each row that maps its largest magnitude to 448, and the error.

    Shapes: weights: [rows, columns] f32, finite; codes: same, u8; scales: [rows, 1] f32.
    """
    largest = np.abs(weights).max(axis=1, keepdims=True)
    raised = np.maximum(largest / np.float32(E4M3_MAX), _SMALLEST_NORMAL_F32)
    scales: F32 = np.where(largest == 0, np.float32(1.0), raised)
    codes = round_to_e4m3(weights / scales)
    return codes, scales, quantisation_error(weights, codes, scales)


def quantisation_error(weights: F32, codes: U8, scales: F32) -> QuantisationError:
    """How far quantised weights lie from their source.

    Shapes: weights: [rows, columns] f32; codes: same, u8; scales: as for :func:`expand_scales`.
    """
    distance = np.abs(dequantise(codes, scales) - weights)
    size = np.abs(weights)
    is_normal = size >= expand_scales(scales * np.float32(2.0**-6), *weights.shape)
    relative = np.divide(distance, size, out=np.zeros_like(size), where=is_normal & (size > 0))
    return QuantisationError(
        squared_error=float(np.sum(np.square(distance, dtype=np.float64))),
        squared_source=float(np.sum(np.square(size, dtype=np.float64))),
        max_relative=float(relative.max()),
        flushed=int(np.count_nonzero((codes & 0x7F == 0) & (size > 0))),
        weights=weights.size,
    )
