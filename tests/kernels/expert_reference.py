"""The expert function in float64 from dense weights, with the error bound of csrc/kernels/experts.h.

Built from the definitions alone (e4m3, scales, SiLU), not from the fp9 packer or its numpy twin;
:func:`pack` is there to hand the same layer to the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from duckllm import _native

UNIT_ROUNDOFF = 2.0**-24
BF16_ROUNDOFF = 2.0**-8
SMALLEST_ACTIVATION = 2.0**-50
SILU_RELATIVE = 6 * UNIT_ROUNDOFF  # 3 ulp


def _e4m3_values() -> np.ndarray:
    """Float64 value of each of the 256 bytes, by the definition of the format."""
    codes = np.arange(256)
    sign = np.where(codes >> 7, -1.0, 1.0)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(
        exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * np.exp2(exponent.astype(float) - 7)
    )
    return np.where((codes & 0x7F) == 0x7F, np.nan, sign * magnitude)


_E4M3_VALUES = _e4m3_values()


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """Float64 values of e4m3 bytes."""
    return _E4M3_VALUES[np.asarray(codes, np.uint8)]


def spread_scales(scales: np.ndarray, shape: tuple[int, int], scale_layout: str = "block") -> np.ndarray:
    """One scale per element from one per 128x128 block or one per row."""
    if scale_layout == "channel":
        return np.broadcast_to(scales.astype(np.float64), shape)
    return np.repeat(np.repeat(scales.astype(np.float64), 128, 0), 128, 1)[: shape[0], : shape[1]]


def random_e4m3(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random finite e4m3 bytes of every exponent, subnormals and both zeros included."""
    codes = rng.integers(0, 254, shape, dtype=np.uint8)
    return np.where(codes >= 0x7F, codes + 1, codes).astype(np.uint8)


