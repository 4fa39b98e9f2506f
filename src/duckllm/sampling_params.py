"""How the next token is chosen and when a reply ends; names and meanings as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from duckllm.errors import ConfigError

# No vocabulary and no context is larger: a number above is a slip of the finger.
MOST = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request.

    Args:
        temperature: Divides the logits; 0 (and anything below 1e-5) takes the likeliest token; at most 1e6.
        top_k: Number of likeliest tokens to choose from; 0 or -1, or more than there are, for all.
        top_p: Smallest set of likeliest tokens whose probabilities sum to this, in (0, 1].
        min_p: Least probability of a token, as a share of the likeliest token's, in [0, 1].
        seed: Makes a sampled reply repeatable; None for a new one each time.
        max_tokens: Most tokens of a reply, which a full context ends too; None until the end or until then.
        ignore_eos: Go on after an end token.

    Raises:
        ConfigError: A value is of the wrong kind or out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._require_number("temperature", "a number from 0 to 1000000", lambda v: 0 <= v <= 1_000_000)
        self._require_int("top_k", f"an integer from 0 to {MOST}, or -1", lambda v: -1 <= v <= MOST)
        self._require_number("top_p", "a number above 0, at most 1", lambda v: 0 < v <= 1)
        self._require_number("min_p", "a number from 0 to 1", lambda v: 0 <= v <= 1)
        if self.seed is not None:
            self._require_int("seed", "an integer from 0 to 2**63 - 1, or None", lambda v: 0 <= v < 2**63)
        if self.max_tokens is not None:
            self._require_int("max_tokens", f"an integer from 1 to {MOST}, or None", lambda v: 1 <= v <= MOST)
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError("ignore_eos", self.ignore_eos, "True or False")

    @classmethod
    def from_generation_config(cls, values: Mapping[str, Any]) -> SamplingParams:
        """The defaults that a model's ``generation_config.json`` asks for: greedy unless ``do_sample``.

        Raises:
            ConfigError: A value is of the wrong kind or out of range.
        """
        if not values.get("do_sample", False):
            return cls(temperature=0.0)
        names = ("temperature", "top_k", "top_p", "min_p")
        return cls(**{name: values[name] for name in names if values.get(name) is not None})

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < 1e-5

    def _require_number(self, field: str, expected: str, in_range: Any) -> None:
        value = getattr(self, field)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_number and in_range(value)):
            raise ConfigError(field, value, expected)

    def _require_int(self, field: str, expected: str, in_range: Any) -> None:
        value = getattr(self, field)
        if not isinstance(value, int) or isinstance(value, bool) or not in_range(value):
            raise ConfigError(field, value, expected)
