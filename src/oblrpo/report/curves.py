"""The curves of a run's metrics, step by step, as the rows of `tables.metrics.CHARTS` say; and its variance ledger."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes

from oblrpo.intervals import Z95, around, geometric_mean, smooth
from oblrpo.report import charts
from oblrpo.report.charts import INK, Line, error_bar, line_style, short
from oblrpo.report.html import seen
from oblrpo.report.record import RunRecord
from oblrpo.runs import Metrics
from oblrpo.tables.baselines import COMPARED, UNBIASED
from oblrpo.tables.metrics import AVERAGED_STEPS, CHARTS, Chart

LOGARITHMIC_FROM = 20.0  # an axis is logarithmic where the greatest value is more than so many times the least
CHART_OF = {key: chart for chart in CHARTS for key in chart.keys.split()}
OPEN_END = 10.0  # an interval of the critical batch that ends at more than so many times all else is drawn as open


def course(record: RunRecord, chart: Chart) -> list[Markup]:
    """Draw the only metric of a chart; nothing where no step has it, or where all have the value that is left out."""
    rows = [row for row in record.steps if row.get(chart.keys) is not None]
    values = [row[chart.keys] for row in rows]
    if all(value == chart.blank for value in values):
        return []
    return [drawn(chart, [line_of(record, chart.keys, chart.ylabel)], values, chart.levels)]


def length(record: RunRecord, chart: Chart) -> list[Markup]:
    """Draw the completions' length, and the limit where they come near it."""
    limit = record.integer("max_completion_length")
    near = limit and any((row.get(chart.keys) or 0) > limit / 2 for row in record.steps)
    return course(record, replace(chart, levels=((limit, "limit"),) if near else ()))


def reward(record: RunRecord, chart: Chart) -> list[Markup]:
    """Draw reward and held-out accuracy."""
    lines = [line_of(record, "reward", "reward of the batch"), line_of(record, "eval/accuracy", "held-out accuracy")]
    return [drawn(chart, lines)]


def n_snr(record: RunRecord, chart: Chart) -> list[Markup]:
    """Draw the signal-to-noise ratio of the batch gradient, N times that of one prompt, with its interval."""
    line = line_of(record, "n_snr", "N SNR")
    return [drawn(chart, [line], levels=chart.levels)] if line.x else []


def rate(record: RunRecord, chart: Chart) -> list[Markup]:
    """Draw the learning rate, and where it began unless it is fixed."""
    line, eta_0 = line_of(record, "learning_rate", "learning rate"), record.number("learning_rate")
    began = "where it starts" if any("step_kl" in row for row in record.steps) else "as set, before the schedule"
    levels = [(eta_0, began)] if eta_0 > 0 and record.of_algorithm("schedule") != "off" else []
    return [drawn(chart, [line], [*line.y, eta_0], levels)]


def critical_batch(record: RunRecord, chart: Chart) -> list[Markup]:
    """Draw the critical batch 1 / SNR; where the interval of SNR reaches 0, it has no upper end."""
    rows, prompts = [row for row in record.steps if chart.keys in row], record.prompts
    line = line_of(record, chart.keys, "critical batch size")
    top = OPEN_END * max([value or 0 for value in line.y] + [prompts, 1])
    low = [1 / row["snr_high"] if row.get("snr_high") else None for row in rows]
    high = [1 / row["snr_low"] if (row.get("snr_low") or 0) > 1 / top else None for row in rows]
    levels = [(prompts, f"batch used: {prompts}")] if prompts else []
    return [drawn(chart, [replace(line, low=low, high=high)], levels=levels, logarithmic=True)] if rows else []


def line_of(record: RunRecord, key: str, label: str = "") -> Line:
    """Return the course of a metric, with its 95 % interval where it has one.

    A reward, and what its chart averages, is a moving average, with the steps as dots.
    """
    chart, rows = CHART_OF.get(key), [row for row in record.rows if key in row]
    averaged = key == "reward" or (chart is not None and chart.averaged)
    rows = [row for row in rows if row[key] is not None] if averaged else rows
    values: list[Any] = [row[key] or None if key == "learning_rate" else row[key] for row in rows]  # 0: no update
    y = averages(values) if averaged else values
    line = Line(label or key, [row["step"] for row in rows], y, dots=values if averaged else None)
    margins = _margins([row.get(f"{key}_stderr") for row in rows], AVERAGED_STEPS if averaged else 1)
    ends = [(None, None) if v is None or m is None else (v - m, v + m) for v, m in zip(y, margins, strict=True)]
    if all(margin is None for margin in margins):  # N SNR is N times SNR, of which the ends are logged
        of, times = ("snr", record.prompts) if key == "n_snr" else (key, 1)
        logged = [[row.get(f"{of}_{end}") for end in ("low", "high")] for row in rows]
        ends = [(low and times * low, high and times * high) for low, high in logged]
    known = any(end is not None for pair in ends for end in pair)
    return replace(line, low=[low for low, _ in ends], high=[high for _, high in ends]) if known else line


