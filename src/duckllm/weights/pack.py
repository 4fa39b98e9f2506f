"""Writes one file of a converted model: a layer's experts as units, or host tensors as they are.

Called by the converter. A few threads read and pack experts ahead of the one that hashes and writes.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from duckllm import _native
from duckllm.config import available_cores
from duckllm.errors import WeightFormatError
from duckllm.weights.checkpoint import FP8
from duckllm.weights.e4m3 import U8, QuantisationError
from duckllm.weights.files import AtomicFile
from duckllm.weights.formats import LayerFormat, is_lossless, num_stripes
from duckllm.weights.grouped import QuantisedExpert, check_expert, scale_words
from duckllm.weights.importance import ImportanceFile
from duckllm.weights.imports.packed import tensor_chunks
from duckllm.weights.layout import ModelLayout
from duckllm.weights.manifest import ExpertLayer, HostFile
from duckllm.weights.reader import DATA_ALIGNMENT, UNITS
from duckllm.weights.rounding import quantise_int4, quantise_int8
from duckllm.weights.safetensors_file import TensorInfo, TensorReader, build_header
from duckllm.weights.source import ExpertTensors
from duckllm.weights.units import ExpertWeights

_HOST_ALIGNMENT = 64
# Words of the wide types, and the bits that are all set in NaN and infinity.
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00)}
OnBytes = Callable[[int], object]
_Item = TypeVar("_Item")


def units_shape(layout: ModelLayout, form: LayerFormat) -> tuple[int, int, int]:
    """[E, S_total, unit_bytes]."""
    length = form.unit_bytes(layout.hidden_size)
    return layout.num_experts, num_stripes(layout.moe_intermediate_size), length


def _expert_header(layout: ModelLayout, layer: int, form: LayerFormat) -> bytes:
    tensors = {UNITS: ("U8", units_shape(layout, form))}
    return build_header(tensors, {"format": form.format, "layer": str(layer)}, DATA_ALIGNMENT)


def _host_header(tensors: Sequence[TensorInfo]) -> bytes:
    entries = {info.name: (info.dtype, info.shape) for info in tensors}
    return build_header(entries, {"format": "pt"}, _HOST_ALIGNMENT)


def expert_file_bytes(layout: ModelLayout, layer: int, form: LayerFormat) -> int:
    """Exact length of a layer's expert file."""
    experts, stripes, length = units_shape(layout, form)
    return len(_expert_header(layout, layer, form)) + experts * stripes * length


def host_file_bytes(tensors: Sequence[TensorInfo]) -> int:
    """Exact length of a file of host tensors."""
    return len(_host_header(tensors)) + sum(info.num_bytes for info in tensors)


