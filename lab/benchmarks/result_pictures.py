"""The pictures of README and docs/results.md, drawn from the CSVs of docs/results alone.

    python -m lab.benchmarks.result_pictures

writes docs/pictures/*.svg, and *-dark.svg for dark pages.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from oblrpo.intervals import mean

matplotlib.use("svg")
DOCS = Path(__file__).parents[2] / "docs"
OURS, OTHERS = "#2a9d6f", ("#c8553d", "#5b7db1", "#b08d3c", "#8a6fae")
INKS = {"": "#333333", "-dark": "#d0d0d0"}
PAPERS = {"": "#ffffff", "-dark": "#0d1117"}


def rows_of(name: str) -> list[dict[str, str]]:
    """The lines of a CSV of results."""
    with (DOCS / "results" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def axes_of(panels: int = 1, height: float = 3.0, share: bool = False) -> tuple[Figure, list[Axes]]:
    """A page as wide as the column of a site, with panels side by side."""
    page = Figure(figsize=(7.2, height), layout="constrained")
    panes = page.subplots(1, panels, sharey=share, squeeze=False)[0]
    for each in panes:
        each.spines[["top", "right"]].set_visible(False)
    return page, list(panes)


def curve(axis: Axes, rows: Iterable[dict[str, str]], label: str, colour: str, at: str = "completions") -> None:
    """Mean accuracy over seeds against completions, with a 95 % interval at the end."""
    by_place: dict[float, list[float]] = {}
    for row in rows:
        by_place.setdefault(float(row[at]), []).append(float(row["accuracy"]))
    places = sorted(by_place)
    means = [statistics.fmean(by_place[place]) for place in places]
    mine = colour == OURS
    axis.plot(places, means, color=colour, lw=2.6 if mine else 1.4, label=label, zorder=3 if mine else 2)
    margin = mean(by_place[places[-1]]).margin
    offset = 0.02 * places[-1] * len(axis.containers)  # side by side, beyond the end
    axis.errorbar(places[-1] + offset, means[-1], margin, color=colour, capsize=2, lw=1.2, marker="o", ms=4)


def learning() -> Figure:
    """A pretrained model learns to add: nothing set, against everything tuned."""
    page, (axis,) = axes_of(height=3.4)
    ours = rows_of("smollm2-arithmetic")
    trl = [row | {"completions": row["samples"]} for row in rows_of("smollm2_trl")]
    curve(axis, _of(ours, variant="oblrpo-shrunk-858b3f3"), "OBLR-PO, no learning rate set", OURS)
    lines = (
        ("GRPO (TRL), best of 3 rates", _of(trl, contender="trl-default", rate="1e-05")),
        ("GRPO, best of 4 rates", _of(ours, variant="grpo", rate="1e-05")),
        ("RLOO, best of 4 rates", _of(ours, variant="rloo", rate="3e-05")),
        ("REINFORCE, best of 4 rates", _of(ours, variant="reinforce", rate="1e-05")),
    )
    for (label, rows), colour in zip(lines, OTHERS, strict=True):
        curve(axis, rows, label, colour)
    axis.set(xlabel="completions seen", ylabel="held-out sums solved", ylim=(0.15, 1.0))
    axis.yaxis.set_major_formatter(PercentFormatter(1))
    axis.legend(frameon=False, loc="upper left", fontsize=9)
    return page


def instructions() -> Figure:
    """Instructions on the same model, where OBLR-PO is not ahead."""
    page, (axis,) = axes_of()
    rows = rows_of("smollm2-format")
    lines = (
        ("OBLR-PO, no learning rate set", OURS, _of(rows, variant="oblrpo-shrunk")),
        ("RLOO, best of 2 rates", OTHERS[2], _of(rows, variant="rloo", rate="3e-05")),
        ("GRPO, best of 2 rates", OTHERS[1], _of(rows, variant="grpo", rate="3e-05")),
    )
    for label, colour, mine in lines:
        curve(axis, mine, label, colour)
    axis.set(xlabel="completions seen", ylabel="share of instructions followed")
    axis.yaxis.set_major_formatter(PercentFormatter(1))
    axis.legend(frameon=False, loc="upper left", fontsize=9)
    return page


def rates() -> Figure:
    """Accuracy at fixed rates, and where the measured one ends from three starts."""
    page, panes = axes_of(3, 2.7, share=True)
    rows = [row for row in rows_of("learning_rates") if row["seed"] in {"0", "1"}]
    for axis, task in zip(panes, ("path", "addition", "countdown"), strict=True):
        for schedule, label, colour in (("off", "fixed", OTHERS[0]), ("auto", "measured, by its start", OURS)):
            found = _of(rows, task=task, schedule=schedule)
            by_rate: dict[float, list[float]] = {}
            for row in found:
                by_rate.setdefault(float(row["rate"]), []).append(float(row["after"]))
            at = sorted(by_rate)
            axis.plot(at, [statistics.fmean(by_rate[rate]) for rate in at], "o-", color=colour, ms=4, label=label)
        axis.set(xscale="log", title=task, xlabel="learning rate")
        axis.set_xticks([1e-7, 1e-5, 1e-3])
    panes[0].set_ylabel("held-out accuracy")
    panes[0].yaxis.set_major_formatter(PercentFormatter(1))
    panes[0].legend(frameon=False, fontsize=8, loc="lower left")
    return page


def cost() -> Figure:
    """What a step with exact norms takes, over a plain step."""
    page, (axis,) = axes_of(height=3.2)
    names = {
        "exact (auto)": "oblrpo, exact",
        "calibrated proxy, no norms": "oblrpo, calibrated proxy",
        "torch.func vmap": "torch.func",
        "Opacus ghost norms": "Opacus",
        "one trajectory per backward": "one by one",
    }
    shapes = {"short": "24 tokens", "medium": "128 tokens", "long": "512 tokens"}
    rows = rows_of("score_norms")
    for number, (method, label) in enumerate(names.items()):
        colour = (OURS, "#8cc9ae", OTHERS[1], OTHERS[2], OTHERS[0])[number]
        times = [float(_of(rows, shape=shape, method=method)[0]["time"]) for shape in shapes]
        places = [place + 0.16 * (number - 2) for place in range(len(shapes))]
        bars = axis.bar(places, [min(time, 2.4) for time in times], 0.15, color=colour, label=label)
        axis.bar_label(bars, [f"{time:.2f}" if time < 10 else f"{time:.0f}" for time in times], fontsize=8, padding=1)
    axis.axhline(1, lw=0.8, ls="--", color="#888888")
    axis.set_xticks(range(len(shapes)), list(shapes.values()))
    axis.set(ylabel="time of a step over a plain one", ylim=(0.8, 2.7))
    axis.legend(frameon=False, ncols=5, fontsize=8, loc="upper center", columnspacing=1, handlelength=1.2)
    return page


def variance() -> Figure:
    """The gradient's variance within prompts over RLOO's, on five policies."""
    page, panes = axes_of(3, 2.9, share=True)
    rows = rows_of("variance")
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    lines = (
        ("oblr_shrunk", "shrunk, ours", OURS, 0.0),
        ("oblr", "leave-one-out, the paper's", OTHERS[1], 0.2),
        ("none", "no baseline", OTHERS[0], -0.2),
    )
    for axis, G in zip(panes, ("2", "4", "8"), strict=True):
        for baseline, label, colour, shift in lines:
            found = [_of(rows, policy=policy, baseline=baseline, generations=G)[0] for policy in policies]
            values = [float(row["over_rloo"]) for row in found]
            bars = [
                [value - float(row["low"]) for value, row in zip(values, found, strict=True)],
                [float(row["high"]) - value for value, row in zip(values, found, strict=True)],
            ]
            places = [place - shift for place in range(len(policies))]
            axis.errorbar(values, places, xerr=bars, fmt="o", color=colour, ms=4, lw=1.2, label=label)
        axis.axvline(1, lw=0.8, ls="--", color="#888888")
        axis.set(title=f"groups of {G}", xlabel="variance over RLOO's", xlim=(0, 2.6))
        axis.set_yticks(range(len(policies)), policies)
    panes[0].invert_yaxis()
    page.legend(*panes[0].get_legend_handles_labels(), frameon=False, ncols=3, fontsize=9, loc="outside upper center")
    return page


def _of(rows: Iterable[dict[str, str]], **wanted: str) -> list[dict[str, str]]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


PICTURES = {"learning": learning, "instructions": instructions, "rates": rates, "cost": cost, "variance": variance}


def main() -> None:
    for suffix, ink in INKS.items():
        paper = PAPERS[suffix]
        style = {
            "svg.fonttype": "none", "svg.hashsalt": "oblrpo", "font.size": 10, "text.color": ink,
            "axes.labelcolor": ink,
            "axes.edgecolor": ink, "xtick.color": ink, "ytick.color": ink, "axes.facecolor": paper,
        }  # fmt: skip
        with matplotlib.rc_context(style):
            for name, draw in PICTURES.items():
                file = DOCS / "pictures" / f"{name}{suffix}.svg"
                draw().savefig(file, facecolor=paper, metadata={"Date": None}, bbox_inches="tight", pad_inches=0.12)


if __name__ == "__main__":
    main()
