"""Layers in int8, int4 and mxfp4, and the bound on what the integer kernels make of them.

The weights' values come from the definitions of the formats (codes, zero points and scales in float64); the
units from the packers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from expert_reference import SILU_RELATIVE, SMALLEST_ACTIVATION, UNIT_ROUNDOFF, silu, spread_scales

from duckllm import _native
from duckllm.weights.formats import FORMATS
from duckllm.weights.grouped import (
    QuantisedExpert,
    QuantisedMatrix,
    codes_of,
    pack_quantised_expert,
    scale_values,
    scale_words,
)

INTEGER_FORMATS = ("int8", "int4", "int4-bf16", "int4-zero", "int4-zero-bf16", "mxfp4")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
BYTE_ROUNDING = (0.5 + 2.0**-15) / 127  # of a group's largest magnitude


@dataclass(frozen=True)
class IntegerLayer:
    """E experts of one format: the codes and scales of gate and up [E, I, H] and down [E, H, I].

    Args:
        codes: By matrix: u8 codes.
        scales: By matrix: float64, one for each group of 32 (16 in down) or, in int8, 128x128 block or row.
        zeros: By matrix: zero points as the scales, or None.
        format: Of these.
        scale_layout: ``"group"``, or of int8 ``"block"`` or ``"channel"``.
    """

    codes: dict[str, np.ndarray]
    scales: dict[str, np.ndarray]
    zeros: dict[str, np.ndarray] | None
    format: str
    scale_layout: str

    @classmethod
    def random(
        cls,
        weight_format: str,
        num_experts: int,
        hidden: int,
        intermediate: int,
        seed: int = 0,
        scale_layout: str | None = None,
    ) -> IntegerLayer:
        rng = np.random.default_rng(seed)
        layout = scale_layout or ("block" if weight_format == "int8" else "group")
        codes, scales, zeros = {}, {}, {}
        for name, size in (
            ("gate", (intermediate, hidden)),
            ("up", (intermediate, hidden)),
            ("down", (hidden, intermediate)),
        ):
            low, high = (1, 256) if weight_format == "int8" else (0, 16)
            codes[name] = rng.integers(low, high, (num_experts, *size), dtype=np.uint8)
            if layout == "block":
                groups = (-(-size[0] // 128), -(-size[1] // 128))
            elif layout == "channel":
                groups = (size[0], 1)
            else:
                groups = (size[0], -(-size[1] // (16 if name == "down" else 32)))
            drawn = (rng.uniform(0.5, 2.0, (num_experts, *groups)) / size[1] ** 0.5).astype(np.float32)
            if weight_format == "int8":
                drawn /= 74
            else:
                kind = codes_of(weight_format).scale_type
                drawn = scale_values(scale_words(drawn / 4, kind), kind)
            scales[name] = drawn
            zeros[name] = rng.integers(0, 16, drawn.shape, dtype=np.uint8)
        has_zeros = "zero" in weight_format
        return cls(codes, scales, zeros if has_zeros else None, weight_format, layout)

    @property
    def num_experts(self) -> int:
        return self.codes["gate"].shape[0]

    @property
    def hidden(self) -> int:
        return self.codes["gate"].shape[2]

    @property
    def intermediate(self) -> int:
        return self.codes["gate"].shape[1]

    @property
    def num_stripes(self) -> int:
        return -(-self.intermediate // 16)

    def zero_code(self) -> int:
        """The code that is 0, in formats without zero points."""
        return {"int8": 128, "mxfp4": 0}.get(self.format, 8)

    def dense(self, expert: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Float64 gate [I, H], up [I, H] and down [H, I] of one expert."""
        matrices = []
        for name in ("gate", "up", "down"):
            codes = self.codes[name][expert]
            scales = self.scales[name][expert].astype(np.float64)
            if self.scale_layout == "group":
                group_of = np.arange(codes.shape[1]) // (16 if name == "down" else 32)
                scales = scales[:, group_of]
                zero = 8.0 if self.zeros is None else self.zeros[name][expert][:, group_of].astype(np.float64)
                values = E2M1[codes] if self.format == "mxfp4" else codes - zero
            else:
                scales = spread_scales(scales, codes.shape, self.scale_layout)
                values = codes - 128.0
            matrices.append(values * scales)
        return matrices[0], matrices[1], matrices[2]

    def one_live_channel_a_stripe(self) -> IntegerLayer:
        """The same with `up` zero but in one channel of each stripe, another one in each."""
        up = self.codes["up"].copy()
        zeros = np.full(up.shape, self.zero_code(), np.uint8)
        if self.zeros is not None:
            zeros = np.repeat(self.zeros["up"], 32, axis=2)[..., : self.hidden]
        channels = np.arange(self.intermediate)
        live = (channels % 16 == channels // 16 * 5 % 16) | (channels == self.intermediate - 1)
        live &= (channels // 16 < self.num_stripes - 1) | (channels == self.intermediate - 1)
        up[:, ~live] = zeros[:, ~live]
        return replace(self, codes=self.codes | {"up": up})

    def pack(self) -> np.ndarray:
        """All units, [E, S, unit_bytes] u8."""
        return np.stack([self._pack(expert) for expert in range(self.num_experts)])

    def _pack(self, expert: int) -> np.ndarray:
        names = ("gate", "up", "down")
        if FORMATS[self.format].grouped is None:
            return _native.pack_expert_units(
                *(self.codes[name][expert] for name in names),
                *(self.scales[name][expert] for name in names),
                format=self.format,
                scale_layout=self.scale_layout,
            )
        row = codes_of(self.format)
        matrices = [
            QuantisedMatrix(
                self.codes[name][expert],
                self.scales[name][expert],
                row.scale_type,
                None if self.zeros is None else self.zeros[name][expert],
                16 if name == "down" else 32,
                row.kind,
            )
            for name in names
        ]
        return pack_quantised_expert(QuantisedExpert(*matrices), self.format)


def group_maxima(values: np.ndarray, size: int) -> np.ndarray:
    """The largest magnitude of each value's group, as the values."""
    padded = np.zeros((*values.shape[:-1], -(-values.shape[-1] // size) * size))
    padded[..., : values.shape[-1]] = abs(values)
    largest = padded.reshape(*values.shape[:-1], -1, size).max(-1)
    return np.repeat(largest, size, axis=-1)[..., : values.shape[-1]]


def integer_sums(
    layer: IntegerLayer,
    x: np.ndarray,
    topk_ids: np.ndarray,
    topk_weights: np.ndarray,
    *,
    exact_bytes: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """The exact sums y [T, H] in float64 and the bound of csrc/kernels/experts.h on the integer kernels.

    With ``exact_bytes`` the bound is without rounding to bytes: for x that bytes hold, and stripes with a
    single activation.
    """
    x, weights = x.astype(np.float64), topk_weights.astype(np.float64)
    y, bound, magnitude = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    blocks = -(-layer.hidden // 32)
    dot_error = (min(blocks, 32) + -(-blocks // 32) + 3) * UNIT_ROUNDOFF
    rounding = 0.0 if exact_bytes else BYTE_ROUNDING
    dx = rounding * group_maxima(x, 32) + 2 * UNIT_ROUNDOFF * abs(x)
    sum_error = (layer.num_stripes * topk_ids.shape[1] + 3) * UNIT_ROUNDOFF
    dense = {expert: layer.dense(expert) for expert in np.unique(topk_ids)}
    for row in range(x.shape[0]):
        for expert, weight in zip(topk_ids[row], weights[row], strict=True):
            gate, up, down = dense[expert]
            g, u = gate @ x[row], up @ x[row]
            dg, du = (
                abs(each) @ dx[row] + dot_error * (abs(each) @ (abs(x[row]) + dx[row])) for each in (gate, up)
            )
            s = silu(g)
            a = s * u * weight
            da = abs(weight) * ((1.1 * dg + SILU_RELATIVE * abs(s)) * (abs(u) + du) + abs(s) * du)
            da += 4 * UNIT_ROUNDOFF * abs(a) + SMALLEST_ACTIVATION
            da += rounding * group_maxima(abs(a) + da, 16) + 2 * UNIT_ROUNDOFF * (abs(a) + da)
            y[row] += down @ a
            magnitude[row] += abs(down) @ (abs(a) + da)
            bound[row] += abs(down) @ da
    return y, bound + sum_error * magnitude
