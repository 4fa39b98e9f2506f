"""Matrices that lie in a checkpoint as 4-bit codes with scales, whatever the tool that packed them.

Called by the modules of the forms beside this one, which make them, by the source of experts and by the
converter of host tensors, which read them. It knows no tool and no model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from duckllm.errors import CheckpointError, UnsupportedModelError, WeightFormatError
from duckllm.weights.e4m3 import F32, U8
from duckllm.weights.grouped import QuantisedMatrix, scale_words
from duckllm.weights.safetensors_file import TensorInfo, TensorReader

Tensors = Mapping[str, TensorInfo]
Shape = tuple[int, int]
SCALE_TYPES = {"F16": "f16", "BF16": "bf16"}
WORD_CODES = 8  # 4-bit codes in a 32-bit word
_CHUNK_BYTES = 8 << 20
_NOT_FINITE = 0x7F80  # exponent bits of a BF16 value that is infinite or NaN


@dataclass(frozen=True)
class StoredMatrix(ABC):
    """A matrix that a checkpoint has in the form of some tool.

    Args:
        weight: The name that it would have unquantised.
        form: The tool's layout, as messages call it.
        shape: [out, in].
        tensors: Every tensor that it takes.
    """

    weight: str
    form: str
    shape: Shape
    tensors: tuple[TensorInfo, ...]

    @abstractmethod
    def parts(self, reader: TensorReader, rows: int) -> Iterator[F32]:
        """The weights as f32, exactly, some rows at a time; perhaps infinite.

        Raises:
            CheckpointError: A file ends early, or a part of the matrix is wrong.
        """

    def read(self, reader: TensorReader, expert: int) -> tuple[F32, None]:
        """The weights as f32, exactly, as :meth:`duckllm.weights.source.ExpertTensor.read` gives others'.

        Raises:
            WeightFormatError: One is NaN or infinite.
        """
        (weights,) = self.parts(reader, self.shape[0])
        bad = weights.size - int(np.count_nonzero(np.isfinite(weights)))
        if bad:
            raise WeightFormatError(f"{self.weight}: got {bad} non-finite weight(s), expected finite weights")
        return weights, None

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.weight

    @property
    def stored_bytes(self) -> int:
        """Bytes that it takes in the checkpoint."""
        return sum(info.num_bytes for info in self.tensors)


@dataclass(frozen=True)
class PackedMatrix(StoredMatrix):
    """One of 4-bit codes.

    Args:
        group_size: Weights of a row that share a scale.
        kind: ``"int4"`` or ``"mxfp4"``.
        scale_type: ``"f16"`` or ``"bf16"``, in which its scales are exact.
        has_zeros: Whether its groups have zero points of their own.
        scales: What messages call the tensor of its scales.
        unpack: Reads it, of scales that are finite.
    """

    group_size: int
    kind: str
    scale_type: str
    has_zeros: bool
    scales: str
    unpack: Callable[[TensorReader], QuantisedMatrix] = field(repr=False)

    def load(self, reader: TensorReader) -> QuantisedMatrix:
        """The matrix with the checkpoint's codes.

        Raises:
            UnsupportedModelError: Its inputs are grouped in the order of their activations.
            CheckpointError: A scale is NaN or infinite, all are zero, a zero point is wrong, or a file ends
                early.
        """
        matrix = self.unpack(reader)
        check_not_lost(matrix.scales, self.scales, lambda: bool(matrix.without_scales().any()))
        return matrix

    def parts(self, reader: TensorReader, rows: int) -> Iterator[F32]:
        """As :meth:`StoredMatrix.parts`."""
        matrix = self.load(reader)
        for start in range(0, self.shape[0], rows):
            part = slice(start, start + rows)
            zeros = None if matrix.zeros is None else matrix.zeros[part]
            some = replace(matrix, codes=matrix.codes[part], scales=matrix.scales[part], zeros=zeros)
            with np.errstate(over="ignore"):
                yield some.values()


@dataclass(frozen=True)
class FloatMatrix(StoredMatrix):
    """One whose codes no format here has: its tool dequantises it.

    Args:
        load: Reads and dequantises it.
    """

    load: Callable[[TensorReader], F32] = field(repr=False)

    def parts(self, reader: TensorReader, rows: int) -> Iterator[F32]:
        """As :meth:`StoredMatrix.parts`."""
        weights = self.load(reader)
        for start in range(0, self.shape[0], rows):
            yield weights[start : start + rows]


class PackedForm(Protocol):
    """A tool's layout of 4-bit matrices."""

    @property
    def name(self) -> str:
        """As messages and manifests call it."""

    def find(self, tensors: Tensors, weight: str, shape: Shape) -> StoredMatrix | None:
        """The matrix in place of a weight; None where the checkpoint has none in this form.

        Raises:
            CheckpointError: A tensor of it is missing, or of another shape or type.
        """


