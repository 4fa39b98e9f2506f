"""Safetensors files without torch: headers checked before use, tensors read by pread into buffers of ours.

Called by the checkpoint reader, the converter and the expert reader. It knows the file format only, no model;
it maps nothing, so that reading a checkpoint larger than memory leaves no pages behind.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from duckllm.errors import CheckpointError, show_value
from duckllm.weights.json_values import parse_json_object

DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
_MAX_HEADER_BYTES = 100_000_000
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies.

    Args:
        name: Its name in the file.
        dtype: Safetensors' name of the type, ``"F8_E4M3"``, ``"BF16"``, ...
        shape: Its dimensions.
        path: The file.
        offset: First byte, counted from the start of the file.
        num_bytes: Its length.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file by name.

    Raises:
        CheckpointError: The file cannot be read, is truncated, or its header is malformed.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: cannot be read (not a regular file)")
        size = status.st_size
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise CheckpointError(f"{path}: got {size} bytes, expected a safetensors file of at least 8")
            (length,) = struct.unpack("<Q", start)
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{path}: the header says {length} bytes but the file holds {size}, "
                    "expected a whole safetensors file"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    header = parse_json_object(text, f"{path}: the safetensors header")
    data_start = 8 + length
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name] = _tensor_info(path, name, entry, data_start)
    end = max((info.offset + info.num_bytes for info in tensors.values()), default=data_start)
    if size < end:
        raise CheckpointError(f"{path}: truncated, got {size} bytes, expected {end}")
    return tensors


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    malformed = CheckpointError(f"{path}: the header's entry for {name} is malformed")
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise malformed from error
    numbers = (*shape, begin, end)
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in numbers) or end < begin:
        raise malformed
    if dtype not in DTYPE_BYTES:
        raise CheckpointError(
            f"{path}: {name}: got dtype {show_value(dtype)}, expected one of {', '.join(sorted(DTYPE_BYTES))}"
        )
    expected = DTYPE_BYTES[dtype]
    for dimension in shape:
        expected *= dimension
    if end - begin != expected:
        raise CheckpointError(
            f"{path}: {name}: got {end - begin} bytes, expected {expected} for {dtype} {list(shape)}"
        )
    return TensorInfo(name, dtype, shape, path, data_start + begin, end - begin)


class TensorReader:
    """Reads tensors by pread; keeps the files open until closed. Threads may share one."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes every file."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def read(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """The tensor's bytes.

        Shapes: result: [num_bytes] u8.
        """
        return self.read_part(info, 0, info.num_bytes)

    def read_part(self, info: TensorInfo, start: int, length: int) -> npt.NDArray[np.uint8]:
        """``length`` of the tensor's bytes from byte ``start`` on.

        Shapes: result: [length] u8.
        """
        buffer = np.empty(length, np.uint8)
        self._read_into(info, start, buffer.data)
        return buffer

    def chunks(self, info: TensorInfo) -> Iterator[memoryview]:
        """The tensor's bytes in pieces of at most 8 MiB; a piece is valid until the next one."""
        buffer = bytearray(min(info.num_bytes, _CHUNK_BYTES))
        for start in range(0, info.num_bytes, _CHUNK_BYTES):
            piece = memoryview(buffer)[: min(_CHUNK_BYTES, info.num_bytes - start)]
            self._read_into(info, start, piece)
            yield piece

    def _read_into(self, info: TensorInfo, start: int, buffer: memoryview) -> None:
        descriptor = self._files.get(info.path)
        if descriptor is None:
            try:
                opened = os.open(info.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"{info.path}: cannot be read ({error.strerror})") from error
            descriptor = self._files.setdefault(info.path, opened)
            if descriptor != opened:
                os.close(opened)
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(descriptor, [buffer[done:]], info.offset + start + done)
            except OSError as error:
                raise CheckpointError(f"{info.path}: cannot be read ({error.strerror})") from error
            if not got:
                raise CheckpointError(f"{info.path}: truncated inside {info.name}")
            done += got


def build_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str], alignment: int
) -> bytes:
    """The start of a safetensors file, up to its data, whose first byte lands on a multiple of ``alignment``.

    Args:
        tensors: Dtype and shape by name, in the order in which the data follows.
        metadata: Free text for ``__metadata__``.
        alignment: Bytes; the header is padded with spaces.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        length = DTYPE_BYTES[dtype]
        for dimension in shape:
            length *= dimension
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + length]}
        offset += length
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return struct.pack("<Q", len(text)) + text
