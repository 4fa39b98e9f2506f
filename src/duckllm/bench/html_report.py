"""A report as one HTML file: tables, and pictures drawn in it, readable light and dark, that loads nothing.

Called by model_report.py and serving_report.py, which say what is in it. matplotlib is imported when a
picture is drawn: only the extra ``bench`` installs it.
"""

from __future__ import annotations

import html
import io
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duckllm.errors import ConfigError, MissingPackageError, without_credentials

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Seen well on white and on black.
COLOURS = ("#3b82f6", "#e8710a", "#12a37f", "#c05fd6", "#d93f6e", "#8f8a2a", "#0ea5b7", "#8b6f5a", "#7a86a0")
LINE_STYLES = ("-", "--", "-.", ":")
# Drawn in this colour, and then in whatever the page's text has.
_INK = "#010203"
_WIDTH_INCHES = 10.0
_STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em;
  background: Canvas; color: CanvasText; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9em; }
th, td { padding: .25em .7em; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; } thead th { background: var(--soft); }
.facts th { text-align: left; font-weight: 600; } .facts td { text-align: left; }
.wide { overflow-x: auto; } code { background: var(--soft); padding: .1em .3em; overflow-wrap: anywhere; }
figure { margin: 1em 0; } svg { max-width: 100%; height: auto; } figcaption { opacity: .75; }
"""


@dataclass(frozen=True)
class Table:
    """A table: its headings, and rows of as many cells."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A picture.

    Args:
        caption: What it shows, in words.
        draw: Draws it; the legend is put beside it.
        height_inches: Its height.
    """

    caption: str
    draw: Callable[[Axes], None]
    height_inches: float = 4.2


@dataclass(frozen=True)
class Section:
    """A part of a report below a heading."""

    heading: str
    text: str = ""
    pictures: Sequence[Picture] = ()
    table: Table | None = None


def check_html(path: Path) -> None:
    """Finds out before anything is measured whether a report can be written there.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ConfigError: The name does not end in .html, or its folder does not exist.
    """
    if path.suffix not in (".html", ".htm"):
        raise ConfigError("html", str(path), "a file name that ends in .html")
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError("html", str(path), "a file in a folder that exists")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingPackageError("matplotlib", "html", "bench") from error


def command_line() -> str:
    """The command that runs now, as it would be typed but for passwords in addresses."""
    return shlex.join(["duckllm", *map(without_credentials, sys.argv[1:])])


def render(title: str, facts: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    """The report's HTML.

    Args:
        title: Its heading.
        facts: The machine, the commit, the command and so on: a name and a value each.
        sections: What was measured.
    """
    facts = [*facts, ("written", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))]
    rows = "".join(
        f"<tr><th>{_escape(name)}</th><td>{_value(name, value)}</td></tr>" for name, value in facts
    )
    parts = [f"<h1>{_escape(title)}</h1>", f'<table class="facts"><tbody>{rows}</tbody></table>']
    for number, section in enumerate(sections):
        parts.append(f"<h2>{_escape(section.heading)}</h2>")
        parts += [f"<p>{_escape(line)}</p>" for line in section.text.splitlines()]
        for place, picture in enumerate(section.pictures):
            svg = to_svg(picture, f"p{number}x{place}-")
            parts.append(f"<figure>{svg}<figcaption>{_escape(picture.caption)}</figcaption></figure>")
        if section.table is not None:
            parts.append(_table(section.table))
    head = f'<meta charset="utf-8"><title>{_escape(title)}</title><style>{_STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def to_svg(picture: Picture, prefix: str) -> str:
    """A picture as an ``svg`` element: text and axes in the page's colour, no ground of its own.

    Args:
        picture: What is drawn.
        prefix: Of every id in it, so that pictures of one page do not share them.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    settings: dict[str, Any] = dict.fromkeys(names, _INK) | {"svg.fonttype": "none", "svg.hashsalt": prefix}
    settings |= {"legend.framealpha": 0.0, "legend.fontsize": "small", "grid.color": "#888888"}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(_WIDTH_INCHES, picture.height_inches), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.patch.set_visible(False)
        axes.set_prop_cycle(color=COLOURS)
        axes.grid(visible=True, alpha=0.3)
        picture.draw(axes)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside right upper")
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":  # 200 in place of 2 x 10^2
                axis.set_major_formatter("{x:g}")
                low, high = axis.get_view_interval()
                axis.set_minor_formatter("{x:g}" if high < 20 * low else "")
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]  # without the declarations of a file of its own
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'href="#', f'href="#{prefix}', text).replace("url(#", f"url(#{prefix}")
    return text.replace(_INK, "currentColor")


def _table(table: Table) -> str:
    head = "".join(f"<th>{_escape(heading)}</th>" for heading in table.headings)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _value(name: str, value: str) -> str:
    return f"<code>{_escape(value)}</code>" if name == "command" else _escape(value)


def _escape(text: str) -> str:
    return html.escape(text)
