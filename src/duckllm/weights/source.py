"""The routed experts of a checkpoint, as e4m3 codes or as its own 4-bit ones, in whatever form it has them.

Called by the converter and by the verifier. It finds the tensors, one an expert and matrix or one for all
experts of a layer, and reads one expert at a time; of the converted form it knows which scales that can hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from duckllm import _native
from duckllm.errors import CheckpointError, UnsupportedModelError, WeightFormatError
from duckllm.weights.checkpoint import (
    FP8,
    Checkpoint,
    check_scales,
    check_type,
    find_scale,
    only_fit,
    scale_names,
)
from duckllm.weights.e4m3 import (
    F32,
    SCALE_BLOCK,
    U8,
    QuantisationError,
    e4m3_values,
    quantisation_error,
    quantise_rows,
    scale_shape,
)
from duckllm.weights.formats import DOWN_GROUP, FORMATS, GATE_UP_GROUP
from duckllm.weights.grouped import QuantisedExpert
from duckllm.weights.imports.packed import PackedMatrix, StoredMatrix
from duckllm.weights.layout import PROJECTIONS, ModelLayout
from duckllm.weights.safetensors_file import DTYPE_BYTES, TensorInfo, TensorReader
from duckllm.weights.scales import ScaleFit, ScaleGrid, widen_to_f32
from duckllm.weights.units import ExpertWeights

_JOINED = "gate_up_proj"
_Shape = tuple[int, int]


@dataclass(frozen=True)
class ExpertTensor:
    """A tensor that holds one matrix of one expert, or of all experts of a layer.

    Args:
        weight: The tensor.
        scale: Its scales, where it is FP8.
        fit: How they lie over one expert's matrix.
        shape: One expert's matrix: [I, H] or [H, I], or [2I, H] for gate above up.
        stacked: Whether the tensor's first dimension is the expert.
        transposed: Whether the tensor holds the matrix, and its scales, with rows and columns exchanged.
        joined: Whether the matrix is gate above up.
    """

    weight: TensorInfo
    scale: TensorInfo | None
    fit: ScaleFit | None
    shape: _Shape
    stacked: bool = False
    transposed: bool = False
    joined: bool = False

    def keeps(self, scale_layout: str) -> bool:
        """Whether the tensor's scales have a place in a layout, whatever their values."""
        fit, (rows, columns) = self.fit, self.shape
        if fit is None:
            return True
        if scale_layout == "channel":
            return fit.columns >= columns
        if self.joined:
            rows //= 2
            if not (fit.by_half or rows % fit.rows == 0 or fit.rows == 2 * rows):
                return False
        spans = ((fit.rows, rows), (fit.columns, columns))
        return all(span % SCALE_BLOCK == 0 or span >= size for span, size in spans)

    def read(self, reader: TensorReader, expert: int) -> tuple[U8 | F32, ScaleGrid | None]:
        """One expert's matrix, as codes with their scales or as f32; reads no other expert's bytes.

        Raises:
            WeightFormatError: A weight is NaN or infinite.
            CheckpointError: A scale is negative, NaN or infinite, or all are zero.
        """
        info = self.weight
        raw = self._part(reader, info, expert)
        if self.scale is None or self.fit is None:
            weights = self._oriented(widen_to_f32(raw, info.dtype), self.shape)
            bad = weights.size - int(np.count_nonzero(np.isfinite(weights)))
            if bad:
                where = self._name(expert)
                raise WeightFormatError(f"{where}: got {bad} non-finite weight(s), expected finite weights")
            return weights, None
        nans = _native.count_nan_e4m3(raw)
        if nans:
            raise WeightFormatError(
                f"{self._name(expert)}: got {nans} NaN byte(s) (0x7f or 0xff), expected finite weights"
            )
        values = widen_to_f32(self._part(reader, self.scale, expert), self.scale.dtype)
        place = f"{self.scale.name}[{expert}]" if self.stacked else self.scale.name
        check_scales(values, place, lambda: bool((raw & 0x7F).any()))
        grid = self.fit.grid(self.shape)
        return self._oriented(raw, self.shape), ScaleGrid.of(
            np.ascontiguousarray(self._oriented(values, grid)), self.fit, self.shape
        )

    def _part(self, reader: TensorReader, info: TensorInfo, expert: int) -> U8:
        if not self.stacked or info.num_bytes == DTYPE_BYTES[info.dtype]:  # one scale for all experts
            return reader.read(info)
        length = info.num_bytes // info.shape[0]
        return reader.read_part(info, expert * length, length)

    def _oriented(self, values: U8 | F32, shape: _Shape) -> U8 | F32:
        return values.reshape(shape[::-1]).T if self.transposed else values.reshape(shape)

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.weight.name

    def _name(self, expert: int) -> str:
        return f"{self.weight.name}[{expert}]" if self.stacked else self.weight.name


