"""Where a context's tokens lie, and the indexer's scores in PyTorch, as the reference of the native ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from duckllm.layers.cpu_runtime import CpuRuntime
from duckllm.layers.indexer import Indexer
from duckllm.layers.step import SequenceStep, StepContext

# The indexer, the step, the input and the index scores, and what was chosen: a row's -1 first, or None, for
# all that it has.
WatchSelection = Callable[[Indexer, StepContext, torch.Tensor, torch.Tensor | None, Any], None]


def slots_of(sequence: SequenceStep) -> npt.NDArray[np.int64]:
    """The row of the cache that holds each token up to the step's last: [stop]."""
    positions = np.arange(sequence.stop)
    return sequence.pages[positions // sequence.page_tokens].astype(np.int64) * sequence.page_tokens + (
        positions % sequence.page_tokens
    )


def index_queries(indexer: Indexer, q_latent: torch.Tensor, step: StepContext) -> torch.Tensor:
    """The index queries of a step, rotated: [T, heads, D]."""
    q = indexer.query(q_latent).view(-1, indexer.shape.num_heads, indexer.shape.head_dim)
    indexer.rotate(q[..., : indexer.rope_dim], step.cos, step.sin, q[..., : indexer.rope_dim])
    return q


def index_scores(
    indexer: Indexer, x: torch.Tensor, q_latent: torch.Tensor, step: StepContext, cache: torch.Tensor
) -> torch.Tensor:
    """The scores of a step of one context that lies in order: [T, S], -inf for later tokens."""
    (sequence,) = step.sequences
    assert sequence.pages.tolist() == [0]
    q = index_queries(indexer, q_latent, step)
    products = torch.relu(torch.einsum("thd,sd->ths", q, cache[: sequence.stop]))
    scores = torch.einsum("th,ths->ts", indexer.head_weights(x), products)
    positions = torch.arange(sequence.start, sequence.stop)[:, None]
    return scores.masked_fill(torch.arange(sequence.stop) > positions, -torch.inf)


def watch_selections(patch: pytest.MonkeyPatch, watch: WatchSelection) -> None:
    """Calls ``watch`` at each selection; the scores are None where none were computed."""
    select, asked = Indexer.__call__, []
    choose = CpuRuntime.select

    def watched_choice(self: CpuRuntime, *args: Any) -> Any:
        asked.append(self)
        return choose(self, *args)

    def watched(
        self: Indexer,
        x: torch.Tensor,
        k: torch.Tensor | None,
        q_latent: torch.Tensor,
        step: StepContext,
        cache: torch.Tensor,
    ) -> Any:
        asked.clear()
        selection = select(self, x, k, q_latent, step, cache)
        scores = index_scores(self, x, q_latent, step, cache) if asked else None
        watch(self, step, x, scores, selection)
        return selection

    patch.setattr(CpuRuntime, "select", watched_choice)
    patch.setattr(Indexer, "__call__", watched)
