"""Values in ``config.json`` that no host could compute with, whatever the family: refused by field name.

Called before a checkpoint is converted and before a configuration is parsed; what contradicts another value
within a family is refused by its layout and by its model. It imports no torch, so that a machine that only
converts knows these too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from duckllm.errors import CheckpointError, show_value

# Far above what any model has: a larger number is a damaged file, and would cost memory before that shows.
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "num_nextn_predict_layers"), 10_000),
    **dict.fromkeys(("n_routed_experts", "n_shared_experts", "num_experts_per_tok"), 100_000),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_key_value_heads"), 100_000),
    **dict.fromkeys(("n_group", "topk_group", "num_attention_heads", "index_n_heads"), 100_000),
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"), 10**8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim", "head_dim"), 10**8),
    **dict.fromkeys(("shared_expert_intermediate_size", "sliding_window"), 10**8),
    **dict.fromkeys(("num_labels", "max_window_layers"), 100_000),
    "max_position_embeddings": 10**9,
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 10**8),
}
# Beyond these, factors of rotations and norms leave f32, or every angle is zero.
_LARGEST_FACTOR = 1e6
_LARGEST_THETA = 1e30
_FACTOR = f"a number above 0 and below {_LARGEST_FACTOR:.0f}"


def check_values(config: Mapping[str, Any]) -> None:
    """Refuses values in config.json with which nothing could be computed. A field that is absent is right.

    Raises:
        CheckpointError: Names the field, what it is and what was expected.
    """
    for field, most in _MOST.items():
        value = config.get(field)
        if isinstance(value, (int, float)) and value > most:
            got = str(value) if value < 10**100 else "a number of over 100 digits"
            raise CheckpointError(f"config.json: {field}: got {got}, expected at most {most}")
    if "rms_norm_eps" in config:
        _require("rms_norm_eps", config["rms_norm_eps"], _is_factor(config["rms_norm_eps"]), _FACTOR)
    scale = config.get("routed_scaling_factor")
    _require("routed_scaling_factor", scale, scale is None or _is_factor(scale), _FACTOR)
    _check_rope(config)
    check_end(config, "config.json", config.get("vocab_size"))


def check_end(values: Mapping[str, Any], file: str, vocab_size: object) -> None:
    """Refuses an ``eos_token_id`` that the model cannot make, so that a reply would never end by it.

    Args:
        values: Content of the file.
        file: Its name.
        vocab_size: V, where config.json has it right.

    Raises:
        CheckpointError: It is neither null nor the id of a token of the vocabulary, nor a list of some.
    """
    value = values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    most = vocab_size - 1 if type(vocab_size) is int and vocab_size > 0 else None
    if not all(type(each) is int and 0 <= each <= (each if most is None else most) for each in ids):
        last = "below vocab_size" if most is None else f"to {most}, as vocab_size is {vocab_size}"
        raise CheckpointError(
            f"{file}: eos_token_id: got {show_value(value)}, expected an id, or a list of ids, from 0 {last}"
        )


def _check_rope(config: Mapping[str, Any]) -> None:
    """The rotations: of ``rope_scaling`` and its newer form the first that says something counts."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(name) or {}
    _require(name, rope, isinstance(rope, dict), "an object, or null")
    holder, field = (rope, f"{name} rope_theta") if "rope_theta" in rope else (config, "rope_theta")
    if "rope_theta" in holder:
        theta = holder["rope_theta"]
        is_base = _is_number(theta) and 1 < theta < _LARGEST_THETA
        _require(field, theta, is_base, f"a number above 1 and below {_LARGEST_THETA:.0e}")
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in ("linear", "llama3", "yarn"):
        return
    factor = rope.get("factor")
    is_stretch = _is_number(factor) and 1 <= factor < _LARGEST_FACTOR
    _require(f"{name} factor", factor, is_stretch, f"a number from 1 to below {_LARGEST_FACTOR:.0f}")
    if kind == "linear":
        return
    original, most = "original_max_position_embeddings", _MOST["max_position_embeddings"]
    for field, values in ((original, config), (f"{name} {original}", rope)):
        if original in values:
            length = values[original]
            is_length = type(length) is int and 1 <= length <= most
            _require(field, length, is_length, f"a whole number from 1 to {most}")
    if kind == "llama3":
        low, high = _bounds(name, rope, low_freq_factor=None, high_freq_factor=None)
        _require(f"{name} high_freq_factor", high, high > low, f"more than low_freq_factor, {low}")
    else:
        _check_yarn(name, rope)


def _check_yarn(name: str, rope: Mapping[str, Any]) -> None:
    slow, fast = _bounds(name, rope, beta_slow=1, beta_fast=32)
    _require(f"{name} beta_fast", fast, fast >= slow, f"at least beta_slow, {slow}")  # Kimi K2's are equal
    for field in ("mscale", "mscale_all_dim"):
        value = rope.get(field)
        fits = value is None or (_is_number(value) and 0 <= value < _LARGEST_FACTOR)
        _require(f"{name} {field}", value, fits, f"a number from 0 to below {_LARGEST_FACTOR:.0f}")
    value = rope.get("attention_factor")
    _require(f"{name} attention_factor", value, value is None or _is_factor(value), _FACTOR)
    value = rope.get("truncate", True)
    _require(f"{name} truncate", value, isinstance(value, bool), "true or false")


def _bounds(name: str, rope: Mapping[str, Any], **defaults: float | None) -> list[Any]:
    """The fields that ``defaults`` names; its values stand for those that are absent or null."""
    values = {
        field: default if rope.get(field) is None else rope[field] for field, default in defaults.items()
    }
    for field, value in values.items():
        _require(f"{name} {field}", value, _is_factor(value), _FACTOR)
    return list(values.values())


def _require(field: str, value: object, fits: bool, expected: str) -> None:
    if not fits:
        raise CheckpointError(f"config.json: {field}: got {show_value(value)}, expected {expected}")


def _is_number(value: object) -> TypeGuard[float]:
    return type(value) in (int, float)


def _is_factor(value: Any) -> bool:
    return _is_number(value) and 0 < value < _LARGEST_FACTOR
