"""The row-wise operations in float64, with the error bounds of csrc/rowwise/row_kernels.h."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from duckllm import _native

UNIT_ROUNDOFF = 2.0**-24
EPS = 1e-5
Arrays = tuple[np.ndarray, ...]


def wide(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float64)


@dataclass(frozen=True)
class Operation:
    """One of them.

    Args:
        run: Computes rows [T, width(size)] on an ISA, beside parameters that all rows share.
        exact: The same in float64, and the bound on the error.
        width: Numbers of an input row for `size` outputs.
        num_parameters: Vectors of `size` that all rows share.
    """

    run: Callable[[np.ndarray, Arrays, str], np.ndarray]
    exact: Callable[[np.ndarray, Arrays], tuple[np.ndarray, np.ndarray]]
    width: Callable[[int], int] = lambda size: size
    num_parameters: int = 0

    def inputs(self, num_rows: int, size: int, seed: int = 0) -> tuple[np.ndarray, Arrays]:
        """Rows whose numbers differ in size, and parameters."""
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((num_rows, self.width(size))) * np.exp2(rng.integers(-3, 6, (num_rows, 1)))
        parameters = [rng.standard_normal(size).astype(np.float32) for _ in range(self.num_parameters)]
        return x.astype(np.float32), tuple(parameters)


def rms_norm(x: np.ndarray, parameters: Arrays) -> tuple[np.ndarray, np.ndarray]:
    y = x / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + EPS) * parameters[0]
    return y, 3 * UNIT_ROUNDOFF * abs(y)


def layer_norm(x: np.ndarray, parameters: Arrays) -> tuple[np.ndarray, np.ndarray]:
    weight, bias = parameters
    off = x - wide(x).mean(-1, keepdims=True)
    scaled = off / np.sqrt((off**2).mean(-1, keepdims=True) + EPS) * weight
    return scaled + bias, 3 * UNIT_ROUNDOFF * (abs(scaled) + abs(bias)) + 2.0**-140


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-wide(x)))


def silu_mul(x: np.ndarray, _: Arrays) -> tuple[np.ndarray, np.ndarray]:
    gate, up = np.split(wide(x), 2, axis=-1)
    y = gate * sigmoid(gate) * up
    return y, 6 * UNIT_ROUNDOFF * abs(y) + 2.0**-120 * abs(up)


def run_scale(x: np.ndarray, _: Arrays, isa: str) -> np.ndarray:
    values = x[:, 1:].copy()
    _native.scale_by_sigmoid(values, x[:, :1].copy(), isa)
    return values


def scale_by_sigmoid(x: np.ndarray, _: Arrays) -> tuple[np.ndarray, np.ndarray]:
    y = sigmoid(x[:, :1]) * x[:, 1:]
    return y, 6 * UNIT_ROUNDOFF * abs(y) + 2.0**-120 * abs(x[:, 1:])


OPERATIONS = {
    "rms_norm": Operation(lambda x, p, isa: _native.rms_norm(x, p[0], EPS, isa), rms_norm, num_parameters=1),
    "layer_norm": Operation(
        lambda x, p, isa: _native.layer_norm(x, p[0], p[1], EPS, isa), layer_norm, num_parameters=2
    ),
    "silu_mul": Operation(lambda x, p, isa: _native.silu_mul(x, isa), silu_mul, width=lambda size: 2 * size),
    "scale_by_sigmoid": Operation(run_scale, scale_by_sigmoid, width=lambda size: size + 1),
}


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    """Equal to the last bit; NaN equals NaN."""
    same = (a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))
    assert same.all()
