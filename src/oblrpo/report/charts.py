"""Line charts as inline SVG, drawn by matplotlib in the page's own text colour."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#123456"
"""Stands for the page's text colour until the SVG is written, so that light and dark both work."""
COLORS = ("#3b7dd8", "#d9822b", "#3f9c5a", "#8e6bbf", "#c8505a", "#2a9d9a", "#a8792c", "#c665a8", "#7a869a", "#8a9a2c")
DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Line:
    """A curve; None where there is no value, `margin` the half-width of its interval."""

    label: str
    x: list[float]
    y: list[float | None]
    margin: list[float] | None = None


def chart(title: str, lines: list[Line], logarithmic: bool = False, xlabel: str = "step", log_x: bool = False) -> str:
    """One chart as an <svg> element; `logarithmic` is its y axis."""

    def draw(axes: Axes) -> None:
        for number, line in enumerate(lines):
            draw_line(axes, line, number)
        if log_x:
            axes.set_xscale("log")
        if logarithmic and any(value and value > 0 for line in lines for value in line.y):
            axes.set_yscale("log")
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=9)

    return drawing(title, xlabel, draw)


def drawing(title: str, xlabel: str, draw: Callable[[Axes], None], height: float = 3) -> str:
    """Whatever `draw` puts on the axes as an <svg> element, 5 inches wide."""
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: dict[Any, str] = dict.fromkeys(inked, INK) | {"svg.fonttype": "none", "svg.hashsalt": "oblrpo"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(5, height), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set_title(title, fontsize=11, loc="left")
        axes.set_xlabel(xlabel)
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
        buffer = io.StringIO()
        figure.savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    svg = buffer.getvalue()
    return re.sub(INK, "currentColor", svg[svg.index("<svg") :])


def look(number: int) -> tuple[str, str]:
    """Colour and dashes of the line with this number, from 0; no two of the first forty look alike."""
    return COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)]


def draw_line(axes: Axes, line: Line, number: int) -> None:
    """The curve and its interval."""
    color, dashes = look(number)
    y = [float("nan") if value is None else value for value in line.y]
    axes.plot(line.x, y, dashes, color=color, label=line.label, linewidth=1.6, marker="." if len(y) < 30 else None)
    if line.margin:
        low = [a - b for a, b in zip(y, line.margin, strict=True)]
        high = [a + b for a, b in zip(y, line.margin, strict=True)]
        axes.fill_between(line.x, low, high, color=color, alpha=0.2, linewidth=0)
