"""Paired tests over seeds, completions to a target, windows of usable rates; no torch, no scipy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oblrpo.intervals import Mean, mean, student_t, within


@dataclass(frozen=True)
class Paired:
    """The mean difference a - b over the seeds that both have, and the two-sided p of Student's paired t test.

    There is no p (None) for a single seed, and where all differences are equal, which leaves no noise to test against.
    """

    difference: Mean
    p: float | None
    adjusted: float | None = None
    """The p adjusted for how many tests there are (`holm`)."""


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Paired | None:
    """Compare two variants seed by seed; None without a common seed."""
    differences = [a[seed] - b[seed] for seed in a if seed in b]
    if not differences:
        return None
    difference = mean(differences)
    if not difference.margin:
        return Paired(difference, None)
    df = difference.n - 1
    t = abs(difference.value) * student_t(df) / difference.margin
    return Paired(difference, 1 - within(t, df))


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Adjust several p values for their number by Holm's step-down method; None stays None and does not count."""
    order = sorted((p, place) for place, p in enumerate(ps) if p is not None)
    adjusted: list[float | None] = [None] * len(ps)
    highest = 0.0
    for rank, (p, place) in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p))
        adjusted[place] = highest
    return adjusted


def crossing(x: Sequence[float], y: Sequence[float], level: float) -> float:
    """Return the first x at which y, linear between its points, reaches the level; infinite if it never does."""
    for place, value in enumerate(y):
        if value >= level:
            if place == 0:
                return x[0]
            before = y[place - 1]
            return x[place - 1] + (level - before) / (value - before) * (x[place] - x[place - 1])
    return math.inf


@dataclass(frozen=True)
class Window:
    """The rates around the best at which final accuracy is at least a share of the best's.

    Between the grid's rates accuracy is taken as linear in the logarithm of the rate. An open end is the grid's: the
    window may extend further.
    """

    low: float
    high: float
    open_low: bool
    open_high: bool


def usable(rates: Sequence[float], finals: Sequence[float], share: float = 0.9, best: float | None = None) -> Window:
    """Return the window of a grid in rising order, given its mean final accuracies.

    `best` is the rate that the window lies around; unless given, the one of the highest accuracy. Accuracy there must
    be above 0.
    """
    top = max(range(len(rates)), key=finals.__getitem__) if best is None else list(rates).index(best)
    level = share * finals[top]
    logs = [math.log(rate) for rate in rates]
    low, open_low = _edge(logs[top::-1], finals[top::-1], level)
    high, open_high = _edge(logs[top:], finals[top:], level)
    return Window(low, high, open_low, open_high)


def _edge(logs: Sequence[float], finals: Sequence[float], level: float) -> tuple[float, bool]:
    """Return where the accuracies, from the best outwards, first fall below the level, and whether they never do."""
    for place in range(1, len(logs)):
        if finals[place] < level:
            inside = (finals[place - 1] - level) / (finals[place - 1] - finals[place])
            return math.exp(logs[place - 1] + inside * (logs[place] - logs[place - 1])), False
    return math.exp(logs[-1]), True
