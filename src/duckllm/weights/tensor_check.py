"""Whether a checkpoint's tensors are the model's: everything that is not is named at once.

Called by the converter, before it writes anything.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from duckllm.errors import CheckpointError
from duckllm.weights.checkpoint import (
    FP8,
    Checkpoint,
    check_scales,
    check_type,
    fp8_scales,
    is_not_needed,
    list_names,
    list_problems,
    scale_names,
)
from duckllm.weights.imports.packed import DequantisedTensor
from duckllm.weights.layout import ModelLayout
from duckllm.weights.safetensors_file import TensorInfo, TensorReader
from duckllm.weights.scales import widen_to_f32
from duckllm.weights.source import ExpertTensors

_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
_INDEXER = ".self_attn.indexer."
# What the layers of multi-token prediction have of the model's embeddings and head, once more.
_MTP_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
_SCALES = re.compile(
    r"(.*scale.*|.*zero_point.*|qweight|qzeros|g_idx|.*weight_(packed|shape|g_idx))", re.IGNORECASE
)
_ALIKE = 0.8
_UNKNOWN = {
    "other": "unknown tensor(s)",
    "layer": "tensor(s) of a layer that config.json has not",
    "expert": "tensor(s) of an expert that config.json has not",
    "scale": "scale(s) or packed weight(s) that belong to no quantised weight",
    "head": f"tensor(s) other than {_EMBEDDINGS}, expected the same by tie_word_embeddings",
}


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of a checkpoint that a model needs.

    Args:
        experts: Those of the routed experts.
        host: All others, with the scales of FP8 ones; 4-bit ones as they will be written.
        host_scales: FP8 ones with their scales, in pairs.
    """

    experts: ExpertTensors
    host: tuple[TensorInfo, ...]
    host_scales: tuple[tuple[TensorInfo, TensorInfo], ...]

    def check_host_scales(self) -> None:
        """Checks the values of the scales of the host's FP8 matrices, which are read; experts' are when used.

        Raises:
            CheckpointError: Names all that :func:`duckllm.weights.checkpoint.check_scales` refuses.
        """
        problems = []
        with TensorReader() as reader:
            for weight, scale in self.host_scales:
                try:
                    values = widen_to_f32(reader.read(scale), scale.dtype)
                    check_scales(values, scale.name, partial(_has_weights, reader, weight))
                except CheckpointError as error:
                    problems.append(str(error))
        if problems:
            raise CheckpointError(list_problems(problems))


def find_tensors(checkpoint: Checkpoint, layout: ModelLayout) -> ModelTensors:
    """Every tensor that the model needs, in its shape and in a type that is understood.

    Left out are tensors that no part of the model uses and that do no harm: scales of activations and of the
    KV cache, positions that are computed here, and what repeats the embeddings or the head.

    Raises:
        CheckpointError: Names what is missing, misshaped or unknown, all at once.
    """
    tensors, experts = checkpoint.tensors, ExpertTensors(checkpoint, layout)
    host: dict[str, TensorInfo] = {}
    missing: list[str] = []
    problems: list[str] = []
    packed: set[str] = set()
    broken = set(experts.broken)
    for name, shape in layout.host_shapes.items():
        info = tensors.get(name)
        try:
            if info is None:
                matrix = checkpoint.quantisation.find_packed(tensors, name, shape)
                if matrix is None:
                    missing.append(name)
                else:
                    host[name] = DequantisedTensor.of(matrix)
                    packed |= {part.name for part in matrix.tensors}
                continue
            host[name] = info
            check_type(info)
            if info.shape != shape:
                raise CheckpointError(f"{name}: got shape {list(info.shape)}, expected {list(shape)}")
        except CheckpointError as error:
            problems.append(str(error))
            broken.add(name)
    problems += _too_few_mtp_layers(checkpoint, layout)
    scales, scale_problems = fp8_scales(tensors, host.values(), checkpoint.quantisation)
    missing += experts.missing
    problems += experts.problems + scale_problems
    known = {name for weight in host.values() if weight.dtype == FP8 for name in scale_names(weight.name)}
    used = host.keys() | experts.names | known | packed
    left = [name for name in tensors if name not in used and _weight_of(name) not in broken]
    problems += _unknown(checkpoint, layout, left, missing)
    if missing:
        problems.insert(0, f"{len(missing)} missing tensor(s): {list_names(missing)}")
    if problems:
        raise CheckpointError(f"{checkpoint.folder}: {list_problems(problems)}")
    pairs = tuple((tensors[weight], scale) for weight, (scale, _) in scales.items())
    return ModelTensors(experts, (*host.values(), *(scale for _, scale in pairs)), pairs)


