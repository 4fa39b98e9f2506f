"""Compares a converted model with its checkpoint, bit for bit, by reading both again from the disk.

Called by ``duckllm convert --verify``. It decodes the units with the numpy twin of the format, not with the
packer that wrote them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial

from duckllm.errors import WeightHashError
from duckllm.weights.checkpoint import Checkpoint
from duckllm.weights.grouped import QuantisedExpert, pack_quantised_expert
from duckllm.weights.importance import ImportanceFile
from duckllm.weights.imports.packed import DequantisedTensor
from duckllm.weights.layout import ModelLayout
from duckllm.weights.manifest import Manifest, check_sha256
from duckllm.weights.pack import ahead_of, encode_expert, host_chunks
from duckllm.weights.progress_file import expert_hashes
from duckllm.weights.reader import UNITS
from duckllm.weights.safetensors_file import TensorReader, read_header
from duckllm.weights.source import ExpertTensors
from duckllm.weights.units import unpack_expert_units

Report = Callable[[str, int, int], object]


def verify_conversion(
    checkpoint: Checkpoint,
    layout: ModelLayout,
    experts: ExpertTensors,
    manifest: Manifest,
    report: Report,
    importance: ImportanceFile | None = None,
) -> None:
    """Checks every hash, and every weight and scale against the source, or against that rounded again.

    Raises:
        WeightHashError: Names the file, and the layer, expert or tensor that differs.
        WeightFormatError: A weight of the source is NaN or infinite.
        CheckpointError: A file is missing, truncated or malformed.
    """
    manifest.check_files()
    total = sum(entry.bytes for entry in manifest.host_files.values())
    total += sum(entry.bytes for entry in manifest.expert_layers.values())
    done = 0
    manifest.check_config()
    with TensorReader() as reader:
        for name, host_entry in manifest.host_files.items():
            check_sha256(manifest.folder / name, host_entry.sha256)
            _compare_host_file(checkpoint, layout, manifest, name, reader)
            done += host_entry.bytes
            report(f"verifying {name}", done, total)
        for layer, entry in manifest.expert_layers.items():
            path = manifest.folder / entry.file
            if expert_hashes(path) != entry.stripe_sha256:
                raise WeightHashError(f"{path}: layer {layer}: stripe hashes differ from the manifest's")
            compare = partial(_compare_expert, experts, layout, manifest, importance, reader, layer)
            for num_bytes in ahead_of(compare, layout.num_experts):
                done += num_bytes
                report(f"verifying {entry.file}", done, total)


def _compare_host_file(
    checkpoint: Checkpoint, layout: ModelLayout, manifest: Manifest, name: str, reader: TensorReader
) -> None:
    path = manifest.folder / name
    for tensor, info in read_header(path).items():
        source = checkpoint.tensors.get(tensor)
        if source is None:
            shape = layout.host_shapes.get(tensor, ())
            matrix = checkpoint.quantisation.find_packed(checkpoint.tensors, tensor, shape)
            if matrix is None:
                raise WeightHashError(f"{path}: {tensor}: got a tensor that the source has not")
            source = DequantisedTensor.of(matrix)
        same = (info.dtype, info.shape) == (source.dtype, source.shape)
        if not same or reader.read(info).tobytes() != b"".join(host_chunks(reader, source)):
            raise WeightHashError(f"{path}: {tensor}: differs from the source")


def _compare_expert(
    experts: ExpertTensors,
    layout: ModelLayout,
    manifest: Manifest,
    importance: ImportanceFile | None,
    reader: TensorReader,
    layer: int,
    expert: int,
) -> int:
    """Compares one expert and returns the bytes it took."""
    path = manifest.expert_path(layer)
    info = read_header(path)[UNITS]
    form = manifest.layer_format(layer)
    _, stripes, unit = manifest.units_shape(layer)
    length = stripes * unit
    units = reader.read_part(info, expert * length, length).reshape(stripes, unit)
    # What was rounded is rounded again, by the same function; what holds it is read by the readable twin.
    expected, _ = encode_expert(experts, reader, layer, expert, form, importance)
    where = f"{path}: layer {layer}, expert {expert}"
    if isinstance(expected, QuantisedExpert):
        if (pack_quantised_expert(expected, form.format) != units).any():
            raise WeightHashError(f"{where}: differs from the source")
        return length
    got = unpack_expert_units(
        units, layout.moe_intermediate_size, layout.hidden_size, form.format, form.scale_layout
    )
    for item in fields(expected):
        if getattr(got, item.name).tobytes() != getattr(expected, item.name).tobytes():
            raise WeightHashError(f"{where}: {item.name} differs from the source")
    return length
