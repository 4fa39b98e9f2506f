"""Turns a checkpoint's experts, which have tensors of their own, into ones that share a layer's tensors."""

from __future__ import annotations

from collections import Counter

import numpy as np

PARTS = ("gate_proj", "up_proj", "down_proj")


def taken(tensors: dict, name: str) -> tuple[str, np.ndarray]:
    """A tensor, taken out: its type and its values in bytes of that type's size."""
    dtype, shape, data = tensors.pop(name)
    kind = {"F32": "<u4", "BF16": "<u2", "F16": "<u2", "F8_E4M3": "u1", "F8_E8M0": "u1"}[dtype]
    return dtype, np.frombuffer(data, kind).reshape(shape)


def stack(
    tensors: dict,
    *,
    joined: bool = True,
    transposed: bool = False,
    suffix: str = "",
    order: tuple[str, str] = ("gate_proj", "up_proj"),
    scale: str = "",
    flat: bool = False,
) -> None:
    """Turns experts one by one into stacked ones; ``scale`` is the name of theirs where they have any."""

    def put(name: str, dtype: str, matrices: np.ndarray) -> None:
        if transposed and matrices.ndim == 3:
            matrices = matrices.swapaxes(1, 2)
        tensors[name] = (dtype, matrices.shape, np.ascontiguousarray(matrices).tobytes())

    found = [name.partition(".experts.") for name in tensors if name.endswith(".gate_proj.weight")]
    layers = Counter(layer + dot for layer, dot, expert in found if expert)
    for prefix, num_experts in layers.items():
        for last in ("weight", *([f"weight_{scale}"] if scale else [])):
            whole = {}
            for part in PARTS:
                each = [taken(tensors, f"{prefix}{expert}.{part}.{last}") for expert in range(num_experts)]
                dtype, whole[part] = each[0][0], np.stack([matrix for _, matrix in each])
            if joined:
                whole["gate_up_proj"] = np.concatenate([whole.pop(part) for part in order], axis=1)
            for part, matrices in whole.items():
                name = prefix + part + suffix
                if last != "weight":
                    name = f"{prefix}{part}.{last}" if suffix else f"{prefix}{part}_{scale}"
                    matrices = matrices.reshape(-1) if flat and part == "down_proj" else matrices
                put(name, dtype, matrices)
