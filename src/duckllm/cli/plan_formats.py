"""The formats of a plan side by side: what each needs of the nodes, and how fast it would be.

Called by cli/plan.py where no format was asked for, or where that one does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from duckllm.config import show_size
from duckllm.errors import ConfigError

if TYPE_CHECKING:
    from duckllm.plan import ClusterPlan


def compare(
    names: Iterable[str],
    made_in: Callable[[str], ClusterPlan],
    tokens_per_s: Callable[[ClusterPlan], float | None],
) -> list[dict[str, Any]]:
    """One row a format, as plain values.

    Args:
        names: The formats.
        made_in: The plan in a format; a ConfigError where no number of nodes holds it.
        tokens_per_s: Of one request with a plan; None where speeds are unknown.
    """
    rows = []
    for name in names:
        try:
            made = made_in(name)
        except ConfigError:
            rows.append({"format": name, "fits": False})
            continue
        rows.append(
            {
                "format": name,
                "fits": made.fits,
                "expert_bytes": made.sizes.num_stripes * made.sizes.stripe_bytes,
                "bytes_per_token": made.read_bytes,
                "nodes": len(made.nodes),
                "need_bytes": max(node.need_bytes for node in made.nodes),
                "tokens_per_s": tokens_per_s(made) if made.fits else None,
            }
        )
    return rows


def describe_formats(rows: Sequence[dict[str, Any]], *, is_predicted: bool) -> str:
    """The rows for people.

    Args:
        rows: As of :func:`compare`.
        is_predicted: Whether tokens a second are a forecast, and no bound.
    """
    has_speed = any(row.get("tokens_per_s") for row in rows)
    speed = ("predicted" if is_predicted else "at most") if has_speed else ""
    lines = [
        f"{'format':<12}{'experts':>12}{'a token':>12}{'nodes':>7}{'a node needs':>14}{speed:>14}".rstrip()
    ]
    for row in rows:
        if "nodes" not in row:
            lines.append(f"{row['format']:<12}  no number of such nodes holds it")
            continue
        line = (
            f"{row['format']:<12}{show_size(row['expert_bytes']):>12}{show_size(row['bytes_per_token']):>12}"
        )
        line += f"{row['nodes']:>7}{show_size(row['need_bytes']):>14}"
        if row["tokens_per_s"]:
            line += f"{row['tokens_per_s']:>8.1f} tok/s"
        lines.append(line if row["fits"] else f"{line}  too little memory")
    lines.append(
        "fp9 and fp8 give the same answers; int8 and int4 round (docs/quality.md says which to take)"
    )
    if not has_speed:
        lines.append("how fast: --nodes FILE predicts it, of machines that docs/planning.md says how to name")
    return "\n".join(lines)