def _too_few_mtp_layers(checkpoint: Checkpoint, layout: ModelLayout) -> list[str]:
    """Layers of multi-token prediction are all there, or none is: a model saved again may have lost them."""
    first = checkpoint.config["num_hidden_layers"]
    present = [layer for layer in layout.moe_layers if layer >= first]
    field = "num_nextn_predict_layers"
    wanted = checkpoint.config.get(field) or 0
    if not present or len(present) == wanted:
        return []
    have = f"layer{'' if len(present) == 1 else 's'} {', '.join(map(str, present))}"
    return [
        f"config.json: {field}: got {wanted} with tensors of {have} alone, "
        f"expected those of layers {first} to {first + wanted - 1}, or of none of them"
    ]


def _has_weights(reader: TensorReader, weight: TensorInfo) -> bool:
    """Whether any code of an FP8 matrix stands for something else than 0."""
    return any((np.frombuffer(chunk, np.uint8) & 0x7F).any() for chunk in reader.chunks(weight))


def _weight_of(part: str) -> str:
    """The weight that a tensor would be a part of: ``x.weight`` of ``x.qzeros`` or ``x.weight_scale``."""
    return part.rpartition(".")[0] + ".weight"


def _unknown(
    checkpoint: Checkpoint, layout: ModelLayout, names: Iterable[str], missing: Iterable[str]
) -> list[str]:
    """What is wrong with tensors that no part of the model uses, a clause for each kind."""
    kinds: dict[str, list[str]] = {kind: [] for kind in _UNKNOWN}
    hints = _Hints(missing)
    indexed = {layout.layer_of(name) for name in layout.host_shapes if _INDEXER in name}
    for name in names:
        layer = layout.layer_of(name)
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if _is_harmless(checkpoint, name, layer):
            continue
        if _INDEXER in name and indexed and layer not in indexed:
            continue  # of a layer that shares the selection of an earlier one
        if layer is not None and layer >= layout.num_layers:
            kinds["layer"].append(name)
        elif expert and layout.is_expert_tensor(name) and int(expert[1]) >= layout.num_experts:
            kinds["expert"].append(name)
        elif _SCALES.fullmatch(name.rsplit(".", 1)[-1]):
            kinds["scale"].append(name)
        elif name == _HEAD:
            kinds["head"].append(name)
        else:
            kinds["other"].append(hints.add_to(name))
    return [f"{len(found)} {_UNKNOWN[kind]}: {list_names(found)}" for kind, found in kinds.items() if found]


def _is_harmless(checkpoint: Checkpoint, name: str, layer: int | None) -> bool:
    if is_not_needed(name) or name.endswith("rotary_emb.inv_freq"):
        return True
    if name.endswith(".bias") and checkpoint.quantisation.method == "gptq":
        return _is_zero(checkpoint.tensors[name])  # AutoGPTQ gave one to every layer that it quantised
    if layer is not None and layer >= checkpoint.config["num_hidden_layers"]:
        return name.endswith(_MTP_COPIES)
    return name == _HEAD and _same(checkpoint.tensors[name], checkpoint.tensors.get(_EMBEDDINGS))


def _is_zero(info: TensorInfo) -> bool:
    with TensorReader() as reader:
        return not any(np.frombuffer(chunk, np.uint8).any() for chunk in reader.chunks(info))


def _same(one: TensorInfo, other: TensorInfo | None) -> bool:
    """Whether two tensors are equal to the last bit."""
    if other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with TensorReader() as reader:
        return all(a == b for a, b in zip(reader.chunks(one), reader.chunks(other), strict=True))


class _Hints:
    """Adds to unknown names the missing ones that they resemble."""

    def __init__(self, missing: Iterable[str]) -> None:
        # Only among names of the same layer and expert: a checkpoint has tens of thousands of them.
        self._missing = defaultdict(list)
        for name in missing:
            self._missing[_numbers(name)].append(name)

    def add_to(self, name: str) -> str:
        alike = difflib.get_close_matches(name, self._missing.get(_numbers(name), ()), n=1, cutoff=_ALIKE)
        return f"{name} (did you mean {alike[0]}?)" if alike else name


def _numbers(name: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\d+", name))
