"""INT4 weights as GPTQ's tools pack them: AutoGPTQ, GPTQModel, and AutoRound's exports of that form.

Called through :meth:`duckllm.weights.quantisation.Quantisation.find_packed`. Of a matrix [out, in] with the
name ``x.weight`` a checkpoint has ``x.qweight`` [in / 8, out] I32, eight codes of one output a word, the
lowest bits first; ``x.qzeros`` [groups, out / 8] I32, packed in the same way along the outputs; ``x.scales``
[groups, out]; and mostly ``x.g_idx`` [in] I32, the group of each input. weight = (code - zero) * scale. In
the first version of the form (``checkpoint_format`` ``gptq``) zero points are stored less one.

Source: the files that AutoGPTQ (MIT) and GPTQModel (Apache-2.0) write.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from duckllm.errors import CheckpointError
from duckllm.weights.e4m3 import U8, ceil_div
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
from duckllm.weights.safetensors_file import TensorReader

_MIDDLE = 8  # zero point of what is symmetric
# One in each of a word's zero points. Tools subtract and add it to whole words, so that a zero point of 0
# borrows from its neighbour: adding it to each nibble alone would miss that.
_ONES = np.uint32(0x11111111)


@dataclass(frozen=True)
class Gptq:
    """What the configuration says.

    Args:
        group_size: Weights of a row that share a scale; None for all of them (-1 in config.json).
        symmetric: Whether all zero points are 8.
        less_one: Whether zero points are stored less one.
        ordered: Whether the tool was told to order inputs by their activations (``desc_act``).
    """

    group_size: int | None
    symmetric: bool
    less_one: bool
    ordered: bool = False
    name: str = "gptq int4"

    def find(self, tensors: Tensors, weight: str, shape: Shape) -> PackedMatrix | None:
        """As :meth:`duckllm.weights.imports.packed.PackedForm.find`."""
        stem = weight.removesuffix("weight")
        if f"{stem}qweight" not in tensors:
            return None
        rows, columns = shape
        group = self.group_size or columns
        groups = ceil_div(columns, group)
        codes = check_tensor(tensors, f"{stem}qweight", (ceil_div(columns, WORD_CODES), rows), ("I32",))
        zeros = check_tensor(tensors, f"{stem}qzeros", (groups, ceil_div(rows, WORD_CODES)), ("I32",))
        scales = check_tensor(tensors, f"{stem}scales", (groups, rows), tuple(SCALE_TYPES))
        found = [codes, zeros, scales]
        order = tensors.get(f"{stem}g_idx")
        if order is not None:
            found.append(check_tensor(tensors, order.name, (columns,), ("I32",)))
            if self.ordered:  # said before hours of conversion; where config.json says no, when it is read
                with TensorReader() as reader:
                    check_order(reader, order, group)
        scale_type = SCALE_TYPES[scales.dtype]

        def unpack(reader: TensorReader) -> QuantisedMatrix:
            if order is not None:
                check_order(reader, order, group)
            words = read_words(reader, zeros)
            points = word_nibbles(words + _ONES if self.less_one else words)[:, :rows].T
            return QuantisedMatrix(
                codes=np.ascontiguousarray(word_nibbles(read_words(reader, codes).T)[:, :columns]),
                scales=np.ascontiguousarray(read_scales(reader, scales).T),
                scale_type=scale_type,
                zeros=self._zeros(points, zeros.name),
                group_size=group,
                kind="int4",
            )

        return PackedMatrix(
            weight,
            self.name,
            shape,
            tuple(found),
            group,
            "int4",
            scale_type,
            not self.symmetric,
            scales.name,
            unpack,
        )

    def _zeros(self, points: U8, name: str) -> U8 | None:
        if not self.symmetric:
            return np.ascontiguousarray(points)
        other = np.flatnonzero(points != _MIDDLE)
        if other.size:
            got = int(points.reshape(-1)[other[0]])
            raise CheckpointError(
                f"{name}: got {other.size} zero point(s) other than {_MIDDLE}, the first {got}, "
                f"expected {_MIDDLE} as quantization_config.sym is true"
            )
        return None
