"""MXFP4 weights (OCP microscaling: e2m1 codes, a power of two for 32 of them), as two tools lay them out.

Called through :meth:`duckllm.weights.quantisation.Quantisation.find_packed`. compressed-tensors
(``mxfp4-pack-quantized``) has for a matrix [out, in] with the name ``x.weight`` two tensors,
``x.weight_packed`` [out, in / 2] U8, two codes a byte, the low half first, and ``x.weight_scale``
[out, in / 32], the exponent plus 127 (e8m0) in a byte. gpt-oss (``quant_method`` ``mxfp4``) has the same of
all experts of a layer in one: ``experts.gate_up_proj_blocks`` [E, 2 I, H / 32, 16] U8, whose even rows are
gate's and odd rows up's, ``experts.down_proj_blocks`` [E, H, I / 32, 16], and ``..._scales``.

Source: OCP Microscaling Formats 1.0, the files that compressed-tensors 0.20 (Apache-2.0) writes, and those
of gpt-oss as transformers (Apache-2.0) reads them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from duckllm.errors import CheckpointError
from duckllm.weights.e4m3 import F32, U8, ceil_div
from duckllm.weights.grouped import QuantisedMatrix
from duckllm.weights.imports.packed import PackedMatrix, Shape, Tensors, check_tensor, nibbles
from duckllm.weights.safetensors_file import TensorInfo, TensorReader

GROUP = 32
_BIAS = 127
# 6 times a larger power of two would be beyond f32.
_LARGEST = 252
_BLOCK_BYTES = GROUP // 2
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
# Where an expert's matrix is: tensor, and which of its rows, as start and step.
_PLACES = {"gate": ("gate_up_proj", 0, 2), "up": ("gate_up_proj", 1, 2), "down": ("down_proj", 0, 1)}


@dataclass(frozen=True)
class MxFp4PackQuantized:
    """MXFP4 of compressed-tensors; all that the form leaves open is fixed."""

    name: str = "compressed-tensors mxfp4"

    def find(self, tensors: Tensors, weight: str, shape: Shape) -> PackedMatrix | None:
        """As :meth:`duckllm.weights.imports.packed.PackedForm.find`."""
        packed = tensors.get(f"{weight}_packed")
        if packed is None or packed.dtype != "U8":
            return None
        rows, columns = shape
        codes = check_tensor(tensors, packed.name, (rows, ceil_div(columns, 2)), ("U8",))
        grid = (rows, ceil_div(columns, GROUP))
        scales = check_tensor(tensors, f"{weight}_scale", grid, ("U8", "F8_E8M0"))

        def unpack(reader: TensorReader) -> QuantisedMatrix:
            values = nibbles(reader.read(codes).reshape(codes.shape))
            return QuantisedMatrix(
                codes=np.ascontiguousarray(values[:, :columns]),
                scales=powers_of_two(reader.read(scales), scales.name).reshape(grid),
                scale_type="bf16",
                zeros=None,
                group_size=GROUP,
                kind="mxfp4",
            )

        found = (codes, scales)
        return PackedMatrix(
            weight, self.name, shape, found, GROUP, "mxfp4", "bf16", False, scales.name, unpack
        )


@dataclass(frozen=True)
class MxFp4Blocks:
    """MXFP4 of gpt-oss: all experts of a layer in one tensor, gate's and up's rows by turns."""

    name: str = "mxfp4"

    def find(self, tensors: Tensors, weight: str, shape: Shape) -> PackedMatrix | None:
        """As :meth:`duckllm.weights.imports.packed.PackedForm.find`."""
        expert = _EXPERT.fullmatch(weight)
        if expert is None:
            return None
        joined, first, step = _PLACES[expert[3]]
        stem, index = f"{expert[1]}{joined}", int(expert[2])
        if f"{stem}_blocks" not in tensors:
            return None
        rows, groups = shape[0], ceil_div(shape[1], GROUP)
        experts = max(1, *tensors[f"{stem}_blocks"].shape[:1])
        of_one = (rows * step, groups)
        codes = check_tensor(tensors, f"{stem}_blocks", (experts, *of_one, _BLOCK_BYTES), ("U8",))
        scales = check_tensor(tensors, f"{stem}_scales", (experts, *of_one), ("U8", "F8_E8M0"))
        if index >= experts:
            raise CheckpointError(f"{codes.name}: got {experts} experts, expected more than {index}")

        def unpack(reader: TensorReader) -> QuantisedMatrix:
            exponents = _of_expert(reader, scales, index).reshape(of_one)[first::step]
            packed = _of_expert(reader, codes, index).reshape(rows * step, groups * _BLOCK_BYTES)[first::step]
            return QuantisedMatrix(
                codes=np.ascontiguousarray(nibbles(packed)[:, : shape[1]]),
                scales=powers_of_two(exponents, scales.name),
                scale_type="bf16",
                zeros=None,
                group_size=GROUP,
                kind="mxfp4",
            )

        found, place = (codes, scales), f"{scales.name}[{index}]"
        return PackedMatrix(weight, self.name, shape, found, GROUP, "mxfp4", "bf16", False, place, unpack)


def _of_expert(reader: TensorReader, info: TensorInfo, expert: int) -> U8:
    length = info.num_bytes // info.shape[0]
    return reader.read_part(info, expert * length, length)


def powers_of_two(exponents: U8, name: str) -> F32:
    """The scales that e8m0 bytes stand for.

    Shapes: exponents: any, u8; result: the same, f32.

    Raises:
        CheckpointError: A byte is NaN (0xff), or so large that a weight may be beyond f32.
    """
    bad = int(np.count_nonzero(exponents > _LARGEST))
    if bad:
        raise CheckpointError(
            f"{name}: got {bad} scale(s) above 2^{_LARGEST - _BIAS}, the largest byte {int(exponents.max())},"
            f" expected at most {_LARGEST}"
        )
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS)
