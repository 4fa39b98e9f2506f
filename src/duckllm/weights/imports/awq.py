"""INT4 weights as AWQ's tools pack them for matrix products (version ``gemm``).

Called through :meth:`duckllm.weights.quantisation.Quantisation.find_packed`. Of a matrix [out, in] with the
name ``x.weight`` a checkpoint has ``x.qweight`` [in, out / 8] I32, the codes of eight outputs a word;
``x.qzeros`` [groups, out / 8] I32, packed alike; and ``x.scales`` [groups, out]. From the lowest bits on a
word has the outputs 0, 2, 4, 6, 1, 3, 5, 7. weight = (code - zero) * scale.

Source: the files that AutoAWQ (MIT) writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from duckllm.weights.e4m3 import U8, ceil_div
from duckllm.weights.grouped import QuantisedMatrix
from duckllm.weights.imports.packed import (
    SCALE_TYPES,
    WORD_CODES,
    PackedMatrix,
    Shape,
    Tensors,
    check_tensor,
    read_scales,
    read_words,
)
from duckllm.weights.safetensors_file import TensorInfo, TensorReader

_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Awq:
    """What the configuration says.

    Args:
        group_size: Weights of a row that share a scale; None for all of them (-1 in config.json).
    """

    group_size: int | None
    name: str = "awq int4"

    def find(self, tensors: Tensors, weight: str, shape: Shape) -> PackedMatrix | None:
        """As :meth:`duckllm.weights.imports.packed.PackedForm.find`."""
        stem = weight.removesuffix("weight")
        if f"{stem}qweight" not in tensors:
            return None
        rows, columns = shape
        group = self.group_size or columns
        groups, words = ceil_div(columns, group), ceil_div(rows, WORD_CODES)
        codes = check_tensor(tensors, f"{stem}qweight", (columns, words), ("I32",))
        zeros = check_tensor(tensors, f"{stem}qzeros", (groups, words), ("I32",))
        scales = check_tensor(tensors, f"{stem}scales", (groups, rows), tuple(SCALE_TYPES))
        scale_type = SCALE_TYPES[scales.dtype]

        def unpack(reader: TensorReader) -> QuantisedMatrix:
            return QuantisedMatrix(
                codes=_outputs(reader, codes, rows),
                scales=np.ascontiguousarray(read_scales(reader, scales).T),
                scale_type=scale_type,
                zeros=_outputs(reader, zeros, rows),
                group_size=group,
                kind="int4",
            )

        found = (codes, zeros, scales)
        return PackedMatrix(
            weight, self.name, shape, found, group, "int4", scale_type, True, scales.name, unpack
        )


def _outputs(reader: TensorReader, info: TensorInfo, rows: int) -> U8:
    """Codes in the order of the outputs.

    Shapes: info: [n, out / 8] I32; result: [out, n] u8, contiguous.
    """
    inputs, words = info.shape
    raw = np.ascontiguousarray(read_words(reader, info).T).view(np.uint8).reshape(words, inputs, 4)
    # Byte by byte, each of which is a row then: ten times as fast as turning single codes around.
    pairs = np.ascontiguousarray(raw.transpose(2, 0, 1))
    codes = np.empty((words, WORD_CODES, inputs), np.uint8)
    for byte, pair in enumerate(pairs):
        np.bitwise_and(pair, 15, out=codes[:, _OUTPUTS[2 * byte]])
        np.right_shift(pair, 4, out=codes[:, _OUTPUTS[2 * byte + 1]])
    return np.ascontiguousarray(codes.reshape(-1, inputs)[:rows])
