"""The architectures that can be loaded, by the name that ``config.json`` gives them.

Called by :mod:`duckllm.llm`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from duckllm.errors import CheckpointError, UnsupportedModelError
from duckllm.models.deepseek_v32 import DeepseekV32Config, DeepseekV32ForCausalLM
from duckllm.weights.checkpoint import load_json

if TYPE_CHECKING:
    from duckllm.moe.executor import ExpertExecutor
    from duckllm.weights.host_tensors import HostTensors
    from duckllm.weights.manifest import Manifest

ARCHITECTURES = {"DeepseekV32ForCausalLM": (DeepseekV32Config, DeepseekV32ForCausalLM)}


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
        if name in ARCHITECTURES:
            return str(name)
    raise UnsupportedModelError(
        f"architectures: got {names!r}, expected one of {', '.join(sorted(ARCHITECTURES))}"
    )


def load_config(folder: Path) -> DeepseekV32Config:
    """The checked configuration of a model folder; raises as :func:`architecture_of` and the family do."""
    return ARCHITECTURES[architecture_of(folder)][0].load(folder)


def check_manifest(manifest: Manifest, config: DeepseekV32Config) -> None:
    """Checks that a manifest is of the model that the configuration describes.

    Raises:
        CheckpointError: A size differs, or a layer's experts are missing; names it.
    """
    sizes = {
        "hidden_size": (manifest.hidden_size, config.hidden_size),
        "moe_intermediate_size": (manifest.moe_intermediate_size, config.moe_intermediate_size),
        "num_experts": (manifest.num_experts, config.n_routed_experts),
        "num_experts_per_tok": (manifest.num_experts_per_tok, config.num_experts_per_tok),
    }
    for field, (got, expected) in sizes.items():
        if got != expected:
            raise CheckpointError(
                f"{manifest.folder / 'duck.json'}: {field}: got {got}, expected {expected} as in config.json"
            )
    for layer, is_moe in enumerate(config.is_moe_layer):
        if is_moe and layer not in manifest.expert_layers:
            raise CheckpointError(
                f"{manifest.folder / 'duck.json'}: expert_layers: got no layer {layer}, "
                "expected it as in config.json"
            )


def load_model(
    folder: Path,
    config: DeepseekV32Config,
    tensors: HostTensors,
    experts: ExpertExecutor,
    *,
    max_tokens: int,
) -> DeepseekV32ForCausalLM:
    """The host's part of the model in ``folder``, with its tensors loaded."""
    return ARCHITECTURES[architecture_of(folder)][1](config, tensors, experts, max_tokens=max_tokens)
