"""The pictures of a comparison; each variant has one colour throughout."""

import statistics
from collections.abc import Callable
from operator import methodcaller

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from oblrpo.compare.summary import ENDED, Curve, Result, Summary, band
from oblrpo.report.charts import INK, Line, below_legend, chart, drawing, error_bar, legend, line_style
from oblrpo.report.curves import averages
from oblrpo.tables.baselines import COMPARED
from oblrpo.tables.metrics import AVERAGED_STEPS

ACCURACY = "held-out accuracy"
MARGIN = 1.4  # how far an axis of rates goes beyond the lowest and the highest, as a factor
_accuracy: Callable[[Result], Curve] = methodcaller("curve", "accuracy")
MOST_TICKS = 10  # the most rates that are written out below an axis


def learning(summary: Summary) -> list[Markup]:
    """Draw held-out accuracy and batch reward against completions, each variant at its best rate."""

    def averaged(result: Result) -> Curve:
        curve = result.curve("reward")
        means = averages([value for _, value in curve])
        return [(x, mean) for (x, _), mean in zip(curve, means, strict=True) if mean is not None]

    target = summary.spec.target.curve == "accuracy" and summary.level is not None
    labels = [o.variant.name + ("" if o.rate is None else f", {o.rate:g}") for o in summary.outcomes]
    drawings = []
    for title, curve, unit, levels in (
        ("Held-out accuracy at the best rate", _accuracy, ACCURACY, [(summary.level or 0.0, "target")] * target),
        (f"Reward, mean of {AVERAGED_STEPS} steps", averaged, "mean reward", []),
    ):
        lines = [_line(name, outcome.best, curve) for name, outcome in zip(labels, summary.outcomes, strict=True)]
        drawings.append(chart(title, lines, xlabel="completions", ylabel=unit, levels=levels))
    return drawings


def _line(label: str, results: list[Result], curve: Callable[[Result], Curve]) -> Line:
    """Return the mean of the runs whose curves are complete, with its band if there are several."""
    curves = [curve(result) for result in results if result.state in ENDED]
    if not curves:
        return Line("", [], [])  # it keeps its colour for the variant, and stands in no legend
    x, middle, low, high = band(curves)
    return Line(label, x, middle, *((low, high) if len(curves) > 1 else ()))


def rates(summary: Summary) -> list[Markup]:
    """Draw final accuracy against learning rate (mean, lowest and highest seed) and the windows of usable rates."""
    if not any(len(outcome.by_rate) > 1 for outcome in summary.outcomes):
        return []

    def draw(axes: Axes) -> None:
        ticks = sorted({rate for outcome in summary.outcomes for rate in outcome.by_rate})
        axes.set_xscale("log")
        axes.set_xlim(ticks[0] / MARGIN, ticks[-1] * MARGIN)  # else those of a variant with one rate have no width
        for number, outcome in enumerate(summary.outcomes):
            if not outcome.by_rate:
                continue
            color, dashes = line_style(number)
            middle = [statistics.fmean(values) for values in outcome.by_rate.values()]
            pairs = list(zip(middle, outcome.by_rate.values(), strict=True))
            below = [max(0.0, mean - min(values)) for mean, values in pairs]
            above = [max(0.0, max(values) - mean) for mean, values in pairs]
            axes.errorbar(
                list(outcome.by_rate), middle, [below, above], color=color, linestyle=dashes, linewidth=1.6, marker="o",
                markersize=4, capsize=2, elinewidth=1, label=outcome.variant.name,
            )  # fmt: skip
            if len(middle) == 1:
                axes.axhline(middle[0], color=color, linewidth=0.8, linestyle=":")
        if len(ticks) <= MOST_TICKS:
            axes.set_xticks(ticks, [f"{rate:g}" for rate in ticks], rotation=30, ha="right")
            axes.xaxis.set_minor_locator(NullLocator())
        low, high = axes.get_ylim()
        gap = 0.05 * (high - low)
        windows = [(n, o.window) for n, o in enumerate(summary.outcomes) if o.window]
        for place, (number, window) in enumerate(windows, start=1):
            y = low - place * gap
            axes.plot([window.low, window.high], [y, y], color=line_style(number)[0], linewidth=4, alpha=0.6)
            for end, opened, mark in ((window.low, window.open_low, "<"), (window.high, window.open_high, ">")):
                if opened:
                    axes.plot([end], [y], mark, color=line_style(number)[0], markersize=6)
        axes.set_ylim(low - (len(windows) + 1) * gap, high)
        legend(axes)

    height = below_legend([outcome.variant.name for outcome in summary.outcomes])
    return [drawing("Final accuracy against learning rate", "learning rate", draw, height, ylabel=ACCURACY)]


def every_rate(summary: Summary) -> list[Markup]:
    """Draw the held-out accuracy of each variant that has several rates, one curve a rate."""
    drawings = []
    for outcome in summary.outcomes:
        rates = outcome.variant.learning_rates
        if len(rates) > 1 and any(result.state in ENDED for result in outcome.results):
            at = {rate: [result for result in outcome.results if result.rate == rate] for rate in rates}
            lines = [_line(f"{rate:g}", at[rate], _accuracy) for rate in rates]
            title = f"{outcome.variant.name}: held-out accuracy by rate"
            drawings.append(chart(title, lines, xlabel="completions", ylabel=ACCURACY))
    return drawings


def variances(summary: Summary) -> list[Markup]:
    """Draw the gradient variance under each unbiased baseline over RLOO's; empty where no run kept a ledger."""
    shown = {
        number: [(place, ratio) for place, name in enumerate(COMPARED) if (ratio := outcome.variance_ratio(name))]
        for number, outcome in enumerate(summary.outcomes)
    }
    if not any(shown.values()):
        return []

    def draw(axes: Axes) -> None:
        axes.axhline(1, color=INK, linewidth=0.8)
        for number, ratios in shown.items():
            shift = 0.5 * ((number + 0.5) / len(shown) - 0.5)
            for place, ratio in ratios:
                name = summary.outcomes[number].variant.name if place == ratios[0][0] else None
                color = line_style(number)[0]
                axes.errorbar([place + shift], [ratio.value], error_bar(ratio), color=color, marker="o", markersize=4,
                              capsize=2, linestyle="", label=name)  # fmt: skip
        axes.set_xticks(range(len(COMPARED)), COMPARED)
        top = max(ratio.value for ratios in shown.values() for _, ratio in ratios)
        axes.set_ylim(0, 1.3 * max(1.0, top))
        legend(axes)

    return [drawing("Gradient variance along each variant's runs", "baseline", draw, ylabel="variance / RLOO's")]
