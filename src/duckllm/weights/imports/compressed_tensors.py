"""INT4 weights as compressed-tensors packs them (``pack-quantized``): Kimi-K2-Thinking's form.

Called through :meth:`duckllm.weights.quantisation.Quantisation.find_packed`. Of a matrix [out, in] with the
name ``x.weight`` a checkpoint has ``x.weight_packed`` [out, in / 8] I32, eight codes q + 8 a word, the lowest
bits first; ``x.weight_scale`` [out, groups] F16 or BF16; ``x.weight_shape``; and, where it is not symmetric,
``x.weight_zero_point`` [out / 8, groups] I32, packed in the same way along the outputs.

Source: the files that compressed-tensors 0.20 (Apache-2.0) writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from duckllm.errors import CheckpointError
from duckllm.weights.e4m3 import ceil_div
from duckllm.weights.grouped import QuantisedMatrix
from duckllm.weights.imports.packed import (
    SCALE_TYPES,
    WORD_CODES,
    PackedMatrix,
    Shape,
    Tensors,
    check_order,
    check_tensor,
    read_scales,
    read_words,
    word_nibbles,
)
from duckllm.weights.safetensors_file import TensorInfo, TensorReader


@dataclass(frozen=True)
class PackQuantized:
    """What a group of the configuration says.

    Args:
        group_size: Weights of a row that share a scale; None for all of them (``channel``).
        symmetric: Whether zero points are absent.
    """

    group_size: int | None
    symmetric: bool
    name: str = "compressed-tensors int4"

    def find(self, tensors: Tensors, weight: str, shape: Shape) -> PackedMatrix | None:
        """As :meth:`duckllm.weights.imports.packed.PackedForm.find`."""
        packed = tensors.get(f"{weight}_packed")
        if packed is None or packed.dtype != "I32":
            return None
        rows, columns = shape
        group = self.group_size or columns
        grid = (rows, ceil_div(columns, group))
        found = [check_tensor(tensors, packed.name, (rows, ceil_div(columns, WORD_CODES)), ("I32",))]
        found.append(check_tensor(tensors, f"{weight}_scale", grid, tuple(SCALE_TYPES)))
        zeros = f"{weight}_zero_point"
        if self.symmetric == (zeros in tensors):
            got, expected = ("zero points", "none") if self.symmetric else ("no zero points", "some")
            raise CheckpointError(
                f"{zeros}: got {got}, expected {expected} as symmetric is {str(self.symmetric).lower()}"
            )
        if not self.symmetric:
            found.append(check_tensor(tensors, zeros, (ceil_div(rows, WORD_CODES), grid[1]), ("I32",)))
        said = tensors.get(f"{weight}_shape")
        order = tensors.get(f"{weight}_g_idx")

        def unpack(reader: TensorReader) -> QuantisedMatrix:
            if said is not None:
                _check_shape(reader, said, shape)
            if order is not None:
                check_order(reader, order, group)
            words = read_words(reader, found[0])
            return QuantisedMatrix(
                codes=np.ascontiguousarray(word_nibbles(words)[:, :columns]),
                scales=read_scales(reader, found[1]),
                scale_type=SCALE_TYPES[found[1].dtype],
                zeros=None
                if self.symmetric
                else np.ascontiguousarray(word_nibbles(read_words(reader, found[2]).T)[:, :rows].T),
                group_size=group,
                kind="int4",
            )

        others = tuple(info for info in (said, order) if info is not None)
        scale_type = SCALE_TYPES[found[1].dtype]
        return PackedMatrix(
            weight,
            self.name,
            shape,
            (*found, *others),
            group,
            "int4",
            scale_type,
            not self.symmetric,
            found[1].name,
            unpack,
        )


def _check_shape(reader: TensorReader, info: TensorInfo, shape: Shape) -> None:
    kinds = {"I64": "<i8", "I32": "<i4"}
    if info.dtype not in kinds or info.shape != (2,):
        got = f"{info.dtype} {list(info.shape)}"
        raise CheckpointError(f"{info.name}: got {got}, expected I64 or I32 [2], rows and columns")
    got_shape = reader.read(info).view(kinds[info.dtype]).tolist()
    if got_shape != list(shape):
        raise CheckpointError(f"{info.name}: got {got_shape}, expected {list(shape)}")
