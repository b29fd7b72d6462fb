"""The charts of a run's variance ledger: the gradient's variance under every baseline, on the run's own batches."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from oblrpo.intervals import GeometricMean, geometric_mean
from oblrpo.report.charts import INK, Level, Line, chart, drawing, error_bar, look, short
from oblrpo.report.html import seen
from oblrpo.report.record import RunRecord
from oblrpo.runs import Metrics
from oblrpo.tables.baselines import COMPARED, UNBIASED


def variance_ratio(row: Metrics, baseline: str) -> float | None:
    """Return a step's variance under a baseline over that under RLOO; None where either is missing or 0."""
    own, rloo = row.get(f"variance/{baseline}") or 0.0, row.get("variance/rloo") or 0.0
    return own / rloo if own > 0 and rloo > 0 else None


def variance_ratios(rows: Sequence[Metrics], baseline: str) -> list[float]:
    """Return `variance_ratio` of every step that has one."""
    return [ratio for row in rows if (ratio := variance_ratio(row, baseline)) is not None]


def charts(record: RunRecord) -> list[str]:
    """Draw the mean ratio under every baseline, and its course; none where the run kept no ledger."""
    rows = [row for row in record.steps if row.get("variance/rloo")]
    names = list(dict.fromkeys(key.removeprefix("variance/") for row in rows for key in row if key[:9] == "variance/"))
    ratios = {name: geometric_mean(of_steps) for name in names if (of_steps := variance_ratios(rows, name))}
    if not ratios:
        return []
    height = 1.2 + 0.27 * len(ratios)
    compared = [name for name in COMPARED if name in ratios]
    steps = [row["step"] for row in rows]
    lines = [Line(name, steps, [variance_ratio(row, name) for row in rows]) for name in compared]
    course = chart(
        "Variance of unbiased baselines over the run", lines, ylabel="variance / RLOO's", height=height,
        note="On the same batch. A single step is a noisy estimate.", levels=[Level(1, "RLOO")],
    )  # fmt: skip
    return [_means(ratios, record.of_algorithm("baseline"), len(rows), height), course]


def _means(ratios: dict[str, GeometricMean], used: str, steps: int, height: float) -> str:
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
            tick.set_fontweight("bold" if name == used else "normal")
        axes.set_ylim(-len(order) + 0.4, 0.9)
        low, high = axes.get_xlim()
        marks = [mark for mark in (0.01, 0.03, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 100, 1000) if low <= mark <= high]
        axes.xaxis.set_major_locator(FixedLocator(marks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(marks, [short(mark) for mark in marks])

    order = sorted(ratios, key=lambda name: (name not in UNBIASED, ratios[name].value))
    taken = f"Geometric mean of {steps} steps, 95 % intervals over them" if steps > 1 else "Of one step"
    note = (
        f"{taken}; left of the line is less than RLOO's. Filled: unbiased. "
        "Hollow: biased, and the gradient is rescaled as well, so that less variance is no gain by itself."
    ) + (" Bold: this run's." if used in ratios else "")
    return drawing("Gradient variance under each baseline", "variance / RLOO's", draw, height, note=note)
