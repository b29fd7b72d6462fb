"""The charts of a run's variance ledger: the gradient's variance under every baseline, on the run's own batches."""

from collections.abc import Sequence

from markupsafe import Markup
from matplotlib.axes import Axes

from oblrpo.intervals import geometric_mean
from oblrpo.report import charts
from oblrpo.report.charts import INK, Line, error_bar, look, short
from oblrpo.report.curves import drawn
from oblrpo.report.html import seen
from oblrpo.report.record import RunRecord
from oblrpo.runs import Metrics
from oblrpo.tables.baselines import COMPARED, UNBIASED
from oblrpo.tables.metrics import Chart

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
            color = look(0 if unbiased else 8)[0]
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
