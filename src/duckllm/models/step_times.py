"""Where a step's time goes. Filled by the models and the engine; knows neither."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class StepTimes:
    """Seconds of one step, or of several, by part.

    Args:
        attention_s: Attention with its projections and norms.
        dense_s: Dense layers and shared experts; the workers compute meanwhile.
        dispatch_s: The router, and sending activations to the workers.
        wait_s: Waiting for the workers, and adding their partial sums; computing, where the experts are here.
        combine_s: Adding routed experts, shared expert and residual.
        head_s: Logits.
        sampling_s: Choosing tokens, and their text.
        device_s: A captured step of a GPU from its inputs to its last experts, which is not told apart.
        draft_s: Drafting the tokens after them, all parts together.
    """

    attention_s: float = 0.0
    dense_s: float = 0.0
    dispatch_s: float = 0.0
    wait_s: float = 0.0
    combine_s: float = 0.0
    head_s: float = 0.0
    sampling_s: float = 0.0
    device_s: float = 0.0
    draft_s: float = 0.0

    def __post_init__(self) -> None:
        self._last_s = time.perf_counter()

    def start(self) -> None:
        """What was before this belongs to no part."""
        self._last_s = time.perf_counter()

    def lap(self, part: str) -> None:
        """Adds the time since the last lap, or since the start, to ``part``."""
        now = time.perf_counter()
        setattr(self, part, getattr(self, part) + now - self._last_s)
        self._last_s = now
