"""What the families with grouped-query attention read alike. Called by their modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from duckllm.errors import CheckpointError
from duckllm.layers.gqa import GQAShape
from duckllm.models.config import require, require_positive


def head_dim_of(parsed: Any) -> int:
    """Size of an attention head; the hidden state shared out where config.json does not say.

    Raises:
        CheckpointError: It is no whole number of at least 1, or the heads cannot share out what they should.
    """
    require_positive(parsed, ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    heads = parsed.num_attention_heads
    divides = heads % parsed.num_key_value_heads == 0
    require(parsed, "num_key_value_heads", divides, f"a divisor of num_attention_heads, {heads}")
    if getattr(parsed, "head_dim", None) is None:
        size: int = parsed.hidden_size // heads
        require(parsed, "num_attention_heads", size >= 1, f"at most hidden_size, {parsed.hidden_size}")
        return size
    require_positive(parsed, ("head_dim",))
    size = parsed.head_dim
    return size


def rotary_dim_of(parsed: Any) -> int:
    """How many dimensions of a head are rotated.

    Raises:
        CheckpointError: They are no pairs.
    """
    part = parsed.rope_parameters.get("partial_rotary_factor", 1.0)
    size = int(head_dim_of(parsed) * part)
    if size < 2 or size % 2:
        raise CheckpointError(
            f"config.json: head_dim: got {head_dim_of(parsed)}, of which {size} are rotated, "
            "expected an even number of them"
        )
    return size


def attention_of(
    parsed: Any,
    windows: Sequence[int | None],
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
) -> tuple[GQAShape, ...]:
    """The attention of each layer.

    Args:
        parsed: What transformers has parsed.
        windows: Of each layer, how many tokens a token attends to; None for all.
        qkv_bias: Whether the projections to queries, keys and values have biases.
        o_bias: Whether the output projection has one.
        qk_norm: Whether each head of queries and keys is normalised.

    Raises:
        CheckpointError: A size contradicts another.
    """
    head_dim = head_dim_of(parsed)
    return tuple(
        GQAShape(
            hidden_size=parsed.hidden_size,
            num_heads=parsed.num_attention_heads,
            num_kv_heads=parsed.num_key_value_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim_of(parsed),
            scaling=head_dim**-0.5,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm_eps=parsed.rms_norm_eps if qk_norm else None,
            sliding_window=window,
        )
        for window in windows
    )


def sparse_layers(parsed: Any) -> tuple[bool, ...]:
    """Of each layer of a Qwen model, whether it has routed experts.

    Raises:
        CheckpointError: ``decoder_sparse_step`` is no whole number of at least 1.
    """
    require_positive(parsed, ("num_hidden_layers", "decoder_sparse_step"))
    return tuple(
        layer not in parsed.mlp_only_layers and (layer + 1) % parsed.decoder_sparse_step == 0
        for layer in range(parsed.num_hidden_layers)
    )
