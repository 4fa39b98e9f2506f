"""Weights of GGUF files beside a checkpoint's config.json and tokenizer: llama.cpp's names, types and blocks.

Called by the checkpoint reader for folders without safetensors. Tensors of F32, F16 and BF16 are read as all
others are, under the names that the layouts know. Quantised ones keep llama.cpp's names and types, and
:class:`GgufBlocks` finds them: experts in Q4_0 with their own codes, everything else as the gguf package
dequantises it. Of the families only those whose weights llama.cpp leaves in their order are here.

Source: the files that llama.cpp (MIT) writes, and the gguf package (MIT), which reads their headers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from duckllm.errors import CheckpointError, MissingPackageError, UnsupportedModelError, show_value
from duckllm.weights.e4m3 import F32, U8
from duckllm.weights.grouped import QuantisedMatrix
from duckllm.weights.imports.packed import (
    FloatMatrix,
    PackedMatrix,
    Shape,
    StoredMatrix,
    Tensors,
    check_finite,
    check_not_lost,
)
from duckllm.weights.safetensors_file import DTYPE_BYTES, TensorInfo, TensorReader

# llama.cpp turns the rows of Mixtral's queries and keys and cuts up DeepSeek's; Qwen3-MoE's are as they were.
_ARCHITECTURES = ("qwen3moe",)
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GGUF_OF = {name: theirs for theirs, name in (_LAYER | _WHOLE).items()}
_THEIRS = re.compile(r"blk\.(\d+)\.(\w+)\.(\w+)")
_OURS = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\.\w+\.weight)")
_PARTS = re.compile(r".*-\d{5}-of-(\d{5})\.gguf")
_Q4_0, _GROUP = "Q4_0", 32
_Q4_0_BYTES = 2 + _GROUP // 2  # of a block: its scale in F16, then the codes
_MOST_ITEMS = 1 << 20  # of a list in a header: tokens and merges are half a million at most


def read_gguf(folder: Path) -> dict[str, TensorInfo]:
    """The tensors of the GGUF file of a folder, or of the parts of one; no tensor data.

    Raises:
        MissingPackageError: The gguf package is not installed.
        CheckpointError: A file cannot be read, is malformed, or a part is missing.
        UnsupportedModelError: A family or a type of weights that is not supported, by name.
    """
    files = sorted(folder.glob("*.gguf"))
    parts = {int(part[1]) if (part := _PARTS.fullmatch(path.name)) else 1 for path in files}
    if parts != {len(files)}:
        names = ", ".join(path.name for path in files)
        raise CheckpointError(f"{folder}: got {names}, expected one GGUF file, or all parts of one")
    tensors: dict[str, TensorInfo] = {}
    for number, path in enumerate(files):
        tensors |= _read_header(path, is_first=number == 0)
    return tensors


def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MissingPackageError("gguf", "model", "gguf") from error
    return gguf


def _open(path: Path) -> Any:
    """The package's reader, which by itself reads on behind the end of a file, as many items as that says."""
    gguf = _package()

    base: Any = gguf.GGUFReader

    class Reader(base):  # type: ignore[misc]
        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **named: Any) -> Any:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise ValueError(f"it has {len(self.data)} bytes, and says something of byte {end}")
            return super()._get(offset, dtype, count, *order, **named)

        def _get_field_parts(self, offset: int, kind: int) -> Any:
            if kind == gguf.GGUFValueType.ARRAY:
                count = int(self._get(offset + 4, np.uint64)[0])
                if count > _MOST_ITEMS:
                    raise ValueError(f"a list of {count} items")
            return super()._get_field_parts(offset, kind)

    return Reader(path)


def _read_header(path: Path, *, is_first: bool) -> dict[str, TensorInfo]:
    try:
        read = _open(path)
        if read.endianess != _package().GGUFEndian.LITTLE:
            raise UnsupportedModelError(
                f"{path}: got a GGUF file of big-endian numbers, expected little-endian ones"
            )
        field = read.get_field("general.architecture")
        family = None if field is None else field.contents()
        found = [
            (each.name, each.tensor_type.name, each.shape.tolist(), int(each.data_offset), int(each.n_bytes))
            for each in read.tensors
        ]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: got no whole GGUF file ({error})") from error
    if (is_first or family is not None) and family not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path}: general.architecture: got {show_value(family)}, "
            f"expected {' or '.join(map(repr, _ARCHITECTURES))}"
        )
    tensors = {}
    for theirs, dtype, shape, offset, num_bytes in found:
        # Elements of 4 or 2 bytes are as safetensors has them, and llama.cpp counts dimensions from the last.
        name = _name_of(theirs) if dtype in DTYPE_BYTES else theirs
        tensors[name] = TensorInfo(name, dtype, tuple(shape[::-1]), path, offset, num_bytes)
    return tensors


