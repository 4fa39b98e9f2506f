"""Random weights in the formats of other engines, and what they mean in float32.

Called by kt_kernel_peer.py and llama_cpp_peer.py, which run in environments of their own: NumPy only. The
bytes themselves are random, so that nothing has to be quantised: a time does not depend on the values, and a
reference made from the same bytes is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

# Weights per block and bytes per block of ggml's formats.
BLOCKS = {"Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_K": (256, 144)}
RAWINT4_GROUP = 32  # weights that share a bf16 scale
GGML_TYPES = {"Q4_0": 2, "Q8_0": 8, "Q4_K": 12}


@dataclass(frozen=True)
class Expert:
    """One expert's gate [I, H], up [I, H] and down [H, I]: what the engine is given, and what that means.

    Args:
        stored: Three arrays, in the engine's format.
        values: The same three in float32.
        scales: Three arrays of block scales, f32 or (RAWINT4) bf16; empty where it has none of its own.
    """

    stored: tuple[npt.NDArray[np.generic], ...]
    values: tuple[F32, F32, F32]
    scales: tuple[npt.NDArray[np.generic], ...] = ()


def bits_per_weight(weight_format: str) -> float:
    """Bits that a step reads for each weight, scales included."""
    if weight_format in BLOCKS:
        weights, num_bytes = BLOCKS[weight_format]
        return 8 * num_bytes / weights
    if weight_format == "RAWINT4":
        return 4 + 16 / RAWINT4_GROUP
    return {"FP8": 8 + 32 / 128**2, "INT8": 8.0, "BF16": 16.0}[weight_format]


def e4m3_values() -> F32:
    """The 256 values of float8 e4m3 (fn) by their codes; NaN for 0x7f and 0xff."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes & 0x80, -values, values).astype(np.float32)


def to_bf16(values: F32) -> npt.NDArray[np.uint16]:
    """Round to nearest even; the sixteen bits of each."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: npt.NDArray[np.uint16]) -> F32:
    """The values of bfloat16 numbers."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def random_blocks(weight_format: str, rows: int, columns: int, rng: np.random.Generator) -> tuple[U8, F32]:
    """Random blocks of a ggml format, [rows, bytes of a row], and their values [rows, columns].

    Raises:
        ValueError: ``columns`` is no multiple of the format's block.
    """
    block, num_bytes = BLOCKS[weight_format]
    if columns % block:
        raise ValueError(
            f"{weight_format} has blocks of {block} weights: a row of {columns} has a part of one"
        )
    blocks = rng.integers(0, 256, (rows, columns // block, num_bytes), dtype=np.uint8)
    spread = {"Q8_0": 74.0, "Q4_0": 4.6, "Q4_K": 225.0}[weight_format]  # standard deviation for a scale of 1
    scale = np.float16(1 / (spread * columns**0.5))
    blocks[..., :2] = np.frombuffer(scale.tobytes(), np.uint8)
    if weight_format == "Q8_0":
        values = blocks[..., 2:].view(np.int8).astype(np.float32) * np.float32(scale)
    elif weight_format == "Q4_0":
        nibbles = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1)
        values = (nibbles.astype(np.float32) - 8) * np.float32(scale)
    else:
        least = np.float16(7.5 * float(scale))  # such that the mean is about zero
        blocks[..., 2:4] = np.frombuffer(least.tobytes(), np.uint8)
        values = _q4_k_values(blocks, np.float32(scale), np.float32(least))
    return blocks.reshape(rows, -1), np.ascontiguousarray(values.reshape(rows, columns))


def _q4_k_values(blocks: U8, scale: np.float32, least: np.float32) -> F32:
    """Eight groups of 32 weights a block, with a scale and a minimum of six bits each."""
    packed, nibbles = blocks[..., 4:16], blocks[..., 16:]
    low, high = packed[..., :4], packed[..., 4:8]
    scales = np.concatenate([low & 63, packed[..., 8:] & 15 | low >> 6 << 4], axis=-1)
    minima = np.concatenate([high & 63, packed[..., 8:] >> 4 | high >> 6 << 4], axis=-1)
    quarters = nibbles.reshape(*nibbles.shape[:-1], 4, 1, 32)
    groups = np.concatenate([quarters & 15, quarters >> 4], axis=-2).reshape(*nibbles.shape[:-1], 8, 32)
    return (
        groups.astype(np.float32) * (scale * scales.astype(np.float32))[..., None]
        - (least * minima.astype(np.float32))[..., None]
    )


def random_expert(weight_format: str, hidden_size: int, channels: int, seed: int) -> Expert:
    """One expert of random weights in a format: FP8, INT8, BF16, RAWINT4, Q8_0, Q4_0 or Q4_K.

    INT8 is given as BF16, for the engine quantises it itself.
    """
    rng = np.random.default_rng(seed)
    sizes = ((channels, hidden_size), (channels, hidden_size), (hidden_size, channels))
    if weight_format in BLOCKS:
        pairs = [random_blocks(weight_format, *size, rng) for size in sizes]
        return Expert(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))
    if weight_format in ("INT8", "BF16"):
        bits = tuple(to_bf16(rng.standard_normal(size, np.float32) / size[1] ** 0.5) for size in sizes)
        return Expert(bits, tuple(from_bf16(each) for each in bits))
    if weight_format == "RAWINT4":
        return _raw_int4_expert(sizes, rng)
    table = e4m3_values()
    codes = [
        rng.integers(0, 126, size, dtype=np.uint8) | rng.integers(0, 2, size, dtype=np.uint8) << 7
        for size in sizes
    ]
    scales, values = [], []
    for code, size in zip(codes, sizes, strict=True):
        # The standard deviation of a random code is about 127.
        shape = (-(-size[0] // 128), -(-size[1] // 128))
        scale = (rng.uniform(0.5, 1.5, shape) / (127 * size[1] ** 0.5)).astype(np.float32)
        scales.append(scale)
        wide = scale.repeat(128, axis=0).repeat(128, axis=1)[: size[0], : size[1]]
        values.append(table[code] * wide)
    return Expert(tuple(codes), tuple(values), tuple(scales))


def _raw_int4_expert(sizes: tuple[tuple[int, int], ...], rng: np.random.Generator) -> Expert:
    """Codes minus 8, two a byte, the lower half first; a bf16 scale for each group of a row."""
    stored, values, scales = [], [], []
    for rows, columns in sizes:
        packed = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
        drawn = rng.uniform(0.5, 1.5, (rows, columns // RAWINT4_GROUP)) / (4.6 * columns**0.5)
        words = to_bf16(drawn.astype(np.float32))
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, columns)
        stored.append(packed)
        scales.append(words)
        values.append((codes.astype(np.float32) - 8) * from_bf16(words).repeat(RAWINT4_GROUP, axis=1))
    return Expert(tuple(stored), (values[0], values[1], values[2]), tuple(scales))


def expert_output(expert: Expert, x: npt.NDArray[np.floating]) -> F64:
    """down(silu(gate x) * up x) in float64: [T, H] of [T, H]."""
    gate, up, down = (each.astype(np.float64) for each in expert.values)
    g = x.astype(np.float64) @ gate.T
    return np.asarray((g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T, dtype=np.float64)
