"""How far one model's predictions lie from another's: KL divergence, agreement, perplexity.

Called by :mod:`duckllm.quality.measure`. Knows arrays of logits; no models and no tokens' texts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


def log_softmax(logits: F32) -> F64:
    """Log probabilities, computed in float64.

    Shapes: logits: [n, V] f32; result: [n, V] f64.
    """
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide


def kl_divergence(reference: F64, other: F64) -> F64:
    """KL(reference || other) of each row, in nats: what is lost by predicting with ``other``.

    It is 0 where the rows are the same to the last bit, and never below 0: what rounding leaves there is cut.

    Shapes: reference, other: [n, V] f64, log probabilities; result: [n] f64.
    """
    # A token that the reference gives no chance at all adds nothing: 0 times infinity would be NaN.
    with np.errstate(invalid="ignore"):
        terms = np.exp(reference) * (reference - other)
    found: F64 = np.where(np.isneginf(reference), 0.0, terms).sum(axis=1)
    found[found <= 0] = 0.0
    return found


@dataclass
class Divergence:
    """What was compared of a text, position by position; rows are added by :meth:`add`.

    Args:
        kl: KL divergence of each position from the reference's prediction, nats.
        agrees: Whether the likeliest token is the reference's, too.
        surprise: Minus the log probability of the text's own next token, nats.
    """

    kl: list[float] = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)
    surprise: list[float] = field(default_factory=list)

    def add(self, reference: F32, logits: F32, next_ids: I64) -> None:
        """Adds positions.

        Args:
            reference: The reference's logits.
            logits: The compared model's, of the same positions.
            next_ids: The token that the text goes on with.

        Shapes: reference, logits: [n, V] f32; next_ids: [n].
        """
        expected, got = log_softmax(reference), log_softmax(logits)
        self.kl += kl_divergence(expected, got).tolist()
        self.agrees += (reference.argmax(axis=1) == logits.argmax(axis=1)).tolist()
        self.surprise += (-got[np.arange(len(got)), next_ids]).tolist()

    @property
    def num_tokens(self) -> int:
        """Positions in all."""
        return len(self.kl)

    @property
    def kl_mean(self) -> float:
        """Mean of the KL divergence, nats."""
        return float(np.mean(self.kl))

    @property
    def kl_p99(self) -> float:
        """What 99 of 100 positions are at most, nats."""
        return float(np.percentile(self.kl, 99))

    @property
    def kl_max(self) -> float:
        """The largest one, nats."""
        return float(np.max(self.kl))

    @property
    def agreement(self) -> float:
        """Share of positions whose likeliest token is the reference's, 0 to 1."""
        return float(np.mean(self.agrees))

    @property
    def perplexity(self) -> float:
        """Exp of the mean surprise at the text: the number of tokens that one would have to guess among."""
        return float(np.exp(np.mean(self.surprise)))
