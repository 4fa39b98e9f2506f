"""The architectures that can be loaded, by the name in ``config.json``, and the first checks of a model.

Called by :mod:`duckllm.llm`. A family's module, and torch with it, is imported when its model is loaded: what
is wrong with a folder is known before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from duckllm.config import LOSSLESS_FORMATS
from duckllm.errors import CheckpointError, ConfigError, UnsupportedModelError
from duckllm.weights.architectures import layout_of
from duckllm.weights.checkpoint import load_json
from duckllm.weights.formats import is_lossless
from duckllm.weights.layout import ModelLayout
from duckllm.weights.manifest import MANIFEST_FILE, Manifest
from duckllm.weights.resolve import resolve_model

if TYPE_CHECKING:
    import torch

    from duckllm.models.causal_lm import CausalLM
    from duckllm.models.config import ModelConfig
    from duckllm.models.mtp import MTPLayer
    from duckllm.moe.executor import ExpertExecutor
    from duckllm.weights.host_tensors import HostTensors

# The module of each: PARSER names the class of transformers that reads config.json, parse() goes on from it.
ARCHITECTURES = {
    "DeepseekV3ForCausalLM": "duckllm.models.deepseek_v3",
    "DeepseekV32ForCausalLM": "duckllm.models.deepseek_v32",
    "Glm4MoeForCausalLM": "duckllm.models.glm4_moe",
    "GlmMoeDsaForCausalLM": "duckllm.models.glm_moe_dsa",
    "MixtralForCausalLM": "duckllm.models.mixtral",
    "Qwen2MoeForCausalLM": "duckllm.models.qwen2_moe",
    "Qwen3MoeForCausalLM": "duckllm.models.qwen3_moe",
}


@dataclass(frozen=True)
class ModelFolder:
    """A converted model whose manifest and config.json belong together.

    Args:
        path: Where it lies.
        manifest: Its duck.json.
        num_layers: Layers that a token passes, those of multi-token prediction not counted.
    """

    path: Path
    manifest: Manifest
    num_layers: int

    @property
    def has_draft_layer(self) -> bool:
        """Whether the checkpoint has a layer of multi-token prediction."""
        return self.num_layers in self.manifest.expert_layers


def open_model(
    model: str | Path | None,
    weight_format: str = "auto",
    keep: Sequence[str] | None = None,
    importance: Path | None = None,
) -> ModelFolder:
    """The folder of a model, converted once where that is needed, and checked as far as is cheap.

    Reads duck.json and config.json, and the length of every other file; imports no torch, unless there is
    something to convert.

    Args:
        model: As for :func:`duckllm.weights.resolve.resolve_model`.
        weight_format: The same.
        keep: The same.
        importance: The same.

    Raises:
        ModelNotFoundError: No such folder, or no model in it.
        UnsupportedModelError: The architecture is not implemented.
        ModelError: The folder's content cannot be used; names the file.
        DiskSpaceError: A checkpoint has no room in the model cache.
        ConfigError: The model's experts are in another format than ``weight_format``, and nothing makes one
            of the other when a model starts.
    """
    folder = usable_folder(model, weight_format, keep, importance)
    manifest = Manifest.load(folder)
    manifest.check_config()
    check_format(manifest.format, weight_format)
    layout = layout_of(load_json(folder / "config.json"), {})
    _check_manifest(manifest, layout)
    return ModelFolder(folder, manifest, layout.num_layers)


def usable_folder(
    model: str | Path | None,
    weight_format: str = "auto",
    keep: Sequence[str] | None = None,
    importance: Path | None = None,
) -> Path:
    """As :func:`duckllm.weights.resolve.resolve_model`; what cannot be loaded is refused, not converted.

    Raises:
        As :func:`load_config`, and that.
    """
    return resolve_model(
        model, weight_format=weight_format, keep=keep, importance=importance, check=load_config
    )


def check_format(stored: str, requested: str) -> None:
    """Refuses a format that a model in ``stored`` is not computed in.

    Raises:
        ConfigError: It is neither what is stored, but for layers kept in others, nor of the same weights.
    """
    if requested not in ("auto", stored) and not (is_lossless(requested) and is_lossless(stored)):
        of_same_weights = " or ".join(LOSSLESS_FORMATS) if is_lossless(stored) else stored
        raise ConfigError(
            "weight_format",
            requested,
            f"{of_same_weights}, as the model is in {stored}: nothing is rounded when a model starts; "
            "duckllm convert makes a model in another format",
        )


def check_context(model: ModelFolder, max_model_len: int | None) -> None:
    """Refuses a context longer than the model's before anything is loaded.

    Raises:
        ConfigError: It is.
    """
    longest = load_json(model.path / "config.json").get("max_position_embeddings")
    if max_model_len is not None and type(longest) is int and max_model_len > longest:
        raise ConfigError("max_model_len", max_model_len, f"at most {longest}, the model's longest context")


def architecture_of(folder: Path) -> str:
    """The name of the supported architecture in a model folder's ``config.json``.

    Raises:
        CheckpointError: The file is missing, malformed or names no architecture.
        UnsupportedModelError: The architecture is not implemented.
    """
    path = Path(folder) / "config.json"
    try:
        names = load_json(path)["architectures"]
    except KeyError as error:
        raise CheckpointError(f"{path}: architectures: got none, expected a list of names") from error
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and name in ARCHITECTURES:
            return name
    raise UnsupportedModelError(
        f"architectures: got {names!r}, expected one of {', '.join(sorted(ARCHITECTURES))}"
    )


def load_config(folder: Path) -> ModelConfig:
    """The checked configuration of a model folder; raises as :func:`architecture_of` and the family do."""
    family = import_module(ARCHITECTURES[architecture_of(folder)])
    from duckllm.models.config import read_config

    return read_config(folder, family.PARSER, family.parse)


def load_model(
    config: ModelConfig,
    tensors: HostTensors,
    experts: ExpertExecutor,
    *,
    max_tokens: int,
    device: torch.device | None = None,
) -> CausalLM:
    """The host's part of a model, with its tensors loaded, on the CPU unless another device is given."""
    from duckllm.models.causal_lm import CPU, CausalLM

    return CausalLM(config, tensors, experts, max_tokens=max_tokens, device=device or CPU)


def load_draft_layer(model: CausalLM, tensors: HostTensors, experts: ExpertExecutor) -> MTPLayer:
    """The layer of multi-token prediction of a model that is loaded, with its tensors."""
    from duckllm.models.mtp import MTPLayer

    return MTPLayer(model, tensors, experts)


def _check_manifest(manifest: Manifest, layout: ModelLayout) -> None:
    """Checks that a manifest is of the model that config.json describes."""
    path = manifest.folder / MANIFEST_FILE
    for field in ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok"):
        got, expected = getattr(manifest, field), getattr(layout, field)
        if got != expected:
            raise CheckpointError(f"{path}: {field}: got {got}, expected {expected} as in config.json")
    for layer in layout.moe_layers:
        if layer not in manifest.expert_layers:
            raise CheckpointError(
                f"{path}: expert_layers: got no layer {layer}, expected it as in config.json"
            )
