"""Heat maps of a trace as a picture. Called by cli/trace.py.

matplotlib is imported when a picture is drawn: only the extra ``bench`` installs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from duckllm.errors import ConfigError, MissingPackageError
from duckllm.tracing.read import F64
from duckllm.tracing.summary import HeatMaps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES, DOTS_PER_INCH = 9.0, 100
SUFFIXES = (".png", ".svg")
_MOST_TICKS = 16


def check_plot(path: Path) -> None:
    """Finds out before a trace is read whether a picture can be drawn there.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ConfigError: The name ends in neither .png nor .svg, or its folder does not exist.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError("plot", str(path), "a file name that ends in .png or .svg")
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError("plot", str(path), "a file in a folder that exists")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingPackageError("matplotlib", "plot", "bench") from error


def write_plot(path: Path, kind: str, title: str, maps: HeatMaps) -> None:
    """Draws layer x worker and layer x expert into a PNG or SVG file, whichever ``kind`` says.

    Raises:
        OSError: The file cannot be written.
    """
    draw_heat_maps(title, maps).savefig(path, format=kind)


def draw_heat_maps(title: str, maps: HeatMaps) -> Figure:
    """The picture of :func:`write_plot`, drawn without a display.

    Layer x worker: compute time, and the round trip. Layer x expert: choices, and time.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 1.6 + 2 * min(6.0, max(1.6, 0.14 * len(maps.layers)))
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="medium")
    panels = (
        ("median compute time of a step, us", "worker", maps.compute_us),
        ("median round trip of a step, us", "worker", maps.round_trip_us),
        ("choices of an expert", "expert", maps.expert_rows),
        ("time of an expert, ms", "expert", maps.expert_ms),
    )
    for number, (name, across, values) in enumerate(panels, 1):
        axes = figure.add_subplot(2, 2, number)
        _draw(figure, axes, name, across, maps.layers, values)
    return figure


def _draw(figure: Figure, axes: Axes, name: str, across: str, layers: Sequence[int], values: F64) -> None:
    axes.set(title=name, xlabel=across, ylabel="layer")
    axes.title.set_fontsize("small")
    if not values.size or np.isnan(values).all():
        axes.text(0.5, 0.5, "none in this trace", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    image = axes.imshow(values, aspect="auto", interpolation="nearest", vmin=0.0, cmap="viridis")
    figure.colorbar(image, ax=axes)
    rows, columns = values.shape
    down = range(0, rows, -(-rows // _MOST_TICKS))
    axes.set_yticks(list(down), [str(layers[row]) for row in down])
    axes.set_xticks(list(range(0, columns, -(-columns // _MOST_TICKS))))