def _name_of(theirs: str) -> str:
    """The name that layouts know a tensor by; its own where they know none."""
    inside = _THEIRS.fullmatch(theirs)
    if inside is not None:
        known = _LAYER.get(inside[2])
        return f"model.layers.{inside[1]}.{known}.{inside[3]}" if known else theirs
    stem, _, suffix = theirs.rpartition(".")
    return f"{_WHOLE[stem]}.{suffix}" if stem in _WHOLE else theirs


def _gguf_name(weight: str) -> str | None:
    inside = _OURS.fullmatch(weight)
    if inside is not None:
        theirs = _GGUF_OF.get(inside[2])
        return None if theirs is None else f"blk.{inside[1]}.{theirs}.weight"
    theirs = _GGUF_OF.get(weight.removesuffix(".weight"))
    return None if theirs is None else f"{theirs}.weight"


@dataclass(frozen=True)
class GgufBlocks:
    """Quantised matrices of a GGUF file; experts of a layer are in one tensor."""

    name: str = "gguf"

    def find(self, tensors: Tensors, weight: str, shape: Shape) -> StoredMatrix | None:
        """As :meth:`duckllm.weights.imports.packed.PackedForm.find`."""
        expert = _EXPERT.fullmatch(weight)
        name = _gguf_name(f"{expert[1]}{expert[3]}" if expert else weight)
        info = None if name is None else tensors.get(name)
        if info is None:
            return None
        num_experts = max(1, *info.shape[:1]) if expert else 1
        expected = (num_experts, *shape) if expert else shape
        if info.shape != expected:
            raise CheckpointError(f"{name}: got shape {list(info.shape)}, expected {list(expected)}")
        index = int(expert[2]) if expert else 0
        if index >= num_experts:
            raise CheckpointError(f"{name}: got {num_experts} experts, expected more than {index}")
        length = info.num_bytes // num_experts
        read = partial(_read_part, info=info, start=index * length, length=length)
        form = f"gguf {info.dtype}"
        place = f"{info.name}[{index}]" if expert else info.name
        if info.dtype == _Q4_0:

            def unpack(reader: TensorReader) -> QuantisedMatrix:
                blocks = read(reader).reshape(-1, _Q4_0_BYTES)
                # The low halves of a block's bytes are its first 16 weights.
                codes = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
                scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
                check_finite(scales, place)
                return QuantisedMatrix(
                    codes=codes.reshape(shape),
                    scales=scales.reshape(shape[0], -1),
                    scale_type="f16",
                    zeros=None,
                    group_size=_GROUP,
                    kind="int4",
                )

            return PackedMatrix(weight, form, shape, (info,), _GROUP, "int4", "f16", False, place, unpack)
        _check_type(info)

        def load(reader: TensorReader) -> F32:
            return _dequantise(read(reader), info.dtype, place).reshape(shape)

        return FloatMatrix(weight, form, shape, (info,), load)


def _read_part(reader: TensorReader, *, info: TensorInfo, start: int, length: int) -> U8:
    return reader.read_part(info, start, length)


def _dequantise(raw: U8, dtype: str, name: str) -> F32:
    """The weights that a matrix's blocks stand for.

    Raises:
        CheckpointError: One is NaN or infinite, or all are zero and the blocks are not all the same.
    """
    gguf = _package()
    kind = gguf.GGMLQuantizationType[dtype]
    with np.errstate(all="ignore"):
        values: F32 = gguf.dequantize(raw.reshape(1, -1), kind)
    bad = values.size - int(np.count_nonzero(np.isfinite(values)))
    if bad:
        raise CheckpointError(f"{name}: got {bad} non-finite weight(s), expected none")
    blocks = raw.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    check_not_lost(values, name, lambda: bool((blocks != blocks[0]).any()))
    return values


def _check_type(info: TensorInfo) -> None:
    """Checks that the package dequantises a type, by a block of zeros."""
    gguf = _package()
    kind = gguf.GGMLQuantizationType[info.dtype]
    try:
        with np.errstate(all="ignore"):
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (NotImplementedError, KeyError) as error:
        raise UnsupportedModelError(
            f"{info.name}: got type {info.dtype}, expected one that the gguf package dequantises"
        ) from error
