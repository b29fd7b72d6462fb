"""Means with intervals by Student's t, and moving averages; the standard library only."""

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

Z95 = 1.959963984540054
"""Half-width of a 95 % interval of a normally distributed quantity, in standard errors."""


def within(t: float, df: int) -> float:
    """Chance that |T| <= t, for Student's T with a whole number of degrees of freedom; exact, in finite sums.

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
    """The t for which |T| <= t has this chance, with Student's T; found by bisection of `within`.

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
    """A mean of n independent values and the half-width of its 95 % interval."""

    value: float
    margin: float | None  # None of a single value, which says nothing of its own error
    n: int

    @property
    def low(self) -> float:
        """Lower end of the interval; the value itself where there is none."""
        return self.value - (self.margin or 0.0)

    @property
    def high(self) -> float:
        """Upper end of the interval; the value itself where there is none."""
        return self.value + (self.margin or 0.0)


@dataclass(frozen=True)
class GeometricMean:
    """A geometric mean of n ratios and the ends of its 95 % interval; both are the value where n is 1."""

    value: float
    low: float
    high: float
    n: int


def geometric_mean(ratios: Sequence[float]) -> GeometricMean:
    """Return exp(mean +- t s / sqrt(n)) of the ratios' logarithms."""
    logs = mean([math.log(ratio) for ratio in ratios])
    return GeometricMean(math.exp(logs.value), math.exp(logs.low), math.exp(logs.high), logs.n)


def mean(values: Sequence[float]) -> Mean:
    """Mean +- t s / sqrt(n), where s is the standard deviation of the values (n - 1) and t Student's."""
    n, mean_of_all = len(values), math.fsum(values) / len(values)
    margin = student_t(n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else None
    return Mean(mean_of_all, margin, n)


def jackknife(blocks: Sequence[Sequence[T]], statistic: Callable[[Sequence[T]], float], groups: int = 20) -> Mean:
    """A statistic of all values with its 95 % interval, from independent blocks of values.

    With m groups of blocks and s_i the statistic without group i, its variance is (m - 1) / m sum_i (s_i - mean s)^2.
    There are at most `groups` of them, of blocks drawn with one seed, so that no order of the blocks shows.
    """
    m, order = min(groups, len(blocks)), list(range(len(blocks)))
    random.Random(0).shuffle(order)
    without = [
        statistic([value for place, block in zip(order, blocks, strict=True) if place % m != group for value in block])
        for group in range(m)
    ]
    whole = statistic([value for block in blocks for value in block])
    if m < 2:
        return Mean(whole, None, m)
    middle = math.fsum(without) / m
    error = math.sqrt((m - 1) / m * math.fsum((value - middle) ** 2 for value in without))
    return Mean(whole, student_t(m - 1) * error, m)


def around(n: int, window: int) -> Iterator[slice]:
    """For each of n points, the `window` points centred on it; towards the ends fewer, still centred."""
    half = (window - 1) // 2
    for place in range(n):
        reach = min(half, place, n - 1 - place)
        yield slice(place - reach, place + reach + 1)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Moving average over the points that `around` gives."""
    return [statistics.fmean(values[part]) for part in around(len(values), window)]
