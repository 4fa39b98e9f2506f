"""Routed experts in plain torch, for tests of everything around them, and host tensors from a dict."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class TorchExperts:
    """The expert executor's twin: dequantised weights, one expert of one token at a time."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def submit(
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, lane: int = 0
    ) -> TorchExperts._Pending:
        assert x.dtype == torch.float32
        assert topk_ids.dtype == torch.int32
        assert topk_weights.dtype == torch.float32
        return self._Pending(self, layer, x, topk_ids, topk_weights)

    def expert(self, layer: int, expert: int, x: torch.Tensor) -> torch.Tensor:
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"
        gate, up, down = (self.tensors[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    class _Pending:
        def __init__(self, owner: TorchExperts, *step: object) -> None:
            self.owner, self.step = owner, step

        def wait(self, shared: torch.Tensor | None = None) -> torch.Tensor:
            layer, x, ids, weights = self.step
            y = torch.zeros_like(x)
            for t in range(x.shape[0]):
                for expert, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
                    y[t] += weight * self.owner.expert(layer, expert, x[t])
            return y if shared is None else shared + y


class DictTensors:
    """Host tensors from a dict."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> list[str]:
        return list(self.tensors)

    def get(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def stored_linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.weight_scale_inv")

    def linear(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.tensors[f"{name}.weight"].to(dtype)
