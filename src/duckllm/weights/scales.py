"""The scales of FP8 weights, however finely a checkpoint has them: for a whole matrix, a row, or a block.

Called by the checkpoint reader, the converter and the host's tensor loader; it knows shapes and arrays, no
names and no files, and imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from duckllm.weights.e4m3 import F32, SCALE_BLOCK, U8, ceil_div


def widen_to_f32(raw: U8, dtype: str) -> F32:
    """Values as f32, exactly.

    Shapes: raw: [num_bytes] u8 of F32, F16, BF16 or F8_E8M0; result: [num_values] f32.
    """
    if dtype == "F8_E8M0":  # 2^(byte - 127): f32's own exponent, but for the denormal 2^-127 and NaN
        bits = raw.astype(np.uint32) << 23
        bits[raw == 0], bits[raw == 0xFF] = 0x400000, 0x7FC00000
        return bits.view(np.float32)
    if dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view("<f4" if dtype == "F32" else "<f2").astype(np.float32, copy=False)


@dataclass(frozen=True)
class ScaleKind:
    """Which weights of a matrix share a scale.

    Args:
        rows: Consecutive rows; None for all of them.
        columns: Consecutive columns; None for all of them.
    """

    rows: int | None
    columns: int | None

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the scales of a matrix [rows, columns]."""
        rows, columns = shape
        return ceil_div(rows, self.rows or rows), ceil_div(columns, self.columns or columns)

    def __str__(self) -> str:
        if (self.rows, self.columns) == (None, None):
            return "one scale per tensor"
        if (self.rows, self.columns) == (1, None):
            return "one scale per row"
        return f"one scale per block of {self.rows} x {self.columns}"


PER_TENSOR = ScaleKind(None, None)
PER_CHANNEL = ScaleKind(1, None)
BLOCK_128 = ScaleKind(SCALE_BLOCK, SCALE_BLOCK)


@dataclass(frozen=True)
class ScaleFit:
    """How the scales of one matrix lie over it.

    Args:
        rows: Rows that share a scale, at most those of the matrix.
        columns: Columns that share a scale, at most those of the matrix.
        by_half: The matrix is two, one above the other, whose scales follow each other.
    """

    rows: int
    columns: int
    by_half: bool = False

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the scales of a matrix [rows, columns]."""
        halves = 2 if self.by_half else 1
        return halves * ceil_div(shape[0] // halves, self.rows), ceil_div(shape[1], self.columns)


def scale_fits(
    shape: tuple[int, int], scales: tuple[int, ...], kinds: Sequence[ScaleKind], *, joined: bool = False
) -> list[ScaleFit]:
    """Every way in which scales of a shape can belong to a matrix: one if the checkpoint is right.

    Args:
        shape: The matrix.
        scales: The scales' shape; ``[]`` and ``[1]`` are one scale, ``[rows]`` is one a row.
        kinds: What the checkpoint's configuration allows.
        joined: Whether the matrix is two of the same height, one above the other.
    """
    rows, columns = shape
    grid = {0: (1, 1), 1: (*scales, 1)}.get(len(scales), scales)
    fits: list[ScaleFit] = []
    for kind in kinds:
        high, wide = min(kind.rows or rows, rows), min(kind.columns or columns, columns)
        candidates = [ScaleFit(high, wide)]
        if joined:
            half = rows // 2
            candidates.append(ScaleFit(min(high, half), wide, by_half=half % min(high, half) != 0))
        fits += [fit for fit in candidates if fit.grid(shape) == grid]
    return list(dict.fromkeys(fits))


@dataclass(frozen=True)
class ScaleGrid:
    """The scales of a matrix.

    Args:
        values: They.
        rows: Rows that share one.
        columns: Columns that share one.
        shape: The matrix.

    Shapes: values: [ceil(shape[0]/rows), ceil(shape[1]/columns)] f32.
    """

    values: F32
    rows: int
    columns: int
    shape: tuple[int, int]

    @classmethod
    def of(cls, values: F32, fit: ScaleFit, shape: tuple[int, int]) -> ScaleGrid:
        """Scales that lie over a matrix [rows, columns] as ``fit`` says.

        Shapes: values: [prod(fit.grid(shape))] f32, or that in two dimensions.
        """
        if fit.by_half:
            half = values.reshape(2, -1, ceil_div(shape[1], fit.columns))
            values = np.repeat(half, fit.rows, axis=1)[:, : shape[0] // 2]
            return cls(values.reshape(shape[0], -1), 1, fit.columns, shape)
        return cls(values.reshape(fit.grid(shape)), fit.rows, fit.columns, shape)

    def part(self, start: int, stop: int) -> ScaleGrid:
        """The scales of the rows from ``start`` to before ``stop``."""
        shape = (stop - start, self.shape[1])
        if start % self.rows == 0:
            values = self.values[start // self.rows : ceil_div(stop, self.rows)]
            return ScaleGrid(values, self.rows, self.columns, shape)
        return ScaleGrid(self._by_row()[start:stop], 1, self.columns, shape)

    def blocks(self) -> F32 | None:
        """The scales of 128x128 blocks that say the same; None where a block has several.

        Shapes: result: [ceil(shape[0]/128), ceil(shape[1]/128)] f32, contiguous.
        """
        by_column = _shared(self._by_row(), SCALE_BLOCK)
        if by_column is None:
            return None
        wide = np.repeat(by_column, self.columns, axis=1)[:, : self.shape[1]]
        shared = _shared(wide.T, SCALE_BLOCK)
        return None if shared is None else np.ascontiguousarray(shared.T)

    def by_row(self) -> F32 | None:
        """The scale of each row; None where a row has several.

        Shapes: result: [shape[0], 1] f32, contiguous.
        """
        first = self.values[:, :1]
        if (self.values != first).any():
            return None
        return np.ascontiguousarray(np.repeat(first, self.rows, axis=0)[: self.shape[0]])

    def expand(self) -> F32:
        """A scale for each weight.

        Shapes: result: shape, f32.
        """
        return np.repeat(self._by_row(), self.columns, axis=1)[:, : self.shape[1]]

    def _by_row(self) -> F32:
        return np.repeat(self.values, self.rows, axis=0)[: self.shape[0]]


def _shared(values: F32, rows: int) -> F32 | None:
    """What each run of ``rows`` rows has in common, column by column; None where one has several values."""
    starts = np.arange(0, values.shape[0], rows)
    lowest: F32 = np.minimum.reduceat(values, starts, axis=0)
    return lowest if (lowest == np.maximum.reduceat(values, starts, axis=0)).all() else None
