"""What the host must know of a model, whatever its family, and how ``config.json`` is read.

Called by the family modules, which turn what transformers has parsed into a :class:`ModelConfig`, and by the
registry. Knows no tensors of a checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from duckllm.errors import CheckpointError, UnsupportedModelError
from duckllm.layers.gqa import GQAShape
from duckllm.layers.mla import MLAShape
from duckllm.moe.router import SigmoidRouting, SoftmaxRouting
from duckllm.text.quiet import quiet_transformers
from duckllm.weights.checkpoint import load_json
from duckllm.weights.config_values import check_end, check_values

# What transformers and Python raise on values that they did not foresee; RecursionError is a RuntimeError.
_UNREADABLE = (
    *(TypeError, ValueError, AttributeError, LookupError, ArithmeticError, MemoryError),
    *(RuntimeError, AssertionError),
)
_SHOWN_CHARS = 300
# How its strict dataclasses say that a field is of another type.
_WRONG_TYPES = (
    re.compile(r"Field '(?P<field>[^']+)' expected (?P<kinds>.+?), got \w+ \(value: (?P<got>.*)\)"),
    re.compile(
        r"Field '(?P<field>[^']+)' with value (?P<got>.*) doesn't match any type in \((?P<kinds>.*)\)"
    ),
)
_CLASS = re.compile(r"<class '([^']+)'>")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class SharedExpert:
    """The expert that every token goes to, computed on the host.

    Args:
        name: Its name below the layer's ``mlp``.
        intermediate_size: Its width; several shared experts are one that is as wide as all.
        gate: Name of the matrix whose sigmoid its output is multiplied with; None where it has none.
    """

    name: str
    intermediate_size: int
    gate: str | None = None


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding.

    Args:
        inv_freq: Angle per position of each pair, radians; [rope / 2] f32.
        attention_scaling: Factor on cosine and sine.
    """

    inv_freq: torch.Tensor
    attention_scaling: float


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of one checkpoint, checked; names as in config.json where it has them.

    Args:
        attention: The attention of each layer.
        is_moe_layer: Of each layer, whether it has routed experts.
        routing: How experts are chosen.
        shared: The shared expert of a layer with routed experts; None where there is none.
        moe_block: Name of that layer's block of router and experts.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    is_moe_layer: tuple[bool, ...]
    routing: SigmoidRouting | SoftmaxRouting
    shared: SharedExpert | None
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention: tuple[MLAShape | GQAShape, ...]
    rotary: Rotary
    moe_block: str = "mlp"

    @property
    def num_hidden_layers(self) -> int:
        """Layers that a token passes."""
        return len(self.attention)

    @property
    def cache_elements_per_token(self) -> int:
        """Numbers that the KV cache holds for one token, over all layers."""
        return sum(sum(shape.cache_widths) for shape in self.attention)