class ExpertTensors:
    """The routed experts of a checkpoint.

    Args:
        checkpoint: It.
        layout: Its shape.

    Attributes:
        names: Every tensor that belongs to an expert, scales included.
        missing: Every tensor that is not there.
        problems: What else is wrong, a clause each; nothing may be read while there is any.
        broken: Weights in whose place are parts of a 4-bit matrix that are wrong.
    """

    def __init__(self, checkpoint: Checkpoint, layout: ModelLayout) -> None:
        self._checkpoint, self._layout = checkpoint, layout
        self.names: set[str] = set()
        self.missing: list[str] = []
        self.problems: list[str] = []
        self.broken: list[str] = []
        self._found: dict[tuple[int, str], list[ExpertTensor | StoredMatrix]] = {}
        for layer in layout.moe_layers:
            stacked = self._stacked(layer)
            if stacked:
                self._find_stacked(layer, stacked)
            else:
                self._find_each(layer)

    @cached_property
    def scale_layout(self) -> str:
        """The converted form's scales that keep the checkpoint's own, as far as any do: block or channel."""
        fp8 = [tensor for tensor in self._plain() if tensor.fit is not None]
        by_block = all(tensor.keeps("block") for tensor in fp8)
        return "channel" if not by_block and all(tensor.keeps("channel") for tensor in fp8) else "block"

    @property
    def dtype(self) -> str:
        """Safetensors' name of the type of most of the tensors, or the form in which most are 4-bit.

        Empty where there are no experts.
        """
        types = Counter(
            tensor.form if isinstance(tensor, StoredMatrix) else tensor.weight.dtype
            for tensor in chain.from_iterable(self._found.values())
        )
        return types.most_common(1)[0][0] if types else ""

    @property
    def requantised(self) -> str:
        """The checkpoint's scales that the converted form has no place for; empty where it has."""
        lost = {
            f"a scale for {tensor.fit.rows} x {tensor.fit.columns} weights"
            for tensor in self._plain()
            if tensor.fit is not None and not tensor.keeps(self.scale_layout)
        }
        return " and ".join(sorted(lost))

    def kept_format(self, layer: int) -> str:
        """The weight format that holds a layer's experts as they are, where all are 4-bit; else empty.

        Raises:
            UnsupportedModelError: They are 4-bit in several ways.
        """
        found = [tensor for part in PROJECTIONS for tensor in self._found.get((layer, part), ())]
        packed = [tensor for tensor in found if isinstance(tensor, PackedMatrix)]
        if not packed or len(packed) < len(found):
            return ""
        kinds = {(matrix.kind, matrix.scale_type) for matrix in packed}
        has_zeros = any(matrix.has_zeros for matrix in packed)
        for row in FORMATS.values():
            codes = row.grouped
            if codes and kinds == {(codes.kind, codes.scale_type)} and codes.has_zeros == has_zeros:
                return row.name
        got = " and ".join(sorted(f"{kind} with {scale_type} scales" for kind, scale_type in kinds))
        where = self._layout.experts_prefix(layer).rstrip(".")
        raise UnsupportedModelError(
            f"{where}: got {got}{' and zero points' if has_zeros else ''}, expected one kind in a layer"
        )

    def read_packed(self, reader: TensorReader, layer: int, expert: int) -> QuantisedExpert:
        """One expert of a layer that has a :meth:`kept_format`, with the codes of the checkpoint.

        Raises:
            UnsupportedModelError: Its inputs are grouped in the order of their activations.
            CheckpointError: A scale is NaN or infinite, all of a matrix are zero, a zero point is wrong, or a
                file ends early.
        """
        matrices = []
        for part in PROJECTIONS:
            matrix = self._found[layer, part][expert]
            assert isinstance(matrix, PackedMatrix), matrix
            matrices.append(matrix.load(reader))
        return QuantisedExpert(*matrices)

    def read(
        self, reader: TensorReader, layer: int, expert: int
    ) -> tuple[ExpertWeights, QuantisationError | None]:
        """One expert, with scales in :attr:`scale_layout`, and how far its weights were rounded, if at all.

        Raises:
            WeightFormatError: A weight is NaN or infinite.
            CheckpointError: A scale is negative, NaN or infinite, all of a matrix are zero, or a file ends
                early.
        """
        codes: dict[str, U8] = {}
        scales: dict[str, F32] = {}
        total = None
        for part, name, matrix, grid in self._matrices(reader, layer, expert):
            codes[part], scales[part], error = _encode(matrix, grid, self.scale_layout, name)
            if error is not None:
                total = total or QuantisationError()
                total += error
        gate, up, down = PROJECTIONS
        weights = ExpertWeights(codes[gate], codes[up], codes[down], scales[gate], scales[up], scales[down])
        return weights, total

    def read_values(self, reader: TensorReader, layer: int, expert: int) -> tuple[F32, F32, F32]:
        """One expert's weights as f32: gate, up [I, H] and down [H, I], contiguous.

        Raises:
            WeightFormatError: A weight is NaN or infinite.
            CheckpointError: A scale is negative, NaN or infinite, all of a matrix are zero, or a file ends
                early.
        """
        values: dict[str, F32] = {}
        for part, name, matrix, grid in self._matrices(reader, layer, expert):
            weights = matrix if grid is None else _widened(matrix, grid, name)
            values[part] = np.ascontiguousarray(weights, dtype=np.float32)
        gate, up, down = (values[part] for part in PROJECTIONS)
        return gate, up, down

    def _matrices(
        self, reader: TensorReader, layer: int, expert: int
    ) -> Iterator[tuple[str, str, U8 | F32, ScaleGrid | None]]:
        """Projection, name of the tensor, weights and scales of an expert's matrices, one at a time."""
        for projection in (_JOINED, *PROJECTIONS):
            tensors = self._found.get((layer, projection))
            if tensors is None:
                continue
            first = tensors[0]
            is_stacked = isinstance(first, ExpertTensor) and first.stacked
            tensor = first if is_stacked else tensors[expert]
            weights, grid = tensor.read(reader, expert)
            if projection != _JOINED:
                yield projection, tensor.name, weights, grid
                continue
            half = self._layout.moe_intermediate_size
            for part, start in (("gate_proj", 0), ("up_proj", half)):
                scales = None if grid is None else grid.part(start, start + half)
                yield part, tensor.name, weights[start : start + half], scales

    def _plain(self) -> Iterator[ExpertTensor]:
        every = chain.from_iterable(self._found.values())
        return (tensor for tensor in every if isinstance(tensor, ExpertTensor))

    def _stacked(self, layer: int) -> dict[str, TensorInfo]:
        """The tensors of a layer that hold all its experts, by projection."""
        prefix = self._layout.experts_prefix(layer)
        names = {part: f"{prefix}{part}" for part in (_JOINED, *PROJECTIONS)}
        tensors = self._checkpoint.tensors
        return {
            part: tensors[full]
            for part, name in names.items()
            for full in (f"{name}.weight", name)
            if full in tensors
        }

    def _find_stacked(self, layer: int, found: dict[str, TensorInfo]) -> None:
        layout = self._layout
        joined = (2 * layout.moe_intermediate_size, layout.hidden_size)
        wanted = (_JOINED, "down_proj") if _JOINED in found else PROJECTIONS
        shapes = {part: joined if part == _JOINED else layout.expert_shape(part) for part in wanted}
        suffix = ".weight" if next(iter(found.values())).name.endswith(".weight") else ""
        ways = {False, True}
        wrong = False
        for part, shape in shapes.items():
            info = found.get(part)
            if info is None:
                self.missing.append(f"{layout.experts_prefix(layer)}{part}{suffix}")
                continue
            self.names.add(info.name)
            either = [(layout.num_experts, *shape), (layout.num_experts, *shape[::-1])]
            if info.shape not in either:
                wrong = True
                expected = " or ".join(str(list(each)) for each in either)
                self.problems.append(f"{info.name}: got shape {list(info.shape)}, expected {expected}")
            else:
                ways &= {way for way in (False, True) if info.shape == either[way]}
        if wrong:
            return
        if len(ways) != 1:
            got = ", ".join(f"{info.name} {list(info.shape)}" for info in found.values())
            how = "of which some are transposed" if not ways else "which may be transposed or not"
            self.problems.append(f"{got}: got shapes {how}, expected one orientation that is certain")
            return
        for part, shape in shapes.items():
            if part in found:
                self._add(layer, part, found[part], shape, stacked=True, transposed=ways == {True})

    def _find_each(self, layer: int) -> None:
        for part in PROJECTIONS:
            shape = self._layout.expert_shape(part)
            for expert in range(self._layout.num_experts):
                name = self._layout.expert_weight(layer, expert, part)
                info = self._checkpoint.tensors.get(name)
                if info is None:
                    self._add_packed(layer, part, name, shape)
                    continue
                self.names.add(name)
                if info.shape != shape:
                    self.problems.append(f"{name}: got shape {list(info.shape)}, expected {list(shape)}")
                else:
                    self._add(layer, part, info, shape)

    def _add_packed(self, layer: int, part: str, name: str, shape: _Shape) -> None:
        """Adds the 4-bit matrix in place of a weight that is not there."""
        try:
            matrix = self._checkpoint.quantisation.find_packed(self._checkpoint.tensors, name, shape)
        except CheckpointError as error:
            self.problems.append(str(error))
            self.broken.append(name)
            return
        if matrix is None:
            self.missing.append(name)
            return
        self.names |= {info.name for info in matrix.tensors}
        multiple = DOWN_GROUP if part == "down_proj" else GATE_UP_GROUP
        size = matrix.group_size if isinstance(matrix, PackedMatrix) else multiple
        if size % multiple and size < shape[1]:
            self.problems.append(f"{name}: got groups of {size} weights, expected a multiple of {multiple}")
            return
        self._found.setdefault((layer, part), []).append(matrix)

    def _add(
        self,
        layer: int,
        part: str,
        info: TensorInfo,
        shape: _Shape,
        *,
        stacked: bool = False,
        transposed: bool = False,
    ) -> None:
        scale, fit, joined = None, None, part == _JOINED
        try:
            check_type(info)
            if info.dtype == FP8:
                tensors = self._checkpoint.tensors
                self.names |= {name for name in scale_names(info.name) if name in tensors}
                scale = find_scale(tensors, info.name)
                of_one = _of_one_expert(scale.shape, self._layout.num_experts) if stacked else scale.shape
                of_one = of_one[::-1] if transposed else of_one
                fit = only_fit(scale, shape, of_one, self._checkpoint.quantisation, joined=joined)
        except CheckpointError as error:
            self.problems.append(str(error))
            return
        tensor = ExpertTensor(info, scale, fit, shape, stacked, transposed, joined)
        self._found.setdefault((layer, part), []).append(tensor)


