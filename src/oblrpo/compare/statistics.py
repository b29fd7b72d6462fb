"""Intervals and tests over seeds by Student's t, rollouts to a target, windows of usable rates; no torch, no scipy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def within(t: float, df: int) -> float:
    """P(-t <= T <= t) for Student's t with a whole number of degrees of freedom, t >= 0; exact, in finite sums.

    With theta = atan(t / sqrt(df)) (Abramowitz & Stegun 26.7.3 and 26.7.4):
    df even: sin(theta) (1 + 1/2 cos^2 + 1*3/(2*4) cos^4 + ... up to cos^(df-2));
    df odd: (2 / pi) (theta + sin(theta) (cos + 2/3 cos^3 + ... up to cos^(df-2))).

    Raises:
        ValueError: df is less than 1.
    """
    if df < 1:
        raise ValueError(f"df is {df}; it must be at least 1.")
    theta = math.atan(t / math.sqrt(df))
    power, terms = (1.0, []) if df % 2 == 0 else (math.cos(theta), [])
    for k in range(2 if df % 2 == 0 else 3, df + 1, 2):
        terms.append(power)
        power *= (k - 1) / k * math.cos(theta) ** 2
    total = math.sin(theta) * math.fsum(terms)
    return min(1.0, total if df % 2 == 0 else 2 / math.pi * (theta + total))


def student_t(df: int, share: float = 0.95) -> float:
    """The t with P(-t <= T <= t) = share, by bisection of `within`.

    Raises:
        ValueError: df is less than 1, or the share is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"share is {share}; it must lie between 0 and 1.")
    low, high = 0.0, 1.0
    while within(high, df) < share:
        high *= 2
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, df) < share else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Mean:
    """A mean over n seeds and the half-width of its 95 % interval; None of a single seed."""

    value: float
    margin: float | None
    n: int


def mean(values: Sequence[float]) -> Mean:
    """Mean +- t s / sqrt(n), s the standard deviation over seeds (n - 1)."""
    n, value = len(values), math.fsum(values) / len(values)
    margin = student_t(n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else None
    return Mean(value, margin, n)


@dataclass(frozen=True)
class Paired:
    """Differences a - b of the seeds that both have, and the two-sided p of Student's paired t test.

    p is None of a single seed, and where all differences are equal, which leaves no noise to test against.
    """

    difference: Mean
    p: float | None


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Paired | None:
    """Compare by seed; None without a common seed."""
    differences = [a[seed] - b[seed] for seed in a if seed in b]
    if not differences:
        return None
    found = mean(differences)
    if not found.margin:
        return Paired(found, None)
    t = abs(found.value) * student_t(found.n - 1) / found.margin
    return Paired(found, 1 - within(t, found.n - 1))


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment of several p values (family-wise error); None stays None and does not count."""
    order = sorted((p, place) for place, p in enumerate(ps) if p is not None)
    adjusted: list[float | None] = [None] * len(ps)
    highest = 0.0
    for rank, (p, place) in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p))
        adjusted[place] = highest
    return adjusted


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Moving average over `window` points around each; at the ends over those there are, as many before as after."""
    half = (window - 1) // 2
    result = []
    for place in range(len(values)):
        reach = min(half, place, len(values) - 1 - place)
        result.append(statistics.fmean(values[place - reach : place + reach + 1]))
    return result


def crossing(x: Sequence[float], y: Sequence[float], level: float) -> float:
    """The first x at which y, linear between its points, reaches the level; infinite if it never does."""
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
    window may well go on.
    """

    low: float
    high: float
    open_low: bool
    open_high: bool

    @property
    def ratio(self) -> float:
        """Highest over lowest."""
        return self.high / self.low


def usable(rates: Sequence[float], finals: Sequence[float], share: float = 0.9) -> Window:
    """The window of a grid in rising order, with its mean final accuracies."""
    best = max(range(len(rates)), key=finals.__getitem__)
    level = share * finals[best]
    logs = [math.log(rate) for rate in rates]
    low, open_low = _edge(logs[best::-1], finals[best::-1], level)
    high, open_high = _edge(logs[best:], finals[best:], level)
    return Window(low, high, open_low, open_high)


def _edge(logs: Sequence[float], finals: Sequence[float], level: float) -> tuple[float, bool]:
    """Where the accuracies, from the best outwards, first fall below the level; the last rate if they never do."""
    for place in range(1, len(logs)):
        if finals[place] < level:
            inside = (finals[place - 1] - level) / (finals[place - 1] - finals[place])
            return math.exp(logs[place - 1] + inside * (logs[place] - logs[place - 1])), False
    return math.exp(logs[-1]), True
