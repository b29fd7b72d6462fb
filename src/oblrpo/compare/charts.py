"""The pictures of a comparison; each variant has one colour throughout."""

import math
import statistics
from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from oblrpo.compare.summary import ENDED, Curve, Result, Summary, band
from oblrpo.intervals import smooth
from oblrpo.report.charts import INK, Level, Line, below_legend, chart, drawing, error_bar, legend, look
from oblrpo.tables.baselines import COMPARED

REWARD_WINDOW = 9  # steps in the moving average of reward curves
ACCURACY = "held-out accuracy"
MARGIN = 1.4  # how far an axis of rates goes beyond the lowest and the highest, as a factor
MOST_TICKS = 10  # the most rates that are written out below an axis


def learning(summary: Summary) -> list[str]:
    """Draw held-out accuracy and batch reward against completions, each variant at its best rate."""
    half = REWARD_WINDOW // 2

    def smoothed(result: Result) -> Curve:
        curve = result.curve("reward")
        values = smooth([value for _, value in curve], REWARD_WINDOW)
        whole = slice(half, -half) if len(curve) > 2 * half else slice(None)  # the ends are means of fewer
        return [(x, value) for (x, _), value in zip(curve, values, strict=True)][whole]

    target = summary.spec.target.curve == "accuracy" and summary.level is not None
    labels = [o.variant.name + ("" if o.rate is None else f", {o.rate:g}") for o in summary.outcomes]
    drawings = []
    for title, curve, unit, levels in (
        ("Held-out accuracy at the best rate", _accuracy, ACCURACY, [Level(summary.level or 0.0, "target")] * target),
        (f"Reward, mean of {REWARD_WINDOW} steps", smoothed, "mean reward", []),
    ):
        lines = [_line(name, outcome.best, curve) for name, outcome in zip(labels, summary.outcomes, strict=True)]
        height = below_legend(labels)
        drawings.append(chart(title, lines, xlabel="completions", ylabel=unit, levels=levels, height=height))
    return drawings


def _accuracy(result: Result) -> Curve:
    return result.curve("accuracy")


def _line(label: str, results: list[Result], curve: Callable[[Result], Curve]) -> Line:
    """Return the mean of the runs whose curves are as whole as they will be, with its band, if there are several."""
    curves = [curve(result) for result in results if result.state in ENDED]
    if not curves:
        return Line("", [], [])  # it keeps its colour for the variant, and stands in no legend
    x, middle, low, high = band(curves)
    return Line(label, x, middle, *((low, high) if len(curves) > 1 else ()))


def rates(summary: Summary) -> list[str]:
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
            color, dashes = look(number)
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
            axes.plot([window.low, window.high], [y, y], color=look(number)[0], linewidth=4, alpha=0.6)
            for end, opened, mark in ((window.low, window.open_low, "<"), (window.high, window.open_high, ">")):
                if opened:
                    axes.plot([end], [y], mark, color=look(number)[0], markersize=6)
        axes.set_ylim(low - (len(windows) + 1) * gap, high)
        legend(axes)

    height = below_legend([outcome.variant.name for outcome in summary.outcomes])
    return [drawing("Final accuracy against learning rate", "learning rate", draw, height, ylabel=ACCURACY)]


def every_rate(summary: Summary) -> list[str]:
    """Draw the held-out accuracy of each variant that has several rates, one curve a rate."""
    drawings = []
    for outcome in summary.outcomes:
        rates = outcome.variant.learning_rates
        if len(rates) > 1 and any(result.state in ENDED for result in outcome.results):
            at = {rate: [result for result in outcome.results if result.rate == rate] for rate in rates}
            lines = [_line(f"{rate:g}", at[rate], _accuracy) for rate in rates]
            title, height = (
                f"{outcome.variant.name}: held-out accuracy by rate",
                below_legend([line.label for line in lines]),
            )
            drawings.append(chart(title, lines, xlabel="completions", ylabel=ACCURACY, height=height))
    return drawings


def completions(summary: Summary) -> list[str]:
    """Draw the completions to the target: a dot a seed, at the right edge if it never arrives, a bar at the median."""
    if not any(outcome.completions for outcome in summary.outcomes):
        return []

    def draw(axes: Axes) -> None:
        arrivals = [v for o in summary.outcomes for v in o.completions.values() if math.isfinite(v)]
        edge = 1.15 * max(arrivals, default=1.0) or 1.0
        for number, outcome in enumerate(summary.outcomes):
            color, y = look(number)[0], -number
            for value in outcome.completions.values():
                never = math.isinf(value)
                axes.plot([edge if never else value], [y], ">" if never else "o", color=color, alpha=0.6, markersize=6)
            middle = outcome.median_completions
            if middle is not None and math.isfinite(middle):
                axes.plot([middle, middle], [y - 0.3, y + 0.3], color=color, linewidth=2.5)
        if any(math.isinf(v) for o in summary.outcomes for v in o.completions.values()):
            axes.annotate("not reached", (edge, 0.55), ha="right", fontsize=8)
        _names(axes, summary)
        axes.set_xlim(left=0)

    title = f"Completions to {'accuracy' if summary.spec.target.curve == 'accuracy' else 'reward'} {summary.level:.3f}"
    return [drawing(title, "completions", draw, height=_height(summary))]


def differences(summary: Summary) -> list[str]:
    """Draw final accuracy less the reference's, paired by seed: a dot a seed, the mean and its 95 % interval."""
    if not summary.tests:
        return []

    def draw(axes: Axes) -> None:
        axes.axvline(0, color=INK, linewidth=0.8)
        others = summary.reference.finals
        for number, outcome in enumerate(summary.outcomes):
            test = summary.tests.get(outcome.variant.name)
            if test is None:
                continue
            color, y, mean = look(number)[0], -number, test.difference
            seeds = [final - others[seed] for seed, final in outcome.finals.items() if seed in others]
            axes.plot(seeds, [y] * len(seeds), "o", color=color, alpha=0.4, markersize=5)
            axes.errorbar([mean.value], [y], xerr=mean.margin, color=color, marker="|", markersize=14, capsize=3)
        _names(axes, summary)

    title = f"Final accuracy less that of {summary.spec.reference}, by seed"
    return [drawing(title, "difference", draw, height=_height(summary))]


def _names(axes: Axes, summary: Summary) -> None:
    names = [outcome.variant.name for outcome in summary.outcomes]
    axes.set_yticks([-number for number in range(len(names))], names)
    axes.set_ylim(-len(names) + 0.3, 0.9)
    axes.locator_params(axis="x", nbins=6)


def _height(summary: Summary) -> float:
    return 1.3 + 0.35 * len(summary.outcomes)


def variances(summary: Summary) -> list[str]:
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
                color = look(number)[0]
                axes.errorbar([place + shift], [ratio.value], error_bar(ratio), color=color, marker="o", markersize=4,
                              capsize=2, linestyle="", label=name)  # fmt: skip
        axes.set_xticks(range(len(COMPARED)), COMPARED)
        top = max(ratio.value for ratios in shown.values() for _, ratio in ratios)
        axes.set_ylim(0, 1.3 * max(1.0, top))
        legend(axes)

    return [drawing("Gradient variance along each variant's runs", "baseline", draw, ylabel="variance / RLOO's")]