def _of_one_expert(shape: tuple[int, ...], num_experts: int) -> tuple[int, ...]:
    """The shape of one expert's share of scales; of all of them where they are one for all experts."""
    return shape[1:] if shape[:1] == (num_experts,) else shape


def _encode(
    weights: U8 | F32, grid: ScaleGrid | None, scale_layout: str, name: str
) -> tuple[U8, F32, QuantisationError | None]:
    """Codes and scales of a matrix, exactly where the layout has a place for its scales."""
    if grid is not None:
        scales = grid.blocks() if scale_layout == "block" else grid.by_row()
        if scales is not None:
            return np.ascontiguousarray(weights), scales, None
        weights = _widened(weights, grid, name)
    wide: F32 = np.ascontiguousarray(weights, dtype=np.float32)
    if scale_layout == "channel":
        return quantise_rows(wide)
    codes = np.empty(wide.shape, np.uint8)
    scales = np.empty(scale_shape(*wide.shape), np.float32)
    total = QuantisationError()
    for band in range(scales.shape[0]):
        part = slice(band * SCALE_BLOCK, (band + 1) * SCALE_BLOCK)
        codes[part], scales[band : band + 1] = _native.quantize_e4m3_blocks(wide[part])
        total += quantisation_error(wide[part], codes[part], scales[band : band + 1])
    return codes, scales, total


def _widened(codes: U8 | F32, grid: ScaleGrid, name: str) -> F32:
    """The weights that e4m3 codes and their scales stand for."""
    weights: F32 = e4m3_values()[codes] * grid.expand()
    if not np.isfinite(weights).all():
        raise WeightFormatError(f"{name}: got a weight beyond f32, expected finite weights")
    return weights
