"""The rows of a step on a GPU, from the contexts that they belong to.

Called by :mod:`duckllm.layers.cuda_runtime`, and where steps are captured, which fill tensors of fixed
addresses with the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from duckllm.kernels.step_rows import PAGE_TOKENS, StepRows
from duckllm.layers.step import SequenceStep


@dataclass
class CudaStep:
    """The tokens of a step, on their way through the layers.

    Args:
        rows: Where they belong.
        longest: Tokens of the longest context.
        selection: The positions that each of them attends to, by the last layer that has chosen some; None
            where that layer attends to all.
    """

    rows: StepRows
    longest: int
    selection: object | None = None


def fill_rows(
    sequences: Sequence[SequenceStep], words: npt.NDArray[np.int32], pages: npt.NDArray[np.int32]
) -> None:
    """Writes what :class:`StepRows` has of each row, and each context's pages.

    Shapes:
        words: [4, R]: positions, contexts, firsts, slots; pages: [C, P], contexts in their order
    """
    for context, each in enumerate(sequences):
        own = small_pages(each)
        pages[context, : len(own)] = own
        positions = np.arange(each.start, each.stop, dtype=np.int32)
        words[0, each.rows] = positions
        words[1, each.rows] = context
        words[2, each.rows] = each.first
        words[3, each.rows] = own[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS


def small_pages(sequence: SequenceStep) -> npt.NDArray[np.int32]:
    """A context's pages as pages of 16 tokens: as they are, or the parts of larger ones.

    Raises:
        ValueError: A page begins where none of 16 tokens does.
    """
    needed = -(-sequence.stop // PAGE_TOKENS)
    if sequence.page_tokens == PAGE_TOKENS:
        return sequence.pages[:needed]
    starts = sequence.pages.astype(np.int64) * sequence.page_tokens
    if (starts % PAGE_TOKENS).any() or (len(starts) > 1 and sequence.page_tokens % PAGE_TOKENS):
        raise ValueError(f"page_tokens: got {sequence.page_tokens}, expected a multiple of {PAGE_TOKENS}")
    parts = np.arange(-(-sequence.page_tokens // PAGE_TOKENS))
    small = (starts[:, None] // PAGE_TOKENS + parts).reshape(-1)
    return small[:needed].astype(np.int32)


def new_rows(sequences: Sequence[SequenceStep], cos: torch.Tensor, sin: torch.Tensor) -> StepRows:
    """The rows of a step that is not captured, on the device of ``cos``."""
    num_rows = sum(each.num_tokens for each in sequences)
    width = max(-(-each.stop // PAGE_TOKENS) for each in sequences)
    words = torch.empty(4, num_rows, dtype=torch.int32, pin_memory=True)
    pages = torch.zeros(len(sequences), width, dtype=torch.int32, pin_memory=True)
    fill_rows(sequences, words.numpy(), pages.numpy())
    positions, contexts, firsts, slots = words.to(cos.device, non_blocking=True)
    spans = tuple((each.rows.start, each.num_tokens) for each in sequences)
    return StepRows(
        positions, contexts, firsts, slots, pages.to(cos.device, non_blocking=True), cos, sin, spans
    )