def ahead_of(make: Callable[[int], _Item], count: int) -> Iterator[_Item]:
    """``make(0)``, ``make(1)``, ... in order, made by a few threads a few items ahead.

    At most an eighth of the items are in memory, so that a layer's experts never are all at once.
    """
    threads = max(1, min(4, available_cores(), count // 8))
    pool = ThreadPoolExecutor(threads, thread_name_prefix="experts")
    try:
        ahead: deque[Future[_Item]] = deque()
        for index in range(count + threads):
            if index < count:
                ahead.append(pool.submit(make, index))
            if index >= threads:
                yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def pack_units(expert: ExpertWeights, weight_format: str, scale_layout: str = "block") -> U8:
    """All units of one expert, stripe by stripe, by the native packer.

    Shapes: result: [S_total, unit_bytes(H, weight_format, scale_layout)] u8, contiguous.
    Reference: :func:`duckllm.weights.units.pack_expert_units`, byte for byte.
    """
    return _native.pack_expert_units(
        expert.gate,
        expert.up,
        expert.down,
        expert.gate_scales,
        expert.up_scales,
        expert.down_scales,
        format=weight_format,
        scale_layout=scale_layout,
    )


def pack_quantised(expert: QuantisedExpert, weight_format: str) -> U8:
    """All units of one expert of 4-bit codes, stripe by stripe, by the native packer.

    Shapes: result: [S_total, unit_bytes(H, weight_format)] u8, contiguous.

    Raises:
        WeightFormatError: The format has no place for the expert.
    Reference: :func:`duckllm.weights.grouped.pack_quantised_expert`, byte for byte.
    """
    check_expert(expert, weight_format)
    matrices = (expert.gate, expert.up, expert.down)
    return _native.pack_grouped_units(
        [np.ascontiguousarray(matrix.codes) for matrix in matrices],
        [scale_words(np.ascontiguousarray(matrix.scales), matrix.scale_type) for matrix in matrices],
        [None if matrix.zeros is None else np.ascontiguousarray(matrix.zeros) for matrix in matrices],
        [matrix.group_size for matrix in matrices],
        weight_format,
    )


def encode_expert(
    experts: ExpertTensors,
    reader: TensorReader,
    layer: int,
    expert: int,
    form: LayerFormat,
    importance: ImportanceFile | None,
) -> tuple[ExpertWeights | QuantisedExpert, QuantisationError | None]:
    """An expert in a format: as the checkpoint has it where the format holds that, else rounded.

    Args:
        experts: The checkpoint's experts.
        reader: Reads the checkpoint, and the calibration.
        layer: The layer.
        expert: The expert.
        form: The format.
        importance: What weights the errors of rounding to 4 bits; None for nothing.

    Returns:
        The expert, and how far it was rounded, if it was.

    Raises:
        WeightFormatError: A weight is NaN, infinite or too large.
        CheckpointError: A scale is wrong, or the checkpoint ends early.
    """
    if form.format == experts.kept_format(layer):
        return experts.read_packed(reader, layer, expert), None
    if is_lossless(form.format):
        return experts.read(reader, layer, expert)
    values = experts.read_values(reader, layer, expert)
    if form.format == "int8":
        return quantise_int8(values)
    hidden, activations = (None, None) if importance is None else importance.of(reader, layer, expert)
    try:
        return quantise_int4(values, form.format, hidden, activations)
    except ValueError as error:
        raise WeightFormatError(f"layer {layer}, expert {expert}: {error}") from error


def write_expert_file(
    out: AtomicFile,
    reader: TensorReader,
    experts: ExpertTensors,
    layout: ModelLayout,
    layer: int,
    form: LayerFormat,
    on_bytes: OnBytes,
    importance: ImportanceFile | None = None,
) -> tuple[ExpertLayer, QuantisationError | None]:
    """Writes a layer's experts and returns their manifest entry, and how far they were rounded, if they were.

    Args:
        out: The file.
        reader: Reads the checkpoint.
        experts: The checkpoint's experts.
        layout: The model.
        layer: The layer.
        form: How to store them.
        on_bytes: Called with the bytes of each piece that was written.
        importance: As for :func:`encode_expert`.

    Raises:
        WeightFormatError: A weight is NaN, infinite or too large.
        CheckpointError: A scale is wrong, or the checkpoint ends early.
    """
    header = _expert_header(layout, layer, form)
    out.write(header, hashed=False)
    on_bytes(len(header))
    total: QuantisationError | None = None
    digests = [hashlib.sha256() for _ in range(num_stripes(layout.moe_intermediate_size))]

    def pack(expert: int) -> tuple[U8, QuantisationError | None]:
        weights, error = encode_expert(experts, reader, layer, expert, form, importance)
        if isinstance(weights, QuantisedExpert):
            return pack_quantised(weights, form.format), error
        return pack_units(weights, form.format, form.scale_layout), error

    for units, error in ahead_of(pack, layout.num_experts):
        out.write(units.data, hashed=False)
        for digest, unit in zip(digests, units, strict=True):
            digest.update(unit.data)
        if error is not None:
            total = total or QuantisationError()
            total += error
        on_bytes(units.nbytes)
    hashes = tuple(digest.hexdigest() for digest in digests)
    return ExpertLayer(out.path.name, expert_file_bytes(layout, layer, form), hashes), total


def host_chunks(reader: TensorReader, info: TensorInfo) -> Iterator[memoryview]:
    """A host tensor's bytes as a converted model has them, as :func:`tensor_chunks` gives them.

    Raises:
        WeightFormatError: It holds NaN or infinity; when all of it was given.
        CheckpointError: The checkpoint ends early.
    """
    bad = 0
    for chunk in tensor_chunks(reader, info):
        if info.dtype == FP8:
            bad += _native.count_nan_e4m3(np.frombuffer(chunk, np.uint8))
        elif info.dtype in _EXPONENTS:
            words, exponent = _EXPONENTS[info.dtype]
            bad += int(np.count_nonzero((np.frombuffer(chunk, words) & exponent) == exponent))
        yield chunk
    if bad:
        what = "NaN byte(s) (0x7f or 0xff)" if info.dtype == FP8 else "non-finite weight(s)"
        raise WeightFormatError(f"{info.name}: got {bad} {what}, expected finite weights")


def write_host_file(
    out: AtomicFile, reader: TensorReader, tensors: Sequence[TensorInfo], on_bytes: OnBytes
) -> HostFile:
    """Copies host tensors, byte for byte or dequantised, and returns their manifest entry.

    Raises:
        WeightFormatError: A tensor holds NaN or infinity.
        CheckpointError: The checkpoint ends early.
    """
    header = _host_header(tensors)
    out.write(header)
    on_bytes(len(header))
    for info in tensors:
        for chunk in host_chunks(reader, info):
            out.write(chunk)
            on_bytes(len(chunk))
    return HostFile(out.sha256(), host_file_bytes(tensors))
