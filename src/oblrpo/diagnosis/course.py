"""The course of a run: means of its metrics over windows of steps, each with its own noise."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import mul, sub
from statistics import median_high, median_low
from typing import Any, NamedTuple

from oblrpo.diagnosis.outages import Outages

WINDOW = 10  # how many steps a mean is taken over, or rows where a log names no steps
FEWEST = 3  # rows of a mean, where a row is the mean of several steps
MOST_WINDOWS = 512  # windows that are kept: of a longer run every second, then every fourth, and so on
SPARSE = 2_000  # rows from which on windows are looked at every thousandth of the run, and not after every row
POOLED = 5 * WINDOW  # how many of the last values say how noisy one is, so that no window is quiet by luck
JUMPS = 2  # the number of changes from one level to another that are no noise
STALLED = 2.0  # the number of standard errors below which a reward has not risen
STEADY = 3.0  # that from which on it surely has
SOLVED = 0.9  # the mean of a reward between 0 and 1 from which on there is next to nothing left to learn
BESIDE = ("step", "epoch", "eval", "val", "skipped")  # what a row may have that says nothing of training
TINY = 1e-12  # rounding, of a square
VAST = 1e150  # the square of less is a number, too
OVERFLOW = "reward, loss or gradient"  # what was not finite, where it is not logged


class Mean(NamedTuple):
    """The mean of a window of steps."""

    value: float
    stderr: float
    """Its standard error: of the differences between neighbouring values, and no less than what was measured."""
    first: int  # the first of the steps
    last: int
    change: float = 0.0  # the sum of the changes of its values from the value before
    squares: float = 0.0
    products: float = 0.0  # the sums of the squares of these changes, and of their products with the change before

    def above(self, other: Mean) -> float:
        """By how many standard errors of the difference it lies above another mean."""
        difference, noise = self.value - other.value, math.hypot(self.stderr, other.stderr)
        return difference / noise if noise else math.copysign(math.inf, difference) if difference else 0.0


@dataclass
class Column:
    """One metric of a run: its last values, and the means of all windows before."""

    window: int = WINDOW  # how many values a mean is taken over
    kept: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=2 * POOLED + WINDOW))
    """Steps, values, and their standard errors where they are known, or 0: 50 are left when an outage is forgotten."""
    windows: list[Mean] = field(default_factory=list)  # means of one window after the other, from the first step on
    count: int = 0
    stride: int = 1  # of the windows one in so many is kept
    lowest: float = math.inf
    highest: float = -math.inf
    means: dict[int, Mean] = field(default_factory=dict)
    """Those of the last values that are computed already, by their number."""
    noise: dict[int, float] = field(default_factory=dict)
    """The standard errors of a mean that are computed already, by the number of windows."""

    @property
    def last(self) -> list[tuple[int, float, float]]:
        """The last 50 of them."""
        return list(self.kept)[-POOLED:]

    def add(self, step: int, value: float, stderr: float) -> None:
        """Take one more value."""
        self.kept.append((step, value, stderr))
        self.count += 1
        if self.means:
            self.means = {}
        if value < self.lowest:
            self.lowest = value
        if value > self.highest:
            self.highest = value
        if self.count % (self.window * self.stride) == 0:
            last = [value for _, value, _ in islice(reversed(self.kept), self.window + 2)]
            changes = list(map(sub, last, last[1:]))
            own = changes[: self.window]
            sums = (math.fsum(own), math.fsum(map(mul, own, own)), math.fsum(map(mul, own, changes[1:])))
            self.windows.append(Mean(*self.mean()[:4], *sums))
            if len(self.windows) == MOST_WINDOWS:
                self.stride *= 2
                del self.windows[1::2]
                self.noise = {}

    def forget(self, since: int) -> None:
        """Leave out the values from a step on."""
        while self.kept and self.kept[-1][0] >= since:
            self.kept.pop()
            self.count -= 1
        while self.windows and self.windows[-1].last >= since:
            self.windows.pop()
            self.noise = {}
        levels = [*(mean.value for mean in self.windows), *(value for _, value, _ in self.last)]
        self.lowest, self.highest = min(levels, default=math.inf), max(levels, default=-math.inf)
        self.means = {}

    def mean(self, width: int = 0) -> Mean:
        """The mean of the last values, so many of them or all that there are; of a window where `width` is 0.

        With x_t the values, one of them has the variance mean (x_t - x_{t-1})^2 / 2, in which a slow course does not
        count. The greater of that of the window and that of the last 50 values is taken, of these without two jumps.
        """
        width = width or self.window
        if width not in self.means:
            last = self.last
            taken = last[-width:]
            values = [value for _, value, _ in taken]
            spread = max(spread_of([value for _, value, _ in last], JUMPS), spread_of(values))
            measured = math.hypot(*(stderr for *_, stderr in taken)) / len(taken)
            stderr = max(spread / math.sqrt(len(taken)), measured)
            self.means[width] = Mean(math.fsum(values) / len(taken), stderr, taken[0][0], taken[-1][0])
        return self.means[width]


def spread_of(values: list[float], jumps: int = 0) -> float:
    """The deviation of one of some values in a row, in which a slow course and the greatest jumps do not count."""
    changes = list(map(sub, values[1:], values))
    squares = sorted(map(mul, changes, changes))
    squares = squares[: max(1, len(squares) - jumps)]
    return math.sqrt(math.fsum(squares) / (2 * len(squares))) if squares else 0.0


def wander(windows: Sequence[Mean], width: int) -> float:
    """The variance of the mean of a window of so many values, which may hang together, by those of some windows.

    It is the greater of two. For values x_t = rho x_(t-1) + noise, with c_t = x_t - x_(t-1) less what is usual, it
    follows from rho = 1 + 2 <c_t c_(t-1)> / <c_t^2>, to which two standard errors, sqrt(2 / n) each, are added (no more
    than 1 - 1 / n, nor 0.98: windows show what hangs together for longer), and from <c_t^2> / (2 (1 - rho)), the
    variance of x; < > is the mean over windows without the wildest eighth, as jumps are no noise. Where values keep
    their level, it is sum A_s / 2, s = 1, 2, 4, ..., with A_s the mean of d^2 / 2 over differences d of neighbouring
    means of s windows (Allan's variance), plus one standard error. The d of that sign count whose mean is less, as a
    slow course is no noise; where all have one sign, it is half of the A before, as of values that do not hang
    together.
    """
    if not windows:
        return 0.0
    n, changes = width * len(windows), [mean.change for mean in windows]
    trend = min(median_low(changes), median_high(changes), key=abs) / width  # of two windows, one may have a jump
    less = ((mean, trend * (2 * mean.change - width * trend)) for mean in windows)
    calm = sorted((mean.squares - each, mean.products - each) for mean, each in less)[: max(1, 7 * len(windows) // 8)]
    squares, products = (math.fsum(each) / len(calm) for each in zip(*calm, strict=True))
    rho = 1 + 2 * products / squares if squares > TINY * width * trend**2 else 0.0
    rho = min(max(rho + 2 * math.sqrt(2 / n), 0.0), 1 - 1 / min(n, POOLED))
    together = (1 + 2 * math.fsum((1 - k / width) * rho**k for k in range(1, width))) / width
    whole, last, means = 0.0, 0.0, [mean.value for mean in windows]
    while len(means) > 1:
        steps = list(map(sub, means[1:], means))
        ways = [each for each in ([x * x for x in steps if x > 0], [x * x for x in steps if x < 0]) if each]
        sizes = [math.fsum(way) / (2 * len(way)) * (1 + math.sqrt(3 / len(way))) for way in ways]
        last = min(sizes) if len(sizes) == 2 else last / 2
        whole += last / 2
        means = [(a + b) / 2 for a, b in zip(means[::2], means[1::2], strict=False)]
    return max(squares / (2 * width * (1 - rho)) * together, whole + last / 2)  # and the rest, by halves


@dataclass(frozen=True)
class Facts:
    """What is known of a run beside its metrics; the defaults are for a log of which nothing is known."""

    looks_across: bool = False
    """Its baseline looks at other prompts: a prompt whose completions all earned the same still teaches."""
    measured_rate: bool = False  # its rate follows from how far updates move the policy, and not from a signal
    corrects_sampler: bool | None = None  # weights make up for a sampler that is not the policy; None: unknown
    prompts: int = 0  # prompts a step; 0: unknown
    every: int = 1  # steps from one row to the next, of which a row is the mean
    unit: str = "step"  # what rows are counted in: "row" where a log names no steps
    row_count: int = 0  # how many rows there are in all; 0: unknown


class Course:
    """What a run has shown so far; rows are those of `metrics.jsonl`, of which any key may be missing."""

    def __init__(self, facts: Facts | None = None) -> None:
        self.facts = facts or Facts()
        self.window, self.long = self.rows(WINDOW), self.rows(2 * WINDOW)  # how many rows means are taken over
        self.span = self.window * self.facts.every  # steps of a window
        self.averaged = math.sqrt(self.facts.every)  # by so much less than one of its steps a row varies
        self.words = {"window": self.said(self.window), "long": self.said(self.long), "unit": self.facts.unit}
        self.columns: dict[str, Column] = {}
        self.empty: dict[str, int] = {}  # how many rows have a metric that has had no finite value yet
        self.logged: Mapping[str, float] = {}  # the newest row
        self.row: Mapping[str, float] = {}  # the same, without what comes of rewards where all of them agree
        self.overflow = OVERFLOW
        self.step = self.rewarded = 0  # the newest, and how many rows have a reward
        self.count = self.compared = 0  # of rows, and the newest step after which windows were compared
        self.outages = Outages(self.facts.every, self.facts.unit)
        self.memory: dict[str, Any] = {}
        """What conditions remember between steps, by their names."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Take the next step."""
        numbers = {key: number for key, value in row.items() if (number := finite(value)) is not None}
        self.step = int(numbers.get("step", self.step + 1))
        self.count += 1
        if self.count < SPARSE or self.count % (self.count // 1_000) == 0:
            self.compared = self.step
        self.rewarded += "reward" in numbers
        if not numbers.keys() <= self.columns.keys():
            self.columns |= {key: Column(self.window) for key in numbers if key not in self.columns}
        self.empty |= {key: self.empty.get(key, 0) + 1 for key in row.keys() - self.columns.keys()}
        self.logged = numbers
        self.row, self.overflow = self.outages.add(self.step, numbers, self.columns), str(row.get("overflow", OVERFLOW))
        alike = self.outages.now
        for key, number in (self.row if alike and alike.long else numbers).items():
            self.columns[key].add(self.step, number, numbers.get(f"{key}_stderr", 0.0) / self.averaged)

    @property
    def steps(self) -> int:
        """How many steps the rows so far cover, with a reward or without; rows, where they name no steps."""
        counts = (column.count for key, column in self.columns.items() if not key.startswith(BESIDE))
        rows = max(self.rewarded, *counts, 0)
        return max(rows, min(rows * self.facts.every, self.step))

    def rows(self, steps: int, fewest: int = FEWEST) -> int:
        """How many rows make so many steps: no fewer than `fewest`, and no more than there are steps."""
        return max(math.ceil(steps / self.facts.every), min(fewest, steps))

    def in_a_row(self, what: str, holds: bool) -> tuple[int, int]:
        """For how many rows up to the newest something holds, and the first step of these."""
        rows, first = self.memory.get(what, (0, 0))
        self.memory[what] = found = (rows + 1, first or self.step) if holds else (0, 0)
        return found

    def lasted(self, rows: int) -> int:
        """How many steps so many rows in a row make; 0 where they are too few to say."""
        return rows * self.facts.every if rows >= FEWEST else 0

    def said(self, rows: int) -> str:
        """So many rows in words: "30 steps", or "3 rows" where a log names no steps."""
        many = rows * self.facts.every
        return f"{many} {self.facts.unit}{'s' * (many != 1)}"

    def value(self, key: str) -> float | None:
        """A metric of the newest step; None where it has no finite value."""
        return self.row.get(key)

    def now(self, key: str, width: int = 0) -> Mean | None:
        """The mean of a metric over its last rows; None where there are not enough, or the newest step has none."""
        width, column = width or self.window, self.columns[key] if key in self.row else None
        return column.mean(width) if column and column.count >= width else None

    def past(self, key: str, before: int) -> list[Mean]:
        """The means of the windows of a metric that ended before a step, the oldest first."""
        windows = self.columns[key].windows if key in self.columns else []
        return windows[: bisect.bisect_left(windows, before, key=lambda mean: mean.last)]

    def last_beyond(self, key: str, now: Mean, factor: float) -> Mean | None:
        """The newest window of a metric that was `factor` times the mean of now or more (less than 1: or less)."""
        bound = factor * now.value
        windows = self.past(key, now.first)
        return next((m for m in reversed(windows) if (m.value >= bound if factor > 1 else m.value <= bound)), None)

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
        enough = now is not None and now.first - half >= self.span
        return enough and self.reward_since(half) < STALLED

    def risen_since(self, step: int) -> bool:
        """Whether the reward has surely risen since a step, or the task is solved."""
        return self.outages.solved is not None or STEADY <= self.reward_since(step) < math.inf

    @property
    def bounded(self) -> bool:
        """Whether all rewards so far lie between 0 and 1."""
        rewards = self.columns.get("reward")
        return rewards is not None and rewards.lowest >= 0 and rewards.highest <= 1

    @property
    def solved(self) -> bool:
        """Whether rewards lie between 0 and 1, and nearly all of them are earned."""
        now, alike = self.now("reward"), self.outages.now
        return self.bounded and SOLVED <= (now.value if now else alike.earned if alike else 0.0) <= 1


def finite(value: object) -> float | None:
    """A number of a row; None if it is none, or NaN or infinite."""
    if type(value) is float:
        return value if -VAST < value < VAST else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if -VAST < number < VAST else None
