"""A model's host part with random weights made on the card, and experts that answer zeros at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from duckllm import _native
from duckllm.kernels import exchange as exchange_kernels
from duckllm.kernels.half_rows import MAX_GROUPED_ROWS
from duckllm.models.causal_lm import CausalLM
from duckllm.models.config import ModelConfig
from duckllm.models.registry import load_config
from duckllm.moe.device_experts import DeviceExperts, Mailboxes
from duckllm.weights.architectures import layout_of

# Published FP8 checkpoints keep these in BF16.
_WIDE = ("embed_tokens", "lm_head", ".gate.", "weights_proj", "norm", "eh_proj", "bias")


class RandomTensors:
    """Host tensors on the card, made as they are asked for: FP8 with block scales, or BF16.

    Args:
        config: ``config.json``.
        device: The card; the embedding stays on the CPU.
    """

    def __init__(self, config: dict[str, Any], device: torch.device) -> None:
        self._shapes, self._device = layout_of(config, {}).host_shapes, device
        self._generator = torch.Generator(device).manual_seed(0)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def get(self, name: str) -> torch.Tensor:
        """A tensor of unit gain."""
        shape = self._shapes[name]
        if "embed_tokens" in name:
            return torch.randn(1, shape[1]).bfloat16().expand(shape)
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        values = torch.randn(shape, device=self._device, generator=self._generator)
        return (values * shape[-1] ** -0.5).bfloat16()

    def stored_linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A layer's weight as a checkpoint has it."""
        rows, columns = self._shapes[f"{name}.weight"]
        if any(part in f"{name}." for part in _WIDE):
            return self.get(f"{name}.weight"), None
        values = torch.randn(rows, columns, device=self._device, generator=self._generator)
        scales = torch.full((-(-rows // 128), -(-columns // 128)), columns**-0.5, device=self._device)
        return values.to(torch.float8_e4m3fn), scales

    def linear(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A layer's weight in ``dtype``."""
        return self.get(f"{name}.weight").to(dtype)


class _Zeros:
    """Experts of nobody, outside of graphs."""

    def submit(self, layer: int, x: torch.Tensor, *rest: object) -> _Zeros:
        """Notes the size."""
        self._x = x
        return self

    def wait(self, shared: torch.Tensor | None = None) -> torch.Tensor:
        """Zeros."""
        return torch.zeros_like(self._x)


def read(folder: Path, **changes: Any) -> tuple[dict[str, Any], ModelConfig]:
    """A configuration as it is in its file, and checked."""
    config = json.loads((folder / "config.json").read_text()) | changes
    return config, load_config(folder)


def device_experts(config: ModelConfig, device: torch.device, delay_us: int = 0) -> DeviceExperts:
    """Experts that answer zeros."""
    boxes = Mailboxes.new(2, MAX_GROUPED_ROWS, config.hidden_size, config.routing.top_k, device)
    exchange = boxes.exchange(_native.echo_server(delay_us=delay_us))
    return DeviceExperts(_Zeros(), boxes, exchange, exchange_kernels)


def random_model(folder: Path, max_tokens: int) -> CausalLM:
    """The host part of the model whose config.json lies in ``folder``."""
    device = torch.device("cuda")
    config, parsed = read(folder)
    return CausalLM(
        parsed,
        RandomTensors(config, device),  # type: ignore[arg-type]
        device_experts(parsed, device),
        max_tokens=max_tokens,
        device=device,
    )


def weight_bytes(model: CausalLM) -> int:
    """Bytes of the weights on the card, all of which a step reads."""
    seen: dict[int, int] = {}

    def visit(value: object, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            if value.is_cuda:
                seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, (list, tuple)):
            for each in value:
                visit(each, depth + 1)
        elif type(value).__module__.startswith("duckllm.") and depth < 8:
            names = getattr(value, "__dict__", {}).items()
            for name, each in names:
                if name not in ("runtime", "_runtime", "experts", "captured"):
                    visit(each, depth + 1)

    visit([model.layers, model.norm, model.head], 0)
    return sum(seen.values())
