"""A simulation as tables, as one JSON object and as a picture. Called by ``duckllm simulate``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duckllm.config import count_of
from duckllm.simulate.measure import PARTS, Bend, Layers, Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

_NAMES = {"pack": "request", "sleep": "waits", "combine": "sum"}
_COLORS = dict(zip(PARTS, ("#9ecae1", "#3182bd", "#bdbdbd", "#e6550d", "#fdae6b"), strict=True))
DOTS_PER_INCH = 100


def print_points(
    console: Console, points: Sequence[Point], layers: Sequence[Layers], bends: Sequence[Bend]
) -> None:
    """Tables of all sizes of steps, and where each bends."""
    from rich import box
    from rich.table import Table

    for bend in bends:
        rows = _rows(bend.num_tokens)
        table = Table(
            box=box.SIMPLE, title=f"{rows} a step, microseconds", title_justify="left", padding=(0, 0, 0, 1)
        )
        names = [_NAMES.get(name, name) for name in PARTS]
        for name in ("workers", *names, "host CPU", "wall", "flock", "with host"):
            table.add_column(name, justify="right")
        for point in points:
            if point.num_tokens == bend.num_tokens:
                numbers = [*(point.cpu_us[name] for name in PARTS), point.host_us]
                numbers += [point.wall_us, point.flock_us, point.with_host_us]
                table.add_row(str(point.num_workers), *(f"{number:.0f}" for number in numbers))
        console.print(table)
        console.print(describe_bend(bend))
        for each in layers:
            if each.num_tokens == bend.num_tokens:
                console.print(
                    f"{count_of(each.num_workers, 'worker')}: a layer in {each.one_us:.0f} us, with lanes in "
                    f"{each.lanes_us:.0f}"
                )


def describe_bend(bend: Bend) -> str:
    """Where a step gets no faster, in words."""
    outside = f", not measured, by the host's cost of a worker at {bend.nearest_measured}"
    return (
        f"{_rows(bend.num_tokens)}: fastest with {count_of(bend.host_workers, 'worker')}, "
        f"{bend.host_us:.0f} us{'' if bend.is_between else outside}; "
        f"nodes and links alone with {bend.flock_workers}, {bend.flock_us:.0f} us"
    )


def as_json(points: Sequence[Point], layers: Sequence[Layers], bends: Sequence[Bend]) -> dict[str, Any]:
    """All figures, plain."""
    return {
        "points": [asdict(point) for point in points],
        "layers": [asdict(each) for each in layers],
        "bends": [asdict(bend) for bend in bends],
    }


def write_plot(path: Path, title: str, points: Sequence[Point], bends: Sequence[Bend]) -> None:
    """Draws one panel for each size of steps into a PNG file.

    Raises:
        OSError: The file cannot be written.
    """
    draw(title, points, bends).savefig(path, format="png")


def draw(title: str, points: Sequence[Point], bends: Sequence[Bend]) -> Figure:
    """The picture of :func:`write_plot`, drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(bends), 3.6), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    for index, bend in enumerate(bends):
        axes = figure.add_subplot(1, len(bends), index + 1)
        here = [point for point in points if point.num_tokens == bend.num_tokens]
        places = list(range(len(here)))
        bottom = [0.0] * len(here)
        for name in PARTS:
            heights = [point.cpu_us[name] for point in here]
            axes.bar(
                places, heights, 0.6, bottom, color=_COLORS[name], label=f"host: {_NAMES.get(name, name)}"
            )
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        axes.plot(places, [point.flock_us for point in here], "k--", marker="o", label="nodes and links")
        axes.plot(places, [point.with_host_us for point in here], "k-", marker="s", label="with the host")
        axes.set_xticks(places, [str(point.num_workers) for point in here])
        axes.set_title(f"{_rows(bend.num_tokens)}: fastest with {bend.host_workers}", fontsize=9)
        axes.set_xlabel("workers")
        axes.set_ylim(bottom=0)
        if index == 0:
            axes.set_ylabel("microseconds of a layer's step")
            axes.legend(fontsize=6)
    figure.suptitle(title, fontsize=10)
    return figure


def _rows(count: int) -> str:
    return count_of(count, "row")
