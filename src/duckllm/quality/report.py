"""The table of ``duckllm quality``, for people and as plain values.

Called by cli/quality.py. Knows what was measured and predicted, and how to write it down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from duckllm.config import show_size
from duckllm.quality.measure import FormatQuality

_NONE = "-"
_FEW_GUESSES = 100


def table(
    measured: Sequence[FormatQuality],
    predicted: Mapping[str, float | None] | None,
    num_questions: Counter[str],
) -> list[str]:
    """One row a format, the reference first, without columns that nothing is known for; layers below them.

    Args:
        measured: The formats.
        predicted: Tokens a second by format of a flock, None where a format does not fit; None for no flock.
        num_questions: Questions asked by task.
    """
    base = measured[0].expert_bytes
    columns: dict[str, list[str]] = {
        "format": [each.name for each in measured],
        "experts": [show_size(each.expert_bytes) for each in measured],
        "size": [f"{each.expert_bytes / base:.3f}" if base else _NONE for each in measured],
        "KL mean": [_nats(each.divergence.kl_mean) for each in measured],
        "KL p99": [_nats(each.divergence.kl_p99) for each in measured],
        "top-1": [f"{each.divergence.agreement:.2%}" for each in measured],
        "perplexity": [_perplexity(each.divergence.perplexity) for each in measured],
    }
    if any(each.num_draft_tokens for each in measured):
        columns["guesses right"] = [_share(each.acceptance, each.num_draft_tokens) for each in measured]
    if num_questions:
        total = sum(num_questions.values())
        columns["suite"] = [f"{each.num_right}/{total}" for each in measured]
    columns["tok/s here"] = [_rate(each.tokens_per_s) for each in measured]
    if predicted is not None:
        columns["predicted"] = [
            _rate(predicted[each.name], "does not fit") if each.name in predicted else _NONE
            for each in measured
        ]
    widths = {name: max(len(name), *map(len, cells)) for name, cells in columns.items()}
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    mixed = [f"{each.name}: {each.layers}" for each in measured if each.layers]
    return [*(_line(row, list(widths.values())) for row in rows), *mixed]


def to_json(
    measured: Sequence[FormatQuality],
    predicted: Mapping[str, float | None] | None,
    num_questions: Counter[str],
) -> dict[str, Any]:
    """The same as plain values; arguments as for :func:`table`."""
    return {
        "reference": measured[0].name,
        "suite_questions": dict(num_questions) or None,
        "formats": [
            {
                **each.to_json(),
                "predicted_tokens_per_s": None if predicted is None else predicted.get(each.name),
            }
            for each in measured
        ],
    }


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join([first.strip().ljust(widths[0]), *rest]).rstrip()


def _nats(value: float) -> str:
    return "0" if value == 0 else f"{value:.2e}" if value < 1e-3 else f"{value:.4f}"


def _perplexity(value: float) -> str:
    return f"{value:.4f}" if value < 1e4 else f"{value:.3e}"


def _share(value: float | None, count: int) -> str:
    """A share; with what it is of where that is little, and the share hence mostly chance."""
    few = f" of {count}" if count < _FEW_GUESSES else ""
    return _NONE if value is None else f"{value:.1%}{few}"


def _rate(value: float | None, none: str = _NONE) -> str:
    return none if value is None else f"{value:.1f}"
