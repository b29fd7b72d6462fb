"""Line charts as inline SVG, drawn by matplotlib in the page's own text colour."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

INK = "#123456"
"""Stands for the page's text colour until the SVG is written, so that light and dark both work."""
COLORS = ("#3b7dd8", "#d9822b", "#3f9c5a", "#8e6bbf")


@dataclass(frozen=True)
class Line:
    """A curve; None where there is no value, `margin` the half-width of its interval."""

    label: str
    x: list[float]
    y: list[float | None]
    margin: list[float] | None = None


def chart(title: str, lines: list[Line], logarithmic: bool = False, xlabel: str = "step", log_x: bool = False) -> str:
    """One chart as an <svg> element; `logarithmic` is its y axis."""
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: dict[Any, str] = dict.fromkeys(inked, INK) | {"svg.fonttype": "none", "svg.hashsalt": "oblrpo"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(5, 3), layout="constrained")
        axes = figure.add_subplot()
        for line, color in zip(lines, COLORS, strict=False):
            _draw(axes, line, color)
        axes.set_title(title, fontsize=11, loc="left")
        axes.set_xlabel(xlabel)
        if log_x:
            axes.set_xscale("log")
        if logarithmic and any(value and value > 0 for line in lines for value in line.y):
            axes.set_yscale("log")
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=9)
        buffer = io.StringIO()
        figure.savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    svg = buffer.getvalue()
    return re.sub(INK, "currentColor", svg[svg.index("<svg") :])


def _draw(axes: object, line: Line, color: str) -> None:
    y = [float("nan") if value is None else value for value in line.y]
    axes.plot(line.x, y, color=color, label=line.label, linewidth=1.6, marker="." if len(y) < 30 else None)  # type: ignore[attr-defined]
    if line.margin:
        low = [a - b for a, b in zip(y, line.margin, strict=True)]
        high = [a + b for a, b in zip(y, line.margin, strict=True)]
        axes.fill_between(line.x, low, high, color=color, alpha=0.2, linewidth=0)  # type: ignore[attr-defined]
