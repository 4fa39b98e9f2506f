"""How much each weight of the experts matters: mean squares of what it is multiplied by, and their file.

Made by :mod:`duckllm.quality.calibrate`, read by the converter. Knows tensors and routings; docs/quality.md
describes the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from duckllm.weights.files import write_atomically

FORMAT = "duckllm-calibration-1"

# Gate and up of an expert of a layer: [I, H] f32 each.
GateUp = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class LayerSums:
    """What was seen of a layer's experts.

    Args:
        hidden: Sum of the squares of their input, over tokens.
        experts: Sum of the squares of each expert's activations times its routing weight, over its tokens.
        counts: Tokens that chose each expert.
        num_tokens: Tokens in all.

    Shapes: hidden: [H] f64; experts: [E, I] f64; counts: [E] i64.
    """

    hidden: npt.NDArray[np.float64]
    experts: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    num_tokens: int = 0

    @classmethod
    def empty(cls, hidden_size: int, intermediate_size: int, num_experts: int) -> LayerSums:
        """Before the first token."""
        return cls(
            np.zeros(hidden_size), np.zeros((num_experts, intermediate_size)), np.zeros(num_experts, np.int64)
        )


@dataclass
class Importance:
    """What was seen of a model's experts, layer by layer; steps are added by :meth:`add`.

    Args:
        hidden_size: H.
        intermediate_size: I.
        num_experts: E.
        layers: By number.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    layers: dict[int, LayerSums] = field(default_factory=dict)

    def add(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        gate_up: GateUp,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        """Adds a step: what an expert's down is multiplied by is computed once more for it, in float32.

        Args:
            layer: The layer.
            x: The experts' input.
            topk_ids: Each token's experts.
            topk_weights: Their weights.
            gate_up: The experts' matrices.
            progress: Called with the share of the step that is done.

        Shapes: x: [T, H] f32; topk_ids: [T, K] int32; topk_weights: [T, K] f32.
        """
        sums = self.layers.get(layer)
        if sums is None:
            sums = LayerSums.empty(self.hidden_size, self.intermediate_size, self.num_experts)
            self.layers[layer] = sums
        sums.num_tokens += len(x)
        sums.hidden += _squares(x)
        chosen = torch.unique(topk_ids).tolist()
        for number, expert in enumerate(chosen):
            tokens, places = torch.nonzero(topk_ids == expert, as_tuple=True)
            gate, up = gate_up(layer, expert)
            rows = x[tokens]
            activations = F.silu(rows @ gate.T) * (rows @ up.T)
            sums.experts[expert] += _squares(activations * topk_weights[tokens, places, None])
            sums.counts[expert] += len(tokens)
            progress((number + 1) / len(chosen))

    def tensors(self) -> dict[str, npt.NDArray[np.generic]]:
        """Means by name, as the file has them; zero for an expert that no token chose."""
        found: dict[str, npt.NDArray[np.generic]] = {}
        for layer, sums in sorted(self.layers.items()):
            found[f"layers.{layer}.hidden"] = (sums.hidden / max(1, sums.num_tokens)).astype(np.float32)
            means = sums.experts / np.maximum(1, sums.counts)[:, None]
            found[f"layers.{layer}.experts"] = means.astype(np.float32)
            found[f"layers.{layer}.counts"] = sums.counts
        return found

    def save(self, path: Path, config_sha256: str, num_tokens: int) -> None:
        """Writes the file, whole or not at all.

        Args:
            path: Where to.
            config_sha256: Hash of the model's config.json, by which a reader knows the model.
            num_tokens: Tokens that were seen.
        """
        from safetensors.numpy import save

        metadata = {"format": FORMAT, "config_sha256": config_sha256, "num_tokens": str(num_tokens)}
        write_atomically(path, save(self.tensors(), metadata))


def _squares(rows: torch.Tensor) -> npt.NDArray[np.float64]:
    """The sum of squares over rows, in float64: [T, n] to [n]."""
    return rows.double().square_().sum(0).numpy()