@dataclass
class Layer:
    """E experts as a checkpoint has them, and what they mean.

    Shapes:
        gate, up: [E, I, H] uint8; down: [E, H, I] uint8; scales: one f32 per 128x128 block of each, or in the
        layout "channel" [E, I, 1] and [E, H, 1].
    """

    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    gate_scale: np.ndarray
    up_scale: np.ndarray
    down_scale: np.ndarray
    scale_layout: str = "block"

    @classmethod
    def random(
        cls, num_experts: int, hidden: int, intermediate: int, seed: int = 0, scale_layout: str = "block"
    ) -> Layer:
        rng = np.random.default_rng(seed)
        gate_up, down = (
            (-(-intermediate // 128), -(-hidden // 128)),
            (-(-hidden // 128), -(-intermediate // 128)),
        )
        if scale_layout == "channel":
            gate_up, down = (intermediate, 1), (hidden, 1)

        def scales(*shape: int) -> np.ndarray:
            return (rng.uniform(0.5, 2.0, shape) * 2.0**-9).astype(np.float32)

        return cls(
            gate=random_e4m3(rng, (num_experts, intermediate, hidden)),
            up=random_e4m3(rng, (num_experts, intermediate, hidden)),
            down=random_e4m3(rng, (num_experts, hidden, intermediate)),
            gate_scale=scales(num_experts, *gate_up),
            up_scale=scales(num_experts, *gate_up),
            down_scale=scales(num_experts, *down),
            scale_layout=scale_layout,
        )

    @property
    def num_experts(self) -> int:
        return self.gate.shape[0]

    @property
    def hidden(self) -> int:
        return self.gate.shape[2]

    @property
    def intermediate(self) -> int:
        return self.gate.shape[1]

    @property
    def num_stripes(self) -> int:
        return -(-self.intermediate // 16)

    def dense(self, expert: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Float64 gate [I, H], up [I, H] and down [H, I] of one expert."""
        matrices = []
        for name in ("gate", "up", "down"):
            codes = getattr(self, name)[expert]
            scales = getattr(self, name + "_scale")[expert]
            matrix = decode_e4m3(codes)
            if self.scale_layout == "channel":
                matrix *= scales
            else:  # what spread_scales says, without an array of its size
                for number, column in enumerate(scales.T):
                    part = matrix[:, 128 * number : 128 * number + 128]
                    part *= np.repeat(column.astype(np.float64), 128)[: len(part), None]
            matrices.append(matrix)
        return matrices[0], matrices[1], matrices[2]


def silu(g: np.ndarray) -> np.ndarray:
    """g / (1 + e^-g) in float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        return g / (1 + np.exp(-g))


def expert_sums(
    layer: Layer,
    x: np.ndarray,
    topk_ids: np.ndarray,
    topk_weights: np.ndarray,
    channels: slice = slice(None),
    *,
    bf16: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """The exact sums y [T, H] in float64 and the bound on the error of the native kernels.

    With bf16 the bound is that of experts of more than 8 rows with prefill in bf16.

    It follows the order of summation of csrc/kernels/experts.h, to first order in the roundoff u: a chain
    of n multiply-adds is within (n + 1) u of the sum of absolute terms, where kernels without FMA need the 1;
    each block adds two sums and a product; errors of gate, up and activation pass on through the slopes.
    """
    x, weights = x.astype(np.float64), topk_weights.astype(np.float64)
    y, bound = np.zeros_like(x), np.zeros_like(x)
    magnitude = np.zeros_like(x)
    blocks = -(-layer.hidden // 128)
    chain = min(layer.hidden, 128) / (1 if bf16 else 2)
    dot_error = (chain + min(blocks, 8) + -(-blocks // 8) + 4) * UNIT_ROUNDOFF
    rounding = BF16_ROUNDOFF if bf16 else 0.0
    dot_error = rounding + (1 + rounding) * dot_error
    stripes = len(range(*channels.indices(layer.num_stripes * 16))) // 16
    num_sums = stripes * topk_ids.shape[1]
    if bf16:
        num_sums = min(128, 16 * stripes) + topk_ids.shape[1] * (-(-stripes // 8) + 1)
    sum_error = (num_sums + 12) * UNIT_ROUNDOFF
    for row in range(x.shape[0]):
        for expert, weight in zip(topk_ids[row], weights[row], strict=True):
            gate, up, down = layer.dense(expert)
            gate, up, down = gate[channels], up[channels], down[:, channels]
            g, u = gate @ x[row], up @ x[row]
            dg, du = dot_error * (abs(gate) @ abs(x[row])), dot_error * (abs(up) @ abs(x[row]))
            s = silu(g)
            ds = 1.1 * dg + SILU_RELATIVE * abs(s)
            a = s * u * weight
            da = abs(weight) * (ds * (abs(u) + du) + abs(s) * du) + 4 * UNIT_ROUNDOFF * abs(a)
            da += rounding * (abs(a) + da)
            y[row] += down @ a
            magnitude[row] += abs(down) @ (abs(a) + da if bf16 else abs(a))
            bound[row] += abs(down) @ (da + SMALLEST_ACTIVATION)
    return y, bound + sum_error * magnitude


def pack(layer: Layer, weight_format: str = "fp9") -> np.ndarray:
    """All units of a layer, [E, S_total, unit_bytes(H, weight_format, layer.scale_layout)] uint8."""
    names = ("gate", "up", "down", "gate_scale", "up_scale", "down_scale")
    experts = range(layer.num_experts)
    return np.stack(
        [
            _native.pack_expert_units(
                *(getattr(layer, name)[e] for name in names),
                format=weight_format,
                scale_layout=layer.scale_layout,
            )
            for e in experts
        ]
    )


def whole_expert(layer: Layer) -> dict[str, Any]:
    """Arguments of native Experts for all of a layer, on one thread."""
    return {
        "hidden_size": layer.hidden,
        "intermediate_size": layer.intermediate,
        "num_experts": layer.num_experts,
        "top_k": 8,
        "first_stripe": 0,
        "num_stripes": layer.num_stripes,
        "max_tokens": 150,
        "num_threads": 1,
        "spin_us": 0,
        "scale_layout": layer.scale_layout,
    }


def random_step(
    layer: Layer, num_tokens: int, top_k: int, seed: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [T, H] f32, topk_ids [T, K] int32 and topk_weights [T, K] f32, checked to be varied."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_tokens, layer.hidden)).astype(np.float32)
    topk_ids = rng.integers(0, layer.num_experts, (num_tokens, top_k), dtype=np.int32)
    topk_weights = rng.uniform(0.1, 1.0, (num_tokens, top_k)).astype(np.float32)
    assert len(np.unique(x)) > 0.99 * x.size
    assert len(np.unique(topk_weights)) > 0.99 * topk_weights.size
    return x, topk_ids, topk_weights


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    """Equal to the last bit, signs of zeros and NaN payloads included."""
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
