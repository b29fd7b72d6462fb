"""The course of a run: means of its metrics over windows of steps, each with its own noise."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from oblrpo.diagnosis.outages import Outages

WINDOW = 10  # how many values a mean is taken over
POOLED = 5 * WINDOW  # how many of the last values say how noisy one is, so that no window is quiet by luck
JUMPS = 2  # the number of changes from one level to another that are no noise
STALLED = 2.0  # the number of standard errors below which a reward has not risen
SOLVED = 0.9  # the mean of a reward between 0 and 1 from which on there is next to nothing left to learn
OVERFLOW = "reward, loss or gradient"  # what was not finite, where nobody says it


class Mean(NamedTuple):
    """The mean of a window of steps."""

    value: float
    stderr: float
    """Its standard error: of the differences between neighbouring values, and no less than what was measured."""
    first: int
    """The first of the steps."""
    last: int

    def above(self, other: Mean) -> float:
        """By how many standard errors of the difference it lies above another mean."""
        difference, noise = self.value - other.value, math.hypot(self.stderr, other.stderr)
        return difference / noise if noise else math.copysign(math.inf, difference) if difference else 0.0


@dataclass
class Column:
    """One metric of a run: its last values, and the means of all windows before."""

    kept: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=2 * POOLED + WINDOW))
    """Steps, values, and their standard errors where they are known, or 0: 50 are left when an outage is forgotten."""
    windows: list[Mean] = field(default_factory=list)
    """Means of one window after the other, from the first step on."""
    first: Mean | None = None
    """The first value, if its standard error is known."""
    count: int = 0
    lowest: float = math.inf
    highest: float = -math.inf
    means: dict[int, Mean] = field(default_factory=dict)
    """Those of the last values that were asked for already, by their number."""

    @property
    def last(self) -> list[tuple[int, float, float]]:
        """The last 50 of them."""
        return list(self.kept)[-POOLED:]

    def add(self, step: int, value: float, stderr: float) -> None:
        """Take one more value."""
        if not self.count and stderr:
            self.first = Mean(value, stderr, step, step)
        self.kept.append((step, value, stderr))
        self.count += 1
        self.means.clear()
        self.lowest, self.highest = min(self.lowest, value), max(self.highest, value)
        if self.count % WINDOW == 0:
            self.windows.append(self.mean())

    def forget(self, since: int) -> None:
        """Leave out the values from a step on."""
        while self.kept and self.kept[-1][0] >= since:
            self.kept.pop()
            self.count -= 1
        while self.windows and self.windows[-1].last >= since:
            self.windows.pop()
        levels = [*(mean.value for mean in self.windows), *(value for _, value, _ in self.last)]
        self.lowest, self.highest = min(levels, default=math.inf), max(levels, default=-math.inf)
        self.means.clear()

    def mean(self, width: int = WINDOW) -> Mean:
        """The mean of the last values, so many of them or all that there are.

        With x_t the values, one of them has the variance mean (x_t - x_{t-1})^2 / 2, in which a slow course does not
        count. The greater of that of the window and that of the last 50 values is taken, of these without two jumps.
        """
        if width not in self.means:
            self.means[width] = self._mean(width)
        return self.means[width]

    def _mean(self, width: int) -> Mean:
        last = self.last
        taken = last[-width:]
        values = [value for _, value, _ in taken]
        spread = max(spread_of([value for _, value, _ in last], JUMPS), spread_of(values))
        measured = math.hypot(*(stderr for *_, stderr in taken)) / len(taken)
        stderr = max(spread / math.sqrt(len(taken)), measured)
        return Mean(math.fsum(values) / len(taken), stderr, taken[0][0], taken[-1][0])


def spread_of(values: list[float], jumps: int = 0) -> float:
    """The deviation of one of some values in a row, in which a slow course and the greatest jumps do not count."""
    squares = sorted((after - before) ** 2 for before, after in pairwise(values))
    squares = squares[: max(1, len(squares) - jumps)]
    return math.sqrt(math.fsum(squares) / (2 * len(squares))) if squares else 0.0


@dataclass(frozen=True)
class Facts:
    """What is known of a run beside its metrics; the defaults are for a log of which nothing is known."""

    looks_across: bool = False
    """Its baseline looks at other prompts: a prompt whose completions all earned the same still teaches."""
    measured_rate: bool = False
    """Its rate follows from how far updates move the policy, and not from a signal."""
    corrects_sampler: bool | None = None
    """Weights make up for a sampler that is not the policy; None: unknown."""
    prompts: int = 0
    """Prompts a step; 0: unknown."""


class Course:
    """What a run has shown so far; rows are those of `metrics.jsonl`, of which any key may be missing."""

    def __init__(self, facts: Facts | None = None) -> None:
        self.facts = facts or Facts()
        self.columns: dict[str, Column] = {}
        self.row: Mapping[str, float] = {}  # the newest, without what comes of rewards where all of them agree
        self.overflow = OVERFLOW
        self.step = self.rewarded = 0  # the newest, and how many have a reward
        self.outages = Outages()
        self.memory: dict[str, Any] = {}
        """What conditions remember between steps, by their names."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Take the next step."""
        numbers = {key: number for key, value in row.items() if (number := finite(value)) is not None}
        self.step = int(numbers.get("step", self.step + 1))
        self.rewarded += "reward" in numbers
        for key in numbers:
            self.columns.setdefault(key, Column())
        self.row, self.overflow = self.outages.add(self.step, numbers, self.columns), str(row.get("overflow", OVERFLOW))
        alike = self.outages.now
        for key, number in (self.row if alike and alike.long else numbers).items():
            self.columns[key].add(self.step, number, numbers.get(f"{key}_stderr", 0.0))

    def value(self, key: str) -> float | None:
        """A metric of the newest step; None where it has no finite value."""
        return self.row.get(key)

    def now(self, key: str, width: int = WINDOW) -> Mean | None:
        """The mean of a metric over its last values; None where there are not enough, or the newest step has none."""
        column = self.columns[key] if key in self.row else None
        return column.mean(width) if column and column.count >= width else None

    def past(self, key: str, before: int) -> list[Mean]:
        """The means of the windows of a metric that ended before a step, the oldest first."""
        return [mean for mean in self.columns[key].windows if mean.last < before] if key in self.columns else []

    def last_beyond(self, key: str, now: Mean, factor: float) -> Mean | None:
        """The newest window of a metric that was `factor` times the mean of now or more (less than 1: or less)."""
        bound = factor * now.value
        windows = reversed(self.past(key, now.first))
        return next((m for m in windows if (m.value >= bound if factor > 1 else m.value <= bound)), None)

    def reward_since(self, step: int) -> float:
        """By how many standard errors the reward is above that of the last window up to a step; infinite if unknown."""
        if self.outages.lasts:
            return 0.0
        now, then = self.now("reward"), self.past("reward", step + 1)
        return now.above(then[-1]) if now and then and then[-1].last < now.first else math.inf

    def stalled_since(self, step: int) -> bool:
        """Whether the reward has not risen in the later half of the time since a step, two windows at least."""
        half = (step + self.step) // 2
        now = self.now("reward")
        return now is not None and now.first - half >= WINDOW and self.reward_since(half) < STALLED

    @property
    def solved(self) -> bool:
        """Whether rewards lie between 0 and 1, and nearly all of them are earned."""
        column, now, alike = self.columns.get("reward"), self.now("reward"), self.outages.now
        reward = now.value if now else alike.earned if alike else 0.0
        return bool(column and column.lowest >= 0 and max(reward, column.highest) <= 1 and reward >= SOLVED)


def finite(value: object) -> float | None:
    """A number of a row; None if it is none, or NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) < 1e150 else None  # a square of which is a number, too