def read_config(folder: Path, parser: str, parse: Callable[[Any], ModelConfig]) -> ModelConfig:
    """The checked configuration in ``config.json``.

    Args:
        folder: A model folder.
        parser: Name of the class in transformers that reads it.
        parse: The family's own reading of what transformers has parsed.

    Raises:
        CheckpointError: The file is missing or malformed, or a value contradicts another.
        UnsupportedModelError: A feature that the family's implementation does not have, by name.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    said = load_json(Path(folder) / "config.json")
    check_values(said)
    generation = "generation_config.json"  # where hosts look for what ends a reply, too
    if (Path(folder) / generation).is_file():
        check_end(load_json(Path(folder) / generation), generation, said.get("vocab_size"))
    with quiet_transformers():
        try:
            parsed = getattr(transformers, parser).from_pretrained(folder, local_files_only=True)
        except (*_UNREADABLE, OSError, StrictDataclassError) as error:
            raise _unreadable(error, f"{Path(folder) / 'config.json'}") from error
        try:
            return parse(parsed)
        except _UNREADABLE as error:
            raise _unreadable(error) from error


def _unreadable(error: BaseException, name: str = "config.json") -> CheckpointError:
    """The first of what the parser says, which may repeat itself and shows values of any length."""
    detail = " ".join(str(error).split()).partition(" Errors: ")[0] or type(error).__name__
    for pattern in _WRONG_TYPES:
        if found := pattern.search(detail):
            kinds = _CLASS.sub(r"\1", found["kinds"]).replace(", ", " or ").replace("NoneType", "null")
            return CheckpointError(f"{name}: {found['field']}: got {_cut(found['got'])}, expected {kinds}")
    return CheckpointError(f"{name}: cannot be read: {_cut(detail)}")


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def require(parsed: Any, field: str, condition: bool, expected: str) -> None:
    """Refuses a value that contradicts another.

    Raises:
        CheckpointError: ``condition`` is false; names the field, what it is and what was expected.
    """
    if not condition:
        raise CheckpointError(f"config.json: {field}: got {getattr(parsed, field)!r}, expected {expected}")


def require_positive(parsed: Any, fields: Iterable[str]) -> None:
    """Refuses a field that is no whole number of at least 1. Raises as :func:`require`."""
    for field in fields:
        value = getattr(parsed, field)
        require(parsed, field, type(value) is int and value >= 1, "an integer of at least 1")


def require_only(parsed: Any, supported: Mapping[str, object]) -> None:
    """Refuses a feature that has one supported value; an absent field has it.

    Raises:
        UnsupportedModelError: Names the field.
    """
    for field, value in supported.items():
        got = getattr(parsed, field, value)
        if got != value:
            raise UnsupportedModelError(f"config.json: {field}: got {got!r}, expected {value!r}")


def common_fields(parsed: Any) -> dict[str, Any]:
    """Fields of a :class:`ModelConfig` that every family has under the same names."""
    return {
        "vocab_size": parsed.vocab_size,
        "hidden_size": parsed.hidden_size,
        "intermediate_size": parsed.intermediate_size,
        "rms_norm_eps": parsed.rms_norm_eps,
        "max_position_embeddings": parsed.max_position_embeddings,
        "tie_word_embeddings": parsed.tie_word_embeddings,
    }


def sigmoid_routing(parsed: Any) -> SigmoidRouting:
    """The routing of a configuration that :func:`check_groups` has passed."""
    return SigmoidRouting(
        num_groups=parsed.n_group,
        topk_group=parsed.topk_group,
        top_k=parsed.num_experts_per_tok,
        normalize=bool(parsed.norm_topk_prob),
        scaling_factor=parsed.routed_scaling_factor,
    )


def shared_experts(parsed: Any) -> SharedExpert | None:
    """The ``n_shared_experts`` as the one that they are together; None where there are none."""
    size = parsed.moe_intermediate_size * (parsed.n_shared_experts or 0)
    return SharedExpert("shared_experts", size) if size else None


def check_softmax(parsed: Any, experts_field: str) -> None:
    """Refuses a softmax routing in which experts cannot be chosen. Raises as :func:`require`."""
    require_positive(parsed, (experts_field, "num_experts_per_tok"))
    experts = getattr(parsed, experts_field)
    require(parsed, "num_experts_per_tok", parsed.num_experts_per_tok <= experts, f"at most {experts}")


def check_groups(parsed: Any) -> None:
    """Refuses a group-limited routing in which experts cannot be chosen. Raises as :func:`require`."""
    require_positive(parsed, ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"))
    experts, groups = parsed.n_routed_experts, parsed.n_group
    require(parsed, "n_group", experts % groups == 0, f"a divisor of n_routed_experts, {experts}")
    require(parsed, "n_group", experts // groups >= 2, f"at most half of n_routed_experts, {experts}")
    require(parsed, "topk_group", parsed.topk_group <= groups, f"at most n_group, {groups}")
    chosen, candidates = parsed.num_experts_per_tok, parsed.topk_group * (experts // groups)
    require(parsed, "num_experts_per_tok", chosen <= candidates, f"at most {candidates}")


def check_rope(parsed: Any, *, partial: bool = False) -> None:
    """Refuses rotary embeddings that are not implemented, before anything is computed with them.

    Args:
        parsed: What transformers has parsed.
        partial: Whether the family can turn a part of a head's dimensions.

    Raises:
        UnsupportedModelError: Another type, or one that turns a part of the dimensions.
        CheckpointError: A part that is none.
    """
    rope = parsed.rope_parameters or {}
    if rope.get("rope_type") not in _ROPE_TYPES:
        raise UnsupportedModelError(
            f"config.json: rope_scaling type: got {rope.get('rope_type')!r}, "
            f"expected one of {', '.join(_ROPE_TYPES)}"
        )
    part = rope.get("partial_rotary_factor", 1.0)
    if not partial and part != 1.0:
        raise UnsupportedModelError(f"config.json: partial_rotary_factor: got {part!r}, expected 1.0")
    if not (isinstance(part, (int, float)) and 0 < part <= 1):
        raise CheckpointError(f"config.json: partial_rotary_factor: got {part!r}, expected a number up to 1")


def rotary_of(parsed: Any, rope_dim: int) -> Rotary:
    """The angles of a configuration that :func:`check_rope` has passed.

    Raises:
        CheckpointError: They are not finite.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = parsed.rope_parameters
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
        inv_freq, attention_scaling = 1.0 / rope["rope_theta"] ** exponents, 1.0
    else:
        inv_freq, attention_scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](parsed, torch.device("cpu"))
    if not (bool(torch.isfinite(inv_freq).all()) and math.isfinite(attention_scaling)):
        raise CheckpointError(
            f"config.json: rope_scaling: got {dict(rope)!r}, expected values that give finite rotations"
        )
    return Rotary(inv_freq, attention_scaling)
