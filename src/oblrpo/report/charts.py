"""Charts as inline SVG, drawn by matplotlib in the page's own text colour; titles and notes beside them are HTML."""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis, YAxis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from oblrpo.intervals import GeometricMean, Mean
from oblrpo.report.html import markup, seen

INK = "#123456"
"""A colour that stands for the page's text colour until the SVG is written, so that light and dark both work."""
COLORS = ("#3b7dd8", "#d9822b", "#3f9c5a", "#8e6bbf", "#c8505a", "#2a9d9a", "#a8792c", "#c665a8", "#7a869a", "#8a9a2c")
DASHES = ("-", "--", ":", "-.")
HEIGHT = 2.8  # height in inches of a chart, which is 5 inches wide
LETTERS = 66  # how many letters of a legend fit across a chart


@dataclass(frozen=True)
class Line:
    """A curve with the ends of its interval, and the single measurements behind it; None stands for no value."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    dots: Sequence[float | None] | None = None


def chart(
    title: str,
    lines: Sequence[Line],
    logarithmic: bool = False,
    xlabel: str = "step",
    log_x: bool = False,
    ylabel: str = "",
    note: str = "",
    levels: Sequence[tuple[float, str]] = (),
) -> Markup:
    """Draw curves over x, dotted `levels` (y, name) across; `logarithmic` is about y, `note` says how to read it.

    A single value of each curve is no course: it is written.
    """
    if max((sum(y is not None for y in line.y) for line in lines), default=0) < 2:
        words = Markup("").join(_written(line, xlabel) for line in lines)
        return framed(title, note, words or Markup("<div class=only>No step has a value.</div>"))

    def draw(axes: Axes) -> None:
        for number, line in enumerate(lines):
            draw_line(axes, line, number)
        if log_x:
            axes.set_xscale("log")
        if logarithmic and any(value and value > 0 for line in lines for value in line.y):
            axes.set_yscale("log")
        for y, name in levels:
            axes.axhline(y, color=INK, linewidth=1, linestyle=":", label=name)
        if len(lines) + len(levels) > 1:
            legend(axes)

    return drawing(title, xlabel, draw, below_legend([line.label for line in lines]), ylabel, note)


def drawing(
    title: str, xlabel: str, draw: Callable[[Axes], None], height: float = HEIGHT, ylabel: str = "", note: str = ""
) -> Markup:
    """Draw what `draw` puts on the axes, 5 inches wide, as a <figure> with its title and a note."""
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: dict[Any, Any] = dict.fromkeys(inked, INK) | {"svg.fonttype": "none", "svg.hashsalt": "oblrpo"}
    style["text.parse_math"] = False  # a name with two $ is a name
    style |= {"font.size": 11, "axes.labelsize": 11, "xtick.labelsize": 10, "ytick.labelsize": 10}
    with mpl.rc_context(style):
        figure = Figure(figsize=(5, height), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
        for axis in (axes.xaxis, axes.yaxis):
            _plain_ticks(axis)
        if xlabel == "step":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        buffer = io.StringIO()
        figure.savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    svg = seen(buffer.getvalue())
    svg = re.sub(INK, "currentColor", svg[svg.index("<svg") :])
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # a page has many charts, and an id must be one element's
    named = Markup(svg.replace("<svg", markup('<svg role="img" aria-label="{}"', title), 1))
    return framed(title, note, named)


def framed(title: str, note: str, body: Markup) -> Markup:
    """Return a <figure> with its title and a note."""
    small = markup(" <small>{}</small>", note) if note else Markup("")
    return markup("<figure><figcaption><b>{}</b>{}</figcaption>{}</figure>", title, small, body)


def _written(line: Line, xlabel: str) -> Markup:
    """Return the only value of a line, with its interval, in words; nothing where it has none."""
    ends = zip(line.low or [None] * len(line.y), line.high or [None] * len(line.y), strict=True)
    form = "<div class=only>{} <b>{}</b> <small>{}</small></div>"
    for x, y, (low, high) in zip(line.x, line.y, ends, strict=True):
        if y is not None:
            between = "" if low is None or high is None else f", 95 % interval {short(low)} to {short(high)}"
            return markup(form, line.label, short(y), f"at {xlabel} {short(x)}, its only value{between}")
    return Markup("")


NARROWEST = 0.02
"""The least height of a linear axis over the greatest value on it: what differs by less is shown as alike."""


def _plain_ticks(axis: Axis) -> None:
    """Write numbers as people do, on a logarithmic axis too, unless the drawing has named its own ticks."""
    if axis.get_scale() == "log" and not isinstance(axis.get_minor_locator(), NullLocator):
        low, high = axis.get_view_interval()
        decades = math.log10(high / low) if low > 0 else 9.0
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2.5 else (1.0,), numticks=9))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    elif axis.get_scale() == "linear":
        low, high = axis.get_view_interval()
        greatest = max(abs(low), abs(high))
        if isinstance(axis, YAxis) and high - low < NARROWEST * greatest:
            middle, half = (low + high) / 2, NARROWEST * greatest / 2
            axis.axes.set_ylim(middle - half, middle + half)
        if 0 < greatest < 1e-2:
            axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def short(value: float) -> str:
    """Write a number in few characters: 3e-4, 0.25, 188, 12k, 3.4M."""
    size = abs(value)
    if size and size < 1e-2:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if size < 1e4:
        return f"{value:.3g}" if size < 1000 else f"{value:.0f}"
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= scale:
            return f"{value / scale:.3g}{unit}" if size < 1e12 else f"{value:.1e}"
    return f"{value}"


def line_style(number: int) -> tuple[str, str]:
    """Return colour and dashes of the line with this number, from 0; no two of the first forty look alike."""
    return COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)]


def draw_line(axes: Axes, line: Line, number: int) -> None:
    """Draw a curve, its interval as a band, and its dots; of open intervals the lower end alone, dashed."""
    color, dashes = line_style(number)
    y, label = _floats(line.y), seen(line.label)
    label = f" {label}" if label.startswith("_") else label  # such names matplotlib leaves out of legends
    axes.plot(line.x, y, dashes, color=color, label=label, linewidth=1.6, marker="." if len(y) < 30 else None)
    if line.dots is not None:
        axes.plot(line.x, _floats(line.dots), ".", color=color, alpha=0.35, markersize=3)
    if line.low is not None and line.high is not None:
        low, high = _floats(line.low), _floats(line.high)
        axes.fill_between(line.x, low, high, color=color, alpha=0.2, linewidth=0)
        if any(math.isnan(top) and not math.isnan(bottom) for bottom, top in zip(low, high, strict=True)):
            axes.plot(line.x, low, "--", color=color, linewidth=0.8)
        if len(line.y) - list(line.y).count(None) == 1:  # a band needs two
            axes.vlines(line.x, low, high, color=color, linewidth=1.6, alpha=0.5)


def error_bar(mean: Mean | GeometricMean) -> list[list[float]]:
    """Return the interval of one point as matplotlib's `errorbar` takes it: its lengths below and above."""
    return [[mean.value - mean.low], [mean.high - mean.value]]


def legend(axes: Axes) -> None:
    """Put the names above the axes, where they hide nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    axes.figure.legend(handles, labels, loc="outside upper left", ncols=_columns(labels), frameon=False, fontsize=10)


def _columns(labels: Sequence[str]) -> int:
    return max(1, min(3, LETTERS // (7 + max(map(len, labels), default=0))))  # 7: line and gap


def below_legend(labels: Sequence[str]) -> float:
    """Return the height that a chart needs so that a long legend takes nothing from its axes, in inches."""
    return HEIGHT + 0.2 * max(0, math.ceil(len(labels) / _columns(labels)) - 2)


def _floats(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]
