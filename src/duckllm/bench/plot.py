"""The roofline as a picture: intensity against speed, both logarithmic. Called by cli/bench.py.

matplotlib is imported when a picture is drawn: only the extra ``bench`` installs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from duckllm.bench.points import Point
from duckllm.errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 9.0, 6.0, 150
LINE_STYLES = ("-", "--", "-.", ":")
MARKERS = "osD^vP*X"


def check_plot(path: Path) -> None:
    """Finds out before anything is measured whether a picture can be drawn there.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ConfigError: The name does not end in .png, or its folder does not exist.
    """
    if path.suffix != ".png":
        raise ConfigError("plot", str(path), "a file name that ends in .png")
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError("plot", str(path), "a file in a folder that exists")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingPackageError("matplotlib", "plot", "bench") from error


def write_plot(
    path: Path,
    title: str,
    memory_roofs: Mapping[str, float],
    compute_roofs: Mapping[str, float],
    points: Sequence[Point],
) -> None:
    """Draws roofs and points into a PNG file of 1350 x 900 pixels.

    Args:
        path: The file.
        title: Above the picture.
        memory_roofs: GB/s by name, one at least; a sloping line each.
        compute_roofs: GFLOP/s by name, one at least; a level line each.
        points: What was measured below them.

    Units: x in FLOP/byte, y in GFLOP/s (10^9 operations a second).

    Raises:
        OSError: The file cannot be written.
    """
    draw_roofline(title, memory_roofs, compute_roofs, points).savefig(path, format="png")


def draw_roofline(
    title: str,
    memory_roofs: Mapping[str, float],
    compute_roofs: Mapping[str, float],
    points: Sequence[Point],
) -> Figure:
    """The picture of :func:`write_plot`, drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    peak, fastest, slowest = (
        max(compute_roofs.values()),
        max(memory_roofs.values()),
        min(memory_roofs.values()),
    )
    intensities = [point.flop_per_byte for point in points]
    left = min([0.25, *(each / 2 for each in intensities)])
    right = 4 * max([peak / slowest, *intensities])
    for number, (name, rate) in enumerate(memory_roofs.items()):
        label = f"{name} {rate:.1f} GB/s"
        axes.plot([left, peak / rate], [left * rate, peak], color=f"C{number}", label=label)
    for number, (name, rate) in enumerate(compute_roofs.items()):
        label = f"{name} {rate:.0f} GFLOP/s"
        style = LINE_STYLES[number % len(LINE_STYLES)]
        axes.plot([rate / fastest, right], [rate, rate], color="black", linestyle=style, label=label)
    for number, point in enumerate(points):
        label = f"{point.name}: {point.gflop_per_s:.0f} GFLOP/s, {point.gb_per_s:.1f} GB/s"
        marker = MARKERS[number % len(MARKERS)]
        axes.plot(
            [point.flop_per_byte],
            [point.gflop_per_s],
            color="C3",
            marker=marker,
            linestyle="none",
            label=label,
        )
    axes.set(title=title, xlabel="arithmetic intensity, FLOP/byte", ylabel="GFLOP/s")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlim(left, right)
    axes.set_ylim(min([left * slowest, *(point.gflop_per_s / 2 for point in points)]), 2 * peak)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small", loc="lower right")
    return figure