@dataclass(frozen=True)
class DequantisedTensor(TensorInfo):
    """A matrix that is quantised in the checkpoint and BF16 in the converted model, as hosts compute it.

    BF16 rounds a weight by 1/512 of it at most. F16 would be closer, and take a host four bytes a weight, as
    it widens F16 to f32.

    Args:
        matrix: What the checkpoint has.
    """

    matrix: StoredMatrix

    @classmethod
    def of(cls, matrix: StoredMatrix) -> DequantisedTensor:
        """The tensor to write."""
        rows, columns = matrix.shape
        path, num_bytes = matrix.tensors[0].path, 2 * rows * columns
        return cls(matrix.weight, "BF16", matrix.shape, path, 0, num_bytes, matrix)

    def chunks(self, reader: TensorReader) -> Iterator[memoryview]:
        """The tensor's bytes in pieces, as :meth:`TensorReader.chunks` gives those of others.

        Raises:
            CheckpointError: A file ends early, a scale is NaN or infinite, or a weight is beyond the type.
        """
        rows = max(1, _CHUNK_BYTES // (2 * self.shape[1]))
        for part in self.matrix.parts(reader, rows):
            words = scale_words(part, "bf16")
            if not np.isfinite(part).all() or ((words & _NOT_FINITE) == _NOT_FINITE).any():
                raise CheckpointError(f"{self.name}: got a weight beyond BF16, expected finite weights")
            yield words.view(np.uint8).reshape(-1).data


def dequantised_summary(tensors: Iterable[TensorInfo]) -> dict[str, Any] | None:
    """What a manifest says of the host's matrices that were 4-bit; None where there were none.

    Returns:
        ``form`` (the tools' layouts), ``matrices``, ``stored_bytes`` and ``bytes`` (before and after).
    """
    found = [info for info in tensors if isinstance(info, DequantisedTensor)]
    if not found:
        return None
    return {
        "form": " and ".join(sorted({info.matrix.form for info in found})),
        "matrices": len(found),
        "stored_bytes": sum(info.matrix.stored_bytes for info in found),
        "bytes": sum(info.num_bytes for info in found),
    }


def tensor_chunks(reader: TensorReader, info: TensorInfo) -> Iterator[memoryview]:
    """A tensor's bytes as a converted model has them, in pieces; a piece is valid until the next one."""
    return info.chunks(reader) if isinstance(info, DequantisedTensor) else reader.chunks(info)


def nibbles(packed: U8) -> U8:
    """4-bit codes, the low half of a byte first.

    Shapes: packed: [..., n] u8; result: [..., 2 n] u8, contiguous.
    """
    out = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 15, out=out[..., 0::2])
    np.right_shift(packed, 4, out=out[..., 1::2])
    return out


def word_nibbles(words: np.ndarray[tuple[int, ...], np.dtype[np.uint32]]) -> U8:
    """4-bit codes of 32-bit words, the lowest first.

    Shapes: words: [..., n] u32, in any strides; result: [..., 8 n] u8, contiguous.
    """
    return nibbles(np.ascontiguousarray(words, "<u4").view(np.uint8))


def check_tensor(tensors: Tensors, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> TensorInfo:
    """A tensor that must be there, in its shape and of one of some types.

    Raises:
        CheckpointError: Names the tensor, what it is and what was expected.
    """
    info = tensors.get(name)
    if info is None:
        raise CheckpointError(f"{name}: got none, expected the part of a 4-bit matrix")
    if info.dtype not in dtypes:
        raise CheckpointError(f"{name}: got dtype {info.dtype}, expected {' or '.join(dtypes)}")
    if info.shape != shape:
        raise CheckpointError(f"{name}: got shape {list(info.shape)}, expected {list(shape)}")
    return info


def read_words(reader: TensorReader, info: TensorInfo) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    """A tensor of 32-bit integers as unsigned words, in its shape."""
    return reader.read(info).view("<u4").reshape(info.shape)


def read_scales(reader: TensorReader, info: TensorInfo) -> F32:
    """Scales of type F16 or BF16 as f32, in their shape.

    Raises:
        CheckpointError: One is NaN or infinite.
    """
    raw = reader.read(info)
    if info.dtype == "BF16":
        values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = raw.view("<f2").astype(np.float32)
    check_finite(values, info.name)
    return values.reshape(info.shape)


def check_finite(values: F32, name: str) -> None:
    """Checks that scales are finite; a negative one turns the signs of its group, which is meant.

    Raises:
        CheckpointError: Names the tensor, and how many are not.
    """
    bad = values.size - int(np.count_nonzero(np.isfinite(values)))
    if bad:
        raise CheckpointError(f"{name}: got {bad} non-finite scale(s), expected none")


def check_not_lost(scales: F32, name: str, has_weights: Callable[[], bool]) -> None:
    """Checks that not all scales of a matrix are zero, unless its codes say that all its weights are.

    A group whose weights were too small for the type of its scale has a scale of zero, whatever its codes
    are. A whole matrix of those is a damaged file. e8m0 has no zero: several of its smallest, 2^-127, and
    nothing else count as such.

    Args:
        scales: Those of the matrix.
        name: What messages call their tensor.
        has_weights: Whether any code stands for something else than 0.

    Raises:
        CheckpointError: Names the tensor.
    """
    is_zero = np.abs(scales) < np.finfo(np.float32).tiny if scales.size > 1 else scales == 0
    if is_zero.all() and has_weights():
        raise CheckpointError(
            f"{name}: got {scales.size} scale(s) of zero, expected others for codes that are not all zero"
        )


def check_order(reader: TensorReader, info: TensorInfo, group_size: int) -> None:
    """Checks that an index of groups (``g_idx``) says that groups follow each other.

    Raises:
        UnsupportedModelError: Inputs were ordered by their activations (act-order).
        CheckpointError: It is no index.
    """
    if info.dtype != "I32" or len(info.shape) != 1:
        raise CheckpointError(f"{info.name}: got {info.dtype} {list(info.shape)}, expected I32 [inputs]")
    index = reader.read(info).view("<i4")
    if (index < 0).all():  # what compressed-tensors has where there is none
        return
    wrong = np.flatnonzero(index != np.arange(index.size) // group_size)
    if wrong.size:
        first = int(wrong[0])
        raise UnsupportedModelError(
            f"{info.name}: got group {int(index[first])} for input {first}, expected {first // group_size} "
            "(act-order, desc_act, scatters the inputs of a group, and scattered groups are not supported)"
        )
