"""What the converter must know of a model: which layers hold experts, and every tensor it must find.

Made by the layouts of the families, :mod:`duckllm.weights.layout_mla` and its like; used by the converter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from duckllm.errors import CheckpointError

_NUMBER = re.compile("[0-9]{1,9}")
Shapes = dict[str, tuple[int, ...]]
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ModelLayout:
    """The shape of a mixture-of-experts model.

    Args:
        architecture: Hugging Face's class name.
        model_type: config.json's model_type.
        hidden_size: H.
        moe_intermediate_size: I.
        num_experts: E, routed experts of a layer.
        num_experts_per_tok: K.
        num_layers: Layers, the MTP layers included.
        moe_layers: Layers with routed experts, the MTP layers included.
        host_shapes: Shape of every tensor that the host needs, by name.
        experts: Name of a layer's experts, below the layer.
        projections: Names of an expert's gate, up and down matrices.
    """

    architecture: str
    model_type: str
    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    num_layers: int
    moe_layers: tuple[int, ...]
    host_shapes: Shapes
    experts: str = "mlp.experts"
    projections: tuple[str, str, str] = PROJECTIONS

    def experts_prefix(self, layer: int) -> str:
        """What the names of a layer's routed experts start with, each expert's and those of all in one."""
        return f"model.layers.{layer}.{self.experts}."

    def expert_weight(self, layer: int, expert: int, projection: str) -> str:
        """Name of one expert's matrix, by its name in :data:`PROJECTIONS`."""
        name = self.projections[PROJECTIONS.index(projection)]
        return f"{self.experts_prefix(layer)}{expert}.{name}.weight"

    def expert_shape(self, projection: str) -> tuple[int, int]:
        """Shape of one expert's matrix: [I, H] for gate and up, [H, I] for down."""
        wide = (self.moe_intermediate_size, self.hidden_size)
        return wide[::-1] if projection == "down_proj" else wide

    @staticmethod
    def layer_of(name: str) -> int | None:
        """The layer that a tensor belongs to; None for embeddings, the last norm and the head."""
        parts = name.split(".")
        if len(parts) > 3 and parts[:2] == ["model", "layers"] and _NUMBER.fullmatch(parts[2]):
            return int(parts[2])
        return None

    def is_expert_tensor(self, name: str) -> bool:
        """Whether a tensor belongs to a routed expert."""
        return self.layer_of(name) is not None and name.split(".")[3:5] == self.experts.split(".")


class ConfigReader:
    """Typed access to config.json whose errors name the field."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def positive(self, field: str) -> int:
        """A whole number of at least 1."""
        value = self._config.get(field)
        if type(value) is not int or value < 1:
            raise CheckpointError(
                f"config.json: {field}: got {value!r}, expected a whole number of at least 1"
            )
        return value

    def count(self, field: str, default: int) -> int:
        """A whole number of at least 0; ``default`` where the field is absent or null."""
        value = self._config.get(field)
        if value is None:
            return default
        if type(value) is not int or value < 0:
            raise CheckpointError(
                f"config.json: {field}: got {value!r}, expected a whole number of at least 0"
            )
        return value

    def get(self, field: str) -> Any:
        """The value as it is; None where the field is absent."""
        return self._config.get(field)


def vocabulary_shapes(read: ConfigReader) -> Shapes:
    """The embedding, the last norm, and the head where it is another matrix."""
    vocabulary = (read.positive("vocab_size"), read.positive("hidden_size"))
    shapes: Shapes = {"model.embed_tokens.weight": vocabulary, "model.norm.weight": vocabulary[1:]}
    return shapes if read.get("tie_word_embeddings") else shapes | {"lm_head.weight": vocabulary}


def sigmoid_moe_shapes(read: ConfigReader) -> Shapes:
    """The router of a layer with sigmoid routing, and its shared experts."""
    hidden, experts = read.positive("hidden_size"), read.positive("n_routed_experts")
    shapes: Shapes = {"mlp.gate.weight": (experts, hidden), "mlp.gate.e_score_correction_bias": (experts,)}
    shared = read.count("n_shared_experts", 1) * read.positive("moe_intermediate_size")
    return shapes | (mlp_shapes("mlp.shared_experts.", hidden, shared) if shared else {})


def mlp_shapes(prefix: str, hidden: int, intermediate: int) -> Shapes:
    """The matrices of a gated MLP."""
    wide = (intermediate, hidden)
    return {
        f"{prefix}gate_proj.weight": wide,
        f"{prefix}up_proj.weight": wide,
        f"{prefix}down_proj.weight": wide[::-1],
    }


def mtp_layers(read: ConfigReader, tensors: Mapping[str, Any]) -> list[int]:
    """The layers of multi-token prediction that there are tensors of; a model saved again may have none."""
    first = read.positive("num_hidden_layers")
    present = {ModelLayout.layer_of(name) for name in tensors}
    last = first + read.count("num_nextn_predict_layers", 0)
    return [layer for layer in range(first, last) if layer in present]


def mtp_shapes(read: ConfigReader) -> Shapes:
    """What a layer of multi-token prediction has besides a decoder layer's tensors."""
    hidden = read.positive("hidden_size")
    return {
        "eh_proj.weight": (hidden, 2 * hidden),
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "shared_head.norm.weight": (hidden,),
    }
