"""The pictures of README and docs/results.md, drawn from the CSVs of docs/results alone.

    python -m lab.results.pictures

writes docs/pictures/*.svg, *-dark.svg for dark pages, and card.png, which links to the site show.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from lab.results.book import Book, Line, Run
from lab.results.pace import paces
from lab.results.plan import PARTS
from lab.results.tables import Label, reported
from oblrpo.intervals import geometric_mean, mean

matplotlib.use("svg")
DOCS = Path(__file__).parents[2] / "docs"
CLAIM = DOCS / "results" / "claim"
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


def claimed(part: str) -> dict[Label, list[tuple[Run, list[Line]]]]:
    """The runs of a part of `lab.results` by arm and rate."""
    return reported(PARTS[part], Book(CLAIM / f"{PARTS[part].shares or part}.csv"))


def points(runs: list[tuple[Run, list[Line]]]) -> list[dict[str, Any]]:
    """Every measurement of held-out accuracy, the seconds of CPU in the mean over runs."""
    measured = [line for _, lines in runs for line in lines if line.accuracy is not None]
    seconds: dict[int, list[float]] = {}
    for line in measured:
        seconds.setdefault(line.step, []).append(line.cpu_seconds)
    return [line._asdict() | {"cpu_seconds": statistics.fmean(seconds[line.step])} for line in measured]


def curve(axis: Axes, rows: Iterable[Mapping[str, Any]], label: str, colour: str, at: str = "completions") -> None:
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
    """A pretrained model learns to add: nothing set, against the best of three rates."""
    page, panes = axes_of(2, 3.2, share=True)
    runs = claimed("smollm2")
    trl = [row | {"completions": row["samples"]} for row in rows_of("smollm2_trl")]
    for axis, clock in zip(panes, ("completions", "cpu_seconds"), strict=True):
        curve(axis, points(runs["default", "1e-06"]), "oblrpo, no learning rate set", OURS, clock)
        for name, colour in zip(("grpo", "rloo", "reinforce"), OTHERS[1:], strict=True):
            curve(axis, points(runs[name, ""]), f"{name.upper()}, best of 3 rates", colour, clock)
    curve(panes[0], _of(trl, contender="trl-default", rate="1e-05"), "GRPO of TRL, best of 3 rates", OTHERS[0])
    panes[0].set(xlabel="completions seen", ylabel="held-out sums solved")
    panes[1].set(xlabel="seconds of CPU")
    panes[0].yaxis.set_major_formatter(PercentFormatter(1))
    page.legend(*panes[0].get_legend_handles_labels(), frameon=False, ncols=3, fontsize=8, loc="outside upper center")
    return page


def window() -> Figure:
    """A pretrained model learns to add, from learning rates three decades apart."""
    page, (axis,) = axes_of(height=3.2)
    _window(axis)
    page.legend(frameon=False, ncols=3, fontsize=9, loc="outside upper center")
    return page


def card() -> Figure:
    """The same under the project's name, 1200 x 630 pixels, as pages that show a link want it."""
    page = Figure(figsize=(12, 6.3), dpi=100)
    page.text(0.06, 0.85, "oblrpo", fontsize=48, weight="bold", color=OURS)
    page.text(0.06, 0.75, "RL of language models that finds its learning rate by itself", fontsize=23)
    with matplotlib.rc_context({"font.size": 16}):
        axis = page.add_axes((0.12, 0.15, 0.82, 0.48))
        axis.spines[["top", "right"]].set_visible(False)
        _window(axis)
        for line in axis.lines:
            line.set(linewidth=2 * line.get_linewidth(), markersize=7)
        axis.legend(frameon=False, ncols=3, fontsize=15, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return page


def _window(axis: Axes) -> None:
    runs = claimed("window")
    for name, label, colour in (
        ("default", "oblrpo, which starts there", OURS),
        ("grpo", "GRPO, which keeps it", OTHERS[1]),
    ):
        ends = {float(rate): [lines[-1].accuracy for _, lines in of] for (arm, rate), of in runs.items() if arm == name}
        rates = sorted(ends)
        means = [statistics.fmean(ends[rate]) for rate in rates]
        axis.plot(rates, means, color=colour, lw=2.6 if colour == OURS else 1.4, label=label)
        axis.plot([rate for rate in rates for _ in ends[rate]], [end for rate in rates for end in ends[rate]], "o",
                  color=colour, ms=4, alpha=0.7)  # fmt: skip
    begun = statistics.fmean(lines[0].accuracy for of in runs.values() for _, lines in of)
    axis.axhline(begun, lw=0.8, ls="--", color="#888888", label="before training")
    axis.set(xscale="log", xlabel="learning rate set", ylabel="held-out sums solved", ylim=(0, 1))
    axis.yaxis.set_major_formatter(PercentFormatter(1))


def instructions() -> Figure:
    """Instructions on the same model, where oblrpo is not ahead."""
    page, (axis,) = axes_of()
    rows = rows_of("smollm2-format")
    lines = (
        ("oblrpo, no learning rate set", OURS, _of(rows, variant="oblrpo-shrunk")),
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
    """Accuracy after training in batches of three sizes: the default, a target of nats, and rates that are held."""
    page, panes = axes_of(3, 3.0, share=True)
    runs = claimed("rates")
    lines = (
        (("fixed", "0.0004"), "4e-4, held", OTHERS[0]),
        (("fixed", "0.0002"), "2e-4, held", OTHERS[2]),
        (("fixed", "0.0001"), "1e-4, held", OTHERS[1]),
        (("kl 0.005", "1e-05"), "0.005 nats a step", OTHERS[3]),
        (("default", "1e-05"), "oblrpo, nothing set", OURS),
    )
    for axis, policy in zip(panes, ("addition-high", "countdown", "path"), strict=True):
        for label, said, colour in lines:
            ends: dict[int, list[float]] = {}
            for run, of in runs[label]:
                if run.policy == policy:
                    ends.setdefault(run.prompts, []).append(of[-1].accuracy)
            at = sorted(ends)
            means = [statistics.fmean(ends[prompts]) for prompts in at]
            axis.plot(at, means, "o-", color=colour, lw=2.6 if colour == OURS else 1.4, ms=4, label=said)
        axis.set(xscale="log", title=policy, xlabel="prompts a step", ylim=(0, 1))
        axis.set_xticks([8, 16, 64], ["8", "16", "64"])
        axis.minorticks_off()
    panes[0].set_ylabel("held-out accuracy")
    panes[0].yaxis.set_major_formatter(PercentFormatter(1))
    page.legend(*panes[0].get_legend_handles_labels(), frameon=False, ncols=5, fontsize=8, loc="outside upper center")
    return page


def baselines() -> Figure:
    """Completions that every baseline needs, with a held rate and with the measured one, over RLOO's at a held rate."""
    page, panes = axes_of(2, 2.9, share=True)
    names = {
        "none": "no baseline",
        "rloo": "RLOO",
        "leave-one-out": "leave-one-out, the paper's",
        "shrunk": "shrunk, ours",
    }
    for axis, (part, G) in zip(panes, (("groups_of_4", 4), ("groups_of_2", 2)), strict=True):
        found = paces(PARTS[part], Book(CLAIM / f"{part}.csv"), "completions")
        kinds = (
            ("fixed", "", "best of 3 held rates", OTHERS[1], 0.12),
            ("default rate", "1e-05", "measured rate", OURS, -0.12),
        )
        for kind, rate, label, colour, shift in kinds:
            for place, name in enumerate(names):
                if (key := (f"{name}, {kind}", rate)) in found and found[key].ratios:
                    ratio = geometric_mean(found[key].ratios)
                    bars = [[ratio.value - ratio.low], [ratio.high - ratio.value]]
                    axis.errorbar(ratio.value, place + shift, xerr=bars, fmt="o", color=colour, ms=4, lw=1.2,
                                  label=label)  # fmt: skip
        axis.axvline(1, lw=0.8, ls="--", color="#888888")
        axis.set(title=f"groups of {G}", xlabel="completions over RLOO's", xscale="log", xlim=(0.4, 2.5))
        axis.set_xticks([0.5, 0.7, 1, 1.4, 2], ["0.5", "0.7", "1", "1.4", "2"])
        axis.minorticks_off()
        axis.set_yticks(range(len(names)), list(names.values()))
    handles, labels = panes[0].get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    page.legend(once.values(), once.keys(), frameon=False, ncols=2, fontsize=9, loc="outside upper center")
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


PICTURES = {draw.__name__: draw for draw in (window, learning, instructions, rates, baselines, cost, variance)}


def main() -> None:
    """Every picture, for light pages and dark ones."""
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
            if not suffix:
                card().savefig(DOCS / "pictures" / "card.png", facecolor=paper, metadata={"Software": None})


if __name__ == "__main__":
    main()
