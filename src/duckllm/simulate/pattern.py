"""What simulated workers answer, and so what a step's sum must be.

Used by :mod:`duckllm.simulate.measure` and by tests. csrc/simulate/stand_in.h says the same natively.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
NUM_OFFSETS = 64
MAX_STEPS = 1 << 24  # a step's number is a weight, f32


def partial_sum(step: int, num_tokens: int, first_stripe: int, hidden_size: int) -> F32:
    """What the worker whose slice begins there answers.

    Args:
        step: The step's number, its first weight.
        num_tokens: T.
        first_stripe: First stripe of the worker's slice.
        hidden_size: H.

    Shapes: result: [T, H] f32, whole numbers from -15 to 15.
    """
    offsets = (5 * step + 3 * np.arange(num_tokens) + 7 * first_stripe) % NUM_OFFSETS
    index = offsets[:, None] + np.arange(hidden_size)
    return (index * index % 31 - 15).astype(np.float32)


class ExpectedSums:
    """The sums of a flock's answers, made once: there are no more than 64 different rows.

    Args:
        first_stripes: First stripe of each worker's slice.
        hidden_size: H.
    """

    def __init__(self, first_stripes: Sequence[int], hidden_size: int) -> None:
        index = np.arange(hidden_size + NUM_OFFSETS)
        pattern = (index * index % 31 - 15).astype(np.float32)
        self._rows = np.zeros((NUM_OFFSETS, hidden_size), np.float32)
        for base in range(NUM_OFFSETS):
            for first_stripe in first_stripes:
                offset = (base + 7 * first_stripe) % NUM_OFFSETS
                self._rows[base] += pattern[offset : offset + hidden_size]

    def of(self, step: int, num_tokens: int) -> F32:
        """The sum of a step's answers.

        Shapes: result: [T, H] f32.
        """
        rows: F32 = self._rows[(5 * step + 3 * np.arange(num_tokens)) % NUM_OFFSETS]
        return rows
