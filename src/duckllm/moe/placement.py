"""Who computes what: the per-worker plan, as data.

Called by the host before it connects; makes plans from a manifest and knows neither sockets nor processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from duckllm.cluster.plan import LayerPlan, WorkerPlan
from duckllm.errors import ConfigError

if TYPE_CHECKING:
    from duckllm.weights.manifest import Manifest


@dataclass(frozen=True)
class Slice:
    """The contiguous range of stripes that one worker owns, of every expert.

    Args:
        first_stripe: First stripe.
        num_stripes: How many, at least one.
    """

    first_stripe: int
    num_stripes: int


def plan_slices(
    num_stripes: int,
    num_workers: int,
    shares: Sequence[float] | None = None,
    most: Sequence[int] | None = None,
) -> tuple[Slice, ...]:
    """Contiguous slices in worker order that cover every stripe once.

    Args:
        num_stripes: Stripes of a whole expert.
        num_workers: W.
        shares: How much each worker should get relative to the others, all above 0; None for even slices,
            whose sizes differ by at most one. Every worker gets at least one stripe, and the largest size
            relative to its share, which decides how long a step takes, is as small as can be.
        most: Most stripes of each worker, at least one, together at least ``num_stripes``; None for no limit.

    Raises:
        ConfigError: More workers than stripes, no worker, or shares that do not fit.
    """
    if not 1 <= num_workers <= num_stripes:
        raise ConfigError(
            "workers", num_workers, f"1 to {num_stripes}, as an expert has {num_stripes} stripes"
        )
    if shares is None:
        shares = [1.0] * num_workers
    if len(shares) != num_workers or not all(0 < share < float("inf") for share in shares):
        raise ConfigError("shares", list(shares), f"{num_workers} numbers above 0")
    limits = [num_stripes] * num_workers if most is None else most
    assert len(limits) == num_workers
    assert min(limits) >= 1
    assert sum(limits) >= num_stripes
    # One stripe each; then each next one to whom it makes the least slow (the first of equals).
    sizes = [1] * num_workers
    for _ in range(num_stripes - num_workers):
        free = (worker for worker in range(num_workers) if sizes[worker] < limits[worker])
        sizes[min(free, key=lambda worker: ((sizes[worker] + 1) / shares[worker], worker))] += 1
    starts = [sum(sizes[:worker]) for worker in range(num_workers)]
    return tuple(Slice(start, size) for start, size in zip(starts, sizes, strict=True))


def plan_workers(
    manifest: Manifest,
    num_workers: int,
    *,
    max_step_tokens: int,
    wire_dtype: str = "f32",
    reply_dtype: str = "f32",
    weight_format: str = "auto",
    slices: Sequence[Slice] | None = None,
    num_layers: int | None = None,
) -> tuple[WorkerPlan, ...]:
    """One plan a worker, in worker order.

    Args:
        manifest: The converted model.
        num_workers: W.
        max_step_tokens: Most tokens in one step.
        wire_dtype: Activations on the wire, ``"f32"`` or ``"bf16"``.
        reply_dtype: Partial sums on the wire, ``"f32"`` or ``"bf16"``.
        weight_format: Format to compute in; ``"auto"`` leaves it to each worker.
        slices: Each worker's; None for even ones.
        num_layers: Layers that the host runs, the first ones; what a converted model has behind them (the
            layers of multi-token prediction) is no worker's. None for all.

    Raises:
        ConfigError: As :func:`plan_slices`.
    """
    if slices is None:
        slices = plan_slices(manifest.num_stripes, num_workers)
    assert len(slices) == num_workers
    return tuple(
        WorkerPlan(
            model_hash=manifest.model_hash,
            format=manifest.format,
            scale_layout=manifest.scale_layout,
            hidden_size=manifest.hidden_size,
            intermediate_size=manifest.moe_intermediate_size,
            num_experts=manifest.num_experts,
            top_k=manifest.num_experts_per_tok,
            total_stripes=manifest.num_stripes,
            unit_bytes=manifest.unit_bytes,
            first_stripe=part.first_stripe,
            num_stripes=part.num_stripes,
            layers=tuple(
                LayerPlan(
                    layer,
                    entry.file,
                    tuple(entry.stripe_sha256[part.first_stripe : part.first_stripe + part.num_stripes]),
                    entry.format,
                    entry.scale_layout,
                )
                for layer, entry in sorted(manifest.expert_layers.items())
                if num_layers is None or layer < num_layers
            ),
            folder=str(manifest.folder.resolve()),
            max_step_tokens=max_step_tokens,
            wire_dtype=wire_dtype,
            reply_dtype=reply_dtype,
            weight_format=weight_format,
        )
        for part in slices
    )