def _margins(errors: Sequence[float | None], window: int) -> list[float | None]:
    """Return the half-widths of 95 % intervals of moving averages, from the errors of all that a window has."""
    margins: list[float | None] = []
    for part in around(len(errors), window):
        squares = [error**2 for error in errors[part] if error is not None]
        complete = len(squares) == part.stop - part.start
        margins.append(Z95 * math.sqrt(statistics.fmean(squares) / len(squares)) if complete else None)
    return margins


def drawn(
    chart: Chart,
    lines: Sequence[Line],
    values: Sequence[float | None] = (),
    levels: Sequence[tuple[float, str]] = (),
    logarithmic: bool = False,
) -> Markup:
    """Draw a chart; its axis is logarithmic if the chart allows it and values are far apart, or in any case."""
    return charts.chart(
        chart.title, lines, logarithmic=logarithmic or (chart.logarithmic and is_wide(values)), ylabel=chart.ylabel,
        note=chart.note, levels=levels,
    )  # fmt: skip


def is_wide(values: Sequence[float | None]) -> bool:
    """Whether values are so far apart that an axis is logarithmic, where it may be."""
    present = [value for value in values if value]
    return bool(present) and min(present) > 0 and max(present) > LOGARITHMIC_FROM * min(present)


def averages(values: Sequence[float]) -> list[float | None]:
    """Return the moving average over `AVERAGED_STEPS` values.

    Averages of complete windows only are kept, if there are any: those at the ends are of fewer values, and jump.
    """
    half = AVERAGED_STEPS // 2 if len(values) > AVERAGED_STEPS else 0
    last = len(values) - half
    return [value if half <= place < last else None for place, value in enumerate(smooth(values, AVERAGED_STEPS))]


VARIANCE = "variance/"


def variance_ratio(row: Metrics, baseline: str) -> float | None:
    """Return a step's variance under a baseline over that under RLOO; None where either is missing or 0."""
    own, rloo = row.get(f"variance/{baseline}") or 0.0, row.get("variance/rloo") or 0.0
    return own / rloo if own > 0 and rloo > 0 else None


def variance_ratios(rows: Sequence[Metrics], baseline: str) -> list[float]:
    """Return `variance_ratio` of every step that has one."""
    return [ratio for row in rows if (ratio := variance_ratio(row, baseline)) is not None]


def variance_course(record: RunRecord, chart: Chart) -> list[Markup]:
    """Draw the course of the ratio under every baseline that is compared."""
    rows = [row for row in record.steps if row.get("variance/rloo")]
    ratios = {name: [variance_ratio(row, name) for row in rows] for name in COMPARED}
    lines = [Line(name, [row["step"] for row in rows], of_steps) for name, of_steps in ratios.items() if any(of_steps)]
    return [drawn(chart, lines, levels=chart.levels)] if rows else []


def variances(record: RunRecord, chart: Chart) -> list[Markup]:
    """Draw a dot and an interval for each baseline: unbiased ones first, each kind by variance."""

    def draw(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.axvline(1, color=INK, linewidth=1, linestyle=":")
        for place, name in enumerate(order):
            ratio, unbiased = ratios[name], name in UNBIASED
            color = line_style(0 if unbiased else 8)[0]
            axes.errorbar([ratio.value], [-place], xerr=error_bar(ratio), color=color, marker="o", markersize=6,
                          capsize=2, markerfacecolor=color if unbiased else "none")  # fmt: skip
            axes.text(1.02, -place, short(ratio.value), transform=axes.get_yaxis_transform(), va="center")
        axes.set_yticks([-place for place in range(len(order))], [seen(name) for name in order])
        for tick, name in zip(axes.get_yticklabels(), order, strict=True):
            tick.set_fontweight("bold" if name == record.of_algorithm("baseline") else "normal")
        axes.set_ylim(-len(order) + 0.4, 0.9)

    names = dict.fromkeys(key.removeprefix(VARIANCE) for row in record.steps for key in row if key.startswith(VARIANCE))
    ratios = {name: geometric_mean(found) for name in names if (found := variance_ratios(record.steps, name))}
    order = sorted(ratios, key=lambda name: (name not in UNBIASED, ratios[name].value))
    height = 1.2 + 0.27 * len(order)
    return [charts.drawing(chart.title, chart.ylabel, draw, height, note=chart.note)] if order else []
