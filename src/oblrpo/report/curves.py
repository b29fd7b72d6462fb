"""The curves of a run's metrics, step by step, as the rows of `tables.metrics.CHARTS` say; and its variance ledger."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from markupsafe import Markup
from matplotlib.axes import Axes

from oblrpo.intervals import Z95, around, geometric_mean, smooth
from oblrpo.report import charts
from oblrpo.report.charts import INK, Line, error_bar, line_style, short
from oblrpo.report.html import seen
from oblrpo.report.record import RunRecord, accuracy_margin
from oblrpo.runs import Metrics
from oblrpo.tables.baselines import COMPARED, UNBIASED
from oblrpo.tables.metrics import AVERAGED_STEPS, Chart

LOGARITHMIC_FROM = 20.0  # an axis is logarithmic where the greatest value is more than so many times the least
OPEN_END = 10.0  # an interval of the critical batch that ends at more than so many times all else is drawn as open


def course(record: RunRecord, chart: Chart) -> list[Markup]:
    """Draw the only metric of a chart; nothing where no step has it, or where all have the value that is left out."""
    rows = [row for row in record.steps if row.get(chart.keys) is not None]
    values = [row[chart.keys] for row in rows]
    if all(value == chart.blank for value in values):
        return []
    line = averaged(rows, chart.keys, chart.ylabel) if chart.averaged else _line(record.steps, chart.keys, chart.ylabel)
    return [drawn(chart, [line], values, chart.levels)]


def length(record: RunRecord, chart: Chart) -> list[Markup]:
    """Draw the completions' length, and the limit where they come near it."""
    limit = record.integer("max_completion_length")
    near = limit and any((row.get(chart.keys) or 0) > limit / 2 for row in record.steps)
    return course(record, replace(chart, levels=((limit, "limit"),) if near else ()))


def reward(record: RunRecord, chart: Chart) -> list[Markup]:
    """Draw reward and held-out accuracy."""
    return [drawn(chart, [reward_line(record.steps), accuracy_line(record)])]


def accuracy_line(record: RunRecord) -> Line:
    """Return the held-out accuracy, with its interval over prompts."""
    line = _line(record.measured, "eval/accuracy", "held-out accuracy")
    return _with_margins(line, [accuracy_margin(row) for row in record.measured])


def n_snr(record: RunRecord, chart: Chart) -> list[Markup]:
    """Draw the signal-to-noise ratio of the batch gradient, N times that of one prompt, with its interval."""
    line = n_snr_line(record)
    return [drawn(chart, [line], levels=chart.levels)] if line.x else []


def n_snr_line(record: RunRecord) -> Line:
    """Return N SNR and the ends of its interval, of the steps that have it."""
    rows = [row for row in record.steps if "n_snr" in row]  # in a log of another trainer, these may be few or none
    low, high = (
        [None if row.get(key) is None else record.prompts * row[key] for row in rows] for key in ("snr_low", "snr_high")
    )
    return replace(_line(rows, "n_snr", "N SNR"), low=low, high=high)


def rate(record: RunRecord, chart: Chart) -> list[Markup]:
    """Draw the learning rate, and where it began unless it is fixed."""
    line, eta_0 = rate_line(record), record.number("learning_rate")
    began = "where it starts" if any("step_kl" in row for row in record.steps) else "as set, before the schedule"
    levels = [(eta_0, began)] if eta_0 > 0 and record.of_algorithm("schedule") != "off" else []
    return [drawn(chart, [line], [*line.y, eta_0], levels)]


def rate_line(record: RunRecord) -> Line:
    """Return the learning rate of the steps that made an update."""
    line = _line(record.steps, "learning_rate", "learning rate")
    return replace(line, y=[rate or None for rate in line.y])


def critical_batch(record: RunRecord, chart: Chart) -> list[Markup]:
    """Draw the critical batch 1 / SNR; where the interval of SNR reaches 0, it has no upper end."""
    rows, prompts = [row for row in record.steps if chart.keys in row], record.prompts
    line = _line(rows, chart.keys, "critical batch size")
    top = OPEN_END * max([value or 0 for value in line.y] + [prompts, 1])
    low = [1 / row["snr_high"] if row.get("snr_high") else None for row in rows]
    high = [1 / row["snr_low"] if (row.get("snr_low") or 0) > 1 / top else None for row in rows]
    levels = [(prompts, f"batch used: {prompts}")] if prompts else []
    return [drawn(chart, [replace(line, low=low, high=high)], levels=levels, logarithmic=True)] if rows else []


def reward_line(steps: Sequence[Metrics]) -> Line:
    """Return the moving average of the batches' rewards, its interval from their standard errors over prompts."""
    rewarded = [row for row in steps if row.get("reward") is not None]
    errors = [row.get("reward_stderr") for row in rewarded]
    margins: list[float | None] = []
    for part in around(len(rewarded), AVERAGED_STEPS):
        squares = [error**2 for error in errors[part] if error is not None]
        complete = len(squares) == part.stop - part.start
        margins.append(Z95 * math.sqrt(statistics.fmean(squares) / len(squares)) if complete else None)
    return _with_margins(averaged(rewarded, "reward", "reward of the batch"), margins)


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


def _with_margins(line: Line, margins: Sequence[float | None]) -> Line:
    pairs = list(zip(line.y, margins, strict=True))
    low = [None if y is None or margin is None else y - margin for y, margin in pairs]
    high = [None if y is None or margin is None else y + margin for y, margin in pairs]
    return replace(line, low=low, high=high)


def _line(rows: Sequence[Metrics], key: str, label: str) -> Line:
    rows = [row for row in rows if key in row]
    return Line(label, [row["step"] for row in rows], [row[key] for row in rows])


def averaged(rows: Sequence[Metrics], key: str, label: str) -> Line:
    """Return the moving average of a metric, with the steps as dots."""
    values = [row[key] for row in rows]
    return Line(label, [row["step"] for row in rows], averages(values), dots=values)


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
