"""4-bit matrices as the tools write them, for tests: with their own packers where PyPI has them for a CPU.

GPTQ's and AWQ's tools need a GPU to be installed; their layouts are written here as published, word by word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

Tensor = tuple[str, tuple[int, ...], bytes]  # safetensors' name of the type, the shape, the bytes
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Written:
    """A matrix as a checkpoint has it, and what it stands for.

    Args:
        tensors: By what their names end in, behind the linear layer's.
        values: The weights, exactly.
        stored: What the tool itself dequantises to, of the type in which it does.
    """

    tensors: dict[str, Tensor]
    values: np.ndarray
    stored: torch.Tensor


class Write(Protocol):
    """Makes a matrix: a random one, or the nearest that the form has to some weights."""

    def __call__(
        self, rng: np.random.Generator, shape: tuple[int, int], weights: np.ndarray | None = None
    ) -> Written: ...


@dataclass(frozen=True)
class Form:
    """A form of checkpoints.

    Args:
        config: Its ``quantization_config``.
        write: Makes a random matrix in it.
        format: The weight format that keeps it.
        name: As manifests call it.
    """

    config: dict
    write: Write
    format: str
    name: str


def stored(tensor: torch.Tensor) -> Tensor:
    """A tensor of torch as safetensors has it."""
    kinds = {
        torch.bfloat16: "BF16",
        torch.float16: "F16",
        torch.float32: "F32",
        torch.int32: "I32",
        torch.int64: "I64",
        torch.uint8: "U8",
    }
    plain = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    return kinds[tensor.dtype], tuple(tensor.shape), plain.numpy().tobytes()


def make_parts(
    rng: np.random.Generator,
    shape: tuple[int, int],
    group: int,
    dtype: torch.dtype,
    weights: np.ndarray | None,
    *,
    has_zeros: bool,
) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """Codes, zero points and scales [out, in], [out, groups]: random, so that each occurs, or of weights."""
    rows, columns = shape
    groups = -(-columns // group)
    if weights is None:
        codes = rng.integers(0, 16, shape)
        zeros = rng.integers(0, 16, (rows, groups)) if has_zeros else np.full((rows, groups), 8)
        scales = torch.from_numpy(rng.uniform(0.5, 1, (rows, groups)) / (8 * columns**0.5)).to(dtype)
        return codes, zeros, scales
    zeros = rng.integers(6, 10, (rows, groups)) if has_zeros else np.full((rows, groups), 8)
    largest = np.maximum.reduceat(np.abs(weights), np.arange(0, columns, group), axis=1)
    scales = torch.from_numpy(largest / 6).to(dtype)
    of = np.arange(columns) // group
    codes = np.clip(np.rint(weights / scales.double().numpy()[:, of]) + zeros[:, of], 0, 15).astype(int)
    return codes, zeros, scales


def exact(codes: np.ndarray, zeros: np.ndarray, scales: torch.Tensor, group: int) -> np.ndarray:
    """(code - zero) * scale in float64."""
    of = np.arange(codes.shape[1]) // group
    return (codes - zeros[:, of]) * scales.double().numpy()[:, of]


def compressed_config(**weights: object) -> dict:
    """As Kimi-K2-Thinking has it."""
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": 32,
                    "num_bits": 4,
                    "observer": "minmax",
                    "strategy": "group",
                    "symmetric": True,
                    "type": "int",
                }
                | weights,
            }
        },
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def compressed_tensors(
    group: int | None, dtype: torch.dtype = torch.bfloat16, *, symmetric: bool = True
) -> Form:
    """INT4 of compressed-tensors, by its own compressor; ``group`` None for one scale a row."""
    strategy = "channel" if group is None else "group"
    args = QuantizationArgs(
        num_bits=4, type="int", strategy=strategy, group_size=group, symmetric=symmetric, dynamic=False
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)

    def write(rng: np.random.Generator, shape: tuple[int, int], weights: np.ndarray | None = None) -> Written:
        span = group or shape[1]
        codes, zeros, scales = make_parts(rng, shape, span, dtype, weights, has_zeros=not symmetric)
        values = exact(codes, zeros, scales, span)
        whole = {
            "weight": torch.from_numpy(values).float(),
            "weight_scale": scales,
            "weight_zero_point": torch.from_numpy(zeros - 8).to(torch.int8),
        }
        packed = PackedQuantizationCompressor.compress(whole, scheme)
        if symmetric or shape[0] > 8:
            back = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
        else:  # compressed-tensors 0.20 fails to unpack a single word of zero points
            back = torch.from_numpy(values).to(dtype)
        return Written({name: stored(tensor) for name, tensor in packed.items()}, values, back)

    kind = "int4" + ("" if symmetric else "-zero") + ("-bf16" if dtype == torch.bfloat16 else "")
    config = compressed_config(group_size=group, strategy=strategy, symmetric=symmetric)
    return Form(config, write, kind, "compressed-tensors int4")


def mxfp4() -> Form:
    """MXFP4 of compressed-tensors, by its own compressor."""
    args = QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype=torch.uint8
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def write(rng: np.random.Generator, shape: tuple[int, int], weights: np.ndarray | None = None) -> Written:
        rows, columns = shape
        scales = 2.0 ** rng.integers(-9, -4, (rows, columns // 32))
        if weights is None:
            units = rng.choice(magnitudes, shape) * rng.choice([-1, 1], shape)
        else:
            largest = np.abs(weights).reshape(rows, -1, 32).max(axis=2)
            scales = 2.0 ** np.ceil(np.log2(largest / 6))
            each = np.abs(weights) / np.repeat(scales, 32, axis=1)
            nearest = np.abs(each[..., None] - magnitudes).argmin(axis=-1)
            units = np.copysign(magnitudes[nearest], weights)
        values = units * np.repeat(scales, 32, axis=1)
        whole = {
            "weight": torch.from_numpy(values).to(torch.bfloat16),
            "weight_scale": torch.from_numpy(scales).to(torch.bfloat16),
        }
        packed = MXFP4PackedCompressor.compress(whole, scheme)
        low = packed["weight_packed"]  # it writes no -0, which other tools may
        low[:, 0] = torch.where(low[:, 0] % 16 == 0, low[:, 0] | 8, low[:, 0])
        tensors = {name: stored(tensor) for name, tensor in packed.items()}
        back = MXFP4PackedCompressor.decompress(dict(packed), scheme)["weight"]
        return Written(tensors, values, back)

    config = compressed_config(type="float", num_bits=4, group_size=32)
    return Form(config | {"format": "mxfp4-pack-quantized"}, write, "mxfp4", "compressed-tensors mxfp4")


def _words(values: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Eight columns a word: column ``order[n]`` in the n-th nibble from below. [r, 8 n] to [r, n] i32."""
    eights = np.zeros((values.shape[0], -(-values.shape[1] // 8) * 8), np.uint32)
    eights[:, : values.shape[1]] = values
    words = np.zeros((values.shape[0], eights.shape[1] // 8), np.uint32)
    for word in range(words.shape[1]):
        for nibble in range(8):
            words[:, word] |= eights[:, 8 * word + order[nibble]] << np.uint32(4 * nibble)
    return words.view(np.int32)


def _int32(words: np.ndarray) -> Tensor:
    return "I32", words.shape, np.ascontiguousarray(words).tobytes()


def gptq(
    group: int,
    *,
    symmetric: bool = True,
    version: int = 1,
    dtype: torch.dtype = torch.float16,
    has_index: bool = True,
) -> Form:
    """INT4 of GPTQ's tools; ``group`` -1 for one scale a row."""

    def write(rng: np.random.Generator, shape: tuple[int, int], weights: np.ndarray | None = None) -> Written:
        span = shape[1] if group == -1 else group
        codes, zeros, scales = make_parts(rng, shape, span, dtype, weights, has_zeros=not symmetric)
        words = _words(zeros.T)
        if version == 1:  # as GPTQModel does it: one less in each nibble, by a subtraction of whole words
            words = (words.view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
        tensors = {
            "qweight": _int32(_words(codes).T),
            "qzeros": _int32(words),
            "scales": stored(scales.T),
        }
        if has_index:
            tensors["g_idx"] = _int32((np.arange(shape[1]) // span).astype(np.int32))
        of = np.arange(shape[1]) // span
        # The tools compute in the scales' type: integers exactly, then one product.
        back = torch.from_numpy(codes - zeros[:, of]).to(dtype) * scales[:, of]
        return Written(tensors, exact(codes, zeros, scales, span), back)

    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "sym": symmetric,
        "desc_act": False,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "lm_head": False,
    }
    kind = "int4" + ("" if symmetric else "-zero") + ("-bf16" if dtype == torch.bfloat16 else "")
    return Form(config, write, kind, "gptq int4")


def awq(group: int) -> Form:
    """INT4 of AWQ's tools for matrix products; ``group`` -1 for one scale a row."""

    def write(rng: np.random.Generator, shape: tuple[int, int], weights: np.ndarray | None = None) -> Written:
        span = shape[1] if group == -1 else group
        codes, zeros, scales = make_parts(rng, shape, span, torch.float16, weights, has_zeros=True)
        tensors = {
            "qweight": _int32(_words(codes.T, AWQ_ORDER)),
            "qzeros": _int32(_words(zeros.T, AWQ_ORDER)),
            "scales": stored(scales.T),
        }
        of = np.arange(shape[1]) // span
        back = torch.from_numpy(codes - zeros[:, of]).to(torch.float16) * scales[:, of]
        return Written(tensors, exact(codes, zeros, scales, span), back)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Form(config, write, "int4-zero", "awq int4")


FORMS = {
    "compressed-32": compressed_tensors(32),
    "compressed-64": compressed_tensors(64),
    "compressed-128-f16": compressed_tensors(128, torch.float16),
    "compressed-row": compressed_tensors(None),
    "compressed-zeros": compressed_tensors(32, symmetric=False),
    "compressed-zeros-row-f16": compressed_tensors(None, torch.float16, symmetric=False),
    "mxfp4": mxfp4(),
    "gptq-128": gptq(128),
    "gptq-32": gptq(32, has_index=False),
    "gptq-row": gptq(-1),
    "gptq-zeros": gptq(64, symmetric=False),
    "gptq-v2-zeros": gptq(64, symmetric=False, version=2),
    "gptq-bf16": gptq(32, dtype=torch.bfloat16),
    "awq-128": awq(128),
    "awq-32": awq(32),
    "awq-row": awq(-1),
}
