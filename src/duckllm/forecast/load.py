"""What one step of a model asks of a flock: bytes and operations, by part, from its configuration.

Used by :mod:`duckllm.forecast.step`. Works on an :class:`~duckllm.models.inspection.Inspection` and on the
attention's shapes; knows no hardware.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from duckllm.config import WEIGHT_FORMATS
from duckllm.models.inspection import MTP, Inspection

if TYPE_CHECKING:
    from duckllm.models.config import ModelConfig

_CACHE_BYTES = {False: 4, True: 2}  # of a number in the KV cache: f32 on a CPU, bf16 on a card
_SHARED, _HEAD, _DENSE = "shared expert", "head", "dense MLP"


@dataclass(frozen=True)
class AttentionLoad:
    """Attention of one layer.

    Args:
        cache_elements: Numbers of the KV cache that are read of each token attended to.
        index_elements: Numbers that are read of every token of the context to choose them.
        most_tokens: Most tokens attended to: a window, or the indexer's choice; None for all.
        flop: Operations for each row and token attended to.
        index_flop: Operations for each row and token of the context to choose them.
    """

    cache_elements: int
    index_elements: int
    most_tokens: int | None
    flop: int
    index_flop: int

    def cache_bytes(self, context: int, on_card: bool) -> float:
        """Bytes of the KV cache that a request with so many tokens reads."""
        chosen = context if self.most_tokens is None else min(context, self.most_tokens)
        # No more than the context asks for no choice.
        index = self.index_elements if self.most_tokens is not None and context > self.most_tokens else 0
        return float(_CACHE_BYTES[on_card] * (chosen * self.cache_elements + context * index))

    def operations(self, context: int) -> float:
        """Floating-point operations of one row."""
        chosen = context if self.most_tokens is None else min(context, self.most_tokens)
        index = self.index_flop if self.most_tokens is not None and context > self.most_tokens else 0
        return float(chosen * self.flop + context * index)


@dataclass(frozen=True)
class ModelLoad:
    """A model, as far as the time of a step is concerned.

    Args:
        hidden_size: H.
        num_experts: E.
        top_k: K.
        num_moe_layers: Layers with routed experts.
        num_layers: All layers.
        expert_flop: Operations of one row with one whole expert.
        num_stripes: Stripes of a whole expert.
        unit_bytes: Bytes of one stripe of one expert, by format; the mean over layers where these differ.
        layer_bytes: The host's dense weights of all layers, shared experts and head apart.
        shared_bytes: Its shared experts.
        head_bytes: Its head.
        draft_bytes: The layer that guesses, without experts; 0 where there is none.
        attention: Each layer's.
        on_card: Whether a card computes the host's part.
    """

    hidden_size: int
    num_experts: int
    top_k: int
    num_moe_layers: int
    num_layers: int
    expert_flop: int
    num_stripes: int
    unit_bytes: dict[str, int]
    layer_bytes: int
    shared_bytes: int
    head_bytes: int
    draft_bytes: int
    attention: tuple[AttentionLoad, ...]
    on_card: bool

    @property
    def has_draft_layer(self) -> bool:
        """Whether it can guess tokens ahead."""
        return self.draft_bytes > 0

    def distinct_experts(self, rows: float) -> float:
        """Expected number of different experts that so many rows choose, each its own at random.

        Source:
            E (1 - (1 - K/E)^T), docs/performance.md, section 1.
        """
        missed = math.pow(1.0 - self.top_k / self.num_experts, rows)
        return self.num_experts * (1.0 - missed)

    def request_bytes(self, rows: float, x_bytes: int) -> float:
        """A layer's step on the wire, to each worker."""
        return rows * (x_bytes * self.hidden_size + 8 * self.top_k)

    def reply_bytes(self, rows: float, reply_bytes: int) -> float:
        """What each worker answers."""
        return rows * reply_bytes * self.hidden_size


def model_load(
    model: Inspection, config: ModelConfig, *, on_card: bool, keep: Sequence[str] | None = None
) -> ModelLoad:
    """What steps of a model ask for.

    Args:
        model: The model, from outside.
        config: Its parsed configuration.
        on_card: Whether a card computes the host's part.
        keep: Layers in other formats, as :meth:`Inspection.formats_in` takes them.
    """
    read = {part.name: part.gpu_bytes if on_card else part.read_bytes for part in model.parts}
    layout = model.layout
    apart = (_SHARED, _HEAD, MTP)
    head = read.get(_HEAD) or (
        layout.hidden_size * model.vocab_size * 2
    )  # tied: the embedding is read as one
    on_top = read.get("embedding", 0) if on_card else 0
    return ModelLoad(
        hidden_size=layout.hidden_size,
        num_experts=layout.num_experts,
        top_k=layout.num_experts_per_tok,
        num_moe_layers=model.num_moe_layers,
        num_layers=model.num_hidden_layers,
        expert_flop=2 * model.expert_weights,
        num_stripes=model.num_stripes,
        unit_bytes={each: _unit_bytes(model, each, keep) for each in WEIGHT_FORMATS},
        layer_bytes=sum(size for name, size in read.items() if name not in apart) - on_top,
        shared_bytes=read.get(_SHARED, 0),
        head_bytes=head,
        draft_bytes=model.draft_gpu_bytes if on_card else model.draft_bytes,
        attention=_attention(config.attention),
        on_card=on_card,
    )


def _unit_bytes(model: Inspection, weight_format: str, keep: Sequence[str] | None) -> int:
    units = model.num_stripes * model.layout.num_experts * max(1, model.num_moe_layers)
    return model.expert_bytes(weight_format, keep=keep) // units


def _attention(shapes: Sequence[object]) -> tuple[AttentionLoad, ...]:
    from duckllm.layers.gqa import GQAShape
    from duckllm.layers.mla import MLAShape

    found = []
    for shape in shapes:
        if isinstance(shape, MLAShape):
            latent = shape.kv_lora_rank + shape.qk_rope_head_dim
            flop = 2 * shape.num_heads * (latent + shape.kv_lora_rank)
            indexer = shape.indexer
            own = indexer is not None and not indexer.is_shared
            found.append(
                AttentionLoad(
                    latent,
                    indexer.head_dim if indexer and own else 0,
                    indexer.topk if indexer else None,
                    flop,
                    2 * indexer.num_heads * indexer.head_dim if indexer and own else 0,
                )
            )
        elif isinstance(shape, GQAShape):
            width = sum(shape.cache_widths)
            flop = 4 * shape.num_heads * shape.head_dim
            found.append(AttentionLoad(width, 0, shape.sliding_window, flop, 0))
    return tuple(found)
