"""Tables of a part's runs, in Markdown: how each arm ended at each place, and the first arm less it, seed by seed."""

from __future__ import annotations

import statistics

from lab.benchmarks.runs import mean_interval
from lab.results.book import Book, Line, Run
from lab.results.plan import Part

Label = tuple[str, str]
"""An arm and its rate, which is empty where the arm's best was searched."""


def reported(part: Part, book: Book) -> dict[Label, list[tuple[Run, list[Line]]]]:
    """The runs of a part's report by arm and rate, in its arms' order; a searched arm's at its best rate alone."""
    searched = {arm.name: arm for arm in part.arms if arm.searched}
    rank = {arm.name: number for number, arm in reversed(list(enumerate(part.arms)))}
    seeds = {*part.seeds, *(seed for arm in part.arms for seed in arm.seeds)}
    found: dict[Label, list[tuple[Run, list[Line]]]] = {}
    mine = [run for run in book.runs if run.arm in rank and run.seed in seeds]
    for run in sorted(mine, key=lambda run: (rank[run.arm], float(run.rate))):
        arm = searched.get(run.arm)
        if arm is None or run.rate == f"{part.best(book, run.policy, run[1:3], arm):g}":
            found.setdefault((run.arm, "" if arm else run.rate), []).append((run, book.runs[run]))
    return found


class Ends:
    """Accuracy after the last step of a part's reported runs, by arm and rate, place and seed."""

    def __init__(self, part: Part, book: Book) -> None:
        self.found: dict[Label, dict[tuple[str, int, int], dict[int, float]]] = {}
        for label, runs in reported(part, book).items():
            for run, lines in runs:
                if (accuracy := lines[-1].accuracy) is not None:
                    self.found.setdefault(label, {}).setdefault(run[:3], {})[run.seed] = accuracy

    def at(self, label: Label, place: tuple[str, int, int]) -> dict[int, float]:
        """By seed."""
        return self.found.get(label, {}).get(place, {})

    def less(self, mine: Label, other: Label, place: tuple[str, int, int]) -> list[float]:
        """The one less the other, for the seeds that both have."""
        ours, theirs = self.at(mine, place), self.at(other, place)
        return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def report(part: Part, book: Book) -> str:
    """Two tables: accuracies, and the part's first arm less every other."""
    ends = Ends(part, book)
    places = [(policy, *size) for policy, size in part.places]
    titles = ["arm", "rate", *(f"{policy}, {P} x {G}" for policy, P, G in places), "mean"]
    rows, differences = [], []
    for label in ends.found:
        cells = [mean_interval(list(ends.at(label, place).values())) for place in places]
        means = [statistics.fmean(ends.at(label, place).values()) for place in places if ends.at(label, place)]
        whole = f"{statistics.fmean(means):.3f}" if len(means) == len(places) else ""
        rows.append([*label, *cells, whole])
    default, searched = part.arms[0], part.arms[0].searched
    first = default.name, "" if searched else f"{default.rates[0]:g}"
    for label in ends.found:
        if label != first:
            pairs = [ends.less(first, label, place) for place in places]
            by_place = [mean_interval(values) for values in pairs]
            everywhere = [value for values in pairs for value in values]
            differences.append([*label, *by_place, mean_interval(everywhere)])
    parts = [f"{part.name}: {part.about}", table(titles, rows)]
    if differences:
        parts += [f"{' from '.join(filter(None, first))} less each, seed by seed", table(titles, differences)]
    return "\n\n".join(parts)


def along(part: Part, book: Book) -> str:
    """Held-out accuracy over completions and the CPU seconds of a step, where runs measured it on the way; or empty."""
    tables = []
    for place in ((policy, *size) for policy, size in part.places):
        rows, at = [], []
        for label, runs in reported(part, book).items():
            curves = [[line for line in lines if line.accuracy is not None] for run, lines in runs if run[:3] == place]
            if not curves or len(curves[0]) < 3:
                continue
            at = [line.completions for line in curves[0]]
            means = [mean_interval([line.accuracy for line in lines]) for lines in zip(*curves, strict=True)]
            seconds = statistics.fmean(curve[-1].cpu_seconds / curve[-1].step for curve in curves)
            rows.append([*label, *means, f"{seconds:.1f}", str(len(curves))])
        if rows:
            titles = ["arm", "rate", *map(str, at), "CPU s a step", "seeds"]
            tables.append(f"{place[0]}, {place[1]} x {place[2]}, over completions\n\n{table(titles, rows)}")
    return "\n\n".join(tables)


def rates_chosen(part: Part, book: Book) -> str:
    """The rate of every searched arm at every place, where its search is done."""
    lines = []
    for policy, size in part.places:
        for arm in part.arms:
            tried = [Run(policy, *size, arm.name, f"{rate:g}", seed) for rate in arm.rates for seed in part.search]
            if arm.searched and all(run in book.runs for run in tried):
                lines.append(f"{policy}, {size[0]} x {size[1]}, {arm.name}: {part.best(book, policy, size, arm):g}")
    return "\n".join(lines)


def table(titles: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [titles, ["---"] * len(titles), *rows])
